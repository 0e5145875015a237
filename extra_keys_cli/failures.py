"""User mistakes become one line on standard error and an exit code; only our own bugs show a traceback.

Exit codes: 0 done, 1 what was asked for did not hold, 2 wrong usage, 130 interrupted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from keying import KeyingError
from protocol_v2.errors import ProtocolError

stdout = Console()
stderr = Console(stderr=True)


class CommandError(Exception):
    """A mistake of the user or of the machine that a command met; the text says what to do."""


@contextmanager
def explained() -> Iterator[None]:
    """Turn the errors that a user can cause into a line and exit code 1."""
    try:
        yield
    except (CommandError, KeyingError, ProtocolError) as error:
        stderr.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        stderr.print(f"[red]error:[/red] {place}{error.strerror or error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
