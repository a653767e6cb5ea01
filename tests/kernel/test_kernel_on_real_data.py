"""The kernel on the keys of a real model, whose softmax has peaks that random keys don't have."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DTYPES, Dense, assert_close, in_each_layout, oracle, paged, rounding

from paged_attention import paged_attention

PATH = Path(__file__).parents[2] / "notebooks" / "data" / "smollm2.npz"


@in_each_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("partition_size", [16, 512, None])
def test_decode_at_several_positions_of_a_text_agrees_with_float64(layout, dtype, partition_size):
    with np.load(PATH) as file:
        key, value, query, positions = (
            torch.from_numpy(file[name])
            for name in ("layer18_key", "layer18_value", "layer18_query", "query_positions")
        )
    some = [0, 7, 101, 255]  # of the captured positions
    lens = [int(positions[i]) + 1 for i in some]
    dense = Dense(
        query[some].to(dtype),
        [key[:n].to(dtype) for n in lens],
        [value[:n].to(dtype) for n in lens],
    )
    pool = paged(dense, 16, layout)
    out = torch.empty(dense.query.shape, dtype=torch.float32)
    _, lse = paged_attention(
        dense.query,
        *pool,
        layout=layout,
        partition_size=partition_size,
        out=out,
        return_lse=True,
    )
    right, right_lse = oracle(*dense)
    assert_close(out, right, extra=rounding(dense))
    assert_close(lse, right_lse, extra=rounding(dense), what="lse")
