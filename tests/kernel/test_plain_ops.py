"""Options cost nothing where none is asked for: the plain call dispatches the ATen ops it did.

`plain_ops.json` holds how often each op ran, by name, in version 0.1.0, before any option existed.
It is not to be written anew because a change made the plain call dispatch something else. Whether
an op writes in place or to another buffer that is there already is no difference. (Written anew
once: a capacity plan of no tokens looks at the lengths, so that a sequence that has some is NaN.)
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from paged_attention import Workspace, paged_attention, plan_decode
from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import count

SHAPES = {  # lengths, and what of the geometry matters for the ops that run
    "one tile": ([75], {}),
    "ragged": ([75, 0, 3, 200], {}),
    "whole blocks": ([64, 128], {}),
    "nothing": ([0, 0], {}),
    "one KV head": ([75, 200], {"num_heads": 7, "num_kv_heads": 1}),
    "half precision": ([75, 0, 3, 200], {"dtype": torch.float16}),
    "bfloat16": ([75, 200], {"dtype": torch.bfloat16}),
    "several waves": ([5000, 300], {"num_heads": 24, "num_kv_heads": 4, "head_size": 64}),
}
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": 8}
CALLS = {
    "paged_attention": lambda x, sizes, layout: (
        lambda: paged_attention(*x, layout=layout, partition_size=64, return_lse=True)
    ),
    "default partitions": lambda x, sizes, layout: lambda: paged_attention(*x, layout=layout),
    "exact plan": lambda x, sizes, layout: planned(x, sizes, layout, seq_lens=x.seq_lens),
    "capacity plan": lambda x, sizes, layout: planned(
        x, sizes, layout, num_seqs=len(x.query), max_seq_len=5120
    ),
}
COMMITTED = json.loads(Path(__file__).with_name("plain_ops.json").read_text())


def planned(x, sizes, layout, **lengths):
    plan = plan_decode(**sizes, layout=layout, partition_size=64, **lengths)
    out, workspace = torch.empty_like(x.query), Workspace()
    return lambda: plan.run(*x, out=out, workspace=workspace)


def ops_of(shape, layout, call):
    lens, changes = SHAPES[shape]
    sizes = {**SIZES, **changes}
    x = random_inputs(lens, **sizes, layout=layout)
    run = CALLS[call](x, sizes, layout)
    run()  # the second call is the one that counts: the workspace has grown
    return by_operation(count(run).by_op)


def by_operation(by_op):
    """sub_ is sub(out=)."""
    counts = Counter()
    for name, times in by_op.items():
        counts[name.removesuffix("_")] += times
    return counts


@pytest.mark.parametrize("layout", ["vllm", "HND", "NHD"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_plain_call_dispatches_the_ops_it_did_before_there_were_options(call, shape, layout):
    assert ops_of(shape, layout, call) == by_operation(COMMITTED[call][shape][layout])


def test_every_committed_list_is_compared():
    assert {call: set(shapes) for call, shapes in COMMITTED.items()} == dict.fromkeys(
        CALLS, set(SHAPES)
    )
