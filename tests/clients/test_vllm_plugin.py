"""The plugin, on small trees of our own that stand in for upstream's vLLM and for CoreX's port."""

import importlib
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, oracle, paged, random, rounding

import paged_attention.vllm as ours
from paged_attention.vllm import dispatch
from paged_attention.vllm.plugin import register, unregister

STANDINS = Path(__file__).parent / "vllm_standins"
NAMES = ("paged_attention_v1", "paged_attention_v2", "reshape_and_cache")
LONG = 8200  # tokens, more than V1 is left with
ROOT = Path(__file__).parents[2]


def forget(*packages):
    for name in [*sys.modules]:
        if name.split(".")[0] in packages:
            del sys.modules[name]


@pytest.fixture
def tree(monkeypatch):
    """A function of a stand-in's name that makes it the vLLM to be imported; undone afterwards."""

    def make(name):
        monkeypatch.syspath_prepend(STANDINS / name)
        ops = importlib.import_module("vllm._custom_ops")
        attention = importlib.import_module("vllm.attention.ops.paged_attn").PagedAttention
        return SimpleNamespace(ops=ops, attention=attention, before=state(ops, attention))

    forget("vllm", "ixformer")
    yield make
    unregister()
    forget("vllm", "ixformer")


def state(ops, attention):
    found = {name: getattr(ops, name, None) for name in NAMES}
    return found | {"forward_decode": vars(attention).get("forward_decode")}


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="vllm.plugins.paged_attention")
    return caplog


def lines(log):
    """What the plugin logged so far, and no more of it next time."""
    said = [(record.levelname, record.getMessage()) for record in log.records]
    log.clear()
    return said


def native(monkeypatch, *names, raises=None):
    """Register operations for the upstream tree; they note the call and fill `out` with a 7."""
    calls = []

    def operation(name):
        def run(out, *rest):
            calls.append((name, len(rest) + 1))
            if raises is not None and name == "paged_attention_v2":
                raise raises
            out.fill_(7.0)

        return run

    for name in names:
        space = torch.ops._C_cache_ops if name == "reshape_and_cache" else torch.ops._C
        monkeypatch.setattr(space, name, operation(name), raising=False)
    return calls


def spied(monkeypatch, vllm, *names):
    """Which of the operations get called, in order, whoever serves them."""
    calls = []

    def spy(name, served):
        def run(*args, **kwargs):
            calls.append(name)
            return served(*args, **kwargs)

        return run

    for name in names:
        monkeypatch.setattr(vllm.ops, name, spy(name, getattr(vllm.ops, name)))
    return calls


class Step:
    """A decode step, as a backend of vLLM passes it on."""

    def __init__(self, lens, num_heads=6, max_seq_len=None, dtype=torch.float32):
        self.dense = random(lens, num_heads, 2, 32, sharp=2.0, dtype=dtype)
        self.pool = paged(self.dense, 16, "vllm")
        self.max_seq_len = max_seq_len or max(lens)

    def arguments(self):
        return (
            self.dense.query,
            self.pool.key_cache,
            self.pool.value_cache,
            self.pool.block_tables,
            self.pool.seq_lens,
            self.max_seq_len,
            "auto",
            2,
            32**-0.5,
            None,
            1.0,
            1.0,
        )

    def assert_right(self, out):
        assert_close(out, oracle(*self.dense)[0], extra=rounding(self.dense))


# -- upstream's tree


def test_where_nothing_is_native_everything_is_ours(tree, log, monkeypatch):
    vllm = tree("upstream")
    register()
    assert [getattr(vllm.ops, name) for name in NAMES] == [getattr(ours, name) for name in NAMES]
    [(level, said)] = lines(log)
    assert level == "INFO" and all(f"{name} is ours" in said for name in NAMES)
    calls = spied(monkeypatch, vllm, "paged_attention_v1", "paged_attention_v2")
    for lens, served in (([5, 0, 600], "v1"), ([8192], "v1"), ([8193, 40], "v2")):
        step = Step(lens)
        step.assert_right(vllm.attention.forward_decode(*step.arguments()))
        assert calls.pop() == f"paged_attention_{served}" and not calls


def test_a_native_v1_keeps_all_steps_that_are_not_long(tree, log, monkeypatch):
    """Upstream's rule would send a few heads with two partitions to V2, which is ours and slow."""
    vllm = tree("upstream")
    calls = native(monkeypatch, "paged_attention_v1", "reshape_and_cache")
    register()
    [(_, said)] = lines(log)
    assert "paged_attention_v2 is ours" in said and "paged_attention_v1" not in said
    assert vllm.ops.reshape_and_cache is vllm.before["reshape_and_cache"]
    for lens in ([5], [600], [8192]):
        out = vllm.attention.forward_decode(*Step(lens).arguments())
        assert out.eq(7).all() and calls.pop() == ("paged_attention_v1", 19) and not calls
    step = Step([LONG])
    step.assert_right(vllm.attention.forward_decode(*step.arguments()))
    assert not calls


def test_a_native_v2_that_works_is_left_alone(tree, log, monkeypatch):
    vllm = tree("upstream")
    calls = native(monkeypatch, *NAMES)
    register()
    assert len(lines(log)) == 1
    for lens in ([600], [LONG], [LONG]):
        out = vllm.attention.forward_decode(*Step(lens).arguments())
        assert out.eq(7).all() and calls.pop() == ("paged_attention_v2", 22) and not calls
        assert state(vllm.ops, vllm.attention) == vllm.before
    assert lines(log) == []


def test_a_native_v2_that_is_not_implemented_is_found_at_its_first_call_which_is_served(
    tree, log, monkeypatch
):
    """PyTorch raises it, too, for an operation that has no kernel for a device."""
    vllm = tree("upstream")
    calls = native(monkeypatch, *NAMES, raises=NotImplementedError("no kernel"))
    register()
    assert len(lines(log)) == 1
    step = Step([600])
    step.assert_right(vllm.attention.forward_decode(*step.arguments()))
    assert calls == [("paged_attention_v2", 22)]
    [(_, first), (_, second)] = lines(log)
    assert "paged_attention_v2 is ours" in first and "no kernel" in first
    assert "forward_decode takes V2 above 8192 tokens" in second
    # From now on V2 is known to be ours: it isn't tried again, and V1 gets what it is good at.
    assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2
    assert vllm.attention.forward_decode(*step.arguments()).eq(7).all()
    step = Step([LONG])
    step.assert_right(vllm.attention.forward_decode(*step.arguments()))
    assert [name for name, _ in calls] == ["paged_attention_v2", "paged_attention_v1"]
    assert lines(log) == []
    unregister()
    assert state(vllm.ops, vllm.attention) == vllm.before


@pytest.mark.parametrize("raises", [None, NotImplementedError("no kernel")])
@pytest.mark.parametrize("registered", [True, False])
def test_one_who_looked_v2_up_before_its_first_call_is_served_all_the_same(
    tree, log, monkeypatch, raises, registered
):
    vllm = tree("upstream")
    calls = native(monkeypatch, *NAMES, raises=raises)
    register()
    v2 = vllm.ops.paged_attention_v2
    if not registered:
        unregister()
    lines(log)
    step = Step([600])
    query, *caches, tables, lens, longest, kind, kv_heads, scale, slopes, k, v = step.arguments()
    for _ in range(3):
        out = torch.empty_like(query)
        rest = kv_heads, scale, tables, lens, 16, longest, slopes, kind, k, v
        v2(out, *dispatch.scratch(query, longest), query, *caches, *rest)
        assert out.eq(7).all() if raises is None else step.assert_right(out) is None
    assert len(calls) == (3 if raises is None else 1)
    assert len(lines(log)) == (0 if raises is None else 1 + registered)
    if raises is None or not registered:
        assert state(vllm.ops, vllm.attention) == vllm.before
    else:
        assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2


def test_another_error_of_a_native_v2_is_the_callers(tree, monkeypatch):
    vllm = tree("upstream")
    native(monkeypatch, *NAMES, raises=RuntimeError("out of memory"))
    register()
    with pytest.raises(RuntimeError, match="out of memory"):
        vllm.attention.forward_decode(*Step([600]).arguments())


def test_a_call_by_keyword_is_served(tree):
    vllm = tree("upstream")
    register()
    names = "query key_cache value_cache block_tables seq_lens max_seq_len kv_cache_dtype".split()
    names += "num_kv_heads scale alibi_slopes k_scale v_scale".split()
    for lens in ([40], [LONG]):
        step = Step(lens)
        step.assert_right(vllm.attention.forward_decode(**dict(zip(names, step.arguments()))))


def test_the_least_length_of_v2_is_the_environments(tree, monkeypatch):
    vllm = tree("upstream")
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    calls = spied(monkeypatch, vllm, "paged_attention_v1", "paged_attention_v2")
    for lens in ([100], [101]):
        vllm.attention.forward_decode(*Step(lens).arguments())
    assert calls == ["paged_attention_v1", "paged_attention_v2"]


@pytest.mark.parametrize("size", ["48", "256", "512", "2048"])
def test_forward_decode_brings_scratch_for_any_partition_size(tree, monkeypatch, size):
    vllm = tree("upstream")
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", size)
    register()
    step = Step([LONG, 3], dtype=torch.bfloat16)
    step.assert_right(vllm.attention.forward_decode(*step.arguments()))


def test_scratch_is_the_same_memory_from_step_to_step_and_each_thread_has_its_own():
    query = torch.zeros(3, 6, 32)

    def addresses(max_seq_len, into):
        into.append([tensor.data_ptr() for tensor in dispatch.scratch(query, max_seq_len)])

    seen = []
    for max_seq_len in (9000, 9001, 9000):
        addresses(max_seq_len, seen)
    thread = threading.Thread(target=addresses, args=(9000, seen))
    thread.start()
    thread.join()
    assert seen[0] == seen[1] == seen[2]
    assert not set(seen[0]) & set(seen[3])
    assert len(set(seen[0])) == 3


# -- CoreX's tree


def test_corex_gets_its_choice_back(tree, log):
    vllm = tree("corex")
    ixf = sys.modules["ixformer.functions"]
    register()
    [(level, said)] = lines(log)
    assert (
        level == "INFO" and "forward_decode takes V2 above 8192 tokens (it took V1 always)" in said
    )
    assert "ixformer.functions.vllm_single_query_cached_kv_attention_v2" in said
    # Its own V1 and cache writes stay, called as the port calls them.
    for lens in ([5], [600], [8192]):
        assert vllm.attention.forward_decode(*Step(lens).arguments()).eq(7).all()
        assert ixf.CALLS.pop() == ("v1", 11) and not ixf.CALLS
    assert vllm.ops.reshape_and_cache is vllm.before["reshape_and_cache"]
    # Its V2 raises: the first long step finds that out and is served, as are all others.
    for _ in range(2):
        step = Step([LONG, 17])
        step.assert_right(vllm.attention.forward_decode(*step.arguments()))
    assert not ixf.CALLS
    assert len(lines(log)) == 1
    assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2
    assert vllm.attention.forward_decode(*Step([600]).arguments()).eq(7).all()
    unregister()
    assert state(vllm.ops, vllm.attention) == vllm.before


@pytest.mark.parametrize("hole", ["few arguments", "no such name"])
def test_a_hole_of_another_shape_is_filled_too(tree, monkeypatch, hole):
    vllm = tree("corex")

    def short(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, head_mapping):
        raise AssertionError("must not be called: it can't take vLLM's arguments")

    if hole == "few arguments":
        monkeypatch.setattr(vllm.ops, "paged_attention_v2", short)
    else:
        monkeypatch.delattr(vllm.ops, "paged_attention_v2")
    before = state(vllm.ops, vllm.attention)
    register()
    step = Step([LONG])
    step.assert_right(vllm.attention.forward_decode(*step.arguments()))
    unregister()
    assert state(vllm.ops, vllm.attention) == before
    assert hasattr(vllm.ops, "paged_attention_v2") == (hole == "few arguments")


def test_a_port_whose_v2_works_gets_upstreams_choice_back(tree, log, monkeypatch):
    vllm = tree("corex")
    calls = []

    def works(out, *rest):
        calls.append(len(rest) + 1)
        out.fill_(8.0)

    monkeypatch.setattr(vllm.ops, "paged_attention_v2", works)
    register()
    assert vllm.attention.forward_decode(*Step([600]).arguments()).eq(7).all()  # not known yet
    for lens, filled in (([LONG], 8), ([600], 8), ([500], 7), ([LONG], 8)):
        assert vllm.attention.forward_decode(*Step(lens).arguments()).eq(filled).all()
    assert vllm.ops.paged_attention_v2 is works and calls == [22] * 3
    assert len(lines(log)) == 1


def test_hard_coding_is_told_from_the_code():
    def by_rule(n):
        use_v1 = True if n < 3 else False
        use_v1 = use_v1 and n != 2
        return ops.paged_attention_v1 if use_v1 else ops.paged_attention_v2

    def always(n):
        use_v1 = n < 3
        use_v1 = True
        return ops.paged_attention_v1 if use_v1 else ops.paged_attention_v2

    def knows_no_v2(n):
        return ops.paged_attention_v1

    def elsewhere(n):
        return ops.decode(n)

    ops = SimpleNamespace()
    found = [dispatch.always_takes_v1(f) for f in (by_rule, always, knows_no_v2, elsewhere)]
    assert found == [False, True, True, False]


# -- being asked, twice, and undone


def test_force_makes_v2_ours_where_a_native_one_works(tree, log, monkeypatch):
    vllm = tree("upstream")
    calls = native(monkeypatch, *NAMES)
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", "force")
    register()
    [(_, said)] = lines(log)
    assert "PAGED_ATTENTION_VLLM=force" in said
    step = Step([LONG])
    step.assert_right(vllm.attention.forward_decode(*step.arguments()))
    assert vllm.attention.forward_decode(*Step([600]).arguments()).eq(7).all()
    assert [name for name, _ in calls] == ["paged_attention_v1"]


def test_off_changes_nothing_and_says_so(tree, log, monkeypatch):
    vllm = tree("corex")
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", "off")
    register()
    assert state(vllm.ops, vllm.attention) == vllm.before
    [(level, said)] = lines(log)
    assert level == "INFO" and "PAGED_ATTENTION_VLLM=off" in said


@pytest.mark.parametrize("name", ["upstream", "corex"])
def test_twice_is_once_and_undoing_leaves_no_trace(tree, log, name):
    vllm = tree(name)
    register()
    after = state(vllm.ops, vllm.attention)
    assert after != vllm.before
    register()
    assert state(vllm.ops, vllm.attention) == after
    assert len(lines(log)) == 1
    unregister()
    assert state(vllm.ops, vllm.attention) == vllm.before
    unregister()
    assert state(vllm.ops, vllm.attention) == vllm.before
    register()
    assert len(lines(log)) == 1
    for changed, again in zip(after.values(), state(vllm.ops, vllm.attention).values()):
        assert type(changed) is type(again)


# -- what isn't as expected is a warning, and no change


def warned(log, *words):
    [(level, said)] = lines(log)
    assert level == "WARNING" and "changes nothing" in said
    assert all(word in said for word in words), said


def test_without_vllm_a_warning(log, monkeypatch):
    forget("vllm")
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises ImportError
    register()
    warned(log, "vllm")


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("PAGED_ATTENTION_VLLM", "on", ["force or off", "'on'"]),
        ("PAGED_ATTENTION_PARTITION_SIZE", "0", ["PAGED_ATTENTION_PARTITION_SIZE", "'0'"]),
        ("PAGED_ATTENTION_V2_MIN_LEN", "8k", ["PAGED_ATTENTION_V2_MIN_LEN", "'8k'"]),
    ],
)
def test_a_setting_that_means_nothing_is_a_warning(tree, log, monkeypatch, name, value, words):
    vllm = tree("corex")
    monkeypatch.setenv(name, value)
    register()
    warned(log, *words)
    assert state(vllm.ops, vllm.attention) == vllm.before


def test_a_forward_decode_of_another_kind_is_a_warning_and_nothing_stays_changed(
    tree, log, monkeypatch
):
    vllm = tree("upstream")

    def forward_decode(query, kv_cache, metadata):
        raise AssertionError("must not be called")

    monkeypatch.setattr(vllm.attention, "forward_decode", staticmethod(forward_decode))
    before = state(vllm.ops, vllm.attention)
    register()
    warned(log, "forward_decode has no argument key_cache, value_cache")
    assert state(vllm.ops, vllm.attention) == before


def test_one_whose_v2_turns_out_to_be_missing_is_served_and_warned_about(tree, log, monkeypatch):
    vllm = tree("upstream")
    native(monkeypatch, *NAMES, raises=NotImplementedError("no kernel"))

    def forward_decode(kv, tables, lens):
        out, scratch = torch.empty_like(kv[0]), dispatch.scratch(kv[0], int(lens.max()))
        rest = 2, 32**-0.5, tables, lens, 16, int(lens.max()), None, "auto", 1.0, 1.0
        vllm.ops.paged_attention_v2(out, *scratch, *kv, *rest)
        return out

    monkeypatch.setattr(vllm.attention, "forward_decode", staticmethod(forward_decode))
    register()
    assert [level for level, _ in lines(log)] == ["INFO"]
    step = Step([600, 3])
    for _ in range(2):
        out = vllm.attention.forward_decode(step.arguments()[:3], *step.arguments()[3:5])
        step.assert_right(out)
    [(_, _), (level, said)] = lines(log)
    assert level == "WARNING" and "forward_decode keeps its own choice" in said
    assert vllm.attention.forward_decode is forward_decode


def test_a_broken_import_is_a_warning(tree, log, monkeypatch):
    vllm = tree("upstream")

    def broken(name):
        if name == "vllm.attention.ops.paged_attn":
            raise OSError("libcudart.so")
        return vllm.ops

    monkeypatch.setattr("paged_attention.vllm.plugin.import_module", broken)
    register()
    warned(log, "OSError", "libcudart.so")
    assert state(vllm.ops, vllm.attention) == vllm.before


@pytest.mark.parametrize("gone", ["forward_decode", "module"])
def test_a_vllm_without_forward_decode_still_gets_the_operations(tree, log, monkeypatch, gone):
    """vLLM 0.12 and later: PagedAttention has lost it, and then its module."""
    vllm = tree("upstream")
    if gone == "module":
        monkeypatch.setitem(sys.modules, "vllm.attention.ops.paged_attn", None)
    else:
        monkeypatch.delattr(vllm.attention, "forward_decode")
    register()
    assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2
    [(level, said)] = lines(log)
    assert level == "INFO" and "no forward_decode" in said


# -- what surrounds it


def test_importing_the_package_imports_nothing_of_vllm():
    program = (
        "import sys, paged_attention, paged_attention.vllm as v\n"
        "assert v.register.__module__ == 'paged_attention.vllm.plugin'\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'ixformer')]"
    )
    path = {"PYTHONPATH": f"{ROOT}:{STANDINS / 'corex'}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_vllm_finds_the_plugin_by_its_entry_point():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = re.search(r'\[project\.entry-points\."vllm\.general_plugins"\]\n(.*)\n', text)[1]
    assert group == 'paged_attention = "paged_attention.vllm:register"'
    assert ours.register is register


def test_a_captured_graph_is_refused(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    step = Step([40])
    query, key_cache, value_cache, tables, lens = (x.to("meta") for x in step.arguments()[:5])
    rest = 2, 1.0, tables, lens, 16, 40
    with pytest.raises(RuntimeError, match="enforce_eager"):
        ours.paged_attention_v1(torch.empty_like(query), query, key_cache, value_cache, *rest)


def test_a_class_that_cannot_be_changed_is_a_warning_and_nothing_stays_changed(tree, log):
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise TypeError("frozen")

    vllm = tree("corex")
    module = importlib.import_module("vllm.attention.ops.paged_attn")
    module.PagedAttention = Frozen("PagedAttention", (vllm.attention,), {})
    register()
    [(level, message)] = lines(log)
    assert level == "WARNING" and "frozen" in message
    assert state(vllm.ops, vllm.attention) == vllm.before


def test_one_that_takes_v1_under_a_condition_chooses_by_itself():
    def forward_decode(query, max_seq_len):
        use_v1 = max_seq_len <= 8192 and query.shape[0] > 1
        if query.shape[1] == 4:
            use_v1 = True
        return paged_attention_v1 if use_v1 else paged_attention_v2  # noqa: F821

    assert not dispatch.always_takes_v1(forward_decode)
