"""Negotiation: a table, its laws, and the answers made of it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keying import KeySpace
from protocol_v2 import Agreement, ClientTerms, Disagreement, Limits, Offer, ServerTerms, answer_hello, negotiate
from protocol_v2.codes import RefusalCode
from protocol_v2.errors import HandshakeError, LocalProtocolError
from protocol_v2.events import HelloReceived
from protocol_v2.hello import Floor, Hello, Refusal, SpaceDifference, Welcome
from protocol_v2.negotiation import check_welcome, nearest_space, space_differences
from protocol_v2.versions import is_grease
from tests.protocol_v2.strategies import CLIENT_BOOT, OTHER_SPACE, SERVER_BOOT, SPACE, offers, spaces


def offer(
    wire: tuple[int, ...] = (2,),
    schemas: tuple[int, ...] = (2,),
    features: str = "",
    wire_floor: int = 0,
    schema_floor: int = 0,
    required: str = "",
) -> Offer:
    """An offer in short."""
    return Offer(
        frozenset(wire), frozenset(schemas), frozenset(features), wire_floor, schema_floor, frozenset(required)
    )


TABLE = [
    # L1: ranges that overlap give the highest common, ranges that do not a typed refusal
    (offer((1, 2)), offer((2, 3)), Agreement(2, 2)),
    (offer((1,)), offer((2,)), RefusalCode.NO_COMMON_WIRE),
    (offer((1, 2, 3)), offer((1, 2, 3)), Agreement(3, 2)),
    (offer((1, 3)), offer((1, 2)), Agreement(1, 2)),
    (offer(()), offer((2,)), RefusalCode.NO_COMMON_WIRE),
    # each number on its own
    (offer(schemas=(1, 2)), offer(schemas=(2, 3)), Agreement(2, 2)),
    (offer(schemas=(3,)), offer(schemas=(2,)), RefusalCode.NO_COMMON_SCHEMA),
    (offer((1,), (3,)), offer((2,), (2,)), RefusalCode.NO_COMMON_WIRE),
    # floors are kept: a client with extra keys never ends below schema 2
    (offer(schemas=(1, 2), schema_floor=2), offer(schemas=(1,)), RefusalCode.NO_COMMON_SCHEMA),
    (offer(schemas=(1, 2), schema_floor=2), offer(schemas=(1, 2)), Agreement(2, 2)),
    (offer((1, 2), wire_floor=2), offer((1,)), RefusalCode.NO_COMMON_WIRE),
    (offer((1, 2)), offer((1, 2), wire_floor=3), RefusalCode.NO_COMMON_WIRE),
    # features
    (offer(features="ab"), offer(features="bc"), Agreement(2, 2, frozenset("b"))),
    (offer(features="ab", required="a"), offer(features="bc"), RefusalCode.FEATURE_REQUIRED),
    (offer(features="ab", required="b"), offer(features="bc"), Agreement(2, 2, frozenset("b"))),
    # reserved numbers are never chosen, also where both announce them
    (offer((2, 0x2A2A)), offer((2, 0x2A2A)), Agreement(2, 2)),
    (offer((0x2A2A,)), offer((0x2A2A,)), RefusalCode.NO_COMMON_WIRE),
]


@pytest.mark.parametrize(("ours", "theirs", "expected"), TABLE)
def test_negotiation_table(ours: Offer, theirs: Offer, expected: Agreement | RefusalCode) -> None:
    """L1: (ours, theirs) gives this version or this refusal, from either side."""
    for one, other in ((ours, theirs), (theirs, ours)):
        verdict = negotiate(one, other)
        assert expected == (verdict.code if isinstance(verdict, Disagreement) else verdict)


@given(offers, offers)
def test_negotiation_is_total_and_symmetric(ours: Offer, theirs: Offer) -> None:
    """Every two offers have an answer, and it does not depend on who asks."""
    there, back = negotiate(ours, theirs), negotiate(theirs, ours)
    if isinstance(there, Agreement):
        assert there == back
    else:
        assert isinstance(back, Disagreement)
        assert there.code == back.code


@given(offers, offers)
def test_what_is_agreed_was_offered_by_both_and_is_above_both_floors(ours: Offer, theirs: Offer) -> None:
    """No number that one side lacks, none below a floor, none that is reserved, no required feature missing."""
    verdict = negotiate(ours, theirs)
    if isinstance(verdict, Disagreement):
        return
    for one in (ours, theirs):
        assert verdict.wire in one.wire
        assert verdict.schema in one.schemas
        assert verdict.wire >= one.wire_floor
        assert verdict.schema >= one.schema_floor
        assert one.required <= verdict.features <= one.features
    assert not is_grease(verdict.wire)
    assert not is_grease(verdict.schema)


@given(offers, offers, st.integers(0, 9), st.integers(0, 9), st.sampled_from(["a", "b", "c"]))
def test_negotiation_is_monotone(ours: Offer, theirs: Offer, wire: int, schema: int, feature: str) -> None:
    """More on one side never lowers or undoes an agreement; a floor raised never makes or raises one below it."""
    before = negotiate(ours, theirs)
    more = dataclasses.replace(
        ours, wire=ours.wire | {wire}, schemas=ours.schemas | {schema}, features=ours.features | {feature}
    )
    after = negotiate(more, theirs)
    if isinstance(before, Agreement):
        assert isinstance(after, Agreement)
        assert (after.wire >= before.wire, after.schema >= before.schema) == (True, True)
        assert after.features >= before.features
    strict = negotiate(dataclasses.replace(ours, wire_floor=wire, schema_floor=schema), theirs)
    if isinstance(strict, Agreement) and wire >= ours.wire_floor and schema >= ours.schema_floor:
        assert strict == before


def hello_event(made: Offer, space: KeySpace | None = SPACE, unknown: tuple[str, ...] = ()) -> HelloReceived:
    """A hello as the connection reports it."""
    return HelloReceived(7, made, space, CLIENT_BOOT, "client", "s", unknown)


SERVER = ServerTerms(SERVER_BOOT, software="server")


def test_a_welcome_says_what_was_chosen_and_what_was_not_recognised() -> None:
    """Nothing of a hello is dropped in silence: unknown fields, features and versions are echoed."""
    later = Offer(frozenset({2, 3, 0x2A2A}), frozenset({2, 9}), frozenset({"shm/3"}))
    answer = answer_hello(hello_event(later, unknown=("region",)), SERVER)
    assert isinstance(answer, Welcome)
    assert (2, 2, ()) == (answer.wire, answer.schema, answer.features)
    assert (("region",), ("shm/3",), (3, 0x2A2A), (9,)) == (
        answer.unrecognised.fields,
        answer.unrecognised.features,
        answer.unrecognised.wire,
        answer.unrecognised.schemas,
    )
    assert (SERVER_BOOT, SPACE.root, Limits()) == (answer.boot, answer.root, answer.limits)


def test_a_refusal_names_both_ranges() -> None:
    """L1: a client of the future is told what would be accepted, and what it asked."""
    asked = Offer(frozenset({3, 4}), frozenset({2}), wire_floor=3)
    answer = answer_hello(hello_event(asked), SERVER)
    assert isinstance(answer, Refusal)
    assert (RefusalCode.NO_COMMON_WIRE, asked.to_wire(), SERVER.offer.to_wire()) == (
        answer.code,
        answer.asked,
        answer.accepted,
    )


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"kv_dtype": "float16"}, [("kv_dtype", "float16", "bfloat16")]),
        ({"model": "n"}, [("model", "n", "m")]),
        ({"chunk_size": 5}, [("chunk_size", "5", "4")]),
        ({"model_revision": "r"}, [("model_revision", "r", "")]),
        ({"kv_layout": "NHD"}, [("kv_layout", "NHD", "")]),
        ({"attributes": {"rope": "yarn"}}, [("attributes.rope", "yarn", "(absent)")]),
        ({"attributes": {"rope": ""}}, [("attributes.rope", "", "(absent)")]),
        ({"kv_dtype": "int8", "model": "n"}, [("model", "n", "m"), ("kv_dtype", "int8", "bfloat16")]),
    ],
)
def test_a_pinned_server_names_the_field_that_differs(
    change: dict[str, object], differences: list[tuple[str, str, str]]
) -> None:
    """H4: another space is a typed refusal at connect, with each field and both values; the right one is welcome."""
    fields: dict[str, object] = {"model": "m", "chunk_size": 4, "kv_dtype": "bfloat16"}
    asked = KeySpace(**fields | change)  # type: ignore[arg-type]
    pinned = dataclasses.replace(SERVER, expected_spaces=(SPACE,))
    answer = answer_hello(hello_event(Offer(), asked), pinned)
    assert isinstance(answer, Refusal)
    assert RefusalCode.SPACE_MISMATCH == answer.code
    assert differences == [(one.field, one.asked, one.accepted) for one in answer.differences]
    assert f"space.{differences[0][0]}" == answer.field
    assert isinstance(answer_hello(hello_event(Offer(), SPACE), pinned), Welcome)
    assert isinstance(answer_hello(hello_event(Offer(), None), pinned), Welcome)


def test_an_open_server_gives_notice_of_the_nearest_space() -> None:
    """Never a silent 0 % hit rate: an open server says how the nearest space of the same model differs."""
    far = KeySpace("m", chunk_size=8, kv_dtype="int8", model_revision="r")
    elsewhere = KeySpace("other", chunk_size=4, kv_dtype="bfloat16")
    cases = [
        ([], ()),
        ([elsewhere], ()),
        ([SPACE, OTHER_SPACE], ()),
        (
            [far, OTHER_SPACE],
            (
                SpaceDifference(field="kv_dtype", asked="bfloat16", accepted="float8_e4m3fn"),
                SpaceDifference(field="attributes.rope", asked="(absent)", accepted="yarn"),
            ),
        ),
    ]
    for known, expected in cases:
        answer = answer_hello(hello_event(Offer()), SERVER, known)
        assert isinstance(answer, Welcome)
        assert expected == answer.notice
    tool = answer_hello(hello_event(Offer(), None), SERVER, [OTHER_SPACE])
    assert isinstance(tool, Welcome)
    assert (None, ()) == (tool.root, tool.notice)


@given(spaces, spaces)
def test_differences_tell_spaces_apart(one: KeySpace, other: KeySpace) -> None:
    """No difference exactly where the roots are equal; mirrored when the sides are."""
    there, back = space_differences(one, other), space_differences(other, one)
    assert (one.root == other.root) == (not there)
    assert {(d.field, d.asked, d.accepted) for d in there} == {(d.field, d.accepted, d.asked) for d in back}


@given(spaces, st.lists(spaces, max_size=4))
def test_the_nearest_space_is_the_space_itself_where_it_is_held(asked: KeySpace, held: list[KeySpace]) -> None:
    """A space that is held is its own nearest, whatever else is."""
    nearest = nearest_space(asked, held)
    assert (nearest is None) == (not held)
    if asked in held:
        assert asked == nearest


CLIENT = ClientTerms(
    CLIENT_BOOT, SPACE, Offer(frozenset({2, 3}), frozenset({2}), frozenset({"a", "b"}), required=frozenset("a"))
)
GOOD = Welcome(wire=2, schema=2, features=("a",), limits=Limits(), boot=SERVER_BOOT, root=SPACE.root)


def test_the_client_accepts_what_it_offered() -> None:
    """A choice from the offer is the agreement."""
    assert Agreement(2, 2, frozenset("a")) == check_welcome(GOOD, CLIENT)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"wire": 4}, RefusalCode.WELCOME_INVALID, "wire"),
        ({"wire": 1}, RefusalCode.WELCOME_INVALID, "wire"),
        ({"wire": 0x2A2A}, RefusalCode.WELCOME_INVALID, "wire"),
        ({"schema": 1}, RefusalCode.WELCOME_INVALID, "schema"),
        ({"features": ("a", "c")}, RefusalCode.WELCOME_INVALID, "features"),
        ({"features": ("b",)}, RefusalCode.WELCOME_INVALID, "features"),
        ({"root": bytes(32)}, RefusalCode.ROOT_MISMATCH, "root"),
        ({"root": None}, RefusalCode.ROOT_MISMATCH, "root"),
    ],
)
def test_the_client_keeps_its_floor_and_checks_the_root(
    change: dict[str, object], code: RefusalCode, field: str
) -> None:
    """H7: a server that chose what was not offered, fell below the floor or derives another root is not used."""
    fields = {name: getattr(GOOD, name) for name in Welcome.__struct_fields__}
    with pytest.raises(HandshakeError) as caught:
        check_welcome(Welcome(**fields | change), CLIENT)
    assert (code, field) == (caught.value.refusal_code, caught.value.field)


@pytest.mark.parametrize("change", [{"wire": 1}, {"schema": 1}, {"wire": 0x1A1A}, {"schema": 0x1A1A}])
def test_the_client_keeps_its_floor_though_it_lists_more(change: dict[str, int]) -> None:
    """H7: what was listed and is below the floor, or reserved, is no choice: a client with extras never ends there."""
    listed = frozenset({1, 2, 0x1A1A})
    terms = ClientTerms(CLIENT_BOOT, SPACE, Offer(listed, listed, frozenset("a"), wire_floor=2, schema_floor=2))
    assert Agreement(2, 2, frozenset("a")) == check_welcome(GOOD, terms)
    fields = {name: getattr(GOOD, name) for name in Welcome.__struct_fields__}
    with pytest.raises(HandshakeError) as caught:
        check_welcome(Welcome(**fields | change), terms)
    assert (RefusalCode.WELCOME_INVALID, *change) == (caught.value.refusal_code, caught.value.field)


def test_the_default_floor_is_schema_2() -> None:
    """Our own client accepts nothing below wire 2 and schema 2, and says so."""
    assert (Floor(wire=2, schema=2), frozenset({2}), frozenset({2})) == (Offer().floor(), Offer().wire, Offer().schemas)


def test_an_offer_survives_the_wire() -> None:
    """What a hello says is the offer it was made from."""
    made = CLIENT.offer
    hello = Hello(
        wire=tuple(made.wire),
        schemas=tuple(made.schemas),
        features=tuple(made.features),
        boot=CLIENT_BOOT,
        floor=made.floor(),
    )
    assert made == Offer.of_hello(hello)


@pytest.mark.parametrize(
    "change",
    [
        {"wire": frozenset({-1})},
        {"schemas": frozenset({65_536})},
        {"wire": frozenset(range(65))},
        {"features": frozenset({""})},
        {"required": frozenset({"x" * 129})},
        {"wire_floor": -1},
        {"schema_floor": 65_536},
    ],
)
def test_an_offer_out_of_bounds_cannot_be_made(change: dict[str, object]) -> None:
    """What no hello can carry is refused where it is made."""
    with pytest.raises(LocalProtocolError):
        Offer(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"boot_id": b""}, {"role": "x" * 129}, {"software": "x" * 129}, {"hello_timeout": 0}, {"max_pending": 0}]
)
def test_terms_out_of_bounds_cannot_be_made(change: dict[str, object]) -> None:
    """Labels, boot ids and bounds are checked when the terms are made."""
    with pytest.raises(LocalProtocolError):
        ClientTerms(**{"boot_id": CLIENT_BOOT} | change)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        ServerTerms(b"short")
