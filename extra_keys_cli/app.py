"""The commands of ``extra-keys`` and their options. Each command imports what it needs, so that ``--help`` is quick."""

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from extra_keys_cli.failures import explained
from extra_keys_cli.places import default_address, default_store
from extra_keys_cli.sizes import checked_size, parse_size


class FsyncChoice(StrEnum):
    """`protocol_v2.tiers.Fsync`, without importing it for a help text."""

    ALWAYS = "always"
    RENAME_ONLY = "rename-only"


EXIT_CODES = (
    "Exit codes: 0 done, 1 what was asked for does not hold or cannot be done, 2 wrong usage, 130 interrupted. "
    "Errors are one line on standard error."
)
DEFAULT_V1_CHUNK_SIZE = 256
"""Tokens; LMCache's own default."""

# groups of serve's options in its help
LOCAL = "Memory and disk"
SHARED = "A tier that servers share"
V1 = "Clients of LMCache 0.5.x"
TOLD = "For routers and scrapers"


app = typer.Typer(
    name="extra-keys",
    help="KV-cache keys that are right: **key = hash(tokens, extra_keys)**.\n\n"
    "Begin with **demo**: it shows the whole on requests captured from a real engine. **serve** runs a cache server; "
    "**probe** and **status** ask one what it speaks and does; **explain** and **diff** say what a key is; **audit** "
    "and **purge** say what a store holds, and retire a part of it.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

KeyInputsFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="JSON file with space, tokens and extra_keys; - reads standard input.", show_default=False
    ),
]


@app.command(epilog=EXIT_CODES)
def serve(
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="ipc://PATH or tcp://HOST:PORT; may be given several times. Default: a socket in your cache folder.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LOCAL,
            metavar="FOLDER",
            help="Folder of the disk tier. Default: in your cache folder.",
            show_default=False,
        ),
    ] = None,
    no_store: Annotated[
        bool, typer.Option("--no-store", rich_help_panel=LOCAL, help="Keep entries in memory only.")
    ] = False,
    memory: Annotated[
        str,
        typer.Option(
            rich_help_panel=LOCAL,
            metavar="SIZE",
            help="Budget of the memory tier, such as 8GiB or 512MB.",
            callback=checked_size,
        ),
    ] = "2GiB",
    shared_memory: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LOCAL,
            metavar="SIZE",
            help="Memory shared with clients on this host, 0 for none. Default: a quarter more than --memory.",
            callback=checked_size,
            show_default=False,
        ),
    ] = None,
    disk: Annotated[
        str, typer.Option(rich_help_panel=LOCAL, metavar="SIZE", help="Budget of the disk tier.", callback=checked_size)
    ] = "16GiB",
    fsync: Annotated[
        FsyncChoice,
        typer.Option(
            rich_help_panel=LOCAL,
            metavar="WHEN",
            help="always: acknowledged means on disk, also after a power cut; rename-only: after kill -9.",
        ),
    ] = FsyncChoice.ALWAYS,
    remote: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SHARED,
            metavar="URL",
            envvar="EXTRA_KEYS_REMOTE",
            help="Where it is, so that each server hits what the others stored: redis://HOST:6379/0?ttl=30d (rediss, "
            "valkey, valkeys, unix), s3://BUCKET/PREFIX (gs, az; credentials from the environment) or file:///FOLDER. "
            "Stores never wait for it, and while it is away its entries are misses. A password belongs into the "
            "variable: others can see a command line.",
            show_default=False,
        ),
    ] = None,
    remote_timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=SHARED,
            metavar="SECONDS",
            min=0.01,
            max=60,
            help="Seconds that one call to the remote tier may take. After three in a row that fail it is left alone "
            "until it answers again.",
        ),
    ] = 1.0,
    workers: Annotated[
        int, typer.Option(rich_help_panel=LOCAL, metavar="N", min=1, max=64, help="Threads for disk and remote work.")
    ] = 4,
    space: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Serve this space only, and refuse others by the field that differs: a JSON file with the fields of "
            "KeySpace, or a store's space.json. May be given several times. Default: any space.",
            show_default=False,
        ),
    ] = None,
    accept_v1: Annotated[
        bool,
        typer.Option(
            "--accept-v1",
            rich_help_panel=V1,
            help="Serve LMCache 0.5.x clients too, unmodified, on the same addresses (engine-driven transfer). Their "
            "entries are kept apart: neither side can hit the other's. Without it they get no answer but to the "
            "question what the server can do.",
        ),
    ] = False,
    v1_chunk_size: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=V1,
            metavar="N",
            min=1,
            max=1 << 20,
            help="Tokens of a chunk for v1 clients, who ask for it: what their old server's --chunk-size was. "
            f"Default: {DEFAULT_V1_CHUNK_SIZE}.",
            show_default=False,
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=TOLD,
            metavar="ADDRESS",
            help="Tell routers here which chunks can be hit, evictions included: ipc://PATH or tcp://HOST:PORT.",
            show_default=False,
        ),
    ] = None,
    events_replay: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=TOLD,
            metavar="ADDRESS",
            help="Answer here what a router missed, and what was there before it came.",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=TOLD,
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve Prometheus metrics on 127.0.0.1 at this port.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Run a cache server. Ctrl-C and SIGTERM stop it cleanly; a restart finds what the disk tier holds.

    Without options it serves this user on this machine: a socket and a store under the cache folder, made on demand.
    """
    if no_store and store is not None:
        raise typer.BadParameter("--store and --no-store exclude each other")
    if v1_chunk_size is not None and not accept_v1:
        raise typer.BadParameter("--v1-chunk-size is for --accept-v1; give both, or neither")
    if events_replay is not None and events is None:
        raise typer.BadParameter("--events-replay answers what --events told; give both")
    with explained():
        from extra_keys_cli.key_inputs import read_space
        from extra_keys_cli.serve import ServeOptions
        from extra_keys_cli.serve import serve as run
        from protocol_v2.tiers import Fsync

        run(
            ServeOptions(
                listen=tuple(listen or [default_address()]),
                store=None if no_store else store or default_store(),
                memory=parse_size(memory),
                shared_memory=None if shared_memory is None else parse_size(shared_memory),
                disk=parse_size(disk),
                fsync=Fsync[fsync.name],
                remote=remote,
                remote_timeout=remote_timeout,
                workers=workers,
                spaces=tuple(read_space(path) for path in space or ()),
                v1_chunk_size=(v1_chunk_size or DEFAULT_V1_CHUNK_SIZE) if accept_v1 else None,
                events=events,
                events_replay=events_replay,
                metrics_port=metrics_port,
                quiet=quiet,
            )
        )


@app.command(epilog=EXIT_CODES)
def demo(
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Captured requests, a JSON object a line. Default: 32 from vLLM 0.32.",
            show_default=False,
        ),
    ] = None,
    chunk_size: Annotated[int, typer.Option(metavar="N", min=1, max=4096, help="Tokens in a chunk.")] = 32,
) -> None:
    """Show the whole at work on requests captured from a real vLLM engine.

    A server starts in a temporary folder. Text, pictures, adapters and salts go through derive, lookup, store and
    retrieve, twice, and again after a restart of the server. A table shows what was hit, why not more, and what keys
    over raw tokens would have served wrongly. Exit code 1 if any hit was wrong, missing, or lost.
    """
    with explained():
        from extra_keys_cli.captured import default_file, read_captured
        from extra_keys_cli.demo import demo as run

        captured = read_captured(requests or default_file())
        with tempfile.TemporaryDirectory(prefix="extra-keys-demo-") as folder:
            right = run(captured, Path(folder), chunk_size)
        if not right:
            raise typer.Exit(1)


ServerAddress = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDRESS",
        help="ipc://PATH or tcp://HOST:PORT. Default: where serve listens without options.",
        show_default=False,
    ),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="Seconds to wait for all of it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(epilog=EXIT_CODES)
def probe(
    address: ServerAddress = None,
    space: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Say this space too, so that a mismatch shows: JSON as for serve --space."),
    ] = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Say hello to a server and print both sides and what was agreed.

    Exit code 0 only if a session of wire protocol 2 stands.
    """
    with explained():
        from extra_keys_cli.key_inputs import read_space
        from extra_keys_cli.probe import probe as run

        if not run(
            address or default_address(), None if space is None else read_space(space), timeout, as_json=as_json
        ):
            raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def status(address: ServerAddress = None, timeout: Timeout = 5.0, as_json: AsJson = False) -> None:
    """Print what a server says of itself: schemas, tiers, hits and misses by reason, leases, refusals.

    The last lines say how many v2 and v1 (LMCache 0.5.x) clients there still are: a roll-out may go on when no v1
    client is left.
    """
    with explained():
        from extra_keys_cli.probe import status as run

        run(address or default_address(), timeout, as_json=as_json)


@app.command(epilog=EXIT_CODES)
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


@app.command(epilog=EXIT_CODES)
def diff(first: KeyInputsFile, second: KeyInputsFile) -> None:
    """Say where the keys of two requests part, and why.

    Exit code 0 if all their chunks are shared, 1 if not.
    """
    if first == second == "-":
        raise typer.BadParameter("standard input has one request only; give a file for the other")
    with explained():
        from extra_keys_cli.explain import diff as run
        from extra_keys_cli.key_inputs import read_key_inputs

        if not run(read_key_inputs(first), read_key_inputs(second)):
            raise typer.Exit(1)


StorePlace = Annotated[
    str,
    typer.Argument(
        metavar="PATH|URL",
        help="Folder of a store, or a database of Redis or Valkey: redis://host:6379/0 (rediss://, valkey://, "
        "valkeys://, unix:///path/to/socket?db=0). A password is better in $REDISCLI_AUTH than in the URL.",
        show_default=False,
    ),
]


@app.command(epilog=EXIT_CODES)
def audit(place: StorePlace, as_json: AsJson = False) -> None:
    """Count what a store holds: by schema, format, model, salted or not, with bytes and ages.

    Names of LMCache 0.5.x are schema 1, ours schema 2. Nothing is opened but descriptions of spaces, and nothing is
    changed. In Redis, bytes are what the server's memory holds, and an age is the time since the last use.
    """
    with explained():
        from extra_keys_cli.audit import audit as run

        run(place, as_json=as_json)


@app.command(epilog=EXIT_CODES)
def purge(
    place: StorePlace,
    schema: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Storage schema; 1 is LMCache 0.5.x.", show_default=False)
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Not modified (in Redis: not used) for this long: 90s, 30m, 12h, 7d, 2w.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model; may be given several times. A name that several models may have written goes only if all of "
            "them are given.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="WHAT",
            help="Which writer, as the audit has it under what: fs, native, xk2, 'xk2, of v1 clients'.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without, only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Retire the entries of a store for which all that is given holds. A dry run unless --yes.

    What cannot be named, or is ambiguous for what is asked, stays. Interrupted, it goes on where it is run again. In a
    folder, schema 2 goes only while no server has it. What becomes younger while the purge runs stays.
    """
    if schema is None and older_than is None and not model and form is None:
        raise typer.BadParameter("say what is to go: --schema, --older-than, --model, --format, or several of them")
    with explained():
        from compat.purge import Criteria
        from extra_keys_cli.ages import parse_age
        from extra_keys_cli.audit import purge as run

        seconds = None if older_than is None else parse_age(older_than)
        run(place, Criteria(schema, seconds, frozenset(model or ()), form), yes=yes, as_json=as_json)


def main() -> None:
    """Entry point of the installed command."""
    app(prog_name="extra-keys")
