"""V1 or V2: the rule where V2 is ours, upstream's rule, and what the environment may set."""

from __future__ import annotations

import os

from paged_attention.kernel.checks import refuse
from paged_attention.kernel.partition import ceil_div

PARTITION_SIZE = 512  # tokens. vLLM compiles it in and passes it to nobody
V2_MIN_LEN = 8192  # tokens, beyond which upstream's V1 has no shared memory for its logits


def takes_v2(max_seq_len: int) -> bool:
    """Whether a step takes V2, where V2 is ours. It does above 8,192 tokens.

    PyTorch's operations cost the host more than one launch of a native V1 does, so V1 keeps what
    it is good at. PAGED_ATTENTION_V2_MIN_LEN sets another length.
    """
    return max_seq_len > v2_min_len()


def upstream_takes_v2(max_seq_len: int, num_seqs: int, num_heads: int) -> bool:
    """Whether a step takes V2 by upstream's rule, which is for a native or compiled V2.

    Up to 8,192 tokens, V1 serves sequences of one partition, and batches that fill the device
    without partitions.

    Source:  vLLM vllm/attention/ops/paged_attn.py, PagedAttention.forward_decode
    Example:
        >>> takes_v2(1024), upstream_takes_v2(1024, num_seqs=1, num_heads=32)
        (False, True)
    """
    one_partition = ceil_div(max_seq_len, PARTITION_SIZE) == 1
    return max_seq_len > V2_MIN_LEN or not (one_partition or num_seqs * num_heads > 512)


def partition_size() -> int:
    """Tokens per partition of V2: 512, or PAGED_ATTENTION_PARTITION_SIZE."""
    return _count("PAGED_ATTENTION_PARTITION_SIZE", PARTITION_SIZE, least=1)


def v2_min_len() -> int:
    """Tokens that V2 begins above: 8,192, or PAGED_ATTENTION_V2_MIN_LEN."""
    return _count("PAGED_ATTENTION_V2_MIN_LEN", V2_MIN_LEN, least=0)


def _count(name: str, default: int, least: int) -> int:
    """A whole number that the environment may set."""
    text = os.environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) >= least):
        refuse(name, f"a whole number of at least {least}", repr(text))
    return int(text or default)
