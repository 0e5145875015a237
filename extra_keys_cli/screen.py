"""Where output goes, and texts of others made fit for it.

What a server, a file or a name says is shown and does nothing: it is no markup, and no escape sequence that a terminal
would obey.
"""

from rich.console import Console
from rich.markup import escape

stdout = Console()
stderr = Console(stderr=True)


def printable(text: str) -> str:
    """A text with a replacement character in the place of each character that is not printed."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def shown(text: object) -> str:
    """Somebody else's text for `Console.print` and tables: printable, and no markup."""
    return escape(printable(str(text)))
