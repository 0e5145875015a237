"""`probe`: say hello to a server and report what was said on both sides; for people and for `extra-keys probe`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol_v2.client import CacheClient, checked_timeout
from protocol_v2.errors import NegotiationRefusedError, ProtocolError
from protocol_v2.session_keeper import Patience

if TYPE_CHECKING:
    from keying import KeySpace
    from protocol_v2.events import Established
    from protocol_v2.hello import Refusal
    from protocol_v2.messages import PingReply
    from protocol_v2.negotiation import Offer


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        address: that was probed.
        offer: what we said.
        space: likewise; None for none.
        capabilities: what the server listed; None: it did not answer the question.
        established: what its welcome said; None without a session.
        refusal: what its refusal (or ours) said, where there was one.
        error: why no session stands; None where one did.
        pong: the answer to a ping in the session.
        hello_seconds: from connecting to the session.
        ping_seconds: round trip of the ping.
    """

    address: str
    offer: Offer
    space: KeySpace | None
    capabilities: frozenset[str] | None
    established: Established | None
    refusal: Refusal | None
    error: ProtocolError | None
    pong: PingReply | None
    hello_seconds: float
    ping_seconds: float | None

    @property
    def ok(self) -> bool:
        """Whether a session of wire protocol 2 stood, and a ping came back in it."""
        return self.error is None and self.established is not None and self.pong is not None


def probe(
    address: str, space: KeySpace | None = None, *, offer: Offer | None = None, timeout: float = 5.0
) -> ProbeReport:
    """Open a session, ping once, and close it.

    Args:
        address: ``ipc://PATH`` or ``tcp://HOST:PORT``.
        space: to say in the hello, so that a mismatch shows; None for none.
        offer: to make; None: what this code can.
        timeout: seconds for all of it.

    Raises:
        LocalProtocolError: an address or another value that cannot be. Everything else is in the report.
    """
    begun, ends = time.monotonic(), time.monotonic() + checked_timeout(timeout)
    patience = Patience(connect=timeout, answer=timeout)
    with CacheClient(address, space, offer=offer, role="probe", timeout=timeout, patience=patience) as client:
        error: ProtocolError | None = None
        pong: PingReply | None = None
        ping_seconds: float | None = None
        try:
            client.wait_ready(timeout)
            ready = time.monotonic()
            pong = client.ping(timeout=max(ends - ready, 0.001))
            ping_seconds = time.monotonic() - ready
        except ProtocolError as caught:
            error, ready = caught, time.monotonic()
        return ProbeReport(
            address,
            client.offer,
            space,
            client.capabilities,
            client.established,
            error.refusal if isinstance(error, NegotiationRefusedError) else None,
            error,
            pong,
            ready - begun,
            ping_seconds,
        )
