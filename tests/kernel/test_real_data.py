"""The kernel on keys, values and queries of a real model, whose softmax has peaks.

notebooks/data/README.md describes the data, and notebook 01 shows what they show.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DTYPES, assert_close, oracle, pairwise, rounding
from pools import LAYOUTS, Dense, paged

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


def test_the_data_are_those_that_their_readme_describes():
    assert hashlib.sha256(PATH.read_bytes()).hexdigest() == SHA256


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
