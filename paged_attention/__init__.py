"""PagedAttention V2 decode in PyTorch: the kernel, its cache, and its float64 judge.

The lessons are in `paged_attention.stages`, the measuring in `paged_attention.measure`.
"""

import os
import signal
import sys

if sys.argv[:1] == ["-m"] and "paged_attention" in sys.orig_argv:
    # The command is being loaded, which takes seconds. Ctrl-C then ends it without a traceback.
    def _leave(*_: object) -> None:
        os.write(2, b"Interrupted before anything was measured.\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and it isn't ignored
        signal.signal(signal.SIGINT, _leave)

from paged_attention.cache import OutOfBlocks, PagedKVCache
from paged_attention.kernel.decode import paged_attention
from paged_attention.kernel.merge import merge_states
from paged_attention.kernel.plan import DecodePlan, plan_decode
from paged_attention.kernel.shared_prefix import shared_prefix_attention
from paged_attention.kernel.workspace import Workspace
from paged_attention.reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "DecodePlan",
    "OutOfBlocks",
    "PagedKVCache",
    "Workspace",
    "merge_states",
    "paged_attention",
    "plan_decode",
    "reference_attention",
    "shared_prefix_attention",
]
