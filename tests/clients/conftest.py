"""A vLLM to be imported: small trees of our own stand in for upstream's and for CoreX's port.

They are namespace packages, so that a tree can take the place of some files of another.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_close, oracle, rounding
from vllm_calls import step

from paged_attention.vllm.plugin import unregister

STANDINS = Path(__file__).parent / "vllm_standins"
NAMES = ("paged_attention_v1", "paged_attention_v2", "reshape_and_cache")
FORWARD_DECODE = (
    "query key_cache value_cache block_tables seq_lens max_seq_len kv_cache_dtype num_kv_heads "
    "scale alibi_slopes k_scale v_scale"
).split()


class Tree:
    """The stand-in that was imported."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.ops = importlib.import_module("vllm._custom_ops")
        self.attention = importlib.import_module("vllm.attention.ops.paged_attn").PagedAttention
        self.before = self.state()

    def state(self):
        """All that the plugin may replace."""
        found = {name: getattr(self.ops, name, None) for name in NAMES}
        return found | {"forward_decode": vars(self.attention).get("forward_decode")}

    def unchanged(self):
        return self.state() == self.before

    def replace(self, owner, name, new):
        """Make a change that a port may have made."""
        self.monkeypatch.setattr(owner, name, new)
        self.before = self.state()

    def register_native(self, *names, raises=None):
        """PyTorch operations for the upstream tree, which fill `out` with a 7.

        Returns: a list of their calls to come: (name, number of arguments)
        """
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
            self.monkeypatch.setattr(space, name, operation(name), raising=False)
        return calls

    def spy(self, *names):
        """A list of the operations that are going to be called, whoever serves them."""
        calls = []

        def spied(name, served):
            return lambda *args, **kwargs: (calls.append(name), served(*args, **kwargs))[1]

        for name in names:
            self.monkeypatch.setattr(self.ops, name, spied(name, getattr(self.ops, name)))
        return calls

    def decode(self, lens, by_keyword=False, **noise):
        """(what forward_decode gives, the dense tensors), called as a backend of vLLM does.

        CoreX's backend gives a head_mapping for num_kv_heads.
        """
        dense, given = step(lens, sharp=2.0, **noise)
        if "ixformer" in sys.modules:
            given["num_kv_heads"] = head_mapping(dense)
        given = {name: given[name] for name in FORWARD_DECODE}
        args, kwargs = ((), given) if by_keyword else (given.values(), {})
        return self.attention.forward_decode(*args, **kwargs), dense

    def assert_ours(self, lens, **more):
        """A step is served right, which no stand-in of a native operation does."""
        out, dense = self.decode(lens, **more)
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))

    def assert_native(self, lens, filled=7):
        assert self.decode(lens)[0].eq(filled).all()


def head_mapping(dense):
    """As CoreX's backend makes it: each query head's KV head."""
    kv_heads = dense.keys[0].shape[1]
    group = dense.query.shape[1] // kv_heads
    return torch.arange(kv_heads, dtype=torch.int32).repeat_interleave(group)


def forget(*packages):
    for name in [*sys.modules]:
        if name.split(".")[0] in packages:
            del sys.modules[name]


@pytest.fixture
def tree(monkeypatch):
    """A function of stand-ins' names that makes them the vLLM to be imported in this test.

    Of a file that several have, the last one's counts.
    """

    def make(*names):
        for name in names:
            monkeypatch.syspath_prepend(STANDINS / name)
        return Tree(monkeypatch)

    forget("vllm", "ixformer")
    yield make
    unregister()
    forget("vllm", "ixformer")


@pytest.fixture
def logged(caplog):
    """A function: (level, message) of what the plugin has logged since it was last asked."""
    caplog.set_level(logging.INFO, logger="vllm.plugins.paged_attention")

    def new():
        said = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return said

    return new
