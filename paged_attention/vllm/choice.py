"""When V2 begins, and what else the environment may set."""

from __future__ import annotations

import os

import torch

from paged_attention.kernel.checks import refuse

PARTITION_SIZE = 512  # tokens. vLLM compiles it in and passes it to nobody
V2_MIN_LEN = 8192  # tokens, beyond which upstream's V1 has no shared memory for its logits


def takes_v2(max_seq_len: int, v1_serves: int = V2_MIN_LEN) -> bool:
    """Whether a step takes V2, where V2 is ours. It does above what V1 serves.

    PyTorch's operations cost the host more than one launch of a native V1 does, so V1 keeps what
    it is good at. PAGED_ATTENTION_V2_MIN_LEN sets another length.

    Args:    v1_serves: tokens
    Example:
        >>> takes_v2(8192), takes_v2(8193), takes_v2(8193, v1_serves=32_768)
        (False, True, False)
    """
    return max_seq_len > v2_min_len(v1_serves)


def partition_size() -> int:
    """Tokens per partition of V2: 512, or PAGED_ATTENTION_PARTITION_SIZE."""
    return _count("PAGED_ATTENTION_PARTITION_SIZE", PARTITION_SIZE, least=1)


def v2_min_len(v1_serves: int = V2_MIN_LEN) -> int:
    """Tokens that V2 begins above: what V1 serves, or PAGED_ATTENTION_V2_MIN_LEN."""
    return _count("PAGED_ATTENTION_V2_MIN_LEN", v1_serves, least=0)


def is_capturing() -> bool:
    """Whether operations are being captured in a CUDA graph, instead of run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _count(name: str, default: int, least: int) -> int:
    """A whole number that the environment may set."""
    text = os.environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) >= least):
        refuse(name, f"a whole number of at least {least}", repr(text))
    return int(text or default)
