"""Hello, welcome, refusal: the three messages whose layout is frozen for ever.

Every version there will be can decode them, so they only ever grow by new names in the map: unknown names are
tolerated, and the welcome echoes them, so that nothing is dropped in silence. Two things are not tolerated because they
would change what was agreed: an unknown field inside `space` (it is part of the identity) and inside `floor` (a
requirement that the reader could not keep).

The transcript digest binds both sides to the exact bytes of both headers:

    H( text("xk2/transcript") || bytes(header frame of the hello) || bytes(header frame of the welcome) )

with `text` and `bytes` as in key schema 2. The welcome carries it as its one payload frame, and every later message
repeats its first 8 bytes in the prelude. Source: docs/spec/wire-2.md, "Handshake".
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from protocol_v2.body import decode, encode, split_map
from protocol_v2.codes import RefusalCode, code_name
from protocol_v2.errors import MAX_SHOWN, HandshakeError, LocalProtocolError, RemoteProtocolError
from protocol_v2.versions import GREASE_PREFIX, MAX_VERSION, grease_number, is_grease

if TYPE_CHECKING:
    from protocol_v2.frames import Frame

BOOT_ID_BYTES: Final = 16
ROOT_BYTES: Final = 32
TRANSCRIPT_BYTES: Final = 32
MAX_NAMES: Final = 64
MAX_NAME_TEXT: Final = 128

MAX_DIFFERENCES: Final = 16
"""Differences that an answer states: with texts cut to `MAX_SHOWN` it fits its cap, whatever was asked."""

Version: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
Versions: TypeAlias = Annotated[tuple[Version, ...], Meta(max_length=MAX_NAMES)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_TEXT)]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)]
Label: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_TEXT)]
Shown: TypeAlias = Annotated[str, Meta(max_length=MAX_SHOWN)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
BootId: TypeAlias = Annotated[bytes, Meta(min_length=BOOT_ID_BYTES, max_length=BOOT_ID_BYTES)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]


class SpaceFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `keying.KeySpace`, field by field. Part of the identity, so an unknown field is refused."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    model_revision: Text = ""
    kv_dtype: Annotated[str, Meta(min_length=1, max_length=4096)]
    chunk_size: Annotated[int, Meta(ge=1, lt=2**31)]
    kv_layout: Text = ""
    attributes: Annotated[dict[str, Text], Meta(max_length=MAX_NAMES)] = {}


class Floor(Struct, frozen=True, kw_only=True):
    """What a side accepts at least. In a hello, an unknown field is a requirement that cannot be kept: refused."""

    wire: Version
    schema: Version
    features: Names = ()


class OfferFields(Struct, frozen=True, kw_only=True):
    """What a side can and what it accepts, as a refusal states it."""

    wire: Versions
    schemas: Versions
    features: Names = ()
    floor: Floor


class SpaceDifference(Struct, frozen=True, kw_only=True):
    """One field in which two spaces differ; name and values as text, each cut to 256 characters."""

    field: Shown
    asked: Shown
    accepted: Shown


class Unrecognised(Struct, frozen=True, kw_only=True):
    """What the server did not know in a hello, so that the client can see that nothing was dropped in silence."""

    fields: Names = ()
    features: Names = ()
    wire: Versions = ()
    schemas: Versions = ()


class Limits(Struct, frozen=True, kw_only=True):
    """What a server holds its clients to.

    Args:
        max_payload_bytes: bytes of all payload frames of one message.
        max_chunks: chunks that one request may name.
        max_pending: requests of one client that may be unanswered at a time.
        lease_ms: how long a lease lasts.
        heartbeat_ms: the server wants to hear from the client at least this often.
        silence_ms: unheard for this long, a client's session and leases end.
        default_deadline_ms: deadline of a request that names none.
        max_deadline_ms: longer deadlines are cut to this.
    """

    max_payload_bytes: Annotated[int, Meta(ge=0, le=2**48)] = 1 << 30
    max_chunks: Annotated[int, Meta(ge=1, le=65_536)] = 16_384
    max_pending: Annotated[int, Meta(ge=1, le=65_536)] = 256
    lease_ms: Milliseconds = 60_000
    heartbeat_ms: Milliseconds = 5_000
    silence_ms: Milliseconds = 20_000
    default_deadline_ms: Milliseconds = 10_000
    max_deadline_ms: Milliseconds = 300_000


class Hello(Struct, frozen=True, kw_only=True):
    """The first message of a client."""

    wire: Versions
    schemas: Versions
    features: Names = ()
    space: SpaceFields | None = None
    boot: BootId
    floor: Floor
    role: Label = ""
    software: Label = ""


class Welcome(Struct, frozen=True, kw_only=True):
    """The session stands.

    Args:
        wire: the one wire version, highest common.
        schema: the one key schema, highest common.
        features: those that both have.
        unrecognised: what of the hello meant nothing to the server.
        limits: what the server holds the client to.
        boot: the server's boot id.
        root: root of the client's space as the server derives it; None where the hello had no space.
        notice: fields in which the nearest space of the same model that the server holds differs; empty when the space
            itself is held, or none of that model.
    """

    wire: Version
    schema: Version
    features: Names = ()
    unrecognised: Unrecognised = Unrecognised()
    limits: Limits
    boot: BootId
    root: Annotated[bytes, Meta(min_length=ROOT_BYTES, max_length=ROOT_BYTES)] | None = None
    notice: Annotated[tuple[SpaceDifference, ...], Meta(max_length=MAX_DIFFERENCES)] = ()
    software: Label = ""


class Refusal(Struct, frozen=True, kw_only=True):
    """No session.

    Args:
        code: a `RefusalCode`, or a number that this version does not know.
        message: one sentence for people.
        field: the field at fault, such as ``space.kv_dtype``, where there is one.
        asked: the client's offer, as the server read it.
        accepted: what the server would accept.
        differences: the fields of the space that differ from the nearest one served, with both values.
    """

    code: Version
    message: Annotated[str, Meta(max_length=1024)] = ""
    field: Shown = ""
    asked: OfferFields | None = None
    accepted: OfferFields | None = None
    differences: Annotated[tuple[SpaceDifference, ...], Meta(max_length=MAX_DIFFERENCES)] = ()

    def explain(self) -> str:
        """One line: why, both ranges (without reserved numbers), and each field of the space that differs."""
        text = f"session refused: {code_name(self.code, RefusalCode)}"
        if self.message:
            text += f": {self.message}"
        for who, offer in (("asked", self.asked), ("accepted", self.accepted)):
            if offer is not None:
                wire, schemas = (
                    [one for one in numbers if not is_grease(one)] for numbers in (offer.wire, offer.schemas)
                )
                text += f"; {who} wire {wire} (floor {offer.floor.wire}), schema {schemas} (floor {offer.floor.schema})"
        for one in self.differences:
            text += f"; space.{one.field}: asked {one.asked!r}, accepted {one.accepted!r}"
        return text


_hello_decoder: Final = msgspec.msgpack.Decoder(Hello)
_space_decoder: Final = msgspec.msgpack.Decoder(SpaceFields | None)
_floor_decoder: Final = msgspec.msgpack.Decoder(Floor)
_welcome_decoder: Final = msgspec.msgpack.Decoder(Welcome)
_refusal_decoder: Final = msgspec.msgpack.Decoder(Refusal)
_NIL: Final = b"\xc0"


def encode_hello(hello: Hello, *, grease: bool) -> bytes:
    """The body of a hello.

    Args:
        hello: what to say.
        grease: add reserved versions, a reserved feature and a reserved field, chosen by the boot id.
    """
    if not grease:
        return encode(hello)
    seed = hello.boot[0]
    number = grease_number(seed)
    greased = msgspec.structs.replace(
        hello,
        wire=(*hello.wire, number),
        schemas=(*hello.schemas, number),
        features=(*hello.features, f"{GREASE_PREFIX}/{seed:02x}"),
    )
    return encode(msgspec.structs.asdict(greased) | {f"{GREASE_PREFIX}_{seed:02x}": seed})


def decode_hello(body: Frame) -> tuple[Hello, tuple[str, ...]]:
    """A hello, and the names in it that this version does not know.

    Raises:
        HandshakeError: with the refusal to answer.
    """
    try:
        entries = split_map(body, "hello")
        _check_space(entries.get("space"))
        _check_floor(entries.get("floor"))
        hello = decode(body, _hello_decoder, "hello")
    except HandshakeError:
        raise
    except RemoteProtocolError as error:
        raise HandshakeError(RefusalCode.HELLO_MALFORMED, str(error)) from None
    unknown = tuple(name for name in entries if name not in Hello.__struct_fields__)
    if len(unknown) > MAX_NAMES or any(not 0 < len(name) <= MAX_NAME_TEXT for name in unknown):
        raise HandshakeError(
            RefusalCode.HELLO_MALFORMED,
            f"hello: wanted at most {MAX_NAMES} names beyond the known ones, each of 1 to {MAX_NAME_TEXT} characters",
        )
    return hello, unknown


def decode_welcome(body: Frame) -> Welcome:
    """A welcome. Unknown names are tolerated.

    Raises:
        HandshakeError: `WELCOME_INVALID`.
    """
    try:
        split_map(body, "welcome")
        return decode(body, _welcome_decoder, "welcome")
    except RemoteProtocolError as error:
        raise HandshakeError(RefusalCode.WELCOME_INVALID, str(error)) from None


def decode_refusal(body: Frame) -> Refusal:
    """A refusal. Unknown names are tolerated.

    Raises:
        RemoteProtocolError: `MALFORMED`.
    """
    split_map(body, "refusal")
    return decode(body, _refusal_decoder, "refusal")


def transcript_digest(hello_header: Frame, welcome_header: Frame) -> bytes:
    """32 bytes over the exact header frames of both sides; see the module's head for the layout."""
    hasher = hashlib.sha256()
    for part in (b"xk2/transcript", hello_header, welcome_header):
        hasher.update(struct.pack("<I", len(part)))
        hasher.update(part)
    return hasher.digest()


def check_boot_id(boot_id: bytes) -> bytes:
    """A boot id of ours.

    Raises:
        LocalProtocolError: not 16 bytes.
    """
    if not isinstance(boot_id, bytes) or len(boot_id) != BOOT_ID_BYTES:
        raise LocalProtocolError(f"boot_id: wanted {BOOT_ID_BYTES} random bytes, made once per process")
    return boot_id


def _check_space(raw: msgspec.Raw | None) -> None:
    """A space that cannot be read is refused as such, so that the client learns which field is at fault."""
    if raw is None or bytes(raw) == _NIL:
        return
    try:
        entries = split_map(memoryview(raw), "space")
        if "attributes" in entries:
            split_map(memoryview(entries["attributes"]), "space.attributes")
        for name in entries:
            if name not in SpaceFields.__struct_fields__:
                fault = f"space: has a field that this version does not know ({name[:64]!r}), so its keys would differ"
                break
        else:
            decode(memoryview(raw), _space_decoder, "space")
            return
    except RemoteProtocolError as error:
        name, fault = "", str(error)
    raise HandshakeError(RefusalCode.SPACE_INVALID, fault, field=f"space.{name}".rstrip("."))


def _check_floor(raw: msgspec.Raw | None) -> None:
    if raw is None:
        return
    entries = split_map(memoryview(raw), "floor")
    unknown = [name for name in entries if name not in Floor.__struct_fields__]
    if unknown:
        raise HandshakeError(
            RefusalCode.FLOOR_UNKNOWN,
            f"floor: has a requirement that this version does not know ({unknown[0][:64]!r}) and so cannot keep",
            field=f"floor.{unknown[0]}",
        )
    decode(memoryview(raw), _floor_decoder, "floor")
