"""What two peers agree on: pure functions over what each can do and what each accepts.

`negotiate` picks the highest wire version and the highest key schema that both have and both floors allow, and the
features that both have. It never guesses: no common number, or a required feature missing, is a disagreement. Reserved
(grease) numbers and features are announced and never chosen. `answer_hello` adds the space and makes the frozen answer.
Source: docs/spec/wire-2.md, "Negotiation".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from protocol_v2.codes import RefusalCode
from protocol_v2.errors import MAX_SHOWN, HandshakeError, LocalProtocolError
from protocol_v2.hello import (
    MAX_DIFFERENCES,
    MAX_NAME_TEXT,
    MAX_NAMES,
    Floor,
    Hello,
    Limits,
    OfferFields,
    Refusal,
    SpaceDifference,
    Unrecognised,
    Welcome,
    check_boot_id,
)
from protocol_v2.versions import (
    GREASE_PREFIX,
    KEY_SCHEMAS,
    MAX_VERSION,
    SCHEMA_FLOOR,
    WIRE_FLOOR,
    WIRE_VERSIONS,
    is_grease,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keying import KeySpace
    from protocol_v2.events import HelloReceived

_SPACE_FIELDS: Final = ("model", "model_revision", "kv_dtype", "chunk_size", "kv_layout")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a side can, and what it accepts.

    Args:
        wire: wire versions it speaks, each a u16.
        schemas: key schemas it derives, each a u16.
        features: optional features it has.
        wire_floor: lowest wire version it accepts.
        schema_floor: lowest key schema it accepts.
        required: features without which it wants no session.

    Raises:
        LocalProtocolError: out of bounds.
    """

    wire: frozenset[int] = frozenset(WIRE_VERSIONS)
    schemas: frozenset[int] = frozenset(KEY_SCHEMAS)
    features: frozenset[str] = frozenset()
    wire_floor: int = WIRE_FLOOR
    schema_floor: int = SCHEMA_FLOOR
    required: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, numbers in (("wire", self.wire), ("schemas", self.schemas)):
            if len(numbers) > MAX_NAMES or any(not 0 <= number <= MAX_VERSION for number in numbers):
                raise LocalProtocolError(f"{name}: wanted at most {MAX_NAMES} numbers in [0, {MAX_VERSION}]")
        for name, features in (("features", self.features), ("required", self.required)):
            if len(features) > MAX_NAMES or any(not 0 < len(feature) <= MAX_NAME_TEXT for feature in features):
                raise LocalProtocolError(f"{name}: wanted at most {MAX_NAMES} names of 1 to {MAX_NAME_TEXT} characters")
        for name, floor in (("wire_floor", self.wire_floor), ("schema_floor", self.schema_floor)):
            if not 0 <= floor <= MAX_VERSION:
                raise LocalProtocolError(f"{name}: got {floor}, wanted a number in [0, {MAX_VERSION}]")

    @classmethod
    def of_hello(cls, hello: Hello) -> Offer:
        """The offer that a hello makes."""
        return cls(
            frozenset(hello.wire),
            frozenset(hello.schemas),
            frozenset(hello.features),
            hello.floor.wire,
            hello.floor.schema,
            frozenset(hello.floor.features),
        )

    def to_wire(self) -> OfferFields:
        """The offer as a refusal states it."""
        return OfferFields(
            wire=tuple(sorted(self.wire)),
            schemas=tuple(sorted(self.schemas)),
            features=tuple(sorted(self.features)),
            floor=self.floor(),
        )

    def floor(self) -> Floor:
        """The part of the offer that must be kept."""
        return Floor(wire=self.wire_floor, schema=self.schema_floor, features=tuple(sorted(self.required)))


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both sides speak in a session.

    Args:
        wire: the wire version.
        schema: the key schema.
        features: the features both have.
    """

    wire: int
    schema: int
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Why there is nothing to agree on.

    Args:
        code: the first of wire, schema, features that fails.
        message: the numbers of both sides; mirrored when the sides are.
    """

    code: RefusalCode
    message: str


def negotiate(ours: Offer, theirs: Offer) -> Agreement | Disagreement:
    """The highest common versions above both floors, and the common features. Total: every two offers have an answer.

    Symmetric: the sides may be swapped, and only the order of words in a disagreement's message changes. Monotone: a
    version or feature more on either side never lowers what is agreed; a floor raised never makes an agreement.
    """
    wire = _highest_common(ours.wire, theirs.wire, max(ours.wire_floor, theirs.wire_floor))
    if wire is None:
        return Disagreement(
            RefusalCode.NO_COMMON_WIRE,
            f"wire versions {_real(ours.wire)} from {ours.wire_floor} up against "
            f"{_real(theirs.wire)} from {theirs.wire_floor} up",
        )
    schema = _highest_common(ours.schemas, theirs.schemas, max(ours.schema_floor, theirs.schema_floor))
    if schema is None:
        return Disagreement(
            RefusalCode.NO_COMMON_SCHEMA,
            f"key schemas {_real(ours.schemas)} from {ours.schema_floor} up against "
            f"{_real(theirs.schemas)} from {theirs.schema_floor} up",
        )
    features = frozenset(one for one in ours.features & theirs.features if not one.startswith(f"{GREASE_PREFIX}/"))
    missing = sorted((ours.required | theirs.required) - features)
    if missing:
        return Disagreement(RefusalCode.FEATURE_REQUIRED, f"not a feature of both: {', '.join(missing)[:512]}")
    return Agreement(wire, schema, features)


def space_differences(asked: KeySpace, accepted: KeySpace) -> tuple[SpaceDifference, ...]:
    """The fields in which two spaces differ, `model` first; empty for equal ones. Attributes as `attributes.<name>`."""
    found = [
        _difference(name, getattr(asked, name), getattr(accepted, name))
        for name in _SPACE_FIELDS
        if getattr(asked, name) != getattr(accepted, name)
    ]
    names = dict.fromkeys([*asked.attributes, *accepted.attributes])
    found += [
        _difference(f"attributes.{name}", asked.attributes.get(name), accepted.attributes.get(name))
        for name in names
        if asked.attributes.get(name) != accepted.attributes.get(name)
    ]
    return tuple(found)


def nearest_space(asked: KeySpace, spaces: Iterable[KeySpace]) -> KeySpace | None:
    """The space with the fewest differences, the model's own before others; None if there are no spaces."""
    return min(
        spaces,
        key=lambda one: (one.model != asked.model, len(space_differences(asked, one)), one.root),
        default=None,
    )


@dataclass(frozen=True, slots=True)
class ClientTerms:
    """What a client says of itself.

    Args:
        boot_id: 16 random bytes, made once per process.
        space: what its keys are derived in; None for tools that send no keys.
        offer: what it can and accepts.
        role: a label for people, at most 128 characters.
        software: likewise.
        grease: announce reserved versions, features and fields.
        hello_timeout: seconds to wait for the answer to a hello.
        max_pending: requests that may be unanswered at a time; the server's limit counts too.

    Raises:
        LocalProtocolError: out of bounds.
    """

    boot_id: bytes
    space: KeySpace | None = None
    offer: Offer = field(default_factory=Offer)
    role: str = "client"
    software: str = ""
    grease: bool = True
    hello_timeout: float = 5.0
    max_pending: int = 1024

    def __post_init__(self) -> None:
        check_boot_id(self.boot_id)
        _check_labels(role=self.role, software=self.software)
        if not self.hello_timeout > 0 or self.max_pending < 1:
            raise LocalProtocolError("hello_timeout, max_pending: wanted both above 0")


@dataclass(frozen=True, slots=True)
class ServerTerms:
    """What a server says of itself.

    Args:
        boot_id: 16 random bytes, made once per process.
        offer: what it can and accepts.
        limits: what it holds clients to.
        expected_spaces: the spaces it serves; empty: any.
        software: a label for people, at most 128 characters.

    Raises:
        LocalProtocolError: out of bounds.
    """

    boot_id: bytes
    offer: Offer = field(default_factory=Offer)
    limits: Limits = field(default_factory=Limits)
    expected_spaces: tuple[KeySpace, ...] = ()
    software: str = ""

    def __post_init__(self) -> None:
        check_boot_id(self.boot_id)
        _check_labels(software=self.software)


def answer_hello(hello: HelloReceived, terms: ServerTerms, known_spaces: Iterable[KeySpace] = ()) -> Welcome | Refusal:
    """What a server answers. Pure.

    Args:
        hello: what the client said.
        terms: the server's.
        known_spaces: spaces it holds entries of, for the notice of an open server.
    """
    verdict = negotiate(terms.offer, hello.offer)
    if isinstance(verdict, Disagreement):
        return _refusal(hello, terms, verdict.code, f"the server has {verdict.message}")
    if hello.space is not None and terms.expected_spaces and hello.space not in terms.expected_spaces:
        nearest = nearest_space(hello.space, terms.expected_spaces)
        differences = () if nearest is None else space_differences(hello.space, nearest)
        first = differences[0].field if differences else ""
        return _refusal(
            hello,
            terms,
            RefusalCode.SPACE_MISMATCH,
            f"pinned to {len(terms.expected_spaces)} space(s), the nearest differs in {len(differences)} field(s)",
            field=f"space.{first}"[:MAX_SHOWN],
            differences=differences[:MAX_DIFFERENCES],
        )
    return Welcome(
        wire=verdict.wire,
        schema=verdict.schema,
        features=tuple(sorted(verdict.features)),
        unrecognised=Unrecognised(
            fields=hello.unknown_fields,
            features=tuple(sorted(hello.offer.features - terms.offer.features)),
            wire=tuple(sorted(hello.offer.wire - terms.offer.wire)),
            schemas=tuple(sorted(hello.offer.schemas - terms.offer.schemas)),
        ),
        limits=terms.limits,
        boot=terms.boot_id,
        root=None if hello.space is None else hello.space.root,
        notice=_notice(hello.space, known_spaces),
        software=terms.software,
    )


def check_welcome(welcome: Welcome, terms: ClientTerms) -> Agreement:
    """What a client agrees to, if the server chose from what was offered.

    Raises:
        HandshakeError: `WELCOME_INVALID` or `ROOT_MISMATCH`.
    """
    offer, features = terms.offer, frozenset(welcome.features)
    for name, chosen, offered, floor in (
        ("wire", welcome.wire, offer.wire, offer.wire_floor),
        ("schema", welcome.schema, offer.schemas, offer.schema_floor),
    ):
        if chosen not in offered or chosen < floor or is_grease(chosen):
            raise HandshakeError(
                RefusalCode.WELCOME_INVALID,
                f"{name}: the server chose {chosen}, we offered {sorted(offered)} from {floor} up",
                field=name,
            )
    if not offer.required <= features <= offer.features:
        raise HandshakeError(
            RefusalCode.WELCOME_INVALID,
            "features: the server chose one that was not offered, or left out one that is required",
            field="features",
        )
    expected = None if terms.space is None else terms.space.root
    if welcome.root != expected:
        raise HandshakeError(
            RefusalCode.ROOT_MISMATCH,
            "root: the server derives another root from our space, so its keys are not ours; one side is broken",
            field="root",
        )
    return Agreement(welcome.wire, welcome.schema, features)


def _highest_common(ours: frozenset[int], theirs: frozenset[int], floor: int) -> int | None:
    return max((one for one in ours & theirs if one >= floor and not is_grease(one)), default=None)


def _real(numbers: frozenset[int]) -> list[int]:
    return sorted(one for one in numbers if not is_grease(one))


def _notice(asked: KeySpace | None, known: Iterable[KeySpace]) -> tuple[SpaceDifference, ...]:
    """How the nearest held space of the same model differs; nothing if the space itself is held."""
    if asked is None:
        return ()
    nearest = nearest_space(asked, (one for one in known if one.model == asked.model))
    return () if nearest is None else space_differences(asked, nearest)[:MAX_DIFFERENCES]


def _refusal(
    hello: HelloReceived,
    terms: ServerTerms,
    code: RefusalCode,
    message: str,
    *,
    field: str = "",
    differences: tuple[SpaceDifference, ...] = (),
) -> Refusal:
    return Refusal(
        code=code,
        message=message[:1024],
        field=field,
        asked=hello.offer.to_wire(),
        accepted=terms.offer.to_wire(),
        differences=differences,
    )


def _difference(name: str, asked: object, accepted: object) -> SpaceDifference:
    return SpaceDifference(field=name[:MAX_SHOWN], asked=_shown(asked), accepted=_shown(accepted))


def _shown(value: object) -> str:
    """A field's value for people; an attribute that is not there shows as such."""
    return "(absent)" if value is None else str(value)[:MAX_SHOWN]


def _check_labels(**labels: str) -> None:
    for name, label in labels.items():
        if len(label) > MAX_NAME_TEXT:
            raise LocalProtocolError(f"{name}: got {len(label)} characters, wanted at most {MAX_NAME_TEXT}")
