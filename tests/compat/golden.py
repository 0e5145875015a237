"""What the released LMCache 0.5.6 answered, for every test that holds us to it."""

import json
from pathlib import Path
from typing import Any

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "lmcache-0.5.6.json").read_text(encoding="utf-8")
)
