"""`python -m windlass.observe.report RUN_DIR`: what a run starts by itself at every save and at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from windlass.errors import UserError
from windlass.observe.report import make


def main(arguments: Sequence[str]) -> int:
    quiet = "--quiet" in arguments
    try:
        report = make([Path(argument) for argument in arguments if argument != "--quiet"])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not quiet:
        from windlass.observe.report.show import show

        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
