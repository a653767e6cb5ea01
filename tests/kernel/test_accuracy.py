"""Never worse than PyTorch's own attention in the same dtype; the table in docs/accuracy.md."""

from __future__ import annotations

import pytest
import torch
from accuracy import CHANCE, DATA, DTYPES, FLOAT32_STEP, LENGTHS, ROOT, TOKENS, errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("tokens", [64, TOKENS])
def test_errors_are_no_larger_than_sdpas_on_the_same_data(data, tokens, dtype):
    if dtype == "fp16" and torch.__version__.startswith("2.1."):
        pytest.skip("scaled_dot_product_attention of this torch has no float16 on a CPU")
    ours, in_float32, sdpa = errors(data, tokens, DTYPES[dtype])
    assert ours <= CHANCE * max(sdpa, FLOAT32_STEP), (ours, sdpa)
    assert in_float32 <= CHANCE * max(sdpa, FLOAT32_STEP), (in_float32, sdpa)


@pytest.mark.parametrize("data", ["SmolLM2, layer 18", "all keys equal"])
def test_errors_do_not_grow_with_the_length(data):
    """Real keys gone through eight times; a mean of 16,384 values."""
    short, long = (errors(data, n, DTYPES["fp32"]).ours for n in (TOKENS, 16_384))
    assert long <= max(2 * short, FLOAT32_STEP)


def test_the_committed_table_has_every_row_and_says_never_worse():
    lines = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8").splitlines()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    header, rows = rows[0], rows[1:]
    assert [row[:2] for row in rows] == [[d, f"{n:,}"] for d in DATA for n in LENGTHS]
    starts = [header.index(dtype) for dtype in DTYPES]
    for row in rows:
        for start, end in zip(starts, [*starts[1:], len(header)]):
            *ours, sdpa = map(float, row[start:end])
            assert max(ours) <= CHANCE * max(sdpa, FLOAT32_STEP), row
