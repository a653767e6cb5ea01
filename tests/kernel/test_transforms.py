"""What torch does with a call from outside: torch.compile goes around it, the rest is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_close

from paged_attention import merge_states, paged_attention, plan_decode, reference_attention
from paged_attention.inputs import random_inputs

SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": 16}
LENS = [50, 7, 0, 33]
INPUTS = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")


def problem():
    return random_inputs(LENS, layout="HND", **SIZES)


def call(query, key_cache, value_cache, block_tables, seq_lens):
    tensors = query * 2, key_cache, value_cache, block_tables, seq_lens
    return paged_attention(*tensors, layout="HND").sin()


def capacity_run(*tensors):
    query, *rest = tensors
    plan = plan_decode(**SIZES, layout="HND", num_seqs=len(query), max_seq_len=64)
    return plan.run(query * 2, *rest).sin()


def merged(query, *_):
    states = torch.stack([query, query * 2]), query.new_ones(2, *query.shape[:2])
    return merge_states(*states)[0] + 1


class Recorder:
    """A backend of torch.compile that runs what it is given, and keeps the names."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append([node.name for node in graph.graph.nodes if node.op[:4] == "call"])
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.mark.parametrize("run", [call, capacity_run])
def test_pub_32_torch_compile_breaks_its_graph_around_a_call_and_never_looks_inside(run):
    recorder = Recorder()
    compiled = torch.compile(run, backend=recorder)
    for lens in (LENS, [49, 0, 0, 30], [1, 2, 0, 4]):
        inputs = problem()._replace(seq_lens=torch.tensor(lens))
        assert torch.equal(compiled(*inputs), run(*inputs))
    names = sorted(name for graph in recorder.graphs for name in graph)
    assert names == ["mul", "sin"], f"of the call nothing is compiled, and once: {names}"


def test_pub_32_a_compiled_call_is_right():
    """With the compiler's default backend, which failed inside of the kernel."""
    if torch.__version__ < "2.3":
        pytest.skip("inductor is not tried on older versions")
    inputs = problem()
    right = reference_attention(inputs.query * 2, *inputs[1:], layout="HND")[0].sin()
    for run in (call, capacity_run):
        assert_close(torch.compile(run)(*inputs), right)


def test_merging_states_can_be_compiled():
    inputs = problem()
    compiled = torch.compile(merged, backend=Recorder())
    assert_close(compiled(*inputs), merged(*inputs).double())


@pytest.mark.quick
def test_the_compiler_is_not_imported_by_a_call():
    code = (
        "import sys, torch, paged_attention as p\n"
        "pool = torch.zeros(1, 1, 4, 16)\n"
        "step = torch.zeros(1, 1, 16), pool, pool, torch.tensor([[0]]), torch.tensor([3])\n"
        "p.paged_attention(*step, layout='HND')\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


# -- autograd


def without_grad(name):
    """The arguments, of which one requires a gradient."""
    inputs = problem()
    options = {"alibi_slopes": torch.ones(6), "sinks": torch.zeros(6), "k_scale": torch.ones(2)}
    given = inputs._asdict() | options
    given[name] = given[name].clone().requires_grad_()
    return given


@pytest.mark.quick
@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "alibi_slopes", "k_scale"])
def test_a_tensor_that_requires_a_gradient_is_refused_by_name(name):
    given = without_grad(name)
    plan = plan_decode(**SIZES, layout="HND", seq_lens=LENS)
    out = torch.full((4, 6, 16), 7.0)
    for run in (
        lambda: paged_attention(**given, layout="HND", out=out),
        lambda: plan.run(**given, out=out),
    ):
        with pytest.raises(ValueError, match=f"{name} must be detached.*no_grad.*backward"):
            run()
    assert (out == 7).all()


@pytest.mark.quick
def test_without_autograd_a_parameter_is_served():
    given = without_grad("query")
    right = paged_attention(**{**given, "query": given["query"].detach()}, layout="HND")
    for surroundings in (torch.no_grad, torch.inference_mode):
        with surroundings():
            assert torch.equal(paged_attention(**given, layout="HND"), right)


# -- transforms


@pytest.mark.quick
def test_vmap_and_functional_gradients_are_refused():
    query, *rest = problem()
    with pytest.raises(ValueError, match="query must be.*torch.func"):
        torch.func.vmap(lambda q: paged_attention(q, *rest, layout="HND"))(query[None])
    with pytest.raises(ValueError, match="seq_lens must be.*torch.func"):
        torch.func.vmap(lambda n: paged_attention(query, *rest[:3], n, layout="HND"))(
            rest[3][None]
        )
    with pytest.raises(ValueError, match="query must be.*torch.func"):
        torch.func.grad(lambda q: paged_attention(q, *rest, layout="HND").sum())(query)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
def test_jit_trace_is_refused_because_it_would_keep_the_lengths():
    plan = plan_decode(**SIZES, layout="HND", num_seqs=4, max_seq_len=64)
    for run in (lambda *tensors: paged_attention(*tensors, layout="HND"), plan.run):
        with pytest.raises(ValueError, match="query must be.*torch.jit.trace"):
            torch.jit.trace(run, tuple(problem()), check_trace=False)
    assert_close(
        paged_attention(*problem(), layout="HND"), reference_attention(*problem(), layout="HND")[0]
    )
