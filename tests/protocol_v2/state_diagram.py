"""Makes the state diagram of `docs/spec/wire-2.md` from the table: `python -m tests.protocol_v2.state_diagram`."""

from collections import defaultdict
from pathlib import Path

from protocol_v2.state import TRANSITIONS, Input, State

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "wire-2.md"
BEGIN = "<!-- state diagram: made by tests/protocol_v2/state_diagram.py -->\n"
END = "<!-- end of state diagram -->\n"


def diagram() -> str:
    """Mermaid text: the arrows, one for each pair of states, and a table of the whole product."""
    arrows: dict[tuple[State, State], list[str]] = defaultdict(list)
    for state, row in TRANSITIONS.items():
        for happening, after in row.items():
            arrows[state, after].append(happening.value)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.FRESH.name}"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(names)}" for (a, b), names in arrows.items()]
    lines += ["```", "", "| | " + " | ".join(one.value for one in Input) + " |", "|---" * (len(Input) + 1) + "|"]
    for state, row in TRANSITIONS.items():
        cells = [row[one].name if one in row else "-" for one in Input]
        lines.append(f"| **{state.name}** | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Rewrite the part of the specification between the markers."""
    text = SPEC.read_text()
    head, rest = text.split(BEGIN)
    SPEC.write_text(head + BEGIN + diagram() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
