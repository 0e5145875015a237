"""Two real connections joined by a pretended link, so that every send is a receive test as well.

The link can spoil messages on the way. Whatever it does, each side may only answer with events or
`RemoteProtocolError`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keying import KeySpace
from protocol_v2 import ClientConnection, ClientTerms, Connection, Limits, ServerConnection, ServerTerms, answer_hello
from protocol_v2.errors import RemoteProtocolError
from protocol_v2.events import (
    AnswerHello,
    Event,
    HelloReceived,
    Outgoing,
    RequestReceived,
    SayHello,
    SendRequest,
)
from protocol_v2.frames import Frame
from protocol_v2.messages import Request
from tests.protocol_v2.strategies import CLIENT_BOOT, LIMITS, SERVER_BOOT, SPACE

Frames = list[Frame]
Fault = Callable[[Frames], list[Frames]]
"""What a link does to one message: the messages that arrive instead."""


def deliver(frames: Frames) -> list[Frames]:
    """No fault."""
    return [frames]


def drop(frames: Frames) -> list[Frames]:
    """Nothing arrives."""
    return []


def repeat(frames: Frames) -> list[Frames]:
    """It arrives twice."""
    return [frames, list(frames)]


def truncate_frames(frames: Frames) -> list[Frames]:
    """The last frame is missing."""
    return [frames[:-1]]


def truncate_bytes(frames: Frames) -> list[Frames]:
    """The last frame lacks its last byte."""
    return [[*frames[:-1], bytes(frames[-1])[:-1]]]


def extra_frame(frames: Frames) -> list[Frames]:
    """A frame more than was sent."""
    return [[*frames, b"extra"]]


def oversize(frames: Frames) -> list[Frames]:
    """The last frame has grown beyond every cap of the tests."""
    return [[*frames[:-1], bytes(frames[-1]) + bytes(17 << 20)]]


FAULTS: tuple[Fault, ...] = (drop, repeat, truncate_frames, truncate_bytes, extra_frame, oversize)


@dataclass
class ConnectionPair:
    """A client and a server, the messages between them, and what they said."""

    space: KeySpace | None = SPACE
    limits: Limits = LIMITS
    expected_spaces: tuple[KeySpace, ...] = ()
    boot: bytes = SERVER_BOOT
    now: float = 100.0
    to_server: deque[Frames] = field(default_factory=deque)
    to_client: deque[Frames] = field(default_factory=deque)
    errors: list[RemoteProtocolError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = ClientConnection(ClientTerms(CLIENT_BOOT, self.space))
        self.server = self.new_server()

    def new_server(self) -> ServerConnection:
        """A server connection as a fresh process would make it."""
        return ServerConnection(self.server_terms())

    def server_terms(self) -> ServerTerms:
        """What the server says of itself."""
        return ServerTerms(self.boot, limits=self.limits, expected_spaces=self.expected_spaces)

    def client_sends(self, event: Outgoing) -> None:
        """Put a message of the client on the link."""
        frames = self.client.send(event, self.now)
        if frames:
            self.to_server.append(frames)

    def server_sends(self, event: Outgoing) -> None:
        """Put a message of the server on the link."""
        frames = self.server.send(event, self.now)
        if frames:
            self.to_client.append(frames)

    def ask(self, message: Request, payload: Sequence[Frame] = (), timeout: float | None = None) -> int:
        """Put a request on the link; its id."""
        request_id = self.client.new_request_id()
        self.client_sends(SendRequest(request_id, message, tuple(payload), timeout))
        return request_id

    def at_server(self, fault: Fault = deliver) -> list[Event]:
        """The next message arrives at the server; what went wrong is answered."""
        events: list[Event] = []
        for frames in fault(self.to_server.popleft()):
            events += self._receive(self.server, frames)
        return events

    def at_client(self, fault: Fault = deliver) -> list[Event]:
        """The next message arrives at the client."""
        events: list[Event] = []
        for frames in fault(self.to_client.popleft()):
            events += self._receive(self.client, frames)
        return events

    def greet(self) -> list[Event]:
        """A whole handshake without faults; what the client makes of it."""
        self.client_sends(SayHello(self.client.new_request_id()))
        events = self.at_server()
        hello = next(one for one in events if isinstance(one, HelloReceived))
        self.server_sends(AnswerHello(hello.request_id, answer_hello(hello, self.server_terms())))
        return self.at_client()

    def request(self, message: Request, payload: Sequence[Frame] = ()) -> RequestReceived:
        """A request that arrives."""
        self.ask(message, payload)
        (received,) = self.at_server()
        assert isinstance(received, RequestReceived)
        return received

    def _receive(self, connection: Connection, frames: Frames) -> list[Event]:
        try:
            return connection.receive_frames(frames, self.now)
        except RemoteProtocolError as error:
            self.errors.append(error)
            if isinstance(connection, ServerConnection):
                reply = connection.error_reply(error)
                if reply:
                    self.to_client.append(reply)
            return []
