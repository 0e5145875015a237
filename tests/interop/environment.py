"""Where the released LMCache lives, and what to say when it is not there."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
STAMP = ROOT / ".venv-lmcache" / ".installed"
"""Written by `make interop` when the environment is whole."""

MISSING = (
    "LMCache 0.5.6 is not installed in .venv-lmcache/, so nothing was tested against the real peer; "
    "run `make interop`, which builds that environment once"
)

needs_lmcache = pytest.mark.skipif(not STAMP.exists(), reason=MISSING)


OLDER = ("0.5.0", "0.5.3", "0.5.5")
"""Releases that are laid beside the environment's own, 0.5.6, and share everything else with it."""


def release_folder(release: str) -> Path:
    """Where one of the older releases is."""
    return ROOT / ".venv-lmcache" / "releases" / release


def peer_environment(release: str | None = None) -> dict[str, str]:
    """Variables for a process of the peer: no usage report, a fixed hash seed, and none of our own packages.

    Args:
        release: one of `OLDER`; None for the environment's own.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    path = {} if release is None else {"PYTHONPATH": str(release_folder(release))}
    return {**inherited, **path, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
