"""A workspace's memory: large enough for every buffer, and never a tracer's."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import in_each_layout, on_each_device

from paged_attention import Workspace, paged_attention, plan_decode, reference_attention
from paged_attention.inputs import random_inputs
from paged_attention.kernel import plan
from paged_attention.kernel.step import StepBuffers
from paged_attention.kernel.workspace import Buffer, Buffers
from paged_attention.vllm.dispatch import scratch

pytestmark = pytest.mark.quick
SIZES = {"num_heads": 4, "num_kv_heads": 2}


def assert_right(inputs, out, layout="HND"):
    right, _ = reference_attention(*inputs, layout=layout)
    assert (out.cpu() - right.cpu()).abs().max() < (2e-6 if out.dtype == torch.float32 else 2e-2)


# -- bounds


@pytest.mark.parametrize("name", ["wave_acc", "wave_m", "wave_s", "merge_weights", "kv"])
def test_a_buffer_declared_too_small_is_an_error_and_overruns_nothing(monkeypatch, name):
    declare = StepBuffers.__init__

    def halved(buffers, shape, extent):
        declare(buffers, shape, extent)
        whole = getattr(buffers, name)
        setattr(
            buffers, name, Buffer(whole.dtype, (math.prod(whole.shape) // 2,), whole.first_byte)
        )

    monkeypatch.setattr(StepBuffers, "__init__", halved)
    monkeypatch.setattr(plan, "step_buffers", StepBuffers)  # which are remembered otherwise
    inputs = random_inputs([700, 300, 0, 1500], head_size=32, layout="HND", poison=False, **SIZES)
    with pytest.raises(RuntimeError, match="would overrun the next one|is invalid for input"):
        paged_attention(*inputs, layout="HND", workspace=Workspace(), partition_size=64)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first, then", [(5, 7), (97, 99), (7, 5)])
def test_own_02_a_larger_last_buffer_at_the_same_place_gets_its_memory(device, dtype, first, then):
    """Offsets alone don't tell two plans apart: their last buffer may differ in size."""
    workspace = Workspace()
    for head_size in (first, then, first):
        inputs = random_inputs(
            [1000], head_size=head_size, layout="HND", dtype=dtype, device=device, **SIZES
        )
        assert_right(inputs, paged_attention(*inputs, layout="HND", workspace=workspace))


@on_each_device
def test_own_02_vllms_scratch_serves_two_models(device):
    for head_size in (64, 128, 64):
        query = torch.zeros(2, 4, head_size, dtype=torch.float16, device=device)
        exp_sum, max_logits, tmp_out = scratch(query, 1024)
        assert tmp_out.shape == (2, 4, 2, head_size)
        for tensor in (exp_sum, max_logits, tmp_out):
            tensor.fill_(1.0)


class TwoBuffers(Buffers):
    def __init__(self, numel):
        super().__init__()
        self.a = self.declare(torch.float32, 3)
        self.b = self.declare(torch.int16, numel)


def test_buffers_of_other_sizes_are_other_buffers():
    workspace, like = Workspace(), torch.zeros(1)
    small = workspace.bind(TwoBuffers(5), like)
    assert workspace.bind(TwoBuffers(5), like) is small
    assert small.b().shape == (5,) and small.b(2, 2) is small.b(2, 2)
    large = workspace.bind(TwoBuffers(7), like)
    assert large is not small and large.b().shape == (7,)
    with pytest.raises(RuntimeError, match="would overrun the next one"):
        large.b(8)


def test_the_first_columns_of_a_buffer_are_a_view_of_their_own():
    buffers = Workspace().bind(TwoBuffers(6), torch.zeros(1))
    whole, part = buffers.b(2, 3), buffers.b(2, 3, columns=2)
    assert buffers.b(2, 3, columns=2) is part and buffers.b(2, 3) is whole
    whole.copy_(torch.arange(6).view(2, 3))
    assert part.tolist() == [[0, 1], [3, 4]]
    with pytest.raises(RuntimeError, match="would overrun the next one"):
        buffers.b(3, 3, columns=2)


# -- tracers


def plan_of(kind, layout):
    lengths = {"seq_lens": [50, 7, 20]} if kind == "exact" else {"num_seqs": 3, "max_seq_len": 64}
    return plan_decode(**SIZES, head_size=16, block_size=16, layout=layout, **lengths)


def exported(run, inputs):
    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return run(*tensors)

    torch.export.export(Model(), tuple(inputs), strict=False)


def made_by_fx(run, inputs):
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda *tensors: run(*tensors))(*inputs)


def under_fake_tensor_mode(run, inputs):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = run(*(mode.from_tensor(tensor) for tensor in inputs))
    assert type(out) is not torch.Tensor and out.shape == inputs.query.shape


TRACERS = [made_by_fx, under_fake_tensor_mode]
if hasattr(torch, "export"):  # from torch 2.1 on; strict=False came later
    TRACERS.append(exported)


@in_each_layout
@pytest.mark.parametrize("kind", ["exact", "capacity"])
@pytest.mark.parametrize("trace", TRACERS, ids=lambda tracer: tracer.__name__)
@pytest.mark.parametrize("warm", [True, False])
def test_own_01_after_a_tracer_the_next_real_call_is_right(layout, kind, trace, warm):
    inputs = random_inputs([50, 7, 20], head_size=16, layout=layout, **SIZES)
    planned, workspace = plan_of(kind, layout), Workspace()

    def run(*tensors):
        return planned.run(*tensors, workspace=workspace)

    if warm:
        assert_right(inputs, run(*inputs), layout)
    if trace is exported and torch.__version__ < "2.3":
        pytest.skip("torch.export traces with strict=True only")
    trace(run, inputs)
    for memory in workspace.tensors():
        assert type(memory) is torch.Tensor
        memory.fill_(torch.nan)  # so that stale memory would show
    assert_right(inputs, run(*inputs), layout)
    assert_right(inputs, paged_attention(*inputs, layout=layout), layout)
