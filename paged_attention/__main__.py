"""`python -m paged_attention`: the ladder on this machine, see `bench/cli.py`."""

import sys

from paged_attention.bench.cli import main
from paged_attention.bench.streams import run

if __name__ == "__main__":
    sys.exit(run(main))
