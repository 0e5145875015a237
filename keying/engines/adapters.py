"""From the adapter that an engine names to a `LoraAdapter` extra key.

The engine's name and path say which adapter it is, not what it computes. So the revision is asked of a function that
the caller hands in (`keying` reads no files); `protocol_v2.connectors.lora_revision` has one. Where it has no answer
the request is uncacheable.

Adapters that an engine does not name on the request are expressible too: a function says which adapters the media
present imply (models with an adapter for each modality), and another at which position an activated adapter begins.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from keying.engines.reading import make
from keying.engines.reasons import UncacheableReason
from keying.errors import UncacheableRequest
from keying.extra_keys import LoraAdapter


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter as an engine names it: what a revision function is asked about.

    Attributes:
        name: the adapter's name, the same in every process of the deployment.
        path: where the engine loaded it from, or None where the request does not say.
        scale: factor on everything that it computes; 1.0 where the engine has none of its own.
        handle: the engine's own object, for functions that know the engine.
    """

    name: str
    path: str | None = None
    scale: float = 1.0
    handle: Any = None


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Where an activated adapter computes.

    Attributes:
        start: first prompt position that it touches.
        stop: None for "to the end of the sequence", however it grows. Anything else is uncacheable: key schema 2 has no
            adapter that ends.
    """

    start: int = 0
    stop: int | None = None


AdapterRevision: TypeAlias = Callable[[AdapterSource], str | None]
"""Identity of everything that an adapter computes; None, or raising, means that it cannot be told."""

AdapterStart: TypeAlias = Callable[[AdapterSource, tuple[int, ...]], int | AdapterSpan | None]
"""Where an adapter begins, from the source and the prompt (no generated tokens); None means that it cannot be told."""

ImpliedAdapters: TypeAlias = Callable[[frozenset[str]], Iterable[LoraAdapter]]
"""Adapters that the model applies because of the modalities present (an empty set for text), without being asked."""


def adapter_key(
    source: AdapterSource,
    *,
    revision: AdapterRevision | None,
    start: AdapterStart | None = None,
    prompt: Callable[[], tuple[int, ...]] = tuple,
    changes_items: bool = False,
) -> LoraAdapter:
    """The extra key of an adapter.

    Args:
        source: the adapter as the engine names it.
        revision: asked for what it computes.
        start: asked for where it begins; None means position 0.
        prompt: gives the prompt's tokens; called only for ``start``.
        changes_items: it computes on the media encoder too, so it begins at 0 whatever ``start`` says.

    Raises:
        UncacheableRequest: no name, no revision, a start that cannot be told, or an adapter that ends.
    """
    if not isinstance(source.name, str) or not source.name:
        raise UncacheableRequest(UncacheableReason.UNKNOWN_ADAPTER, "the request's adapter has no name")
    identity = _asked(revision, source)
    begin = 0 if start is None or changes_items else _begin(start, source, prompt())
    return make(UncacheableReason.MALFORMED_ADAPTER, LoraAdapter, source.name, identity, begin)


def _asked(revision: AdapterRevision | None, source: AdapterSource) -> str:
    if revision is None:
        raise UncacheableRequest(
            UncacheableReason.UNKNOWN_REVISION,
            "the request has an adapter, and no adapter_revision function was handed in",
        )
    try:
        answer = revision(source)
    except UncacheableRequest:
        raise
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.UNKNOWN_REVISION, f"asking for the adapter's revision raised {type(error).__name__}"
        ) from error
    if not isinstance(answer, str) or not answer:
        raise UncacheableRequest(UncacheableReason.UNKNOWN_REVISION, "the adapter's revision is not known")
    return answer


def _begin(start: AdapterStart, source: AdapterSource, prompt: tuple[int, ...]) -> int:
    try:
        answer = start(source, prompt)
    except UncacheableRequest:
        raise
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_ADAPTER, f"asking where the adapter begins raised {type(error).__name__}"
        ) from error
    if answer is None:
        raise UncacheableRequest(UncacheableReason.MALFORMED_ADAPTER, "where the adapter begins is not known")
    if not isinstance(answer, AdapterSpan):
        return answer
    if answer.stop is not None:
        raise UncacheableRequest(
            UncacheableReason.ADAPTER_ENDS, "the adapter ends before the sequence does, which no key can say"
        )
    return answer.start


def implied_keys(implied: ImpliedAdapters | None, modalities: Iterable[str]) -> list[LoraAdapter]:
    """The adapters that the model applies by itself.

    Raises:
        UncacheableRequest: the function raised, or gave something else than adapters.
    """
    if implied is None:
        return []
    try:
        adapters = list(implied(frozenset(modalities)))
    except Exception as error:
        raise UncacheableRequest(
            UncacheableReason.UNKNOWN_ADAPTER, f"asking for the implied adapters raised {type(error).__name__}"
        ) from error
    if not all(isinstance(adapter, LoraAdapter) for adapter in adapters):
        raise UncacheableRequest(
            UncacheableReason.MALFORMED_ADAPTER, "implied_adapters gave something else than LoraAdapter"
        )
    return adapters


def invocation_start(tokens: tuple[int, ...], invocation: tuple[int, ...]) -> int | None:
    """Where the last occurrence of an activated adapter's invocation tokens begins.

    Args:
        tokens: the prompt.
        invocation: the adapter's ``alora_invocation_tokens``, from its configuration; none occur nowhere.

    Returns:
        The position of the first invocation token, or None where they do not occur.
    """
    width = len(invocation)
    for begin in range(len(tokens) - width, -1, -1) if width else ():
        if tokens[begin : begin + width] == invocation:
            return begin
    return None
