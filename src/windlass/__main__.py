"""`python -m windlass`, and `accelerate launch … -m windlass`: the same as the `windlass` command."""

import os
import signal
import sys

if "WINDLASS_JOB" in os.environ:
    # A container's first process ignores signals that it has no handler for, and importing takes time.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(75))  # nothing to save yet

from windlass.cli import main

if __name__ == "__main__":
    main()
