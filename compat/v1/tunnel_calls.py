"""Requests as chains of v1 calls, sans-IO: what a tunnel does for a request is a generator that yields its calls.

A generator yields `Call`s, is sent the value of each answer, and returns reply and payload. Calls that nobody waits for
are posted. A v1 server leaves unanswered what it cannot do: `NoAnswerError` is thrown into a generator whose call has
had its time, and a request whose deadline passes ends.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from compat.errors import CompatError
from compat.v1.operations import V1Operation
from compat.v1.wire import MAX_ID_BYTES, V1WireError, decode_answer, encode_request
from protocol_v2.codes import ErrorCode
from protocol_v2.errors import ProtocolError, RemoteProtocolError, RequestTimeoutError, ServerError
from protocol_v2.events import ReplyReceived, RequestFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from protocol_v2.events import Event
    from protocol_v2.frames import Frame
    from protocol_v2.messages import Reply


@dataclass(frozen=True, slots=True)
class Call:
    """One v1 operation that a request waits for.

    Args:
        operation: what is asked.
        payloads: of it.
        seconds: that an answer may take; the request's own deadline stands beside it.
    """

    operation: V1Operation
    payloads: tuple[object, ...]
    seconds: float = math.inf


class NoAnswerError(Exception):
    """The server did not answer a call in the time that it had."""


Steps: TypeAlias = "Generator[Call, Any, tuple[Reply, tuple[Frame, ...]]]"
Part: TypeAlias = "Generator[Call, Any, None]"

_NO_UID: Final = -1


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way.

    Attributes:
        steps: what is left to do.
        deadline: seconds, monotonic.
        uid: of the call that it waits for.
        operation: likewise.
        call_ends: when that call has had its time.
    """

    steps: Steps
    deadline: float
    uid: int = _NO_UID
    operation: V1Operation = V1Operation.NOOP
    call_ends: float = math.inf


class CallRunner:
    """All requests under way on one socket."""

    def __init__(self) -> None:
        self._next_uid = 1
        self._running: dict[int, _Running] = {}
        self._waiting: dict[int, int] = {}  # uid -> request id
        self._outgoing: deque[list[Frame]] = deque()
        self._events: list[Event] = []

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def start(self, request_id: int, steps: Steps, deadline: float, now: float) -> None:
        """Take a request and run it to its first call."""
        self._running[request_id] = _Running(steps, deadline)
        self._advance(request_id, partial(next, steps), now)

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """Take a message of the server; what answers nothing that is waited for is ignored."""
        request_id = self._waiting.pop(_uid_of(frames), None)
        if request_id is None:
            return
        running = self._running[request_id]
        try:
            _, value = decode_answer(frames, running.operation)
        except V1WireError as error:
            self._end(request_id, RemoteProtocolError(ErrorCode.MALFORMED, str(error)))
        else:
            self._advance(request_id, partial(running.steps.send, value), now)

    def expire(self, now: float) -> None:
        """Let time pass."""
        for request_id, running in list(self._running.items()):
            if running.deadline <= now:
                self._end(request_id, RequestTimeoutError("the v1 server did not answer before the deadline"))
            elif running.call_ends <= now:
                self._waiting.pop(running.uid, None)
                self._advance(request_id, partial(running.steps.throw, NoAnswerError()), now)

    def next_timeout(self) -> float | None:
        """When `expire` has something to do, or events wait to be taken; None for never."""
        if self._events:
            return -math.inf
        ends = min((min(one.deadline, one.call_ends) for one in self._running.values()), default=math.inf)
        return None if ends == math.inf else ends

    def abandon(self, request_id: int) -> None:
        """Forget a request."""
        running = self._running.pop(request_id, None)
        if running is not None:
            self._waiting.pop(running.uid, None)
            running.steps.close()

    def fail_all(self, error: ProtocolError) -> None:
        """End every request."""
        for request_id in list(self._running):
            self._end(request_id, error)

    def post(self, operation: V1Operation, *payloads: object) -> int:
        """Queue a message whose answer nobody waits for; its uid."""
        uid = self._next_uid
        self._next_uid += 1
        self._outgoing.append(encode_request(uid, operation, *payloads))
        return uid

    def take_outgoing(self) -> list[list[Frame]]:
        """Messages to send now."""
        taken = list(self._outgoing)
        self._outgoing.clear()
        return taken

    def take_events(self) -> list[Event]:
        """What has ended."""
        taken, self._events = self._events, []
        return taken

    def _advance(self, request_id: int, step: Callable[[], Call], now: float) -> None:
        """Run a request to its next call, or to its end."""
        running = self._running[request_id]
        try:
            call = step()
            uid = self.post(call.operation, *call.payloads)
        except StopIteration as done:
            reply, payload = done.value
            del self._running[request_id]
            self._events.append(ReplyReceived(request_id, reply, payload))
        except NoAnswerError:
            self._end(request_id, RequestTimeoutError("the v1 server did not answer"))
        except RemoteProtocolError as error:  # a v2 server would have said so
            self._end(request_id, ServerError(error.error_code, str(error), retriable=False))
        except ProtocolError as error:
            self._end(request_id, error)
        except CompatError as error:
            self._end(request_id, ServerError(ErrorCode.INTERNAL, str(error), retriable=False))
        else:
            running.uid, running.operation, running.call_ends = uid, call.operation, now + call.seconds
            self._waiting[uid] = request_id

    def _end(self, request_id: int, error: ProtocolError) -> None:
        self.abandon(request_id)
        self._events.append(RequestFailed(request_id, error))


def _uid_of(frames: Sequence[Frame]) -> int:
    """Uid of a message; -1 for anything else."""
    if not frames or len(frames[0]) > MAX_ID_BYTES:
        return _NO_UID
    try:
        uid: int = msgspec.msgpack.decode(frames[0], type=int)
    except msgspec.MsgspecError:
        return _NO_UID
    return uid
