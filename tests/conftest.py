"""For all tests: one thread, in workers and in the notebook kernels and commands they start."""

import os

# Two workers with every core each get in each other's way; small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import hypothesis as _  # noqa: F401
except ImportError:
    import no_hypothesis

    no_hypothesis.stand_in()
