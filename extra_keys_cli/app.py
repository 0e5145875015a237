"""The commands of ``extra-keys`` and their options. Each command imports what it needs, so that ``--help`` is quick."""

from pathlib import Path
from typing import Annotated

import typer

from extra_keys_cli.failures import explained
from extra_keys_cli.places import default_address, default_store
from extra_keys_cli.sizes import parse_size

app = typer.Typer(
    name="extra-keys",
    help="KV-cache keys that are right: [bold]key = hash(tokens, extra_keys)[/bold].\n\n"
    "[b]serve[/b] runs a cache server, [b]probe[/b] asks one what it speaks, [b]demo[/b] shows the whole on requests "
    "captured from a real engine, [b]explain[/b] and [b]diff[/b] say what a key stands for.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

KeyInputsFile = Annotated[
    str, typer.Argument(help="JSON file with space, tokens and extra_keys; - reads standard input.", show_default=False)
]
Size = Annotated[int, typer.Option(parser=parse_size, metavar="SIZE")]


@app.command()
def explain(inputs: KeyInputsFile) -> None:
    """Show each chunk's key and what beside the tokens it is the hash of.

    The file holds, for instance:
    {"space": {"model": "org/m", "chunk_size": 4, "kv_dtype": "bfloat16"}, "tokens": [1, 2, 9, 9, 9, 9, 3, 4],
    "extra_keys": [["mm", "image-id", 2, 4], ["lora", "sql", "sha256:ab", 0], ["salt", "tenant-7"]]}

    Salts and tag values are never shown.
    """
    with explained():
        from extra_keys_cli.explain import explain as run
        from extra_keys_cli.key_inputs import read_key_inputs

        run(read_key_inputs(inputs))


@app.command()
def diff(first: KeyInputsFile, second: KeyInputsFile) -> None:
    """Say where the keys of two requests part, and why.

    Exit code 0 if all their chunks are shared, 1 if not.
    """
    with explained():
        from extra_keys_cli.explain import diff as run
        from extra_keys_cli.key_inputs import read_key_inputs

        if not run(read_key_inputs(first), read_key_inputs(second)):
            raise typer.Exit(1)


def main() -> None:
    """Entry point of the installed command."""
    app()
