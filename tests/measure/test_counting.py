"""What a call does is counted exactly, and the same on every device: operations and bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import cuda

from paged_attention.inputs import random_inputs
from paged_attention.measure import counting
from paged_attention.measure.counting import count
from paged_attention.stages import STAGES

quick = pytest.mark.quick
on_cuda = pytest.mark.parametrize("device", [cuda])

X = torch.arange(60.0).view(5, 12) / 7
KB = torch.zeros(256)  # 1,024 bytes


def counted(expression):
    """The counts of an expression, which is text so that it names its test."""
    return count(lambda: eval(expression, {"X": X, "KB": KB, "torch": torch}))


# num_heads, num_kv_heads, head_size, block_size, partition_size, seq_lens
SHAPES = {
    "one token": (4, 4, 8, 1, 4, [1]),
    "a token more than a partition": (6, 2, 16, 8, 24, [25]),
    "partitions rounded up to blocks": (6, 1, 12, 5, 7, [34]),
    "ragged, an empty one among them": (8, 2, 20, 16, 32, [40, 0, 33, 1, 96]),
    "no sequence": (4, 2, 8, 4, 8, []),
}


@quick
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_counts_the_same_on_real_and_on_meta_tensors(name, shape):
    *sizes, partition_size, seq_lens = SHAPES[shape]
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_size", "block_size"), sizes))

    def counts(device):
        inputs = random_inputs(seq_lens, **sizes, device=device)
        c = count(lambda: STAGES[name](*inputs, 0.5, partition_size=partition_size))
        return c.ops, c.gemms, c.host_reads, c.peak_bytes, c.by_op

    assert counts("cpu") == counts("meta")


def test_a_hundred_thousand_tokens_are_counted_without_their_memory():
    inputs = random_inputs([100_000], device="meta")
    assert inputs.query.is_meta and inputs.key_cache.is_meta and inputs.value_cache.is_meta
    bmm = count(lambda: STAGES["single_bmm"](*inputs, 0.0625))
    assert (bmm.gemms, bmm.host_reads) == (3, 1)
    assert bmm.peak_bytes > 2 * 24 * 100_000 * 256 * 4  # K and V of every query head
    inputs = random_inputs([10_000], device="meta")
    naive = count(lambda: STAGES["naive_loops"](*inputs, 0.0625))
    assert naive.host_reads == 625 + 1  # every block id, and the length
    assert naive.gemms == 2 * 20 + 1  # two a partition, and the merge


# -- operations

VIEWS = """X[0]; X[1:3, ::2]; X.t(); X.permute(1, 0); X.view(3, 20); X.reshape(-1)
X[:, None].expand(-1, 9, -1); X.unsqueeze(0); X[None].squeeze(0); X.split(2); X.chunk(3)
X.unbind(); list(X); X.narrow(1, 2, 3); X.unfold(1, 3, 2); X.as_strided((2, 2), (1, 1))
X.diagonal(); X.detach(); X.view(torch.int32); X.contiguous(); X.float(); X.movedim(0, 1)
X.flatten(); X.unflatten(1, (3, 4)); X.mT""".replace("\n", "; ").split("; ")


@quick
@pytest.mark.parametrize("expression", VIEWS)
def test_a_view_is_no_op_and_takes_no_memory(expression):
    counts = counted(expression)
    assert (counts.ops, counts.peak_bytes, counts.largest, dict(counts.by_op)) == (0, 0, 0, {})


@quick
def test_the_largest_tensor_is_the_one_with_most_elements_that_an_op_made():
    x, y = torch.ones(2, 3), torch.ones(100, dtype=torch.float64)
    assert count(lambda: (x + 1, x.expand(50, 2, 3))).largest == 6
    assert count(lambda: x.expand(50, 2, 3) + 1).largest == 300
    assert count(lambda: (x.clone().flatten(), y.sum(), y[:7].mul_(2))).largest == 7


@quick
@pytest.mark.parametrize(
    "expression",
    ["torch.empty(3, 4)", "torch.empty_like(X)", "X.new_empty(12)"]
    + ["torch.empty_strided((3, 4), (1, 3))", "X.new_empty_strided((3, 4), (4, 1))"],
)
def test_asking_for_memory_is_no_op_but_takes_the_memory(expression):
    counts = counted(expression)
    assert counts.ops == 0
    assert counts.peak_bytes == 4 * counts.largest == (240 if "like" in expression else 48)


OPERATIONS = {
    "torch.zeros(3)": {"zeros": 1},
    "X.new_full((3,), 2.0)": {"new_full": 1},
    "torch.empty(3).fill_(1.0)": {"fill_": 1},
    "X.clone()": {"clone": 1},
    "X.t().contiguous()": {"clone": 1},
    "X.t().reshape(-1)": {"clone": 1},
    "torch.empty(5, 12).copy_(X)": {"copy_": 1},
    "X.double()": {"_to_copy": 1},
    "X.clone().unsqueeze_(0).mul_(2.0)": {"clone": 1, "mul_": 1},
    "X[torch.tensor([1, 3])]": {"index": 1},
    "torch.exp(X - X.amax(-1, keepdim=True))": {"amax": 1, "sub": 1, "exp": 1},
    "X[2, 3].item()": {"_local_scalar_dense": 1},
}
GEMMS = """torch.mm(X, X.t()); torch.addmm(X[0, :5], X, X.t()); torch.bmm(X[None], X.t()[None])
torch.baddbmm(X[:, :5][None], X[None], X.t()[None]); torch.mv(X, X[0]); torch.dot(X[0], X[1])
torch.addmv(X[:, 0], X, X[0]); X @ X.t(); torch.einsum("hd,td->ht", X, X)
torch.mm(X, X.t(), out=torch.empty(5, 5)); torch.zeros(5, 5).addmm_(X, X.t())"""
HOST_READS = {"X[0, 0].item()": 1, "int(X[0, 0])": 1, "bool(X[0, 0] > 0)": 1, "X.equal(X)": 1}
HOST_READS |= {"X.nonzero()": 1, "[float(x) for x in X[0]]": 12, "X.clone()": 0, "X.to('cpu')": 0}


@quick
@pytest.mark.parametrize("expression", OPERATIONS)
def test_fills_copies_arithmetic_and_host_reads_are_ops(expression):
    counts, by_op = counted(expression), OPERATIONS[expression]
    assert dict(counts.by_op) == by_op
    assert counts.ops == sum(by_op.values())


@quick
@pytest.mark.parametrize("expression", [*GEMMS.replace("\n", "; ").split("; "), "(X * X).sum(-1)"])
def test_gemms_are_the_matrix_products_whatever_spelling(expression):
    assert counted(expression).gemms == ("X * X" not in expression)


@quick
@pytest.mark.parametrize("expression", HOST_READS)
def test_host_reads_are_what_waits_for_a_value(expression):
    assert counted(expression).host_reads == HOST_READS[expression]


@quick
def test_inference_mode_counts_what_normal_mode_counts():
    def work():
        scores = torch.einsum("hd,td->ht", X, X) @ X
        return scores.t().reshape(-1), torch.nn.functional.linear(X, X), X.t().contiguous()

    normal = count(work)
    with torch.inference_mode():
        inference = count(work)
    assert normal == inference
    assert normal.gemms == 3


@quick
def test_what_fn_raises_comes_through_and_the_mode_is_left():
    with pytest.raises(ZeroDivisionError):
        count(lambda: 1 / 0)
    assert count(lambda: X + 1).ops == 1


@quick
def test_a_copy_is_a_host_read_only_from_a_device_to_the_host():
    there, here, nowhere = (
        SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cpu", "meta")
    )
    for name in ("_to_copy", "copy_"):
        assert counting._copies_to_host(name, [there], [here])
        for pair in ((here, there), (there, there), (nowhere, here)):
            assert not counting._copies_to_host(name, pair[:1], pair[1:])
    assert not counting._copies_to_host("mul", [there], [here])


@pytest.mark.cuda
@on_cuda
def test_cuda_copies_to_the_host_are_counted(device):
    there, here = torch.ones(3, device=device), torch.ones(3)
    assert count(lambda: there.cpu()).host_reads == 1
    assert count(lambda: here.copy_(there)).host_reads == 1
    assert count(lambda: there.copy_(here)).host_reads == 0


@pytest.mark.cuda
@on_cuda
def test_cuda_counts_what_the_cpu_counts(device):
    for name, stage in STAGES.items():
        counts = [
            count(lambda stage=stage, inputs=inputs: stage(*inputs, 0.5, partition_size=24))
            for inputs in (random_inputs([25, 0, 49], device=device) for device in ("cpu", device))
        ]
        assert counts[0].by_op == counts[1].by_op, name
        assert counts[0].host_reads == counts[1].host_reads, name
