"""PagedAttention.forward_decode with the choice between V1 and V2 put back in."""

import dis
import functools
import inspect
import threading

import torch

from paged_attention.kernel.partition import ceil_div
from paged_attention.kernel.workspace import Buffers, Workspace
from paged_attention.vllm.choice import PARTITION_SIZE, partition_size

# What forward_decode is given and the operations want, in the operations' order.
BEFORE = "query key_cache value_cache num_kv_heads scale block_tables seq_lens".split()
AFTER = "max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale".split()  # after block_size
BLOCKSPARSE = (
    "tp_rank blocksparse_local_blocks blocksparse_vert_stride blocksparse_block_size "
    "blocksparse_head_sliding_step"
).split()  # from 0.5.3 on; all or none


def always_takes_v1(forward_decode):
    """Whether it calls V1 whatever the lengths are: it sets `use_v1 = True` in the end, under no
    condition, or knows no V2.

    Told from its bytecode: a call would launch a kernel.
    """
    code = inspect.unwrap(forward_decode).__code__
    if "paged_attention_v1" in code.co_names and "paged_attention_v2" not in code.co_names:
        return True
    steps = list(dis.get_instructions(code))
    last = store = None
    for value, step in zip(steps, steps[1:]):
        if step.opname == "STORE_FAST" and step.argval == "use_v1":
            last, store = value, step.offset
    if last is None or last.opname != "LOAD_CONST" or last.argval is not True:
        return False
    jumps = [step for step in steps if step.opcode in {*dis.hasjrel, *dis.hasjabs}]
    return not any(step.offset < store < step.argval for step in jumps)  # an `if` around it


def choosing(forward_decode, ops, takes_v2):
    """A forward_decode that asks takes_v2(max_seq_len, num_seqs, num_heads) each time.

    Args:    forward_decode: the port's own, which goes on serving V1 where it always did
             ops: the module whose paged_attention_v1 and _v2 are called, as they are then
    Raises:  ValueError: it lacks an argument of vLLM's forward_decode, 0.5.3 to 0.11
    Source:  vLLM vllm/attention/ops/paged_attn.py, PagedAttention.forward_decode
    """
    signature = inspect.signature(forward_decode)
    missing = [name for name in BEFORE + AFTER if name not in signature.parameters]
    if missing:
        raise ValueError(f"forward_decode has no argument {', '.join(missing)}: {signature}")
    always_v1 = always_takes_v1(forward_decode)
    blocksparse = [name for name in BLOCKSPARSE if name in signature.parameters]

    @functools.wraps(forward_decode)
    def decode(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        given = given.arguments
        query, max_seq_len = given["query"], given["max_seq_len"]
        v2 = takes_v2(max_seq_len, *query.shape[:2])
        if always_v1 and not v2:
            return forward_decode(*args, **kwargs)
        arguments = [given[name] for name in BEFORE]
        arguments.append(given["value_cache"].shape[3])  # block_size
        arguments += [given[name] for name in AFTER + blocksparse]
        out = torch.empty_like(query)
        if v2:
            ops.paged_attention_v2(out, *scratch(query, max_seq_len), *arguments)
        else:
            ops.paged_attention_v1(out, *arguments)
        return out

    return decode


def scratch(query, max_seq_len):
    """V2's exp_sum, max_logits and tmp_out, in memory that is used again from step to step.

    As many partitions as there may be at 512 tokens, or at fewer if ours are smaller: a native V2
    takes the memory for as much of it as it needs.
    """
    partitions = ceil_div(max_seq_len, min(PARTITION_SIZE, partition_size()))
    shape = (*query.shape[:2], partitions)
    buffers = _scratch_buffers(shape, query.shape[2], query.dtype)
    buffers = _workspace(query.device).bind(buffers, query)
    return buffers.exp_sum(), buffers.max_logits(), buffers.tmp_out()


class _ScratchBuffers(Buffers):
    """Args: shape: (num_seqs, num_heads, num_partitions)"""

    def __init__(self, shape, head_size, dtype):
        super().__init__()
        self.exp_sum = self.declare(torch.float32, *shape)
        self.max_logits = self.declare(torch.float32, *shape)
        self.tmp_out = self.declare(dtype, *shape, head_size)


_scratch_buffers = functools.lru_cache(maxsize=16)(_ScratchBuffers)


def _workspace(device):
    """The calling thread's, for a device and its current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _own.__dict__.setdefault((device, stream), Workspace(device))


_own = threading.local()
