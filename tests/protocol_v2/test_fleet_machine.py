"""Two clients and a server against a dictionary: restarts, evictions, expiry, lost replies, garbage.

Never a wrong value, never a lost acknowledged entry, and leases end at 0. Values follow from what a request means, so a
value under a wrong key is seen whoever stored it. The memory tier holds a few chunks only; the disk tier holds all.
"""

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from keying import CacheSalt, ChunkKey, ExtraKey, LoraAdapter, MultimodalItem, chunk_keys
from protocol_v2.errors import ServerError
from protocol_v2.identity import keys_of_digests
from protocol_v2.messages import ClearRequest, EndSessionRequest, PingRequest, PrefetchRequest, ReleaseRequest
from protocol_v2.state import State
from protocol_v2.tiers import DiskTier, Fsync
from tests.protocol_v2.service_harness import SPACE, Client, Harness, store_message

TOKENS = [1, 2, 3, 4, 5, 9, 9, 9, 9, 10, 11, 12, 13, 14, 15, 16]
VALUE_BYTES = 600
PRELUDE_ID = range(8, 16)
FEW_CHUNKS = 6 * (VALUE_BYTES + 1024)

REQUESTS: list[tuple[str, list[int], list[ExtraKey]]] = [
    ("text", TOKENS, []),
    ("other text", [*TOKENS[:12], 7, 7, 7, 7], []),
    ("cat", TOKENS, [MultimodalItem("cat", 5, 4)]),
    ("dog", TOKENS, [MultimodalItem("dog", 5, 4)]),
    ("adapter", TOKENS, [LoraAdapter("a", "r")]),
    ("salt", TOKENS, [CacheSalt("a")]),
]
requests = st.sampled_from(range(len(REQUESTS)))
clients = st.sampled_from([0, 1])


def keys_of(request: int) -> list[ChunkKey]:
    """The keys of a request."""
    _, tokens, extra_keys = REQUESTS[request]
    return chunk_keys(SPACE, tokens, extra_keys)


def token_only_keys_of(request: int) -> list[ChunkKey]:
    """The fault that this project is against."""
    return chunk_keys(SPACE, REQUESTS[request][1])


def meaning(request: int, place: int) -> tuple[Any, ...]:
    """What a chunk's KV depends on, without keys."""
    _, tokens, extra_keys = REQUESTS[request]
    stop = (place + 1) * 4
    seen = tuple(one for one in extra_keys if not isinstance(one, MultimodalItem) or one.offset < stop)
    return (tuple(tokens[:stop]), seen)


def value_of(request: int, place: int) -> bytes:
    """The KV of a chunk."""
    described = repr([(type(one).__name__, getattr(one, "value", one)) for one in meaning(request, place)[1]])
    return hashlib.shake_256(f"{meaning(request, place)[0]}{described}".encode()).digest(VALUE_BYTES)


class Fleet(RuleBasedStateMachine):
    """See the module's text."""

    @initialize()
    def begin(self) -> None:
        """A server on an empty folder, two clients."""
        self.folder = tempfile.TemporaryDirectory()
        self.boots = 0
        self.sure: set[tuple[Any, ...]] = set()
        self.maybe: set[tuple[Any, ...]] = set()
        self.sessions: list[tuple[int, str]] = []
        self.started = 0
        self.clients: list[Client] = []
        self._boot()
        self.clients = [self.harness.client(boot=b"c" * 16), self.harness.client(boot=b"d" * 16)]

    def _boot(self) -> None:
        self.boots += 1
        disk = DiskTier(Path(self.folder.name), budget=1 << 24, fsync=Fsync.RENAME_ONLY)
        self.harness = Harness(memory=FEW_CHUNKS, disk=disk, boot=b"%016d" % self.boots)

    def _session(self, client: int) -> str:
        self.started += 1
        self.sessions.append((client, f"s{self.started}"))
        return self.sessions[-1][1]

    def _bounds(self, request: int) -> tuple[int, int]:
        """Fewest and most leading chunks that may be hit."""
        places = range(len(keys_of(request)))
        surely = [meaning(request, place) in self.sure for place in places]
        maybe = [sure or meaning(request, place) in self.maybe for sure, place in zip(surely, places, strict=True)]
        return [*surely, False].index(False), [*maybe, False].index(False)

    @rule(client=clients, request=requests, end=st.booleans())
    def look_up_and_retrieve(self, client: int, request: int, end: bool) -> None:
        """What is hit is what was acknowledged, with the right bytes."""
        peer, session = self.clients[client], self._session(client)
        hit = peer.lookup(keys_of(request), session=session)
        least, most = self._bounds(request)
        assert least <= hit.hit_chunks <= most
        if hit.hit_chunks:
            delivered = peer.retrieve(hit.lease, hit.hit_chunks)
            assert [value_of(request, place) for place in range(hit.hit_chunks)] == delivered
            if end:
                peer.ask(ReleaseRequest(lease=hit.lease, first=1))
        if end:
            peer.ask(EndSessionRequest(session=session))

    @rule(client=clients, request=requests, first=st.integers(0, 2), lose_reply=st.booleans())
    def store(self, client: int, request: int, first: int, lose_reply: bool) -> None:
        """Stored and acknowledged is there; stored without an answer may be."""
        peer, session, keys = self.clients[client], self._session(client), keys_of(request)
        places = range(first, len(keys))
        message, payload = store_message(keys, [value_of(request, place) for place in places], session, first)
        if lose_reply:
            self.harness.hold = True
            peer.begin(message, payload, timeout=1.0)
            self.harness.pass_time(2)
            self.harness.release_jobs()
            peer.events += peer.connection.expire(self.harness.now)
            self.maybe |= {meaning(request, place) for place in places} - self.sure
            return
        reply = peer.ask(message, payload)
        assert not isinstance(reply, ServerError), reply
        assert len(places) == reply.stored + reply.present + reply.declined
        assert 0 == reply.declined
        self.sure |= {meaning(request, place) for place in places}

    @rule(client=clients, request=requests)
    def prefetch(self, client: int, request: int) -> None:
        """Prefetch changes nothing that a lookup can see."""
        session = self._session(client)
        self.clients[client].ask(PrefetchRequest(session=session, keys=keys_of_digests(keys_of(request))))

    @rule(client=clients)
    def clear(self, client: int) -> None:
        """What is not leased is forgotten; what is leased may stay."""
        held = self.harness.fact("cache.held")
        self.clients[client].ask(ClearRequest(scope="all"))
        self.maybe = (self.maybe | self.sure) if held else set()
        self.sure = set()

    @rule(seconds=st.sampled_from([0.2, 5.0, 61.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Leases expire, sessions are forgotten, silent clients are dropped and come back."""
        self.harness.pass_time(seconds)
        if seconds > 19:
            for peer in self.clients:
                peer.hello()
            self.sessions.clear()

    @rule()
    def restart(self) -> None:
        """The server stops and comes back on the same folder; clients say hello again."""
        self.harness.service.close(self.harness.now)
        now = self.harness.now
        self._boot()
        self.harness.now = now
        self.harness.pass_time(1)
        for peer in self.clients:
            peer.harness = self.harness
            answer = peer.lookup(keys_of(0), session="of before")
            assert isinstance(answer, Exception)  # the old session is noticed, not served
            peer.hello()
        self.sessions.clear()

    @rule(frames=st.lists(st.binary(max_size=40), max_size=4))
    def garbage(self, frames: list[bytes]) -> None:
        """A stranger sends something."""
        self.harness.raw(b"stranger", *frames)

    @rule(client=clients, place=st.integers(0, 60), byte=st.integers(0, 255))
    def spoiled(self, client: int, place: int, byte: int) -> None:
        """A message arrives with one byte changed: it is refused, or it is another legal lookup of the same keys.

        Its id is left alone: a changed one is the client's own name for a later request, which it costs (by deadline).
        """
        from protocol_v2.events import SendRequest
        from protocol_v2.messages import LookupRequest

        peer = self.clients[client]
        message = LookupRequest(session=self._session(client), keys=keys_of_digests(keys_of(0)), lease=False)
        request_id = peer.connection.new_request_id()
        frames = peer.connection.send(SendRequest(request_id, message, timeout=1.0), self.harness.now)
        header = bytearray(frames[2])
        header[place if place < PRELUDE_ID.start else place + len(PRELUDE_ID)] = byte
        self.harness.service.receive(peer.identity, [frames[0], frames[1], bytes(header)], self.harness.now)
        self.harness.pump()
        self.harness.inboxes.pop(peer.identity, None)
        self.harness.pass_time(2)
        peer.events += peer.connection.expire(self.harness.now)
        if peer.connection.state is not State.OPEN or isinstance(peer.ask(PingRequest()), Exception):
            peer.hello()  # it had become a message that breaks the protocol, or one that ended the session
            self.sessions = [one for one in self.sessions if one[0] != client]

    @invariant()
    def the_server_lives(self) -> None:
        """Both clients' heartbeats are answered, bounds hold, nothing is set aside."""
        if not self.clients:
            return
        for peer in self.clients:
            assert self.harness.service.boot_id == peer.ask(PingRequest()).boot
        facts = self.harness.service.status(self.harness.now)
        used, budget = facts["tier.memory.used"], facts["tier.memory.budget"]
        assert isinstance(used, int)
        assert isinstance(budget, int)
        assert used <= budget
        assert 0 == facts["cache.quarantine_bytes"]

    def teardown(self) -> None:
        """When every session has ended, no lease is left and no chunk is held."""
        if not self.clients:
            return
        try:
            for client, session in self.sessions:
                self.clients[client].ask(EndSessionRequest(session=session))
            assert (0, 0) == (self.harness.fact("cache.leases"), self.harness.fact("cache.held"))
        finally:
            self.harness.service.close(self.harness.now)
            self.folder.cleanup()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=120, stateful_step_count=30)


def test_the_machine_sees_keys_without_extra_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with keys over tokens alone, the same machine finds a wrong hit."""
    monkeypatch.setattr(sys.modules[__name__], "keys_of", token_only_keys_of)
    quick = settings(max_examples=200, phases=[Phase.generate], database=None)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(Fleet, settings=quick)
