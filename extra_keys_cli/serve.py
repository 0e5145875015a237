"""``extra-keys serve``: a cache server until somebody stops it."""

import contextlib
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from rich.logging import RichHandler
from rich.progress import Progress

from compat import V1Front
from extra_keys_cli.failures import CommandError
from extra_keys_cli.screen import shown, stderr, stdout
from extra_keys_cli.sizes import format_size
from keying import KeySpace
from protocol_v2.cache import ChunkCache
from protocol_v2.cache_news import CacheNews
from protocol_v2.errors import UnsharedError
from protocol_v2.event_feed import EventPublisher
from protocol_v2.hello import Limits
from protocol_v2.metrics import StatusCollector
from protocol_v2.negotiation import ServerTerms
from protocol_v2.server import CacheServer, checked_addresses
from protocol_v2.service import MAX_PEERS, CacheService
from protocol_v2.sharing import Sharing
from protocol_v2.tiers import DiskTier, Fsync, TierError
from protocol_v2.tiers.descriptions import described_spaces
from protocol_v2.tiers.remote import RemoteTier

BOOT_ID_BYTES = 16

WANTED_FILES = MAX_PEERS + 1024
"""Open files: one for each client that may have a session, those without one, and the store's."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line said.

    Args:
        listen: addresses.
        store: folder of the disk tier; None for memory only.
        memory: bytes of the memory tier.
        shared_memory: bytes of values that lie in memory shared with clients; 0 for none, None for a quarter more than
            the memory tier holds, so that there is room for what comes in before what must go is gone.
        disk: bytes of the disk tier.
        fsync: when data is forced to the disk.
        remote: URL of the tier that servers share; None for none.
        remote_timeout: seconds that one call to it may take.
        workers: threads for work that blocks.
        spaces: the only spaces to serve; empty for any.
        v1_chunk_size: tokens of a chunk for LMCache 0.5.x clients on the same port; None refuses such clients.
        events: address to publish chunk events at; None for none.
        events_replay: address at which past events can be asked for; None for none.
        metrics_port: port on 127.0.0.1 for a Prometheus scraper; None for none.
        quiet: print nothing but warnings and errors.
    """

    listen: tuple[str, ...]
    store: Path | None
    memory: int
    shared_memory: int | None
    disk: int
    fsync: Fsync
    remote: str | None
    remote_timeout: float
    workers: int
    spaces: tuple[KeySpace, ...]
    v1_chunk_size: int | None
    events: str | None
    events_replay: str | None
    metrics_port: int | None
    quiet: bool


def serve(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM, then stop cleanly.

    Raises:
        ProtocolError: the folder or an address cannot be had.
        OSError: the same, from the operating system.
    """
    logging.basicConfig(
        level=logging.WARNING if options.quiet else logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=stderr, show_path=False)],
    )
    _raise_file_limit()
    stop = threading.Event()
    with _stopped_by_signals(stop):
        for address in checked_addresses(options.listen):
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as stack:
            publisher = stack.enter_context(_events(options))
            remote = None if options.remote is None else _opened_remote(options.remote, options.remote_timeout)
            cache = _loaded_cache(options, remote)
            service = CacheService(
                cache,
                ServerTerms(
                    boot_id=os.urandom(BOOT_ID_BYTES),
                    limits=Limits(),
                    expected_spaces=options.spaces,
                    software="extra-keys",
                ),
                started=time.monotonic(),
                front=None if options.v1_chunk_size is None else V1Front(cache, chunk_size=options.v1_chunk_size),
                spaces=() if options.store is None else described_spaces(options.store),
                news=None if publisher is None else CacheNews(publisher),
                sharing=_sharing(options),
            )
            server = stack.enter_context(CacheServer(options.listen, service, workers=options.workers))
            if options.metrics_port is not None:
                stack.enter_context(_metrics(options.metrics_port, service))
            if not options.quiet:
                _announce(server, publisher, remote, options)
            while not stop.wait(0.5):
                if server.join(0):  # the loop failed: `stop` below raises what it died of
                    break
        if not options.quiet:
            stdout.print("stopped")


def _raise_file_limit() -> None:
    """Open as many files as this process may: each client is one, and libzmq aborts where an ipc client finds none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # what there is stays, and is told below
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < WANTED_FILES:
        logging.getLogger(__name__).warning(
            "only %d files may be open, and each client is one: about as many clients end the server; "
            "raise the hard limit to %d (ulimit -Hn, LimitNOFILE=)",
            soft,
            WANTED_FILES,
        )


def _sharing(options: ServeOptions) -> Sharing | None:
    """Shared memory, unless it is not wanted or the operating system has none: then clients send through the socket."""
    nbytes = options.memory * 5 // 4 if options.shared_memory is None else options.shared_memory
    if not nbytes:
        return None
    try:
        return Sharing(nbytes)
    except UnsharedError as error:
        logging.getLogger(__name__).warning("%s; clients on this host send through the socket", error)
        return None


def _loaded_cache(options: ServeOptions, remote: RemoteTier | None) -> ChunkCache:
    """The cache over its tiers, with the disk tier's entries found again; a bar shows where that takes long."""
    if options.store is None:
        return ChunkCache(options.memory, remote=remote)
    if options.store.exists() and not options.store.is_dir():
        raise CommandError(f"{options.store}: a file; give a folder for the store")
    try:
        disk = DiskTier(options.store, budget=options.disk, fsync=options.fsync)
    except TierError as error:  # which does not say where
        raise CommandError(f"{options.store}: {error}") from None
    if disk.reclaimed:
        logging.getLogger(__name__).warning(
            "the last server on this store did not stop in order; its entries are checked"
        )
    cache = ChunkCache(options.memory, disk, remote)
    with Progress(console=stderr, transient=True, disable=options.quiet or not stderr.is_terminal) as progress:
        bar = progress.add_task("reading the store", total=None)
        found = cache.load(lambda done, total: progress.update(bar, completed=done, total=total))
    if found and not options.quiet:
        stdout.print(f"found {found} entries in {shown(options.store)}", highlight=False, soft_wrap=True)
    return cache


def _opened_remote(url: str, timeout: float) -> RemoteTier:
    """The remote tier. One that does not answer is told and keeps nobody from starting: it may come."""
    from protocol_v2.tiers.remote_url import open_remote  # with redis-py, which servers without it need not load

    remote = open_remote(url, timeout=timeout)
    try:
        remote.ping()
    except TierError as error:
        logging.getLogger(__name__).warning(
            "the remote tier %s does not answer (%s); serving without it until it does", remote.address, error
        )
    return remote


def _announce(
    server: CacheServer, publisher: EventPublisher | None, remote: RemoteTier | None, options: ServeOptions
) -> None:
    if publisher is not None:
        missed = "" if publisher.replay_address is None else f", what was missed at {publisher.replay_address}"
        stdout.print(f"events at {publisher.address}{missed}", highlight=False, soft_wrap=True)
    if options.v1_chunk_size is not None:
        stdout.print(
            f"LMCache 0.5.x (v1) clients are accepted too, in chunks of {options.v1_chunk_size} tokens; "
            "`extra-keys status` says how many there still are",
            highlight=False,
            soft_wrap=True,
        )
    for address in server.addresses:
        stdout.print(f"listening on {address}", highlight=False, soft_wrap=True)
    place = "none" if options.store is None else f"{options.store} ({format_size(options.disk)})"
    shared = "" if remote is None else f", remote {remote.address}"
    stdout.print(
        f"memory {format_size(options.memory)}, disk {place}{shared}; Ctrl-C stops", highlight=False, soft_wrap=True
    )


@contextlib.contextmanager
def _events(options: ServeOptions) -> Iterator[EventPublisher | None]:
    """What publishes chunk events, if that is wanted."""
    if options.events is None:
        yield None
        return
    with EventPublisher(options.events, options.events_replay) as publisher:
        yield publisher


@contextlib.contextmanager
def _metrics(port: int, service: CacheService) -> Iterator[None]:
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: service.facts))
    exporter, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        yield
    finally:
        exporter.shutdown()
        exporter.server_close()
        thread.join(5)


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event; what was there before comes back at the end."""
    before = {one: signal.signal(one, lambda *_: stop.set()) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
