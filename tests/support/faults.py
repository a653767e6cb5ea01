"""Every argument with every fault it can have, as data: what to put in its place.

A refusal names the argument, says what it must be, and shows what was wrong with it: a value, or
the shape, dtype or device in which a tensor differs from a good one. Words are given where it must
say more.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers import assert_same
from pools import INF, NAN, paged, random, to

from paged_attention import Workspace, plan_decode

SEQS, HEADS, KV_HEADS, SIZE, BLOCK, LENS = 2, 4, 2, 16, 4, [7, 3]
WRONG = (ValueError, TypeError)
META = {"device": "meta"}
ones, zeros = torch.ones, torch.zeros


def good(layout="HND", dtype=torch.float32, device="cpu"):
    """A call that works: its arguments by name, `out` full of a number to be left alone."""
    dense = to(random(LENS, HEADS, KV_HEADS, SIZE, seed=1, dtype=dtype), device=device)
    pool = paged(dense, BLOCK, layout, device=device)
    out = torch.full_like(dense.query, 7.0)
    return {"query": dense.query, **pool._asdict(), "layout": layout, "out": out}


SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "block_size": BLOCK}
KINDS = {"exact": {"seq_lens": LENS}, "capacity": {"num_seqs": SEQS, "max_seq_len": 9}}


def run_of(kind, layout="HND", **changes):
    """A plan's `run`, for the good call's sizes and lengths unless `changes` says otherwise."""
    return plan_decode(**{**SIZES, "layout": layout, **KINDS[kind], **changes}).run


def without(call, *names):
    return {name: value for name, value in call.items() if name not in names}


class Fault(NamedTuple):
    name: str  # of the argument at fault
    change: dict  # of the good call
    words: tuple[str, ...] = ()


def ids(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def of(name, *values):
    return [Fault(name, {name: value}) for value in values]


GOOD = good()
QUERY, KEY, VALUE, TABLE, LENGTHS = (GOOD[name] for name in list(GOOD)[:5])
BYTES = torch.zeros(KEY.shape, dtype=torch.uint8)

# What shows without reading a value of the five tensors: type, rank, shape, dtype, device.
INPUTS = [
    *of("query", QUERY[0], QUERY[None, None], QUERY.tolist(), None, QUERY.double(), QUERY.long()),
    *of("query", QUERY > 0, QUERY.to(torch.complex64), QUERY.to("meta"), QUERY.to_sparse()),
    *of("query", zeros(2, 4, 8), zeros(2, 3, 16), zeros(2, 1, 16), zeros(2, 0, 16)),
    *of("query", zeros(2, 0, 4, 16)),
    Fault("block_tables", {"query": zeros(3, 4, 16)}, ("3", "2")),
    *of("key_cache", KEY[0], KEY[None], [1.0], KEY.int(), KEY.double(), KEY.to("meta")),
    *of("key_cache", KEY.to_sparse(), zeros(6, 2, 0, 16), zeros(6, 0, 4, 16)),
    *of("value_cache", VALUE[0], None, VALUE.half(), VALUE.to("meta"), VALUE.to_sparse()),
    *of("value_cache", VALUE[:-1], VALUE[:, :, :3], VALUE[:, :1], VALUE[..., :8]),
    *of("block_tables", TABLE[0], TABLE[None], TABLE.tolist(), TABLE.float(), TABLE > 0),
    *of("block_tables", TABLE.to(torch.uint8), TABLE.to("meta"), TABLE.to_sparse(), TABLE[:1]),
    *of("seq_lens", LENGTHS[0], LENGTHS[None], 7, LENGTHS.float(), LENGTHS > 0),
    *of("seq_lens", torch.tensor([7, 3, 1]), LENGTHS.to("meta"), LENGTHS.to_sparse()),
]
# What shows only to who reads ids.
IDS = [
    Fault("block_tables", {"block_tables": ids(table, place, bad)}, (*map(str, place), str(bad)))
    for table, place, bad in (
        (TABLE, (0, 1), 6),
        (TABLE, (1, 0), 2**31 - 1),
        (TABLE, (0, 1), -1),
        (TABLE, (1, 0), -(2**31)),
        (TABLE.long(), (0, 0), 2**32),  # which would wrap to a good one
    )
]
LENGTH_VALUES = [
    Fault("seq_lens", {"seq_lens": torch.tensor([7, -3])}, ("1", "-3")),
    Fault("seq_lens", {"seq_lens": torch.tensor([7, 17])}, ("1", "17", "16")),
]
SCALES = ["0.5", [1.0], None, True, NAN, INF, -1e39, 10**400, ones(HEADS), ones(1, 2), ones(0)]
SCALES += [ones(KV_HEADS).long(), ones(KV_HEADS, **META)]
LOGITS = [
    *of("scale", "big", [1.0], True, torch.tensor(0.5), NAN, -INF, 1e39, 10**400),
    *of("softcap", 0.0, -5.0, "x", True, NAN, INF, 1e-50),  # in float32 the last one is 0
    *of("alibi_slopes", [1.0] * HEADS, 0.5, ones(KV_HEADS), torch.tensor(0.5), ones(HEADS, 1)),
    *of("alibi_slopes", ones(HEADS).long(), ones(HEADS, **META)),
    Fault("alibi_slopes", {"alibi_slopes": ones(HEADS), "causal": False}, ("causal", "1.")),
    *of("sinks", 1.0, ones(HEADS + 1), ones(KV_HEADS), torch.tensor(1.0), ones(HEADS).int()),
    *of("sinks", ones(HEADS, **META)),
    *of("causal", 1, None, "no"),
    *of("k_scale", *SCALES),
    *of("v_scale", *SCALES),
]
# What shows only to who reads the options' tensors.
LOGIT_VALUES = [
    Fault(name, {name: torch.tensor([1.0] * (n - 1) + [bad])}, (str(bad),))
    for name, n in (("alibi_slopes", HEADS), ("sinks", HEADS))
    + tuple((scale, n) for scale in ("k_scale", "v_scale") for n in (1, KV_HEADS))
    for bad in (NAN, INF)
]
WINDOWS = of("window", 0, -3, 2.5, True, "4", NAN)
WINDOWS += [Fault("window", {"window": 3, "causal": False}, ("3", "causal"))]
FORMATS = [
    *of("kv_cache_dtype", "fp7", None, torch.uint8),
    Fault("key_cache", {"kv_cache_dtype": "fp8"}, ("float32", "fp8", "uint8")),
    Fault("kv_cache_dtype", {"key_cache": BYTES, "value_cache": BYTES}, ("uint8", "auto")),
    Fault(
        "key_cache",
        {n: BYTES.view(torch.float8_e5m2) for n in ("key_cache", "value_cache")}
        | {"kv_cache_dtype": "fp8_e5m2"},
        ("float8_e5m2", "uint8"),
    ),
    Fault("value_cache", {"key_cache": BYTES, "kv_cache_dtype": "fp8"}, ("float32", "uint8")),
]
LAYOUTS = of("layout", "HDN", "hnd", None, "vllm", 3)


def over(name, numel):
    """An option that lies in the memory of `out`."""
    out = torch.full((2, 4, 16), 0.5)
    option = out.flatten()[20 : 20 + numel]
    return Fault("out", {"out": out, name: option}, (name, "overlap"))


OUTS = [
    *of("out", [7.0], zeros(2, 4, 8), zeros(2, 64), zeros(2, 4, 16).half(), QUERY.double()),
    *of("out", zeros(2, 4, 16).int(), zeros(2, 4, 16, **META), zeros(1, 4, 16).expand(2, 4, 16)),
    Fault("out", {"out": zeros(2, 4, 16, requires_grad=True)}, ("grad",)),
    Fault("out", {"out": QUERY, "query": QUERY}, ("query", "overlap")),
    Fault("out", {"out": KEY.flatten()[5:133].view(2, 4, 16)}, ("key_cache", "overlap")),
    Fault("out", {"out": VALUE.flatten()[-128:].view(2, 4, 16)}, ("value_cache", "overlap")),
    *(over(name, HEADS) for name in ("alibi_slopes", "sinks")),
    *(over(name, n) for name in ("k_scale", "v_scale") for n in (1, KV_HEADS)),
    *of("workspace", object(), "w"),
    Fault("workspace", {"workspace": Workspace("meta")}, ("meta", "cpu")),
    *of("return_lse", 1, None),
]
SWITCHES = [
    *of("max_seq_len", -1, 7.5, "7", True, 6),  # the longest sequence has 7
    *of("partition_size", 0, -16, 16.5, "512", True),
    *of("backend", "flash", "", 3),
]
FLAGS = of("validate", 0, None)


def signs(name, bad):
    """Ways to show what is wrong with a value, of which a message must have one."""
    if not isinstance(bad, torch.Tensor):
        return [repr(bad), type(bad).__name__]
    right = GOOD.get(name, ones(HEADS))
    different = [str(n) for n, m in zip(bad.shape, right.shape) if n != m]
    shown = [str(tuple(bad.shape)).strip("(,)")] if bad.shape != right.shape else []
    shown += different[:1] if bad.dim() == right.dim() else []
    shown += [str(bad.dtype).removeprefix("torch.")] if bad.dtype != right.dtype else []
    shown += ["meta"] if bad.is_meta else []
    return shown + (["sparse"] if bad.is_sparse else []) or [str(tuple(bad.shape))[1:-1]]


def bits(tensor):
    """fp8 as bytes, which every torch can compare."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def refused(function, call, name, words=(), shown=(), error=WRONG):
    """An error that names the argument, with all words and one of `shown`. No tensor changes."""
    held = {
        k: v
        for k, v in call.items()
        if isinstance(v, torch.Tensor) and not v.is_meta and v.layout == torch.strided
    }
    before = {k: bits(v.detach()).clone() for k, v in held.items()}
    with pytest.raises(error) as caught:
        function(**call)
    message = str(caught.value)
    missing = [word for word in (name, *words) if word not in message]
    assert not missing, f"{message!r} doesn't mention {missing}"
    assert not shown or "must" in message and any(word in message for word in shown), message
    for k, copy in before.items():
        assert_same(bits(held[k].detach()), copy, k)
