"""For all tests: with two workers, one thread each."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers, and the notebook kernels they start, would otherwise each use every core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
