"""`python -m paged_attention`: the ladder on this machine, see `bench/cli.py`."""

from __future__ import annotations

import os
import sys

from paged_attention.bench.cli import main

if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `| head`: what was to be read has been read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
