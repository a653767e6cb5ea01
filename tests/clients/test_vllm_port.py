"""What is told from a port's code: whether it always takes V1, and what its V1 can't be given."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import pytest
import torch

from paged_attention.vllm import port

ops = SimpleNamespace(paged_attention_v1=print, paged_attention_v2=print)
gather = print


# -- ports that always take V1. The code is only read


def hard_coded(c):
    if c is not None and c > 1:
        assert c % 2 == 0
    use_v1 = c < 3
    use_v1 = True
    if use_v1:
        ops.paged_attention_v1(c)
    else:
        ops.paged_attention_v2(c)
    return c


def knows_no_v2(c):
    """paged_attention_v2 is only spoken of."""
    out = ops.paged_attention_v1(c)
    return out


def returns_v1(c):
    return ops.paged_attention_v1(c)


def inherits():
    class Port:
        @staticmethod
        def forward_decode(c):
            use_v1 = _ = True
            if use_v1:
                ops.paged_attention_v1(c)
            return c

    return Port.forward_decode


# -- ports that choose


def conditional_expression(c):
    use_v1 = False if c else True
    if use_v1:
        return ops.paged_attention_v1(c)
    return ops.paged_attention_v2(c)


def conjunction(c):
    use_v1 = c and True
    if use_v1:
        ops.paged_attention_v1(c)
    else:
        ops.paged_attention_v2(c)
    return c


def early_return(c):
    if c > 8192:
        return ops.paged_attention_v2(c)
    use_v1 = True
    if use_v1:
        ops.paged_attention_v1(c)
    return c


def early_return_of_something_else(c):
    if c > 8192:
        return gather(c)
    use_v1 = True
    if use_v1:
        ops.paged_attention_v1(c)
    return c


def under_a_condition(c):
    use_v1 = c <= 8192
    if c == 4:
        use_v1 = True
    if use_v1:
        ops.paged_attention_v1(c)
    else:
        ops.paged_attention_v2(c)
    return c


def undone_later(c):
    use_v1 = True
    use_v1 &= c < 3
    if use_v1:
        ops.paged_attention_v1(c)
    else:
        gather(c)
    return c


def undone_in_a_block(c):
    use_v1 = True
    with torch.no_grad():
        use_v1 = c < 3
    if use_v1:
        ops.paged_attention_v1(c)
    else:
        gather(c)
    return c


def chosen_in_an_expression(c):
    return ops.paged_attention_v1(c) if c < 3 else gather(c)


def v1_tried_and_something_else(c):
    try:
        ops.paged_attention_v1(c)
    except RuntimeError:
        gather(c)
    return c


def both(c):
    ops.paged_attention_v1(c)
    ops.paged_attention_v2(c)


def elsewhere(c):
    return gather(c)


@functools.wraps(returns_v1)
def decorated(c):
    return gather(c) if c > 3 else returns_v1(c)


without_source = eval("lambda c: ops.paged_attention_v1(c)")


@pytest.mark.parametrize(
    "forward_decode, always",
    [(f, True) for f in (hard_coded, knows_no_v2, returns_v1, inherits())]
    + [
        (f, False)
        for f in (
            conditional_expression,
            conjunction,
            early_return,
            early_return_of_something_else,
            under_a_condition,
            undone_later,
            undone_in_a_block,
            chosen_in_an_expression,
            v1_tried_and_something_else,
            both,
            elsewhere,
            decorated,
            without_source,
            print,
        )
    ],
)
def test_own_08_only_a_port_without_any_choice_always_takes_v1(forward_decode, always):
    assert port.always_takes_v1(forward_decode) is always


# -- what V1 lacks, and where it is CoreX's


def short(out, query, alibi_slopes=None, kv_cache_dtype=None): ...


def whole(out, k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride): ...


@pytest.mark.parametrize(
    "v1, lacks",
    [
        (short, ["k_scale", *port.SPARSE]),
        (whole, ["blocksparse_head_sliding_step"]),
        (lambda *given: None, []),
        (type, []),  # compiled, and without a signature
    ],
)
def test_what_a_v1_lacks_is_told_from_its_signature(v1, lacks):
    assert port.lacking(v1) == lacks


@pytest.mark.parametrize("module", ["torch", "vllm", "ixformer", None])
def test_corex_is_told_from_versions_and_from_its_kernels(monkeypatch, module):
    monkeypatch.delitem(sys.modules, "ixformer", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.6.3"))
    if module == "torch":
        monkeypatch.setattr(torch, "__version__", "2.1.0+corex.3.2.3")
    elif module is not None:
        corex = SimpleNamespace(__version__="0.6.3+corex.3.2.3")
        monkeypatch.setitem(sys.modules, module, corex)
    assert port.is_corex() is (module is not None)
    native = SimpleNamespace(paged_attention_v1=print)
    assert port.limit_of_v1(native) == (32768 if module else 8192)
    assert port.limit_of_v1(SimpleNamespace()) == 8192
