"""Counting is exact and the same everywhere; a time is synchronised, or it is refused."""

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from paged_attention import measure as m
from paged_attention.inputs import random_inputs
from paged_attention.measure import calibration, counting, timing
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import PROFILES
from paged_attention.measure.synchronization import device_measured
from paged_attention.stages import STAGES

quick = pytest.mark.quick
cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# num_heads, num_kv_heads, head_size, block_size, partition_size, seq_lens
SHAPES = {
    "one token": (4, 4, 8, 1, 4, [1]),
    "a token more than a partition": (6, 2, 16, 8, 24, [25]),
    "partitions rounded up to blocks": (6, 1, 12, 5, 7, [34]),
    "ragged, an empty one among them": (8, 2, 20, 16, 32, [40, 0, 33, 1, 96]),
    "no sequence": (4, 2, 8, 4, 8, []),
}


# -- counting: what counts ---------------------------------------------------------------------


@quick
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_counts_the_same_on_real_and_on_meta_tensors(name, shape):
    heads, kv_heads, head_size, block_size, partition_size, seq_lens = shape

    def counts(device):
        inputs = random_inputs(
            seq_lens,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            block_size=block_size,
            device=device,
        )
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


X = torch.arange(60.0).view(5, 12) / 7

VIEWS = {
    "select": lambda: X[0],
    "slice": lambda: X[1:3, ::2],
    "transpose": lambda: X.t(),
    "permute": lambda: X.permute(1, 0),
    "view": lambda: X.view(3, 20),
    "reshape of what is contiguous": lambda: X.reshape(-1),
    "expand": lambda: X[:, None].expand(-1, 9, -1),
    "unsqueeze": lambda: X.unsqueeze(0),
    "squeeze": lambda: X[None].squeeze(0),
    "split": lambda: X.split(2),
    "chunk": lambda: X.chunk(3),
    "unbind": lambda: X.unbind(),
    "iteration": lambda: list(X),
    "narrow": lambda: X.narrow(1, 2, 3),
    "unfold": lambda: X.unfold(1, 3, 2),
    "as_strided": lambda: X.as_strided((2, 2), (1, 1)),
    "diagonal": lambda: X.diagonal(),
    "detach": lambda: X.detach(),
    "view of another type": lambda: X.view(torch.int32),
    "contiguous of what is": lambda: X.contiguous(),
    "float of what is": lambda: X.float(),
    "movedim": lambda: X.movedim(0, 1),
    "flatten": lambda: X.flatten(),
    "unflatten": lambda: X.unflatten(1, (3, 4)),
    "mT": lambda: X.mT,
}


@quick
@pytest.mark.parametrize("fn", VIEWS.values(), ids=VIEWS)
def test_a_view_is_no_op_and_takes_no_memory(fn):
    counts = count(fn)
    assert (counts.ops, counts.peak_bytes, counts.largest, dict(counts.by_op)) == (0, 0, 0, {})


@quick
def test_the_largest_tensor_is_the_one_with_most_elements_that_an_op_made():
    x, y = torch.ones(2, 3), torch.ones(100, dtype=torch.float64)
    assert count(lambda: (x + 1, x.expand(50, 2, 3))).largest == 6
    assert count(lambda: x.expand(50, 2, 3) + 1).largest == 300
    assert count(lambda: (x.clone().flatten(), y.sum(), y[:7].mul_(2))).largest == 7


@quick
@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.empty(3, 4),
        lambda: torch.empty_like(X),
        lambda: X.new_empty(12),
        lambda: torch.empty_strided((3, 4), (1, 3)),
        lambda: X.new_empty_strided((3, 4), (4, 1)),
    ],
)
def test_asking_for_memory_is_no_op_but_takes_the_memory(fn):
    counts = count(fn)
    assert counts.ops == 0
    assert counts.largest == fn().numel()
    assert counts.peak_bytes == fn().numel() * 4


@quick
@pytest.mark.parametrize(
    ("fn", "by_op"),
    [
        (lambda: torch.zeros(3), {"zeros": 1}),
        (lambda: X.new_full((3,), 2.0), {"new_full": 1}),
        (lambda: torch.empty(3).fill_(1.0), {"fill_": 1}),
        (lambda: X.clone(), {"clone": 1}),
        (lambda: X.t().contiguous(), {"clone": 1}),
        (lambda: X.t().reshape(-1), {"clone": 1}),
        (lambda: torch.empty(5, 12).copy_(X), {"copy_": 1}),
        (lambda: X.double(), {"_to_copy": 1}),
        (lambda: X.clone().unsqueeze_(0).mul_(2.0), {"clone": 1, "mul_": 1}),
        (lambda: X[torch.tensor([1, 3])], {"index": 1}),
        (lambda: torch.exp(X - X.amax(-1, keepdim=True)), {"amax": 1, "sub": 1, "exp": 1}),
        (lambda: X[2, 3].item(), {"_local_scalar_dense": 1}),
    ],
)
def test_fills_copies_arithmetic_and_host_reads_are_ops(fn, by_op):
    counts = count(fn)
    assert dict(counts.by_op) == by_op
    assert counts.ops == sum(by_op.values())


@quick
@pytest.mark.parametrize(
    ("fn", "gemms"),
    [
        (lambda: torch.mm(X, X.t()), 1),
        (lambda: torch.addmm(X[0, :5], X, X.t()), 1),
        (lambda: torch.bmm(X[None], X.t()[None]), 1),
        (lambda: torch.baddbmm(X[:, :5][None], X[None], X.t()[None]), 1),
        (lambda: torch.mv(X, X[0]), 1),
        (lambda: torch.addmv(X[:, 0], X, X[0]), 1),
        (lambda: torch.dot(X[0], X[1]), 1),
        (lambda: X @ X.t(), 1),
        (lambda: torch.einsum("hd,td->ht", X, X), 1),
        (lambda: torch.mm(X, X.t(), out=torch.empty(5, 5)), 1),
        (lambda: torch.zeros(5, 5).addmm_(X, X.t()), 1),
        (lambda: (X * X).sum(-1), 0),
    ],
)
def test_gemms_are_the_matrix_products_whatever_spelling(fn, gemms):
    assert count(fn).gemms == gemms


@quick
@pytest.mark.parametrize(
    ("fn", "host_reads"),
    [
        (lambda: X[0, 0].item(), 1),
        (lambda: int(X[0, 0]), 1),
        (lambda: bool(X[0, 0] > 0), 1),
        (lambda: X.equal(X), 1),
        (lambda: X.nonzero(), 1),
        (lambda: [float(x) for x in X[0]], 12),
        (lambda: X.clone(), 0),
        (lambda: X.to("cpu"), 0),
    ],
)
def test_host_reads_are_what_waits_for_a_value(fn, host_reads):
    assert count(fn).host_reads == host_reads


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


# -- counting: peak bytes ------------------------------------------------------------------------

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


@pytest.mark.parametrize("x", [pytest.param("cuda", marks=cuda)])
def test_peak_bytes_equal_the_cuda_allocators(x):
    a = torch.randn(4, 128, 128, device=x)  # a multiple of 512 bytes, as everything below

    def work():
        b = a.mul(a)
        c = b.exp()
        del b
        return c.add(a)[0]

    work()
    assert count(work).peak_bytes == m.allocator_peak_bytes(work, device=x)


@pytest.mark.parametrize("x", [pytest.param("cuda", marks=cuda)])
def test_cuda_counts_what_the_cpu_counts(x):
    for name, stage in STAGES.items():
        counts = [
            count(lambda stage=stage, inputs=inputs: stage(*inputs, 0.5, partition_size=24))
            for inputs in (random_inputs([25, 0, 49], device=device) for device in ("cpu", x))
        ]
        assert counts[0].by_op == counts[1].by_op, name
        assert counts[0].host_reads == counts[1].host_reads, name


# -- time ----------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still, but for what the work under test takes."""

    def __init__(self, monkeypatch):
        self.now, self.events = 1000.0, []
        monkeypatch.setattr(timing.time, "perf_counter", self.read)

    def read(self):
        self.events.append("clock")
        return self.now

    def work(self, *durations):
        """A callable that takes these times, then the last one for ever."""
        left = list(durations)

        def fn():
            self.events.append("launch")
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return fn

    def sync(self):
        self.events.append("sync")


@quick
def test_an_asynchronous_devices_time_is_the_works_not_the_launchs():
    done_at = 0.0

    def launch():
        nonlocal done_at
        done_at = time.perf_counter() + 0.05

    def synchronize():
        time.sleep(max(0.0, done_at - time.perf_counter()))

    result = m.measure(launch, device="stub", synchronize=synchronize, min_seconds=0.2)
    assert min(result.samples) >= 0.05
    assert result.seconds >= 0.05 and result.cold_seconds >= 0.05
    assert result.runs == len(result.samples)
    assert result.device == "stub"


@quick
def test_every_sample_synchronises_before_it_starts_and_before_it_stops(monkeypatch):
    clock = Clock(monkeypatch)
    m.measure(clock.work(0.05), device="stub", synchronize=clock.sync, min_seconds=0.2)
    cold, rest = clock.events[:5], clock.events[6:]
    timed_call = ["sync", "clock", "launch", "sync", "clock"]
    assert cold == timed_call
    assert clock.events[5] == "launch"  # the counted call, which isn't timed
    assert rest == timed_call * (len(rest) // 5) and len(rest) >= 4 * 5


@quick
def test_short_calls_are_timed_in_blocks_and_divided_once(monkeypatch):
    clock = Clock(monkeypatch)
    result = m.measure(clock.work(2e-5), device="stub", synchronize=clock.sync, min_seconds=0.01)
    assert result.seconds == pytest.approx(2e-5, rel=1e-6)
    assert result.samples == pytest.approx([2e-5] * len(result.samples), rel=1e-6)
    assert result.runs == 50 * len(result.samples)  # blocks of a millisecond
    assert clock.events.count("launch") == result.runs + 3  # cold, counted, and one to size


@quick
def test_the_cold_call_is_apart_and_median_and_quartiles_are_of_the_rest(monkeypatch):
    clock = Clock(monkeypatch)
    fn = clock.work(100.0, 50.0, 1.0, 5.0, 2.0, 4.0, 3.0)  # cold, counted, five samples
    result = m.measure(fn, device="cpu", min_seconds=14.0)
    assert result.cold_seconds == 100.0
    assert sorted(result.samples) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (result.seconds, result.spread, result.runs) == (3.0, (2.0, 4.0), 5)


@quick
def test_a_slow_call_still_has_three_samples(monkeypatch):
    clock = Clock(monkeypatch)
    assert m.measure(clock.work(60.0), device="cpu", min_seconds=0.5).runs == 3


@quick
def test_min_seconds_are_sampled(monkeypatch):
    clock = Clock(monkeypatch)
    assert sum(m.measure(clock.work(0.03), device="cpu", min_seconds=0.5).samples) >= 0.5


@quick
def test_interleaved_takes_turns(monkeypatch):
    clock, order = Clock(monkeypatch), []

    def work(name):
        takes_a_second = clock.work(1.0)
        return lambda: (order.append(name), takes_a_second())

    results = m.interleaved({"a": work("a"), "b": work("b")}, min_seconds=0, rounds=4)
    assert "".join(order) == "aaa" + "bbb" + "abbaabba"  # there and back
    assert [result.runs for result in results.values()] == [5, 5]


@quick
@pytest.mark.parametrize("device", ["mps", "xpu:1", "stub", "meta", torch.device("meta")])
def test_a_device_that_nothing_waits_for_is_refused_before_anything_runs(device):
    ran = []
    with pytest.raises(ValueError, match=f"device='{device}' needs synchronize="):
        m.measure(lambda: ran.append(1), device=device)
    assert not ran


@quick
def test_a_device_inferred_that_nothing_waits_for_is_refused():
    with pytest.raises(ValueError, match="device='meta' needs synchronize="):
        m.measure(lambda: X.to("meta"))


@quick
def test_working_on_another_device_than_stated_is_refused_naming_both():
    with pytest.raises(ValueError, match="device='cpu', but fn works on meta"):
        m.measure(lambda: X.to("meta"), device="cpu")
    hidden = []
    with pytest.raises(ValueError, match="device='cpu', but fn works on meta"):
        m.measure(lambda: hidden.append(X.to("meta")), device="cpu")  # not in what it returns


@quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_cuda_is_refused():
    with pytest.raises(ValueError, match="device='cuda', but PyTorch sees no CUDA device"):
        m.measure(lambda: X + 1, device="cuda")


@pytest.mark.parametrize("x", [pytest.param("cuda", marks=cuda)])
def test_cuda_stated_for_work_on_the_cpu_is_refused(x):
    with pytest.raises(ValueError, match="device='cuda', but fn works on cpu"):
        m.measure(lambda: X + 1, device=x)
    assert m.measure(lambda: X.to(x) + 1, min_seconds=0.01).device == "cuda:0"


@quick
def test_tensors_on_the_cpu_beside_a_devices_are_no_second_device():
    assert device_measured(None, set()) == device_measured("cpu:0", {"cpu"}) == "cpu"
    assert device_measured(None, {"cpu", "cuda:1"}) == "cuda:1"
    assert device_measured("cuda:1", {"cpu", "cuda:1"}) == "cuda:1"
    with pytest.raises(ValueError, match="fn works on cuda:0 and cuda:1: pass device="):
        device_measured(None, {"cuda:0", "cuda:1"})
    for touched in ({"cpu"}, {"cpu", "cuda:0"}):
        with pytest.raises(ValueError, match="device='cuda:1', but fn works on c"):
            device_measured("cuda:1", touched)


@quick
def test_the_device_is_inferred_from_results_and_ops():
    assert m.measure(lambda: X + 1, min_seconds=0.001).device == "cpu"
    assert m.measure(lambda: None, min_seconds=0.001).device == "cpu"


@quick
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fn": 3}, TypeError, "fn must be a callable without arguments, not 3"),
        ({"fn": X.sum, "synchronize": 3}, TypeError, "synchronize must be a callable, not 3"),
        ({"fn": X.sum, "min_seconds": -1}, ValueError, "min_seconds=-1"),
        ({"fn": X.sum, "min_seconds": float("nan")}, ValueError, "min_seconds=nan"),
    ],
)
def test_a_malformed_call_names_the_argument_and_its_value(arguments, error, words):
    with pytest.raises(error, match=words):
        m.measure(**arguments)
    with pytest.raises(ValueError, match="rounds=0"):
        m.interleaved({"a": X.sum}, rounds=0)


@quick
def test_a_measurement_holds_its_counts():
    result = m.measure(lambda: (X @ X.t()).sum().item(), min_seconds=0.001)
    assert (result.ops, result.gemms, result.host_reads) == (3, 1, 1)
    assert result.peak_bytes == 5 * 5 * 4 + 4


# -- yardsticks ----------------------------------------------------------------------------------


@quick
def test_the_floor_reads_at_least_the_bytes_asked_for_with_two_products():
    floor = m.floor(5 * 16384 + 1, min_seconds=0.01)
    assert floor.num_bytes == 6 * 16384  # whole rows of 4,096 numbers, as many for K as for V
    assert floor.measurement.gemms == floor.measurement.ops == 2
    assert floor.gb_per_second * floor.seconds * 1e9 == pytest.approx(floor.num_bytes)
    reader = m.FloorReader(6 * 16384)
    assert reader.key.nbytes + reader.value.nbytes == reader.num_bytes == 6 * 16384
    reader.value.mul_(2)  # both are read
    assert [x.tolist() for x in reader()] == [[4096.0] * 3, [8192.0] * 3]
    with pytest.raises(ValueError, match="num_bytes=0"):
        m.floor(0)


@quick
def test_kv_bytes_of_the_workload():
    assert m.kv_bytes(100_000, 4, 256) == 819_200_000
    assert m.kv_bytes(100_000, 4, 256, torch.bfloat16) == 409_600_000


def test_calibrate_measures_a_profile(monkeypatch):
    once = {"min_seconds": 0.0, "rounds": 1}
    monkeypatch.setattr(calibration, "interleaved", lambda fns, **_: m.interleaved(fns, **once))
    profile = m.calibrate("cpu")
    assert profile.name == m.device_name("cpu") != ""
    assert 1e8 < profile.bandwidth.low <= profile.bandwidth.high < 1e13  # bytes per second
    assert 1e-8 < profile.op_cost.low <= profile.op_cost.high < 1.0
    assert profile.num_sms is None
    rearrange, fresh = profile.rearrange_bandwidth, profile.fresh_page_cost
    assert 1e7 < rearrange.low <= rearrange.high < 1e13
    assert 0 <= fresh.low <= fresh.high < 1e-6  # seconds per byte
    assert profile.fresh_from == 32 * 2**20


@quick
def test_a_profile_follows_from_what_was_timed(monkeypatch):
    """Bytes over seconds, seconds over operations; the fast end of a band is its quartile's."""
    spreads = {"read": (0.5, 2.0), "ops": (4.0, 8.0), "rearrange": (3, 5)}
    medians = {"rearrange": 4.0, "rearrange afresh": 18.0, "fill": 1.0, "fill afresh": 3.0}
    ran = {}

    def timed(fns, **_):
        ran.update(fns)
        return {
            name: SimpleNamespace(spread=spreads.get(name), seconds=medians.get(name))
            for name in fns
        }

    monkeypatch.setattr(calibration, "interleaved", timed)
    profile = m.calibrate("cpu")
    blocks = 80 * 2**20
    assert (profile.bandwidth.low, profile.bandwidth.high) == (2**27, 2**29)
    assert (profile.op_cost.low, profile.op_cost.high) == (1.0, 2.0)
    assert profile.rearrange_bandwidth.low == 4 * blocks / 5  # K and V, each read and written
    assert profile.rearrange_bandwidth.high == 4 * blocks / 3
    assert profile.fresh_page_cost.low == (3 - 1) / blocks
    assert profile.fresh_page_cost.high == (18 - 4) / (2 * blocks)
    medians["rearrange afresh"] = 2.0  # noise: no page costs less than nothing
    assert m.calibrate("cpu").fresh_page_cost.low == 0
    assert profile.wave_bytes == PROFILES["cpu"].wave_bytes

    assert count(ran["ops"]).ops == 4
    assert count(ran["rearrange"]).by_op == {"copy_": 2}
    assert count(ran["rearrange"]).peak_bytes == 0
    assert count(ran["rearrange afresh"]).peak_bytes == blocks  # one at a time
    assert count(ran["fill"]).peak_bytes == 0
    assert count(ran["fill afresh"]).peak_bytes == blocks


@quick
def test_a_copy_is_a_host_read_only_from_a_device_to_the_host():
    there, here, nowhere = (
        SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cpu", "meta")
    )
    for name in ("_to_copy", "copy_"):
        assert counting._copies_to_host(name, [there], [here])
        assert not counting._copies_to_host(name, [here], [there])
        assert not counting._copies_to_host(name, [there], [there])
        assert not counting._copies_to_host(name, [nowhere], [here])
    assert not counting._copies_to_host("mul", [there], [here])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_copies_to_the_host_are_counted():
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    assert count(lambda: there.cpu()).host_reads == 1
    assert count(lambda: here.copy_(there)).host_reads == 1
    assert count(lambda: there.copy_(here)).host_reads == 0
