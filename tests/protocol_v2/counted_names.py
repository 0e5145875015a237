"""Names that count how often they are compared: what finds its own by hash compares next to nothing."""


class CountedName:
    """A client or a session.

    Args:
        text: what it is equal by.
    """

    comparisons = 0

    def __init__(self, text: str) -> None:
        self._text = text

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return isinstance(other, CountedName) and self._text == other._text


def comparisons_since(before: int) -> int:
    """How many comparisons there were since there had been `before`."""
    return CountedName.comparisons - before
