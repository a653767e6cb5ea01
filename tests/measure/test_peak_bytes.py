"""Peak bytes are those of the storages that are alive at once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers import cuda

from paged_attention import measure as m
from paged_attention.measure.counting import count

quick = pytest.mark.quick
KB = torch.zeros(256)  # 1,024 bytes


def _chain():
    a = KB.mul(KB)  # 1 alive
    b = a.mul(KB)  # 2
    del a
    return b.mul(KB)  # 2


def _loop():
    for _ in range(50):
        KB.mul(KB)


def _kept():
    return [KB.mul(KB) for _ in range(50)]


def _view_outlives_its_base():
    base = KB.mul(KB)
    view = base[:1]
    del base
    return view, KB.mul(KB)


def _view_gone_too():
    base = KB.mul(KB)
    view = base[:1].view(1, 1)
    del base, view
    return KB.mul(KB)


def _in_place():
    a = KB.mul(KB)
    a.mul_(KB).unsqueeze_(0)
    torch.mul(KB, KB, out=a[0])
    a.view(-1).copy_(KB)
    return a


def _peak_in_the_middle():
    a = [KB.mul(KB) for _ in range(7)]
    del a
    return KB.mul(KB)


def _in_a_cycle():
    holder = [KB.mul(KB)]
    holder.append(holder)
    del holder  # only the collector finds it
    gc.collect()
    return KB.mul(KB)


@quick
@pytest.mark.parametrize(
    ("fn", "kilobytes"),
    [
        (_chain, 2),
        (_loop, 1),
        (_kept, 50),
        (_view_outlives_its_base, 2),
        (_view_gone_too, 1),
        (_in_place, 1),
        (_peak_in_the_middle, 7),
        (_in_a_cycle, 1),
        (lambda: torch.empty(256, dtype=torch.float64), 2),
        (lambda: KB.expand(9, -1), 0),
        (lambda: KB.expand(9, -1).contiguous(), 9),
        (lambda: KB.mul_(KB), 0),
        (lambda: torch.tensor([0.0] * 256), 1),
        (lambda: torch.mul(KB, KB, out=torch.empty(0)), 1),
        (lambda: KB.clone().resize_(1024), 4),
    ],
)
def test_peak_bytes_are_those_of_storages_alive_at_once(fn, kilobytes):
    assert count(fn).peak_bytes == 1024 * kilobytes


@quick
def test_what_was_alive_before_is_not_in_the_peak_but_what_it_grows_by_is():
    out = torch.empty(128)
    assert count(lambda: torch.mul(KB[:128], KB[:128], out=out)).peak_bytes == 0
    out.resize_(0)  # keeps its 512 bytes
    counts = count(lambda: (torch.mul(KB, KB, out=out), out.mul_(KB), out[3:].mul_(2.0)))
    assert counts.peak_bytes == 1024 - 512


@quick
def test_counting_keeps_nothing_alive():
    kept = []

    def work():
        tensor = KB.mul(KB)
        kept.append(weakref.ref(tensor))
        return tensor

    count(work)
    assert kept[0]() is None


def _softmax_of_a_product():
    logits = torch.bmm(A, B)
    weights = torch.softmax(logits, -1)
    del logits
    return torch.bmm(weights, B.transpose(1, 2))


A, B = torch.randn(4, 30, 64), torch.randn(4, 64, 50)

SEEN_BY_BOTH = {
    "softmax of a product": _softmax_of_a_product,
    "chain": _chain,
    "kept": _kept,
    "view outlives its base": _view_outlives_its_base,
    "in place": _in_place,
    "gather": lambda: A.index_select(1, torch.arange(20)).transpose(0, 1).contiguous(),
    "cat": lambda: torch.cat([A, A]).exp().sum(-1),
    "copy": lambda: torch.empty_like(A).copy_(A),
    "convert": lambda: A.double(),
}


@pytest.mark.parametrize("fn", SEEN_BY_BOTH.values(), ids=SEEN_BY_BOTH)
def test_peak_bytes_equal_the_profilers_where_both_can_see(fn):
    assert count(fn).peak_bytes == m.profiler_peak_bytes(fn) > 0


def test_a_copy_inside_a_kernel_is_seen_by_the_profiler_alone():
    every_other = torch.randn(4, 50, 128)[:, :, ::2]  # (4, 50, 64), no stride is 1
    seen = count(lambda: torch.bmm(A, every_other.transpose(1, 2))).peak_bytes
    profiled = m.profiler_peak_bytes(lambda: torch.bmm(A, every_other.transpose(1, 2)))
    print(f"bmm of a strided operand: {seen} bytes by ops, {profiled} by the profiler")
    assert seen == 4 * 30 * 50 * 4  # the result
    assert profiled >= seen + 50 * 64 * 4  # and a copy of at least one of the batch's matrices


@pytest.mark.cuda
@pytest.mark.parametrize("device", [cuda])
def test_peak_bytes_equal_the_cuda_allocators(device):
    a = torch.randn(4, 128, 128, device=device)  # a multiple of 512 bytes, as everything below

    def work():
        b = a.mul(a)
        c = b.exp()
        del b
        return c.add(a)[0]

    work()
    assert count(work).peak_bytes == m.allocator_peak_bytes(work, device=device)
