"""`python -m tests.matrix`: run the migration matrix without sockets, and print its table or write it to a file."""

import argparse
import logging
import sys
from pathlib import Path

from tests.matrix.in_process import observe
from tests.matrix.observation import deviations
from tests.matrix.table import render, replaced


def main() -> int:
    """Exit code 1 where a cell is not what the rules say."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks of this file")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # every client says that it tunnels
    observed = observe()
    section = render(observed)
    if arguments.write is None:
        sys.stdout.write(section + "\n")
    else:
        path: Path = arguments.write
        path.write_text(replaced(path.read_text(encoding="utf-8"), section), encoding="utf-8")
    wrong = deviations(observed)
    sys.stderr.writelines(f"{line}\n" for line in wrong[:20])
    sys.stderr.write(f"{len(wrong)} cells are not what the rules say\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
