"""The plugin fills what a build of vLLM lacks, leaves what works, and can be undone."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_close, oracle, rounding
from vllm_calls import step

import paged_attention.vllm as ours
from paged_attention.vllm import dispatch, register, unregister

NAMES = ("paged_attention_v1", "paged_attention_v2", "reshape_and_cache")
LONG = 8200  # tokens, more than V1 is left with
ROOT = Path(__file__).parents[2]
NO_KERNEL = NotImplementedError("no kernel")  # which PyTorch raises, too, on another device


# -- upstream's tree


def test_where_nothing_is_native_everything_is_ours(tree, logged):
    vllm = tree("upstream")
    register()
    assert [getattr(vllm.ops, name) for name in NAMES] == [getattr(ours, name) for name in NAMES]
    [(level, said)] = logged()
    assert level == "INFO" and all(f"{name} is ours" in said for name in NAMES)
    calls = vllm.spy("paged_attention_v1", "paged_attention_v2")
    for lens, served in (([5, 0, 600], "v1"), ([8192], "v1"), ([8193, 40], "v2")):
        vllm.assert_ours(lens)
        assert calls.pop() == f"paged_attention_{served}" and not calls


def test_a_native_v1_keeps_all_steps_that_are_not_long(tree, logged):
    """Upstream's rule would send a few heads with two partitions to V2, which is ours and slow."""
    vllm = tree("upstream")
    calls = vllm.register_native("paged_attention_v1", "reshape_and_cache")
    register()
    [(_, said)] = logged()
    assert "paged_attention_v2 is ours" in said and "paged_attention_v1" not in said
    assert vllm.ops.reshape_and_cache is vllm.before["reshape_and_cache"]
    for lens in ([5], [600], [8192]):
        vllm.assert_native(lens)
        assert calls.pop() == ("paged_attention_v1", 19) and not calls
    vllm.assert_ours([LONG])
    assert not calls


def test_a_native_v2_that_works_is_left_alone(tree, logged):
    vllm = tree("upstream")
    calls = vllm.register_native(*NAMES)
    register()
    assert len(logged()) == 1
    for lens in ([600], [LONG], [LONG]):
        vllm.assert_native(lens)
        assert calls.pop() == ("paged_attention_v2", 22) and not calls
        assert vllm.unchanged()
    assert logged() == []


def test_a_native_v2_without_a_kernel_is_found_at_its_first_call_which_is_served(tree, logged):
    vllm = tree("upstream")
    calls = vllm.register_native(*NAMES, raises=NO_KERNEL)
    register()
    assert len(logged()) == 1
    vllm.assert_ours([600])
    assert calls == [("paged_attention_v2", 22)]
    [(_, first), (_, second)] = logged()
    assert "paged_attention_v2 is ours" in first and "no kernel" in first
    assert "forward_decode takes V2 above 8192 tokens" in second
    # From now on V2 is known to be ours: it isn't tried again, and V1 gets what it is good at.
    assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2
    vllm.assert_native([600])
    vllm.assert_ours([LONG])
    assert [name for name, _ in calls] == ["paged_attention_v2", "paged_attention_v1"]
    assert logged() == []
    unregister()
    assert vllm.unchanged()


@pytest.mark.parametrize("raises", [None, NO_KERNEL])
@pytest.mark.parametrize("registered", [True, False])
def test_one_who_looked_v2_up_before_its_first_call_is_served_all_the_same(
    tree, logged, raises, registered
):
    vllm = tree("upstream")
    calls = vllm.register_native(*NAMES, raises=raises)
    register()
    v2 = vllm.ops.paged_attention_v2
    if not registered:
        unregister()
    logged()
    dense, given = step([600], sharp=2.0)
    right = oracle(*dense)[0] if raises else torch.full_like(dense.query, 7)
    for _ in range(3):
        out = torch.empty_like(dense.query)
        v2(out, *dispatch.scratch(dense.query, 600), *given.values())
        assert_close(out, right, extra=rounding(dense))
    assert len(calls) == (3 if raises is None else 1)
    assert len(logged()) == (0 if raises is None else 1 + registered)
    if raises is None or not registered:
        assert vllm.unchanged()
    else:
        assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2


def test_another_error_of_a_native_v2_is_the_callers(tree):
    vllm = tree("upstream")
    vllm.register_native(*NAMES, raises=RuntimeError("out of memory"))
    register()
    with pytest.raises(RuntimeError, match="out of memory"):
        vllm.decode([600])


@pytest.mark.parametrize("gone", ["forward_decode", "module"])
def test_a_vllm_without_forward_decode_still_gets_the_operations(tree, logged, monkeypatch, gone):
    """vLLM 0.12 and later: PagedAttention has lost it, and then its module."""
    vllm = tree("upstream")
    if gone == "module":
        monkeypatch.setitem(sys.modules, "vllm.attention.ops.paged_attn", None)
    else:
        monkeypatch.delattr(vllm.attention, "forward_decode")
    register()
    assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2
    [(level, said)] = logged()
    assert level == "INFO" and "no forward_decode" in said


@pytest.mark.parametrize("hole", ["few arguments", "no such name"])
def test_a_hole_of_another_shape_is_filled_too(tree, monkeypatch, hole):
    vllm = tree("upstream")
    calls = vllm.register_native("paged_attention_v1", "reshape_and_cache")

    def short(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, head_mapping):
        raise AssertionError("must not be called: it can't take vLLM's arguments")

    vllm.replace(vllm.ops, "paged_attention_v2", short)
    if hole == "no such name":
        monkeypatch.delattr(vllm.ops, "paged_attention_v2")
        vllm.before = vllm.state()
    register()
    vllm.assert_ours([LONG])
    assert not calls
    unregister()
    assert vllm.unchanged()
    assert hasattr(vllm.ops, "paged_attention_v2") == (hole == "few arguments")


# -- being asked, twice, and undone


def test_force_makes_v2_ours_where_a_native_one_works(tree, logged, monkeypatch):
    vllm = tree("upstream")
    calls = vllm.register_native(*NAMES)
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", "force")
    register()
    [(_, said)] = logged()
    assert "PAGED_ATTENTION_VLLM=force" in said
    vllm.assert_ours([LONG])
    vllm.assert_native([600])
    assert [name for name, _ in calls] == ["paged_attention_v1"]


@pytest.mark.parametrize("name", ["upstream", "corex"])
def test_twice_is_once_and_undoing_leaves_no_trace(tree, logged, name):
    vllm = tree(name)
    register()
    after = vllm.state()
    assert not vllm.unchanged()
    register()
    assert vllm.state() == after and len(logged()) == 1
    for _ in range(2):
        unregister()
        assert vllm.unchanged()
    register()
    assert len(logged()) == 1
    assert [*map(type, vllm.state().values())] == [*map(type, after.values())]


# -- what isn't as expected is a warning, and no change


@pytest.mark.parametrize(
    "name, value, level, words",
    [
        ("PAGED_ATTENTION_VLLM", "off", "INFO", ["PAGED_ATTENTION_VLLM=off"]),
        ("PAGED_ATTENTION_VLLM", "on", "WARNING", ["force, vendor or off", "'on'"]),
        ("PAGED_ATTENTION_PARTITION_SIZE", "0", "WARNING", ["PARTITION_SIZE", "'0'"]),
        ("PAGED_ATTENTION_V2_MIN_LEN", "8k", "WARNING", ["V2_MIN_LEN", "'8k'"]),
    ],
)
def test_a_setting_may_forbid_everything(tree, logged, monkeypatch, name, value, level, words):
    vllm = tree("corex")
    monkeypatch.setenv(name, value)
    register()
    assert_one_line(logged, level, *words)
    assert vllm.unchanged()


def assert_one_line(logged, level, *words):
    [(got, said)] = logged()
    assert got == level and (level == "INFO" or "changes nothing" in said)
    assert all(word in said for word in words), said


def test_without_vllm_a_warning(logged, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises ImportError
    register()
    assert_one_line(logged, "WARNING", "vllm")


def forward_decode_of_another_kind(vllm):
    def forward_decode(query, kv_cache, metadata):
        raise AssertionError("must not be called")

    vllm.replace(vllm.attention, "forward_decode", staticmethod(forward_decode))


def broken_import(vllm):
    def broken(name):
        if name == "vllm.attention.ops.paged_attn":
            raise OSError("libcudart.so")
        return vllm.ops

    vllm.monkeypatch.setattr("paged_attention.vllm.port.import_module", broken)


def frozen_class(vllm):
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise TypeError("frozen")

    module = importlib.import_module("vllm.attention.ops.paged_attn")
    module.PagedAttention = Frozen("PagedAttention", (vllm.attention,), {})


@pytest.mark.parametrize(
    "break_it, words",
    [
        (
            forward_decode_of_another_kind,
            ["forward_decode has no argument key_cache, value_cache"],
        ),
        (broken_import, ["OSError", "libcudart.so"]),
        (frozen_class, ["frozen"]),
    ],
)
def test_what_is_not_as_expected_is_a_warning_and_nothing_stays_changed(
    tree, logged, break_it, words
):
    vllm = tree("upstream")
    break_it(vllm)
    register()
    assert_one_line(logged, "WARNING", *words)
    assert vllm.unchanged()


def test_one_whose_v2_turns_out_to_be_missing_is_served_and_warned_about(tree, logged):
    vllm = tree("upstream")
    vllm.register_native(*NAMES, raises=NO_KERNEL)
    dense, given = step([600, 3])

    def forward_decode():
        out, scratch = torch.empty_like(dense.query), dispatch.scratch(dense.query, 600)
        vllm.ops.paged_attention_v2(out, *scratch, *given.values())
        return out

    vllm.replace(vllm.attention, "forward_decode", staticmethod(forward_decode))
    register()
    assert [level for level, _ in logged()] == ["INFO"]
    for _ in range(2):
        out = vllm.attention.forward_decode()
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    [(_, _), (level, said)] = logged()
    assert level == "WARNING" and "forward_decode keeps its own choice" in said
    assert vllm.attention.forward_decode is forward_decode


# -- what surrounds it


def test_importing_the_package_imports_nothing_of_vllm():
    program = (
        "import sys, paged_attention, paged_attention.vllm as v\n"
        "assert v.register.__module__ == 'paged_attention.vllm.plugin'\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'ixformer')]"
    )
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/clients/vllm_standins/corex'}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_vllm_finds_the_plugin_by_its_entry_point():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = re.search(r'\[project\.entry-points\."vllm\.general_plugins"\]\n(.*)\n', text)[1]
    assert group == 'paged_attention = "paged_attention.vllm:register"'
    assert ours.register.__module__ == "paged_attention.vllm.plugin"
