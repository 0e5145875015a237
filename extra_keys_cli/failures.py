"""User mistakes become one line on standard error and an exit code; only our own bugs show a traceback.

Exit codes: 0 done, 1 what was asked for did not hold, 2 wrong usage, 130 interrupted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from extra_keys_cli.screen import shown, stderr


class CommandError(Exception):
    """A mistake of the user or of the machine that a command met; the text says what to do."""


@contextmanager
def explained() -> Iterator[None]:
    """Turn the errors that a user can cause into a line and exit code 1."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            text = f"{place}{error.strerror or error}"
        elif isinstance(error, _told()):
            text = str(error)
        else:
            raise
        line = shown(" ".join(text.split()))
        stderr.print(f"[red]error:[/red] {line}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _told() -> tuple[type[Exception], ...]:
    """Errors whose text is for users."""
    from compat.errors import CompatError
    from keying import KeyingError
    from protocol_v2.errors import ProtocolError

    return (CommandError, CompatError, KeyingError, ProtocolError)
