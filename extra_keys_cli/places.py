"""Where things are when nobody says otherwise: a cache folder of the user's, made when it is first needed."""

import hashlib
import os
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 107
"""Bytes of a path that a Unix socket can have on Linux (``sun_path`` without its NUL)."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/extra-keys``, or ``~/.cache/extra-keys``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "extra-keys"


def default_store() -> Path:
    """The folder of the embedded disk tier."""
    return cache_folder() / "store"


def socket_address(folder: Path) -> str:
    """An ``ipc://`` address in a folder; a short one in the temporary folder where the folder's path is too long."""
    path = folder / "server.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"extra-keys-{os.getuid()}-{name}.sock"
    return f"ipc://{path}"


def default_address() -> str:
    """The address that a server listens on, and a client finds it under, by default."""
    return socket_address(cache_folder())
