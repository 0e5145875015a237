"""A `CacheService` and clients without sockets: virtual time, jobs run when the test says so."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keying import ChunkKey, KeySpace
from protocol_v2.cache import CacheLimits, ChunkCache
from protocol_v2.client_connection import ClientConnection
from protocol_v2.events import Established, Event, ReplyReceived, RequestFailed, SayHello, SendRequest
from protocol_v2.foreign import ForeignFront
from protocol_v2.frames import Frame
from protocol_v2.hello import Limits
from protocol_v2.identity import keys_of_digests
from protocol_v2.messages import LookupRequest, Request, RetrieveRequest, StoreRequest
from protocol_v2.negotiation import ClientTerms, Offer, ServerTerms
from protocol_v2.service import CacheService
from protocol_v2.sharing import Sharing
from protocol_v2.tensors import TensorMeta
from protocol_v2.tiers import DiskTier
from protocol_v2.wire_keys import Shard

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from protocol_v2.jobs import Job
    from protocol_v2.tiers.remote import RemoteTier

SPACE = KeySpace("org/m", chunk_size=4, kv_dtype="bfloat16")
MEMORY = 1 << 20
PLAIN = Offer()


class Harness:
    """One service, any number of clients, a clock that the test moves."""

    def __init__(
        self,
        *,
        memory: int = MEMORY,
        disk: DiskTier | None = None,
        remote: "RemoteTier | None" = None,
        remote_executor: "Executor | None" = None,
        limits: Limits | None = None,
        expected: tuple[KeySpace, ...] = (),
        boot: bytes = b"s" * 16,
        front: ForeignFront | Callable[[ChunkCache], ForeignFront] | None = None,
        max_peers: int = 8,
        sharing: Sharing | None = None,
        cache_limits: CacheLimits | None = None,
    ) -> None:
        self.now = 1000.0
        cache = ChunkCache(memory, disk, remote, limits=cache_limits, remote_executor=remote_executor)
        cache.load()
        terms = ServerTerms(boot_id=boot, limits=limits or Limits(), expected_spaces=expected, software="test")
        made = front(cache) if callable(front) else front
        self.service = CacheService(cache, terms, started=self.now, max_peers=max_peers, front=made, sharing=sharing)
        self.inboxes: dict[bytes, list[list[Frame]]] = defaultdict(list)
        self.held_jobs: list[Job] = []
        self.hold = False
        self._identities = (b"peer-%d" % number for number in itertools.count())

    def client(self, space: KeySpace | None = SPACE, boot: bytes = b"c" * 16, offer: Offer | None = None) -> "Client":
        """A client whose session stands."""
        client = Client(self, next(self._identities), space, boot, offer or Offer())
        client.hello()
        return client

    def pump(self) -> None:
        """Run jobs (unless they are held) and sort what goes out, until nothing moves."""
        while True:
            jobs = self.service.take_jobs()
            if self.hold:
                self.held_jobs += jobs
                jobs = []
            for job in jobs:
                job.run()
                self.service.finish(job, self.now)
            sent = self.service.take_outgoing()
            for identity, frames in sent:
                self.inboxes[identity].append([bytes(frame) for frame in frames])
            if not jobs and not sent:
                return

    def release_jobs(self) -> None:
        """Run what was held."""
        self.hold = False
        held, self.held_jobs = self.held_jobs, []
        for job in held:
            job.run()
            self.service.finish(job, self.now)
        self.pump()

    def raw(self, identity: bytes, *frames: bytes) -> list[list[Frame]]:
        """Send anything; what comes back."""
        self.inboxes[identity].clear()
        self.service.receive(identity, list(frames), self.now)
        self.pump()
        return self.inboxes.pop(identity, [])

    def pass_time(self, seconds: float) -> None:
        """Move the clock and let the service see it."""
        self.now += seconds
        self.service.tick(self.now)
        self.pump()

    def fact(self, name: str) -> Any:
        """One fact of the status."""
        return self.service.status(self.now)[name]


class Client:
    """A real client connection, wired to the service."""

    def __init__(
        self, harness: Harness, identity: bytes, space: KeySpace | None, boot: bytes, offer: Offer = PLAIN
    ) -> None:
        self.harness = harness
        self.identity = identity
        self.connection = ClientConnection(ClientTerms(boot_id=boot, space=space, offer=offer))
        self.events: list[Event] = []

    def send(self, frames: Sequence[Frame]) -> None:
        """Deliver a message and take what comes back."""
        self.harness.service.receive(self.identity, [bytes(frame) for frame in frames], self.harness.now)
        self.receive()

    def receive(self) -> None:
        """Take what the service has sent."""
        self.harness.pump()
        inbox = self.harness.inboxes.pop(self.identity, [])
        for frames in inbox:
            self.events += self.connection.receive_frames(frames, self.harness.now)

    def hello(self) -> Event:
        """Say hello; the answer."""
        self.send(self.connection.send(SayHello(self.connection.new_request_id()), self.harness.now))
        return self.events[-1]

    def begin(self, message: Request, payload: Sequence[Frame] = (), timeout: float | None = None) -> int:
        """Send a request; its id."""
        request_id = self.connection.new_request_id()
        self.send(self.connection.send(SendRequest(request_id, message, tuple(payload), timeout), self.harness.now))
        return request_id

    def outcome(self, request_id: int) -> ReplyReceived | RequestFailed | None:
        """What a request ended in, if it has."""
        for event in self.events:
            if isinstance(event, ReplyReceived | RequestFailed) and event.request_id == request_id:
                return event
        return None

    def ask(self, message: Request, payload: Sequence[Frame] = ()) -> Any:
        """Send a request; the reply, or the error."""
        ended = self.outcome(self.begin(message, payload))
        assert ended is not None
        return ended.message if isinstance(ended, ReplyReceived) else ended.error

    def established(self) -> Established:
        """The last welcome."""
        return next(event for event in reversed(self.events) if isinstance(event, Established))

    def lookup(self, keys: Sequence[ChunkKey | bytes], session: str = "r", **more: Any) -> Any:
        """A lookup by digests."""
        return self.ask(LookupRequest(session=session, keys=keys_of_digests(keys), **more))

    def store(
        self, keys: Sequence[ChunkKey], values: Sequence[bytes], session: str = "r", first: int = 0, **shard: int
    ) -> Any:
        """Store one uint8 tensor a chunk."""
        return self.ask(*store_message(keys, values, session, first, **shard))

    def retrieve(self, lease: bytes, count: int, first: int = 0, **shard: int) -> list[bytes] | Any:
        """The chunks' bytes, or the error."""
        request_id = self.begin(RetrieveRequest(lease=lease, first=first, count=count, shard=Shard(**shard)))
        ended = self.outcome(request_id)
        assert ended is not None
        return [bytes(frame) for frame in ended.payload] if isinstance(ended, ReplyReceived) else ended.error


def store_message(
    keys: Sequence[ChunkKey], values: Sequence[bytes], session: str = "r", first: int = 0, **shard: int
) -> tuple[StoreRequest, list[bytes]]:
    """A store of one uint8 tensor a chunk, and its payload."""
    stored = keys[first : first + len(values)]
    message = StoreRequest(
        session=session,
        keys=keys_of_digests(keys),
        first=first,
        starts=tuple(key.start for key in stored),
        n_tokens=tuple(key.stop - key.start for key in stored),
        shard=Shard(**shard),
        tensors=tuple((TensorMeta("uint8", (len(value),)),) for value in values),
    )
    return message, list(values)
