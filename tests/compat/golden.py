"""What the released LMCache 0.5.6 answered, for every test that holds us to it."""

import json
from pathlib import Path
from typing import Any

_VECTORS = Path(__file__).parents[1] / "vectors"

GOLDEN: dict[str, Any] = json.loads((_VECTORS / "lmcache-0.5.6.json").read_text(encoding="utf-8"))
"""Values of its functions."""

WIRE: dict[str, Any] = json.loads((_VECTORS / "lmcache-0.5.6-wire.json").read_text(encoding="utf-8"))
"""Frames between its client and its server."""
