"""The kernel on CUDA tensors without a GPU: FakeTensorMode knows shapes, dtypes and devices only.

An operation on tensors of two devices is an error there, and so is reading a value.
"""

from __future__ import annotations

import pytest
import torch
from helpers import pairwise
from pools import LAYOUTS
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from paged_attention import Workspace, merge_states, paged_attention, plan_decode
from paged_attention.inputs import random_inputs

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.3", reason="fake tensors ask for a driver on older versions"
)
LENS = [50, 7, 0, 33, 140]
ON_HOST = torch.tensor(LENS)
HEADS, KV_HEADS = 6, 2
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": 32, "block_size": 8}
WAYS = ("paged_attention", "no host read", "exact", "capacity")
STORED = {
    "float32": (torch.float32, "auto"),
    "bfloat16": (torch.bfloat16, "auto"),
    "e4m3": (torch.uint8, "fp8_e4m3"),
    "e5m2": (torch.uint8, "fp8_e5m2"),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 20},
    "everything": {
        "window": 20, "softcap": 3.0, "alibi_slopes": (HEADS,), "sinks": (HEADS,),
        "k_scale": (KV_HEADS,), "v_scale": (), "q_len": 3,
    },
    "not causal": {"causal": False, "q_len": 2, "k_scale": ()},
}  # fmt: skip


class NoDriver(TorchFunctionMode):
    """Indexing and copying that ask no driver.

    PyTorch's own ask the device's driver, which a PyTorch for CPUs hasn't got.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return part(*args)
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            return copied(part(tensor, index), value)
        if func is torch.Tensor.copy_:
            return copied(*args)
        return func(*args, **(kwargs or {}))


def part(tensor, index):
    """tensor[index], for numbers, slices, None and an ellipsis."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (tensor.dim() - sum(i is not None for i in index) + 1)
    dim = 0
    for i in index:
        if i is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(i, int):
            tensor, dim = tensor.select(dim, i), dim - 1
        else:
            start, stop, step = i.indices(tensor.shape[dim])
            assert step == 1
            tensor = tensor.narrow(dim, start, max(0, stop - start))
        dim += 1
    return tensor


def copied(target, source):
    """target.copy_(source), which may lead from the host to the device and not back."""
    assert target.device == source.device or source.device.type == "cpu", "a copy to the host"
    assert torch.broadcast_shapes(target.shape, source.shape) == target.shape
    return target


@pytest.fixture
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True), NoDriver():
        yield


def on_cuda(stored, q_len, layout):
    """The inputs, of which only shapes, dtypes and the device are left."""
    inputs = random_inputs(LENS, layout=layout, dtype=stored, device="meta", **SIZES)
    query = torch.empty(len(LENS), q_len, HEADS, SIZES["head_size"], device="meta")
    inputs = inputs._replace(query=query if q_len > 1 else query[:, 0])
    return [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in inputs]


@pairwise(way=WAYS, layout=LAYOUTS, stored=STORED, options=OPTIONS)
def test_no_operation_mixes_devices_and_none_reads_a_value(row, fake):
    (dtype, kv_cache_dtype), layout = STORED[row["stored"]], row["layout"]
    given = {
        name: torch.empty(value, device="cuda") if isinstance(value, tuple) else value
        for name, value in OPTIONS[row["options"]].items()
    }
    q_len, window = given.pop("q_len", 1), given.pop("window", None)
    given |= {"kv_cache_dtype": kv_cache_dtype, "return_lse": True, "workspace": Workspace()}
    query, *pool, seq_lens = on_cuda(dtype, q_len, layout)
    if row["way"] in ("exact", "capacity"):
        lengths = {"num_seqs": len(LENS), "max_seq_len": 150}
        if row["way"] == "exact":
            lengths = {"seq_lens": LENS}
        how = {**SIZES, **lengths, "q_len": q_len, "window": window}
        plan = plan_decode(**how, layout=layout, dtype=dtype, device="cuda", partition_size=64)
        out, lse = plan.run(query, *pool, seq_lens, **given)
    else:
        if row["way"] == "paged_attention":  # with lengths on the CPU
            seq_lens = ON_HOST
        else:
            given["max_seq_len"] = 150
        given |= {"layout": layout, "window": window, "partition_size": 64, "validate": False}
        out, lse = paged_attention(query, *pool, seq_lens, **given)
    assert out.device == lse.device == torch.device("cuda:0")
    assert out.shape == query.shape and lse.shape == query.shape[:-1]


def test_states_merge_on_their_device(fake):
    outs, lses = torch.empty(3, 5, 6, 16, device="cuda"), torch.empty(3, 5, 6, device="cuda")
    out, lse = merge_states(outs, lses)
    assert out.device == lse.device == torch.device("cuda:0")


def test_these_tests_notice_a_value_that_is_read_and_devices_that_are_mixed(fake):
    query, *rest = on_cuda(torch.float32, 1, "HND")
    with pytest.raises(Exception, match="_local_scalar_dense"):
        paged_attention(query, *rest, layout="HND", validate=False)
    with pytest.raises(RuntimeError, match="cuda:0.*cpu|cpu.*cuda:0"):
        query.add_(torch.ones(len(LENS), HEADS, 32))
