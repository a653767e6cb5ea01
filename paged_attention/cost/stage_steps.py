"""The steps of a stage that several stages have, for `stage_costs`, in the order of a decode step.

Where PyTorch needs no operation, none is written down: views, `.float()` of a float32 tensor, and
a `reshape` whose dimensions already lie one after the other (`_reordered`, `_regrouped`).
"""

from __future__ import annotations

from paged_attention.cost.tape import Tensor
from paged_attention.kernel.layouts import lanes_per_piece
from paged_attention.kernel.partition import ceil_div, whole_blocks

PARTITION_SIZE = 512  # tokens, where none is asked for


class Numbers:
    """The sizes of one sequence's step; those without a word are elements."""

    def __init__(self, shape, tokens):
        self.heads, self.kv_heads = shape.num_heads, shape.num_kv_heads
        self.group = shape.num_heads // shape.num_kv_heads  # num_queries_per_kv
        self.head_size, self.block_size = shape.head_size, shape.block_size
        self.itemsize = shape.dtype.itemsize  # of query and caches, bytes
        self.lanes = lanes_per_piece(shape.dtype)  # x of the "vllm" layout
        self.tokens = tokens
        self.blocks = ceil_div(tokens, shape.block_size)
        self.partition_size = whole_blocks(
            shape.partition_size or PARTITION_SIZE, shape.block_size
        )
        self.partitions = ceil_div(tokens, self.partition_size)
        self.padded = self.partitions * self.partition_size  # tokens
        self.row = self.heads * self.head_size  # a query, or an output
        self.maxima = self.heads * self.partitions  # one number per head and partition
        self.partials = self.heads * self.partitions * self.head_size

    def kv(self, tokens):
        """Elements of K, or of V, for so many tokens."""
        return self.kv_heads * tokens * self.head_size


def output(t, shape):
    numel = len(shape.seq_lens) * shape.num_heads * shape.head_size
    return t.op("set up", new=numel, itemsize=shape.dtype.itemsize)


def sequences(t, shape):
    """Reads each length on the host, and passes over the empty ones."""
    for tokens in shape.seq_lens:
        t.host_read("set up")
        if tokens > 0:
            yield Numbers(shape, tokens)


def as_float(t, n, tensor, label="convert"):
    return tensor if n.itemsize == 4 else t.op(label, tensor, new=tensor.numel)


def scale_query(t, n, x):
    x.q = t.op("set up", as_float(t, n, Tensor(n.row, n.itemsize), "set up"), new=n.row)


def gather(t, n, x):
    x.block_ids = t.op("gather", Tensor(n.blocks, 4), new=n.blocks, itemsize=8)
    blocks = Tensor(n.kv(n.blocks * n.block_size), n.itemsize)
    one_run = n.blocks == 1 or n.block_size == 1  # slots already lie one after the other
    one_piece = n.head_size == n.lanes
    lie_in_order = n.block_size == 1 or (one_piece and (n.blocks == 1 or n.kv_heads == 1))
    x.k = t.op("gather", blocks, x.block_ids, new=blocks.numel, itemsize=n.itemsize)
    x.k = _reordered(t, n, x.k, lie_in_order)
    x.v = t.op("gather", blocks, x.block_ids, new=blocks.numel, itemsize=n.itemsize)
    x.v = _reordered(t, n, x.v, one_run)


def _reordered(t, n, tensor, lie_in_order):
    if lie_in_order:
        return tensor
    return t.rearrange("reorder", tensor, new=tensor.numel, itemsize=n.itemsize)


def convert(t, n, x):
    x.k = as_float(t, n, x.k.view(n.kv(n.tokens)))
    x.v = as_float(t, n, x.v.view(n.kv(n.tokens)))


def partition_by_partition(t, n, x, by_einsum):
    x.max_logits, x.exp_sums, x.partials = [], [], []
    for p in range(n.partitions):
        tokens = min(n.partition_size, n.tokens - p * n.partition_size)
        logits, repeated = n.heads * tokens, n.group * n.kv(tokens)
        x.k_p = t.rearrange("repeat", as_float(t, n, x.k.view(n.kv(tokens))), new=repeated)
        x.v_p = t.rearrange("repeat", as_float(t, n, x.v.view(n.kv(tokens))), new=repeated)
        x.logits = t.gemm("GEMMs", x.q, x.k_p, new=logits)
        x.m = t.op("softmax", x.logits, new=n.heads)
        x.weights = t.op("softmax", t.op("softmax", x.logits, x.m, new=logits), new=logits)
        x.s = t.op("softmax", x.weights, new=n.heads)
        x.max_logits.append(x.m)
        x.exp_sums.append(x.s)
        normalised = t.op("softmax", x.weights, x.s, new=logits)
        weigh = t.op if by_einsum and tokens == 1 else t.gemm  # einsum only multiplies then
        x.partials.append(weigh("GEMMs", normalised, x.v_p, new=n.row))
        del normalised
    x.m = t.op("phase 2", *x.max_logits, new=n.maxima)
    x.s = t.op("phase 2", *x.exp_sums, new=n.maxima)
    x.partial_out = t.op("phase 2", *x.partials, new=n.partials)


def padded_softmax(t, n, x, kv_heads):
    """Up to `v_padded`, with K and V of so many heads."""
    logits = n.heads * n.padded
    x.logits = t.op("pad", new=logits)
    real = x.logits.view(n.heads * n.tokens)
    t.op("pad", t.gemm("GEMMs", x.q, x.k, new=real.numel), into=real)
    del real
    x.m = t.op("softmax", x.logits, new=n.maxima)
    x.weights = t.op("softmax", t.op("softmax", x.logits, x.m, new=logits), new=logits)
    x.s = t.op("softmax", x.weights, new=n.maxima)
    x.v_padded = t.op("pad", new=kv_heads * n.padded * n.head_size)
    t.op("pad", x.v, into=x.v_padded.view(x.v.numel))


def all_partitions(t, n, x):
    padded_softmax(t, n, x, kv_heads=n.kv_heads)
    x.weights = t.op("softmax", x.weights, x.s, new=n.heads * n.padded)
    x.partial_out = t.gemm("GEMMs", _regrouped(t, n, x.weights), x.v_padded, new=n.partials)
    x.partial_out = _regrouped(t, n, x.partial_out)


def _regrouped(t, n, tensor):
    """Groups and partitions change places, unless there is one of either, or one KV head."""
    if 1 in (n.kv_heads, n.group, n.partitions):
        return tensor
    return t.rearrange("regroup", tensor, new=tensor.numel)


def one_softmax(t, n, x, out):
    logits = n.heads * n.tokens
    x.weights = t.op("softmax", t.gemm("GEMMs", x.q, x.k, new=logits), new=logits)
    row = out.view(n.row)
    t.op("output", t.gemm("GEMMs", x.weights, x.v, new=n.row), into=row)


def merge(t, n, x, out):
    x.global_m = t.op("phase 2", x.m, new=n.heads)
    shifted = t.op("phase 2", x.m, x.global_m, new=n.maxima)
    shifted = t.op("phase 2", shifted, new=n.maxima)  # exp
    x.rescaled = t.op("phase 2", x.s, shifted, new=n.maxima)
    del shifted
    x.total = t.op("phase 2", x.rescaled, new=n.heads)
    x.weights = t.op("phase 2", x.rescaled, x.total, new=n.maxima)
    row = out.view(n.row)
    t.op("output", t.gemm("phase 2", x.weights, x.partial_out, new=n.row), into=row)


def fused_merge(t, n, x, out):
    row = out.view(n.row)
    shifted = t.op("phase 2", x.m, t.op("phase 2", x.m, new=n.heads), new=n.maxima)
    shifted = t.op("phase 2", shifted, new=n.maxima)  # exp
    x.rescale = t.op("phase 2", x.s, shifted, new=n.maxima)
    del shifted
    x.total = t.op("phase 2", x.rescale, new=n.heads)
    reduced = t.gemm("phase 2", x.rescale, x.partial_out, new=n.row)
    t.op("output", t.op("phase 2", reduced, x.total, new=n.row), into=row)
