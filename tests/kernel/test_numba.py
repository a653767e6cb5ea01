"""The numba backend as such: how it is chosen, its threads, and what it must refuse. What it
computes is tested where eager's results are, in the files that conftest.py names."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from paged_attention import paged_attention, plan_decode, reference_attention
from paged_attention.inputs import random_inputs
from paged_attention.kernel.compiled import choice

SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32}
needs_numba = pytest.mark.usefixtures("numba")


@pytest.fixture
def numba():
    return pytest.importorskip("numba")


def inputs_of(seq_lens, **more):
    return random_inputs(seq_lens, layout="HND", **SIZES, **more)


def decoded(inputs, **more):
    return paged_attention(*inputs, layout="HND", backend="numba", **more)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_numba
def test_bits_are_the_same_with_any_number_of_threads(threads):
    inputs = inputs_of([4000, 33, 0, 2500])
    threads(1)
    alone = decoded(inputs)
    right = reference_attention(*inputs, layout="HND")[0]
    assert (alone - right).abs().max() < 2e-6
    for count in (2, 3, 8):
        threads(count)
        assert torch.equal(decoded(inputs), alone)


@needs_numba
def test_several_callers_at_once_get_what_each_gets_alone(threads):
    threads(2)
    batches = [inputs_of([n, 3 * n], seed=n) for n in (700, 900, 1100, 1300)]
    right, got = [decoded(batch) for batch in batches], [[] for _ in batches]

    def call(i):
        for _ in range(5):
            got[i].append(decoded(batches[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for one, results in zip(right, got):
        assert len(results) == 5 and all(torch.equal(result, one) for result in results)


@needs_numba
def test_another_default_dtype_changes_no_bit():
    inputs = inputs_of([70, 5])
    fp8 = [cache.to(torch.float8_e4m3fn) for cache in inputs[1:3]]
    inputs = inputs._replace(key_cache=fp8[0], value_cache=fp8[1])
    right = decoded(inputs, k_scale=0.5, softcap=7.0)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        from paged_attention.kernel.compiled import numba_backend

        numba_backend._tables.clear()
        assert torch.equal(decoded(inputs, k_scale=0.5, softcap=7.0), right)
    finally:
        torch.set_default_dtype(before)


@needs_numba
@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_a_block_outside_the_pool_is_an_error_without_validation_too(bad):
    inputs = inputs_of([100, 40])
    tables = inputs.block_tables.long()
    tables[1, 1] = bad
    with pytest.raises(IndexError, match="outside the pool"):
        decoded(inputs._replace(block_tables=tables), validate=False)


@needs_numba
def test_a_plan_has_a_backend_and_its_schedule_can_be_read():
    plan = plan_decode(**SIZES, block_size=16, layout="HND", seq_lens=[40, 7], backend="numba")
    assert plan.backend == "numba" and len(plan.schedule.waves) == 2
    inputs = inputs_of([40, 7])
    right = reference_attention(*inputs, layout="HND")[0]
    assert (plan.run(*inputs) - right).abs().max() < 2e-6


@needs_numba
def test_what_a_tracer_looks_at_is_served_by_eager():
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = inputs_of([40])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = inputs._replace(query=mode.from_tensor(inputs.query))
        plan = plan_decode(**SIZES, block_size=16, layout="HND", seq_lens=[40], backend="numba")
        try:
            plan.run(*fake)
        except Exception as error:  # what eager says of fake tensors is tested elsewhere
            assert "numba" not in str(error)
    assert (decoded(inputs) - reference_attention(*inputs, layout="HND")[0]).abs().max() < 2e-6


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="backend must be None or one of 'eager', 'numba', got"):
        paged_attention(*inputs_of([3]), layout="HND", backend="cuda")


def test_another_device_is_refused():
    with pytest.raises(ValueError, match='None or "eager" on meta'):
        choice.chosen_backend("numba", torch.device("meta"))


def test_without_numba_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'paged-attention\[cpu\]'"):
        paged_attention(*inputs_of([3]), layout="HND", backend="numba")


def test_eager_never_imports_numba():
    program = """
import sys, torch
from paged_attention import paged_attention
from paged_attention.inputs import random_inputs
paged_attention(*random_inputs([5]))
assert "numba" not in sys.modules and "llvmlite" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
