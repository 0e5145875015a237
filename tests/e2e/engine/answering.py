"""How a process with an engine in it is told what to do: lines of JSON.

Each line on stdin is ``{"call": name, ...}``, each answer a line on stdout; whatever else is printed goes to the log.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

H = TypeVar("H")


def answer_calls(make: Callable[[], H]) -> H:
    """Make a host and call its methods until stdin ends; the host, to be closed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    host = make()
    answers.write(json.dumps({"result": "ready"}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            result = getattr(host, asked.pop("call"))(**asked)
        except Exception as error:  # goes to the test, which says what it wanted
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        else:
            answers.write(json.dumps({"result": result}) + "\n")
    return host
