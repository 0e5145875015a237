"""A folder as a migration leaves it: LMCache's files, a disk tier's, junk, and names at the edge of the grammar."""

from pathlib import Path

from keying import KeySpace
from protocol_v2.tiers import DiskTier
from tests.compat.v1_writers import EngineKey, MpObject
from tests.protocol_v2.storage_samples import chain, make_object, open_disk

SPACE = KeySpace("org/two", chunk_size=16, kv_dtype="bfloat16")
RANK = 0x01000100
PLAIN = MpObject("one", RANK, 0, b"\xaa" * 32).fs()
SALTED = MpObject("one", RANK, 0, b"\xbb" * 32, "tenant").fs()
SLASHED = MpObject("org/m", RANK, 0, b"\xcc" * 32).fs()
ENGINE = EngineKey("one", 1, 0, 255, "half").disk()
GDS = "ab/cd/" + EngineKey("other", 1, 0, 255, "half").gds()
V1 = {PLAIN, SALTED, SLASHED, ENGINE, GDS}
JUNK = {
    "readme.txt",
    PLAIN.replace(".data", ".data.tmp"),
    PLAIN.replace("@0x", "@"),
    PLAIN.replace("@0@", "@00@"),
    PLAIN.replace("one@", "@"),
    SALTED.replace("@tenant", "@"),
    f"xk1/{PLAIN}",
    f"xk2/{PLAIN}",
}
INTERNAL = {f"xk2.tmp/{PLAIN}", f"xk2.quarantine/1-checksum/{PLAIN}", "xk2.lock"}
KEYS = chain("mixed", 3, SPACE.root)
V2 = {str(make_object(KEYS, index, root=SPACE.root).id.name) for index in range(3)}


def fill(folder: Path) -> DiskTier:
    """Write all of it; the tier is still open, so the folder is owned."""
    tier = open_disk(folder)
    tier.describe(SPACE)
    for index in range(3):
        tier.put(make_object(KEYS, index, root=SPACE.root))
    for name in V1 | JUNK | INTERNAL - {"xk2.lock"}:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0123456789")
    return tier


def files(folder: Path) -> set[str]:
    """Paths of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() or path.is_symlink()}
