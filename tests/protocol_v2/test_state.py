"""The state table: the whole product of states and inputs, and the diagram made from it."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol_v2.errors import LocalProtocolError
from protocol_v2.state import TRANSITIONS, Input, SessionState, State
from tests.protocol_v2.state_diagram import BEGIN, END, diagram

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "wire-2.md"


@pytest.mark.parametrize(("state", "happening"), list(itertools.product(State, Input)))
def test_every_pair_moves_by_the_table_or_ends_in_error(state: State, happening: Input) -> None:
    """Listed: the next state. Unlisted: an error, and ERROR for good."""
    machine = SessionState(state)
    assert machine.allows(happening) == (happening in TRANSITIONS[state])
    if machine.allows(happening):
        assert TRANSITIONS[state][happening] == machine.step(happening) == machine.state
        return
    with pytest.raises(LocalProtocolError, match=f"{happening.value}: not possible in state {state.value}"):
        machine.step(happening)
    assert State.ERROR is machine.state


@given(st.lists(st.sampled_from(Input)))
def test_error_and_closed_are_left_by_nothing(inputs: list[Input]) -> None:
    """Whatever happens after a failure or a close, no session stands again."""
    for first in (State.ERROR, State.CLOSED):
        machine = SessionState(first)
        for happening in inputs:
            if machine.allows(happening):
                machine.step(happening)
            else:
                with pytest.raises(LocalProtocolError):
                    machine.step(happening)
            assert machine.state in {State.ERROR, State.CLOSED}


def test_every_state_is_reachable_and_every_input_is_used() -> None:
    """No row and no input is dead, and every state can be closed."""
    reached = {State.FRESH} | {after for row in TRANSITIONS.values() for after in row.values()}
    assert set(State) == reached
    assert set(Input) == {happening for row in TRANSITIONS.values() for happening in row}
    assert all(State.CLOSED is row[Input.CLOSE] for row in TRANSITIONS.values())


def test_only_a_welcome_opens_a_session() -> None:
    """There is one way to OPEN from outside it: a welcome after a hello."""
    ways = [
        (state, happening)
        for state, row in TRANSITIONS.items()
        for happening, after in row.items()
        if after is State.OPEN and state is not State.OPEN
    ]
    assert [(State.GREETED, Input.WELCOME)] == ways


def test_the_diagram_in_the_specification_is_made_from_the_table() -> None:
    """Run `python -m tests.protocol_v2.state_diagram` after a change of the table."""
    text = SPEC.read_text()
    assert diagram() == text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
