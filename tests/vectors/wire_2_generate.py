"""Makes `wire-2.json`, the vectors of wire protocol 2: `python tests/vectors/wire_2_generate.py [--check]`.

Inputs are fixed. `wire_2_verify.py` reads the vectors with the standard library alone. A changed vector of a frozen or
released message is a new wire version: this file is appended to, never edited.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from keying import (
    CacheSalt,
    KeySpace,
    LoraAdapter,
    MultimodalItem,
    PromptEmbeds,
    Tag,
    chunk_keys,
)
from protocol_v2.body import encode
from protocol_v2.capability import answer_probe, probe
from protocol_v2.codes import Code, ErrorCode, MissReason, RefusalCode
from protocol_v2.frames import PRELUDE, Prelude, join
from protocol_v2.hello import (
    Floor,
    Hello,
    Limits,
    OfferFields,
    Refusal,
    SpaceDifference,
    Unrecognised,
    Welcome,
    encode_hello,
    transcript_digest,
)
from protocol_v2.identity import keys_of_digests, keys_of_tokens, space_to_wire
from protocol_v2.messages import (
    AttachReply,
    AttachRequest,
    ClearReply,
    ClearRequest,
    EndSessionReply,
    EndSessionRequest,
    ErrorReply,
    LookupReply,
    LookupRequest,
    Message,
    PingReply,
    PingRequest,
    PrefetchReply,
    PrefetchRequest,
    ReleaseReply,
    ReleaseRequest,
    RetrieveReply,
    RetrieveRequest,
    SharedRange,
    StatusReply,
    StatusRequest,
    StoreReply,
    StoreRequest,
    encode_message,
)
from protocol_v2.tensors import TensorMeta
from protocol_v2.wire_keys import Shard

if TYPE_CHECKING:
    import enum
    from collections.abc import Sequence

    from protocol_v2.frames import Frame

PATH = Path(__file__).with_name("wire-2.json")

SPACE = KeySpace(
    "org/model", chunk_size=4, kv_dtype="bfloat16", model_revision="r1", attributes={"rope": "yarn", "é": "x"}
)
TOKENS = [1, 2, 300, 70_000, 4_294_967_295, 0, 9, 9, 9, 5]
EXTRA_KEYS = [
    MultimodalItem("img-A", 5, 3),
    LoraAdapter("adapter", "sha256:00", 2),
    CacheSalt("tenant/ü"),
    PromptEmbeds(8, bytes(range(8)), 4, "float16"),
    Tag("policy", b"\x00\xff", 0),
]
KEYS = chunk_keys(SPACE, TOKENS, EXTRA_KEYS)
BY_DIGESTS = keys_of_digests(KEYS)
BY_TOKENS = keys_of_tokens(TOKENS, EXTRA_KEYS, partial_tail=True)
CLIENT_BOOT, SERVER_BOOT, LEASE = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
CLIENT_NONCE, SERVER_NONCE = bytes(range(64, 96)), bytes(range(96, 128))
META = TensorMeta("bfloat16", (2, 4))
OTHER = TensorMeta("int8", (3,))

HELLO = Hello(
    wire=(2,),
    schemas=(2,),
    space=space_to_wire(SPACE),
    boot=CLIENT_BOOT,
    floor=Floor(wire=2, schema=2),
    role="connector",
    software="vectors/1",
)
TOOL = Hello(wire=(2,), schemas=(2,), boot=CLIENT_BOOT, floor=Floor(wire=2, schema=2), role="tool")
LATER = {
    "wire": [2, 3, 9],
    "schemas": [2, 3],
    "features": ["kind/6", "shm/3"],
    "space": {"model": "org/model", "kv_dtype": "bfloat16", "chunk_size": 4},
    "boot": CLIENT_BOOT,
    "floor": {"wire": 2, "schema": 2, "features": []},
    "region": {"zone": ["a", {"b": 1.5}]},
    "wire_9_ticket": None,
}
WELCOME = Welcome(
    wire=2,
    schema=2,
    unrecognised=Unrecognised(fields=("grease_00",), features=("grease/00",), wire=(0x0A0A,), schemas=(0x0A0A,)),
    limits=Limits(
        max_payload_bytes=1 << 30,
        max_chunks=16_384,
        max_pending=256,
        lease_ms=60_000,
        heartbeat_ms=5_000,
        silence_ms=20_000,
        default_deadline_ms=10_000,
        max_deadline_ms=300_000,
    ),
    boot=SERVER_BOOT,
    root=SPACE.root,
    notice=(SpaceDifference(field="kv_dtype", asked="bfloat16", accepted="float8_e4m3fn"),),
    software="vectors/1",
)
REFUSAL = Refusal(
    code=RefusalCode.SPACE_MISMATCH,
    message="pinned",
    field="space.attributes.rope",
    asked=OfferFields(wire=(2, 3), schemas=(2,), features=("kind/6",), floor=Floor(wire=2, schema=2)),
    accepted=OfferFields(wire=(2,), schemas=(2,), floor=Floor(wire=2, schema=2)),
    differences=(SpaceDifference(field="attributes.rope", asked="yarn", accepted="(absent)"),),
)

REQUESTS: list[tuple[str, Message]] = [
    ("lookup by digests", LookupRequest(session="req-1", keys=BY_DIGESTS, world=2, groups=1)),
    ("lookup by tokens and extra keys", LookupRequest(session="req-1", keys=BY_TOKENS, lease=False)),
    ("lookup reply, two chunks and a lease", LookupReply(hit_chunks=2, lease=LEASE, lease_ms=60_000)),
    ("lookup reply, miss", LookupReply(hit_chunks=0, miss=MissReason.ABSENT)),
    ("retrieve", RetrieveRequest(lease=LEASE, first=0, count=2, shard=Shard(world=2, rank=1, group=0))),
    (
        "retrieve reply, shared descriptions",
        RetrieveReply(count=2, starts=(0, 4), n_tokens=(4, 4), tensors=((META, OTHER),)),
    ),
    (
        "retrieve reply, own descriptions, a prefix only",
        RetrieveReply(count=2, starts=(0, 4), n_tokens=(4, 2), tensors=((META,), (OTHER,)), miss=MissReason.CHECKSUM),
    ),
    ("retrieve reply, nothing", RetrieveReply(count=0, miss=MissReason.ABSENT)),
    (
        "store",
        StoreRequest(
            session="req-1",
            keys=BY_DIGESTS,
            first=1,
            starts=(4,),
            n_tokens=(4,),
            shard=Shard(world=2, rank=1),
            tensors=((META,),),
        ),
    ),
    ("store reply", StoreReply(stored=1, present=0, declined=0)),
    ("prefetch", PrefetchRequest(session="req-1", keys=BY_DIGESTS, world=2)),
    ("prefetch reply", PrefetchReply(accepted=1, resident=1)),
    ("release a part", ReleaseRequest(lease=LEASE, first=1, count=1)),
    ("release all", ReleaseRequest(lease=LEASE)),
    ("release reply", ReleaseReply(released=1)),
    ("end session", EndSessionRequest(session="req-1")),
    ("end session reply", EndSessionReply(known=True)),
    ("ping", PingRequest()),
    ("ping reply", PingReply(boot=SERVER_BOOT, uptime_ms=2**40, loop_lag_us=250)),
    ("status", StatusRequest()),
    ("status reply", StatusReply(status={"chunks": 3, "lag": 0.5, "tier": "memory", "full": False, "none": None})),
    ("clear", ClearRequest(scope="space")),
    ("clear reply", ClearReply(objects=3, bytes=2**33)),
    ("error", ErrorReply(error=ErrorCode.IDENTITY_MISMATCH, message="another identity", retriable=False)),
    ("error of a later version", ErrorReply(error=999, message="?", retriable=True)),
    ("attach", AttachRequest(pid=4711, fd=9, nonce=CLIENT_NONCE, size=2**28)),
    ("attach reply", AttachReply(pid=42, fd=17, nonce=SERVER_NONCE, size=2**33)),
    (
        "store through shared memory",
        StoreRequest(
            session="req-1",
            keys=BY_DIGESTS,
            starts=(0, 4),
            n_tokens=(4, 4),
            tensors=((META, OTHER),),
            shared=(SharedRange(0, 2**62 + 5), SharedRange(7, 1)),
        ),
    ),
    (
        "retrieve through shared memory",
        RetrieveRequest(lease=LEASE, count=2, shared=SERVER_NONCE),
    ),
    (
        "retrieve reply, one chunk in shared memory and one inline",
        RetrieveReply(
            count=2, starts=(0, 4), n_tokens=(4, 4), tensors=((META,), (OTHER,)), shared=(SharedRange(3, 9), None)
        ),
    ),
    ("error of shared memory", ErrorReply(error=ErrorCode.UNSHARED, message="not the range", retriable=False)),
]


def generate() -> dict[str, Any]:
    """All vectors."""
    hello = join(Prelude(Code.HELLO, 1), encode_hello(HELLO, grease=True))
    welcome = join(Prelude(Code.WELCOME, 1), encode(WELCOME))
    digest = transcript_digest(hello[2], welcome[2])
    messages = [
        _case("hello with grease", hello),
        _case("hello of a tool", join(Prelude(Code.HELLO, 2), encode_hello(TOOL, grease=False))),
        _case("hello of a later version", join(Prelude(Code.HELLO, 3), encode(LATER))),
        _case("welcome to the first hello", [*welcome, digest]),
        _case("refusal", join(Prelude(Code.REFUSAL, 1), encode(REFUSAL))),
    ]
    for number, (name, message) in enumerate(REQUESTS):
        reply = message.code % 2 == 1 or message.code == Code.ERROR
        prelude = Prelude(message.code, 100 + number, 0 if reply else 2500, digest[:8])
        payload = [bytes((number + i) & 0xFF for i in range(size)) for size in message.payload_sizes()]
        messages.append(_case(name, join(prelude, encode_message(message), payload)))
    return {
        "comment": "Wire protocol 2: made by wire_2_generate.py, read by wire_2_verify.py with the standard library",
        "numbers": {one.__name__: _numbers(one) for one in (Code, ErrorCode, RefusalCode, MissReason)},
        "space": {
            "model": SPACE.model,
            "model_revision": SPACE.model_revision,
            "kv_dtype": SPACE.kv_dtype,
            "chunk_size": SPACE.chunk_size,
            "kv_layout": SPACE.kv_layout,
            "attributes": dict(SPACE.attributes),
        },
        "root": SPACE.root.hex(),
        "keys": [key.digest.hex() for key in KEYS],
        "tail_key": chunk_keys(SPACE, TOKENS, EXTRA_KEYS, partial_tail=True)[-1].digest.hex(),
        "transcript": {"hello": bytes(hello[2]).hex(), "welcome": bytes(welcome[2]).hex(), "digest": digest.hex()},
        "capability": {
            "asked": [bytes(frame).hex() for frame in probe(1)],
            "answered": [bytes(frame).hex() for frame in answer_probe(probe(1))],
        },
        "messages": messages,
    }


def _case(name: str, frames: Sequence[Frame]) -> dict[str, Any]:
    code, flags, deadline_ms, request_id, digest = PRELUDE.unpack_from(frames[2])
    return {
        "name": name,
        "code": code,
        "flags": flags,
        "deadline_ms": deadline_ms,
        "id": request_id,
        "digest": digest.hex(),
        "body": _plain(_decoded(bytes(frames[2])[PRELUDE.size :])),
        "frames": [bytes(frame).hex() for frame in frames],
    }


def _decoded(body: bytes) -> Any:
    return msgspec.msgpack.decode(body)


def _plain(value: Any) -> Any:
    """A body as JSON: bytes as `{"bin": hex}`."""
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, dict):
        return {"map": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def _numbers(registry: type[enum.IntEnum]) -> dict[str, int]:
    return {name: int(member) for name, member in registry.__members__.items()}


def main() -> int:
    """Write the vectors, or with `--check` say whether they are what this code makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = json.dumps(generate(), indent=1, ensure_ascii=False) + "\n"
    if not options.check:
        PATH.write_text(text, encoding="utf-8")
        return 0
    same = PATH.read_text(encoding="utf-8") == text
    sys.stdout.write("wire-2.json is current\n" if same else "wire-2.json differs from what this code makes\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
