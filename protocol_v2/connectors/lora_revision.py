"""Revision of a LoRA adapter: the identity of everything that it computes.

Theory of operation
-------------------
A name or a path says which adapter is meant, not what is in it: adapters are reloaded under their name with other
weights. So a revision is a digest over the adapter's own configuration and weight files:

    sha256:<64 hex>                     H( text("xk2/lora-files") u32(n) n x ( text(name) u64(size) content ) )
    sha256:<64 hex>;scale=<8 hex>       the bits of the scale as a float32, where it is not 1

with the files sorted by the UTF-8 bytes of their names; integers little-endian, ``text`` as in key schema 2. Files
count whose loading changes the adapter: ``adapter_config.json``, ``adapter_model*`` and ``new_embeddings*`` with the
ending ``.safetensors``, ``.bin`` or ``.pt``. A README or an optimizer state does not.

Weights can be gigabytes, so a digest is kept as long as each file's path, size, mtime, ctime and inode are what they
were. A file that changes while it is read is noticed by the same numbers, and read again.

The operator may declare adapters shared and immutable, by name or by path; those are not read:

    declared:name                       the name alone says it all
    declared:path:<normal path>         the path says it

Neither form can be a digest's. Declared adapters must hold the same weights wherever the name or path occurs, for ever.

What no reader of files can see: an engine that still computes with weights it loaded before the files were replaced.
Replace an adapter by a new folder, or reload it in the moment its files change.

Source: docs/spec/key-schema-2.md §13; docs/engines.md, "Adapters".
"""

import hashlib
import math
import os
import re
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from keying import KeyingTypeError, UncacheableRequest
from keying.encoding import U32, U64, text
from keying.engines import AdapterSource, UncacheableReason

DOMAIN_FILES: Final = text("xk2/lora-files")
CONFIG_FILE: Final = "adapter_config.json"
_WEIGHT_FILE: Final = re.compile(r"(adapter_model|new_embeddings)[A-Za-z0-9_.-]*\.(safetensors|bin|pt)\Z")

READ_BYTES: Final = 1 << 20
"""Bytes read at a time: large enough for the disk, small enough to share the machine."""

ATTEMPTS: Final = 3
"""Readings of files that keep changing before the adapter is given up for this request."""

MAX_KEPT: Final = 4096
"""Folders whose digest is kept; a deployment has tens. The one asked for least recently goes first."""

_State = tuple[tuple[str, int, int, int, int, int], ...]
"""Name, size, mtime and ctime in ns, inode and device of each file."""


def lora_content_revision(path: str | os.PathLike[str], *, scale: float = 1.0) -> str:
    """The revision of the adapter in a folder, from its own files.

    Side effects:
        Reads the files once for each state that they are in; the digest is kept in this process. Threads that ask for
        the same folder wait for one reading.

    Args:
        path: folder with ``adapter_config.json`` and the weights, as PEFT saves it.
        scale: factor on everything that the adapter computes, finite; 1 for engines that have none of their own.

    Returns:
        ``sha256:<hex>``, and ``;scale=<float32 bits, 8 hex>`` where the scale is not 1.

    Raises:
        UncacheableRequest: the files cannot be read (`unreadable_adapter`), are never the same for the length of a
            reading (`adapter_changed`), or the scale is no finite float32 (`malformed_adapter`).
    """
    suffix = _scale_suffix(scale)
    return _DIGESTS.of(os.path.realpath(_text_path(path))) + suffix


def _text_path(path: str | os.PathLike[str]) -> str:
    told = os.fspath(path)
    if not isinstance(told, str) or not told or "\0" in told:
        raise UncacheableRequest(UncacheableReason.UNREADABLE_ADAPTER, "the adapter's path is no path")
    return told


def _scale_suffix(scale: float) -> str:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise UncacheableRequest(UncacheableReason.MALFORMED_ADAPTER, "scale: wanted a finite number")
    try:
        bits = struct.pack(">f", scale)
    except OverflowError as error:
        raise UncacheableRequest(UncacheableReason.MALFORMED_ADAPTER, "scale: is wider than a float32") from error
    return "" if bits == _ONE else f";scale={bits.hex()}"


_ONE: Final = struct.pack(">f", 1.0)


@dataclass(slots=True)
class _Kept:
    """One folder: its last digest, and the lock under which it is read."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    state: _State | None = None
    revision: str = ""


class _Digests:
    """Digests by folder and file state, for all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def of(self, folder: str) -> str:
        """The digest of a folder in the state that it is in now."""
        with self._lock:
            kept = self._kept.setdefault(folder, _Kept())
            self._kept.move_to_end(folder)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        with kept.lock:
            for _ in range(ATTEMPTS):
                state = _file_states(folder)
                if state == kept.state:
                    return kept.revision
                revision = _digest(folder, state)
                if revision is not None and _file_states(folder) == state:
                    kept.state, kept.revision = state, revision
                    return revision
        raise UncacheableRequest(
            UncacheableReason.ADAPTER_CHANGED, "the adapter's files keep changing while they are read"
        )


_DIGESTS: Final = _Digests()


def _file_states(folder: str) -> _State:
    """The files that make up an adapter, sorted by the UTF-8 bytes of their names.

    Raises:
        UncacheableRequest: no configuration, no weights, or something that is no regular file.
    """
    try:
        files = {one.name: one for one in Path(folder).iterdir()}
        names = sorted(name for name in files if name == CONFIG_FILE or _WEIGHT_FILE.match(name))
        states = [(name, files[name].stat()) for name in names]  # links are followed
    except OSError as error:
        raise _unreadable(error) from error
    if CONFIG_FILE not in names or len(names) < 2:
        raise UncacheableRequest(
            UncacheableReason.UNREADABLE_ADAPTER,
            f"the adapter's folder lacks {CONFIG_FILE} or weights (adapter_model.safetensors, .bin or .pt)",
        )
    if not all(stat.S_ISREG(state.st_mode) for _, state in states):
        raise UncacheableRequest(UncacheableReason.UNREADABLE_ADAPTER, "the adapter's folder holds no regular files")
    return tuple(
        (name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev)
        for name, state in states
    )


def _digest(folder: str, states: _State) -> str | None:
    """The revision of files in a state, or None where one was not in it when it was read."""
    hasher = hashlib.sha256(DOMAIN_FILES + U32.pack(len(states)))
    block = bytearray(READ_BYTES)
    view = memoryview(block)
    try:
        for name, size, *_ in states:
            hasher.update(text(name) + U64.pack(size))
            # without O_NONBLOCK a file that became a pipe since would hold this thread for ever
            handle = os.open(Path(folder, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(handle, "rb", buffering=0) as source:
                left = size
                while left and (count := source.readinto(view[: min(left, READ_BYTES)])):
                    hasher.update(view[:count])
                    left -= count
                if left or source.read(1):
                    return None
    except OSError as error:
        raise _unreadable(error) from error
    return f"sha256:{hasher.hexdigest()}"


def _unreadable(error: OSError) -> UncacheableRequest:
    return UncacheableRequest(
        UncacheableReason.UNREADABLE_ADAPTER,
        f"the adapter's files cannot be read ({error.strerror or type(error).__name__}); make them readable here, or "
        "declare the adapter shared and immutable",
    )


class AdapterRevisions:
    """The ``adapter_revision`` function for the engines: declared adapters by their word, all others by their files.

    Args:
        shared_names: names of adapters that the operator declares shared and immutable: the same name is the same
            weights in every process of the deployment, for ever.
        shared_paths: patterns of paths with the same promise: ``*``, ``?`` and ``[...]`` as in file names, where ``*``
            also matches ``/``; a pattern that ends with ``/`` stands for everything below.
        paths: folder of an adapter by name, for engines whose requests do not carry it.

    Raises:
        KeyingTypeError: one string in place of a collection of them, or something that is not text.
    """

    __slots__ = ("_names", "_paths", "_patterns")

    def __init__(
        self,
        shared_names: Iterable[str] = (),
        shared_paths: Iterable[str] = (),
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self._names = frozenset(_texts(shared_names, "shared_names"))
        self._patterns = tuple(
            pattern + "*" if pattern.endswith("/") else pattern for pattern in _texts(shared_paths, "shared_paths")
        )
        self._paths = dict(paths or {})

    def __call__(self, source: AdapterSource) -> str | None:
        """The adapter's revision, or None where nothing is known of it: no declaration, and no path.

        Raises:
            UncacheableRequest: its files cannot be read, or keep changing, or its scale is no float32.
        """
        suffix = _scale_suffix(source.scale)
        if source.name in self._names:
            return f"declared:name{suffix}"
        path = source.path or self._paths.get(source.name)
        if not path:
            return None
        normal = os.path.normpath(_text_path(path))  # before matching: no way out of a declared folder by ".."
        if any(fnmatchcase(normal, pattern) for pattern in self._patterns):
            return f"declared:path:{normal}{suffix}"
        return lora_content_revision(path, scale=source.scale)


def _texts(values: Iterable[str], field_name: str) -> list[str]:
    if isinstance(values, str | bytes):
        raise KeyingTypeError(
            f"{field_name}: got {type(values).__name__}, wanted a collection of str; put it in a tuple"
        )
    told = list(values)
    if not all(isinstance(value, str) and value for value in told):
        raise KeyingTypeError(f"{field_name}: wanted str that are not empty")
    return told
