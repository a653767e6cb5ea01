"""Keys, values and queries of a real model: they show what random ones hide, and the kernel is
right on them.

What is said of the data is in notebooks/data/README.md. Its arithmetic here is float64.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DTYPES, LAYOUTS, Dense, assert_close, oracle, paged, pairwise, rounding

from paged_attention import paged_attention, reference_attention

PATH = Path(__file__).parents[2] / "notebooks" / "data" / "smollm2.npz"
SHA256 = "931a0416941176c9ce5d706606f68de96de0a190218cb976588b349e89d19210"


@pytest.fixture(scope="module")
def arrays():
    """{layer: (key, value (tokens, kv_heads, head_size), query)}, positions: of the queries."""
    with np.load(PATH) as file:
        layers = {
            layer: [torch.from_numpy(file[f"layer{layer}_{x}"]) for x in ("key", "value", "query")]
            for layer in (7, 18)
        }
        return layers, file["query_positions"].tolist()


def attention(arrays, layer, row, backwards=False):
    """(weights (heads, tokens), value (heads, tokens, head_size)) of one query, float64."""
    layers, positions = arrays
    tokens = positions[row] + 1
    key, value, query = (x.double() for x in layers[layer])
    key, value = (x[:tokens].repeat_interleave(3, dim=1).transpose(0, 1) for x in (key, value))
    key = key.flip(1) if backwards else key
    return torch.einsum("hd,htd->ht", query[row], key) / 8, value


def test_the_data_are_those_that_their_readme_describes():
    assert hashlib.sha256(PATH.read_bytes()).hexdigest() == SHA256


def test_layer_18_has_first_token_sinks_and_layer_7_needs_every_partition(arrays):
    sinks = attention(arrays, 18, -1)[0].softmax(-1)[:, 0]
    assert sinks[8] > 0.99
    weights = attention(arrays, 7, -1)[0].softmax(-1)
    assert weights[:, 0].max() < 0.05
    shares = torch.stack([part.sum(-1) for part in weights.split(512, dim=-1)])
    assert shares.min() > 0.01 and shares.mean(1).min() > 0.1  # of each head; of all heads


@pytest.mark.parametrize("position, partition_size, gap", [(1538, 512, 33), (1956, 128, 22)])
def test_a_merge_that_forgets_the_maxima_fails_where_they_differ(
    arrays, position, partition_size, gap
):
    logits, value = attention(arrays, 18, arrays[1].index(position))
    right = torch.einsum("ht,htd->hd", logits.softmax(-1), value)
    parts = logits.split(partition_size, -1), value.split(partition_size, 1)
    maxima = torch.stack([part.amax(-1) for part in parts[0]])  # (partitions, heads)
    sums = torch.stack([(p - m[:, None]).exp().sum(-1) for p, m in zip(parts[0], maxima)])
    outs = torch.stack([torch.einsum("ht,htd->hd", p.softmax(-1), v) for p, v in zip(*parts)])

    def error(weights):
        merged = (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
        return (merged - right).norm(dim=-1) / right.norm(dim=-1)

    assert (maxima.amax(0) - maxima.amin(0)).max() > gap
    assert error(sums * (maxima - maxima.amax(0)).exp()).max() < 1e-12
    assert error(sums)[8] > 5  # head 8: 6.9 and more


@pytest.mark.parametrize("layer", [7, 18])
def test_keys_in_reverse_order_change_every_head(arrays, layer):
    outs = []
    for backwards in (False, True):
        logits, value = attention(arrays, layer, -1, backwards)
        outs.append(torch.einsum("ht,htd->hd", logits.softmax(-1), value))
    assert ((outs[1] - outs[0]).norm(dim=-1) / outs[0].norm(dim=-1)).min() > 0.5


@pairwise(layout=LAYOUTS, dtype=DTYPES, partition_size=[16, 512, None], layer=[7, 18])
def test_decode_at_several_positions_of_a_text_agrees_with_float64(arrays, row):
    (key, value, query), some = arrays[0][row["layer"]], [0, 7, 101, 255]
    lens = [arrays[1][i] + 1 for i in some]
    query, key, value = (x.to(row["dtype"]) for x in (query[some], key, value))
    dense = Dense(query, [key[:n] for n in lens], [value[:n] for n in lens])
    pool, out = paged(dense, 16, row["layout"]), torch.empty(query.shape, dtype=torch.float32)
    how = {"layout": row["layout"], "partition_size": row["partition_size"]}
    _, lse = paged_attention(query, *pool, **how, out=out, return_lse=True)
    right, right_lse = oracle(*dense)
    assert_close(out, right, extra=rounding(dense))
    assert_close(lse, right_lse, extra=rounding(dense), what="lse")
    judged = reference_attention(query, *pool, layout=row["layout"])
    assert_close(judged[0], right, extra=1e-10)
    assert_close(judged[1], right_lse, dtype=torch.float64, extra=1e-10, what="lse")
