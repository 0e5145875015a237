"""A Redis database as a migration leaves it: LMCache's keys, ours, junk, and names at the edge of the grammar."""

from typing import Any

from protocol_v2.storage.descriptions import format_description
from protocol_v2.storage.names import description_name
from tests.compat.mixed_folder import KEYS, RANK, SPACE
from tests.compat.v1_writers import EngineKey, MpObject
from tests.protocol_v2.storage_samples import make_object

PLAIN = MpObject("org/one", RANK, 0, b"\xaa" * 32).native()
SALTED = MpObject("org/one", RANK, 0, b"\xbb" * 32, "tenant").native()
PREFIXED = MpObject("org/one", RANK, 1, b"\xcc" * 32).valkey("fleet")
ENGINE = EngineKey("org/two", 1, 0, 255, "half").text()
ENGINE_PARTS = set(EngineKey("org/other", 1, 0, 255, "half").redis())
V1 = {PLAIN, SALTED, PREFIXED, ENGINE, *ENGINE_PARTS}
NAMES = [make_object(KEYS, index, root=SPACE.root).id.name for index in range(3)]
V2 = {str(name) for name in NAMES}
DESCRIPTION = description_name(SPACE.root)
INTERNAL = {f"xk2.quarantine/1-checksum/{PLAIN}"}
JUNK = {
    "session:42",
    PLAIN.upper(),
    PLAIN.replace("@0@", "@00@"),
    PLAIN + "@",
    PLAIN.replace("org/one", ""),
    "fleet@too@" + PLAIN,
    MpObject("org/one", RANK, 0, b"\xaa" * 32).fs(),
    f"xk1/{PLAIN}",
    f"xk2/{PLAIN}",
    str(NAMES[0]).upper(),
    str(NAMES[0]) + "\n",
}
WRONG_TYPE = MpObject("org/one", RANK, 0, b"\xdd" * 32).native()
"""A name of v1 with a list under it, which LMCache never writes."""

NOT_UTF8 = PLAIN.encode() + b"@\xff"
IDLE = 1000
"""Seconds since anybody used one of these keys."""

EVERYTHING = {*(name.encode() for name in {*V1, *V2, *INTERNAL, *JUNK, DESCRIPTION, WRONG_TYPE}), NOT_UTF8}


def fill(client: Any, *, idle: int = IDLE) -> None:
    """Write all of it, as it would look to the server if nobody had used it for some time."""
    client.set("dumped", b"0123456789" * 10)
    value = client.dump("dumped")
    client.set("dumped", format_description(SPACE))
    description = client.dump("dumped")
    client.delete("dumped")
    for name in EVERYTHING - {WRONG_TYPE.encode(), DESCRIPTION.encode()}:
        client.restore(name, 0, value, idletime=idle)
    client.restore(DESCRIPTION, 0, description, idletime=idle)
    client.rpush(WRONG_TYPE, b"0123456789")


def keys(client: Any) -> set[bytes]:
    """All keys of the database."""
    return set(client.keys("*"))


def names(client: Any) -> set[str]:
    """The same as text, without the one that is none."""
    return {key.decode() for key in keys(client) - {NOT_UTF8}}
