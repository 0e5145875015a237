"""Where things are when nobody says otherwise: a cache folder of the user's, made when it is first needed."""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from extra_keys_cli.failures import CommandError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/extra-keys``, or ``~/.cache/extra-keys``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "extra-keys"


def default_store() -> Path:
    """The folder of the embedded disk tier."""
    return cache_folder() / "store"


def socket_address(folder: Path) -> str:
    """An ``ipc://`` address in a folder; where the folder's path is too long, a short one that only this user can take.

    Raises:
        CommandError: there is something else where such short ones are.
    """
    from protocol_v2.addresses import MAX_SOCKET_PATH

    path = folder / "server.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        path = _own_folder() / f"{name}.sock"
    return f"ipc://{path}"


def _own_folder() -> Path:
    """A folder of the user's in the temporary one, where anybody can take a name first and would be sent the KV."""
    folder = Path(tempfile.gettempdir()) / f"extra-keys-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CommandError(
            f"{folder}: got something else than a folder of yours that nobody else can write to; remove it, or let "
            "XDG_CACHE_HOME name a shorter path"
        )
    return folder


def default_address() -> str:
    """The address that a server listens on, and a client finds it under, by default."""
    return socket_address(cache_folder())
