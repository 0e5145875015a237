"""Imports go one way: compat -> protocol_v2 -> keying; read from the sources, so that no import can hide."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("keying", "protocol_v2", "compat", "extra_keys_cli")
MAY_IMPORT = {
    "keying": {"keying"},
    "protocol_v2": {"protocol_v2", "keying"},
    "compat": {"compat", "protocol_v2", "keying"},
    "extra_keys_cli": set(PACKAGES),
}
MEMORY_OWNERS = {"protocol_v2/shared_memory.py"}
SOCKET_OWNERS = {"protocol_v2/server.py", "protocol_v2/client_thread.py", "protocol_v2/event_feed.py"}


def imported(source: str) -> Iterator[str]:
    """Top-level names of all modules that a source imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) in {"__import__", "import_module"}
        ):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def sources(package: str) -> list[Path]:
    """All modules of a package."""
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_against_the_direction(package: str) -> None:
    """The core knows nobody, protocol_v2 knows keying, compat knows both, and only the command line knows compat."""
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in sources(package)
        for name in imported(path.read_text())
        if name.split(".")[0] in PACKAGES and name.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert [] == wrong
    assert sources(package)


def test_keying_imports_the_standard_library_only() -> None:
    """Not even lazily: torch and numpy are accepted by their shape."""
    wrong = [
        (path.name, name)
        for path in sources("keying")
        for name in imported(path.read_text())
        if name.split(".")[0] not in {*sys.stdlib_module_names, "keying"}
    ]
    assert [] == wrong


def test_keying_does_no_io() -> None:
    """No clock, environment, file, socket or random source is in reach of a key."""
    impure = {"os", "io", "time", "datetime", "random", "secrets", "socket", "pathlib", "subprocess", "uuid", "logging"}
    names = {name.split(".")[0] for path in sources("keying") for name in imported(path.read_text())}
    assert set() == impure & names
    assert "hashlib" in names


def test_sockets_live_at_the_edge_only() -> None:
    """The protocol is sans-IO: who imports zmq is listed here."""
    owners = {
        str(path.relative_to(ROOT))
        for path in sources("protocol_v2")
        if any(name.split(".")[0] == "zmq" for name in imported(path.read_text()))
    }
    assert SOCKET_OWNERS == owners


def test_memory_is_mapped_in_one_place() -> None:
    """Messages and services name ranges; who maps memory is listed here."""
    owners = {
        str(path.relative_to(ROOT))
        for path in sources("protocol_v2")
        if {"mmap", "ctypes", "multiprocessing"} & {name.split(".")[0] for name in imported(path.read_text())}
    }
    assert owners == MEMORY_OWNERS


def test_the_detector_sees_each_form_of_import() -> None:
    """Negative control: plain, from, nested and dynamic imports are all found."""
    code = (
        "import compat.v1\ndef f():\n from zmq import asyncio\n __import__('torch')\nimportlib.import_module('numpy')\n"
    )
    assert {"compat.v1", "zmq", "torch", "numpy"} == set(imported(code))
