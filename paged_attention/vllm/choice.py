"""V1 or V2: the rule where V2 is ours, upstream's rule, and what the environment may set."""

import os

from paged_attention.kernel.partition import ceil_div

PARTITION_SIZE = 512  # tokens; vLLM compiles it in and passes it to nobody
V2_MIN_LEN = 8192  # tokens; where upstream's V1 runs out of shared memory for its logits


def takes_v2(max_seq_len):
    """Whether a step takes V2, where V2 is ours: only if it has more than 8,192 tokens.

    PyTorch's operations cost the host more than one launch of a native V1 does, so V1 keeps what
    it is good at. PAGED_ATTENTION_V2_MIN_LEN sets another length.
    """
    return max_seq_len > v2_min_len()


def upstream_takes_v2(max_seq_len, num_seqs, num_heads):
    """Whether a step takes V2 by upstream's rule, for a V2 that is native or compiled.

    Up to 8,192 tokens V1 serves what has one partition, and batches that fill the device anyway.

    Source:  vLLM vllm/attention/ops/paged_attn.py, PagedAttention.forward_decode
    """
    one_partition = ceil_div(max_seq_len, PARTITION_SIZE) == 1
    return max_seq_len > 8192 or not (one_partition or num_seqs * num_heads > 512)


def partition_size():
    """Tokens per partition of V2: 512, or PAGED_ATTENTION_PARTITION_SIZE."""
    return _count("PAGED_ATTENTION_PARTITION_SIZE", PARTITION_SIZE, least=1)


def v2_min_len():
    """Tokens that V2 begins above: 8192, or PAGED_ATTENTION_V2_MIN_LEN."""
    return _count("PAGED_ATTENTION_V2_MIN_LEN", V2_MIN_LEN, least=0)


def _count(name, default, least):
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {text!r}")
    return int(text)
