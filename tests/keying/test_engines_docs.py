"""docs/engines.md says of every refusal when it comes."""

from pathlib import Path

from keying.engines import UncacheableReason

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def test_every_reason_is_in_the_table() -> None:
    """An operator who sees a counter rise finds its word on the page, and the page has no word that is no reason."""
    table = PAGE.split("## Refusals")[1].split("## Space")[0]
    words = {
        word.strip("` ") for row in table.splitlines() if row.startswith("| `") for word in row.split("|")[1].split(",")
    }
    assert {str(reason) for reason in UncacheableReason} == words
