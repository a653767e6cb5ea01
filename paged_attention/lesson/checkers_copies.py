"""Checkers of the steps that fetch, pad and share K and V: notebooks 02 to 05."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attention.lesson.steps import Function, Misunderstood, called, close, tensor_of
from paged_attention.measure import count

INF = float("inf")


def gather_values(function: Function) -> str:
    """Fetch a sequence's values through its block table.

    function(value_cache, table, seq_len) -> (num_kv_heads, seq_len, head_size), with value_cache
    (num_blocks, num_kv_heads, head_size, block_size) and table (max_blocks,), int32, -1 past the
    sequence's last block. Slots that no token uses hold NaN.
    """
    heads, lanes, size = 2, 5, 3
    table = torch.tensor([6, 1, 4, -1, -1], dtype=torch.int32)
    ops = {}
    for tokens in (9, 7, 4, 1):
        used = -(-tokens // size)
        cache = torch.full((7, heads, lanes, size), float("nan"))
        right = torch.empty(heads, tokens, lanes)
        for t in range(tokens):
            numbers = 100.0 * t + 10 * torch.arange(heads)[:, None] + torch.arange(lanes)
            cache[int(table[t // size]), :, :, t % size] = right[:, t] = numbers
        row = torch.where(torch.arange(5) < used, table, -1).to(torch.int32)
        case = f"{tokens} tokens in blocks of {size}"
        result = called(function, cache, row, tokens, case=case)
        wrong = {
            (heads, used * size, lanes): "the slots of the last block past seq_len came along",
            (heads, 5 * size, lanes): "the table's entries past the sequence's end were followed",
            (tokens, heads, lanes): "the KV heads should come first, and then the tokens",
            (heads, lanes, tokens): "the lanes should come last",
            (heads, tokens // size * size, lanes): "the last, partly filled block was forgotten",
        }
        got = tensor_of(result, (heads, tokens, lanes), case, wrong)
        if not close(got, right):
            if got.isnan().any():
                raise Misunderstood(f"NaN for {case}: a slot that no token uses was read")
            if close(got.flatten().sort()[0], right.flatten().sort()[0]):
                raise Misunderstood(
                    f"the right numbers in the wrong order for {case}: reshape keeps the order in "
                    "memory, so permute the dimensions first"
                )
            raise Misunderstood(f"other tokens than the table's for {case}: block i is table[i]")
        ops[used] = count(lambda c=cache, r=row, t=tokens: function(c, r, t))
    if ops[3].host_reads:
        return f"right, and {ops[3].host_reads} values are read back to the host on the way"
    if ops[3].ops > ops[2].ops:
        more = ops[3].ops - ops[2].ops
        return f"right, and each block more costs {more} operations more: index with all ids"
    return f"right, in {ops[3].ops} operations for any number of blocks"


def pad_partitions(function: Function) -> str:
    """Make partitions a dimension.

    function(logits, values, partition_size) -> (logits, values), with logits (num_heads, tokens)
    and values (num_heads, tokens, head_size); returns (num_heads, partitions, partition_size) and
    (num_heads, partitions, partition_size, head_size).
    """
    heads, lanes = 2, 5
    for tokens, size in ((7, 4), (8, 4), (3, 4), (10, 3)):
        case = f"{tokens} tokens in partitions of {size}"
        parts = -(-tokens // size)
        logits = torch.arange(1.0, 1 + heads * tokens).view(heads, tokens).sin() - 2
        values = torch.arange(1.0, 1 + heads * tokens * lanes).view(heads, tokens, lanes)
        result = called(function, logits, values, size, case=case)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise Misunderstood("it should return two tensors, the logits and the values")
        short = tokens // size
        wrong = {
            (heads, short, size): "the last partition was forgotten, which isn't full",
            (heads, short + 1, size): "a partition of nothing but padding was added",
            (heads, parts * size): "padded, and partitions are no dimension yet",
            (parts, heads, size): "heads should come first, and then partitions",
        }
        x = tensor_of(result[0], (heads, parts, size), case, wrong)
        wrong = {(*shape, lanes): why for shape, why in wrong.items()}
        v = tensor_of(result[1], (heads, parts, size, lanes), case, wrong)
        x, v = x.flatten(1), v.flatten(1, 2)
        if not close(x[:, :tokens], logits) or not close(v[:, :tokens], values):
            if close(x[:, -tokens:], logits):
                raise Misunderstood(f"the padding stands before the tokens for {case}")
            raise Misunderstood(f"a token lies in another place than its own for {case}")
        padding = x[:, tokens:]
        if padding.isnan().any() or (padding != -INF).any():
            number = float(padding.flatten()[0])
            raise Misunderstood(
                f"the logits are padded with {number:g}, which is a key of weight "
                f"e^({number:g} - m): the last partition's sum takes it in"
            )
        if not v[:, tokens:].isfinite().all():
            raise Misunderstood(
                "the values are padded with what isn't finite, and a weight of 0 times it is NaN"
            )
    return "right"


def group_logits(function: Function) -> str:
    """Make the logits without repeating K.

    function(q, k) -> (num_heads, tokens), with q (num_heads, head_size) and k (num_kv_heads,
    tokens, head_size). Query head h shares KV head h // (num_heads / num_kv_heads).
    """
    for heads, kv_heads, tokens, lanes in ((6, 2, 7, 5), (4, 1, 3, 5), (3, 3, 8, 4)):
        case = f"{heads} heads on {kv_heads}, {tokens} tokens, {lanes} lanes"
        group = heads // kv_heads
        q = torch.arange(1.0, 1 + heads * lanes).view(heads, lanes).sin()
        k = torch.arange(1.0, 1 + kv_heads * tokens * lanes).view(kv_heads, tokens, lanes).cos()
        by_head = [  # what each query head would get from each KV head
            torch.stack([k[j].double() @ q[h].double() for j in range(kv_heads)])
            for h in range(heads)
        ]
        right = torch.stack([by_head[h][h // group] for h in range(heads)])
        wrong = {
            (kv_heads, group, tokens): "the logits are grouped still; one view is missing",
            (tokens, heads): "heads should come first, and then tokens",
        }
        got = tensor_of(called(function, q, k, case=case), (heads, tokens), case, wrong)
        if not close(got, right):
            raise Misunderstood(_kv_heads_taken(got, by_head, group, case))
    q, k = torch.ones(6, 5), torch.ones(2, 7, 5)
    counts, least = count(lambda: function(q, k)), 6 * 7 * 4
    if counts.peak_bytes >= least + 6 * 7 * 5 * 4:
        return (
            f"right, and K was copied to 6 heads on the way (peak {counts.peak_bytes:,} bytes, "
            f"{least} are enough): try a view of q instead"
        )
    if counts.gemms != 1:
        return f"right, with {counts.gemms} GEMMs: a batch of KV heads makes it one"
    return "right, with one GEMM and no copy of K"


def _kv_heads_taken(got: Tensor, by_head: list[Tensor], group: int, case: str) -> str:
    taken = []
    for row, options in zip(got, by_head):
        taken.append(next((j for j, x in enumerate(options) if close(row, x)), None))
    if None in taken:
        return f"head {taken.index(None)} has no KV head's logits for {case}"
    wanted = [h // group for h in range(len(taken))]
    words = f"heads {_listed(range(len(taken)))} got KV heads {_listed(taken)}, not "
    why = f"{_listed(wanted)}: a group is query heads that follow each other"
    return words + why


def _listed(numbers: object) -> str:
    return ", ".join(map(str, numbers))  # type: ignore[call-overload]


def one_tile(function: Function) -> str:
    """Decide whether a sequence needs partitions.

    function(q, k, v, partition_size, in_partitions) -> (num_kv_heads, group, head_size), with q
    (num_kv_heads, group, head_size), scaled, and k and v (num_kv_heads, tokens, head_size). For
    what is longer than one partition, in_partitions(q, k, v) gives the result.
    """
    kv_heads, group, lanes, size = 2, 3, 5, 8
    for tokens in (7, 8, 9, 20, 1):
        case = f"{tokens} tokens and partitions of {size}"
        q = torch.arange(1.0, 1 + kv_heads * group * lanes).view(kv_heads, group, lanes).sin() * 3
        k = torch.arange(1.0, 1 + kv_heads * tokens * lanes).view(kv_heads, tokens, lanes).cos()
        v = k.flip(-1) + 1
        right = torch.softmax(q.double() @ k.double().transpose(1, 2), -1) @ v.double()
        calls = []

        def in_partitions(*args: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(len(args))
            q, k, v = (x.double() for x in args)
            return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).float()

        result = called(function, q, k, v, size, in_partitions, case=case)
        wrong = {(kv_heads * group, lanes): "leave the heads grouped"}
        got = tensor_of(result, (kv_heads, group, lanes), case, wrong)
        if calls and tokens <= size:
            raise Misunderstood(f"{case}: they fit one partition, and took two phases")
        if not calls and tokens > size:
            raise Misunderstood(f"{case}: they need more than one, and took the short way")
        if not close(got, right):
            logits = q.double() @ k.double().transpose(1, 2)
            if close(got, torch.softmax(logits, 1) @ v.double()):
                raise Misunderstood("the softmax goes over heads, and should go over tokens")
            if close(got, logits.exp() @ v.double()):
                raise Misunderstood("nothing is divided: the weights should add up to 1")
            raise Misunderstood(f"the result is wrong for {case}")
    q, k = torch.ones(kv_heads, group, lanes), torch.ones(kv_heads, size, lanes)
    ops = count(lambda: function(q, k, k, size, None)).ops
    if ops > 3:
        return f"right, in {ops} operations: two products and one softmax are enough"
    return f"right, in {ops} operations"
