"""Errors: one base, the right families, and nothing secret in their text."""

import pytest

from keying import CacheSalt
from protocol_v2 import errors
from protocol_v2.codes import ErrorCode, RefusalCode
from protocol_v2.errors import (
    HandshakeError,
    LocalProtocolError,
    NegotiationRefusedError,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
    SpaceMismatchError,
    TensorError,
)
from protocol_v2.events import RequestReceived, SendRequest
from protocol_v2.hello import Refusal
from protocol_v2.identity import keys_of_tokens
from protocol_v2.messages import LookupRequest

SALT = "s3cret-of-tenant"


def test_one_base_that_is_never_raised_itself() -> None:
    """Every error of the module is a `ProtocolError`, and the base refuses to be made."""
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)]
    assert all(issubclass(one, ProtocolError) for one in classes)
    with pytest.raises(TypeError, match="base"):
        ProtocolError("x")


def test_families_of_the_standard_library() -> None:
    """Misuse is a `ValueError`, a timeout a `TimeoutError`, no server a `ConnectionError`."""
    assert issubclass(LocalProtocolError, ValueError)
    assert issubclass(TensorError, ValueError)
    assert issubclass(RequestTimeoutError, TimeoutError)
    assert issubclass(ServerUnavailableError, ConnectionError)
    assert issubclass(SpaceMismatchError, NegotiationRefusedError)
    assert not issubclass(RemoteProtocolError, ValueError)


def test_a_server_error_says_what_the_server_said() -> None:
    """Code (known or not), retriable flag and a bounded text come from the server."""
    known = ServerError(ErrorCode.BUSY, "full", retriable=False)
    unknown = ServerError(999, "x" * 10_000, retriable=True)
    assert (ErrorCode.BUSY, False, "server: BUSY: full") == (known.error_code, known.retriable, str(known))
    assert (999, True) == (unknown.error_code, unknown.retriable)
    assert len(str(unknown)) < 600


def test_a_peers_words_are_cut() -> None:
    """Texts that quote a peer are bounded."""
    assert 512 == len(str(RemoteProtocolError(ErrorCode.MALFORMED, "x" * 10_000)))
    assert 256 == len(HandshakeError(RefusalCode.SPACE_INVALID, "x", field="f" * 10_000).field)


def test_a_refusal_error_explains_itself() -> None:
    """The text holds the reason, and the data is there as an attribute."""
    refusal = Refusal(code=4, message="pinned")
    error = NegotiationRefusedError(refusal)
    assert ("session refused: SPACE_MISMATCH: pinned", refusal) == (str(error), error.refusal)


def test_no_repr_shows_a_salt_a_token_or_a_payload() -> None:
    """Messages and events can be logged: identity and payload do not show in their `repr`."""
    keys = keys_of_tokens([123456789], [CacheSalt(SALT)])
    request = LookupRequest(session="r", keys=keys)
    for shown in (
        repr(keys),
        repr(keys.extra_keys),
        repr(request),
        repr(SendRequest(1, request, (b"payload-bytes",))),
        repr(RequestReceived(1, 2.0, request, (b"payload-bytes",))),
    ):
        assert SALT not in shown
        assert "payload-bytes" not in shown
        assert str((123456789).to_bytes(4, "little"))[2:-1] not in shown
    assert "Keys(1 tokens, 1 extra keys)" in repr(request)
