"""The captured keys and queries of a real model show what random ones hide.

Every bound leaves room below (or above) the figure in notebooks/data/README.md. All arithmetic is
float64 and knows nothing of the package.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[2] / "notebooks" / "data" / "smollm2.npz"
NUM_TOKENS, NUM_POSITIONS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 1957, 256, 9, 3, 64


@pytest.fixture(scope="module")
def arrays():
    with np.load(PATH) as file:
        return dict(file)


def load(arrays, layer):
    """Keys and values repeated for every query head, queries, positions; float64 and int32."""
    key, value, query = (
        torch.from_numpy(arrays[f"layer{layer}_{name}"]).double()
        for name in ("key", "value", "query")
    )
    group = NUM_HEADS // NUM_KV_HEADS
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    return key, value, query, torch.from_numpy(arrays["query_positions"])


def scaled_logits(key, query, positions):
    """(num_positions, num_heads, num_tokens), -inf after a query's own position."""
    logits = torch.einsum("phd,thd->pht", query, key) * HEAD_SIZE**-0.5
    return logits.masked_fill(torch.arange(len(key)) > positions[:, None, None], -torch.inf)


def partials(logits, value, partition_size):
    """Per partition: maxima, sums relative to them, normalised outputs; partitions come first."""
    parts = logits.split(partition_size, dim=-1)
    maxima = torch.stack([part.amax(dim=-1) for part in parts])
    sums = torch.stack(
        [(p - m[..., None]).exp().sum(-1) for p, m in zip(parts, maxima, strict=True)]
    )
    outs = torch.stack(
        [
            torch.einsum("pht,thd->phd", part.softmax(dim=-1), values)
            for part, values in zip(parts, value.split(partition_size), strict=True)
        ]
    )
    return maxima, sums, outs


def average(weights, outs):
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]


def relative_error(wrong, right):
    return (wrong - right).norm(dim=-1) / right.norm(dim=-1)


def test_arrays_have_the_documented_names_shapes_and_types(arrays):
    expected = {
        "token_ids": ((NUM_TOKENS,), np.int32),
        "query_positions": ((NUM_POSITIONS,), np.int32),
        "layers": ((2,), np.int32),
        "scale": ((), np.float64),
    }
    for layer in (7, 18):
        expected[f"layer{layer}_key"] = ((NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE), np.float16)
        expected[f"layer{layer}_value"] = ((NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE), np.float16)
        expected[f"layer{layer}_query"] = ((NUM_POSITIONS, NUM_HEADS, HEAD_SIZE), np.float16)
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == expected


def test_the_file_is_smaller_than_4_megabytes():
    assert PATH.stat().st_size < 4_000_000


def test_every_value_is_finite(arrays):
    for name, array in arrays.items():
        assert np.isfinite(array).all(), name


def test_layers_scale_and_positions_describe_the_arrays(arrays):
    assert arrays["layers"].tolist() == [7, 18]
    assert arrays["scale"] == HEAD_SIZE**-0.5
    positions = arrays["query_positions"]
    assert (np.diff(positions) > 0).all()
    assert {0, 511, 512, 1538} <= set(positions.tolist())
    assert positions[-64:].tolist() == list(range(NUM_TOKENS - 64, NUM_TOKENS))


def test_layer_18_has_first_token_sinks_and_layer_7_has_none(arrays):
    newest = {}
    for layer in (7, 18):
        key, _, query, positions = load(arrays, layer)
        logits = scaled_logits(key, query[-64:], positions[-64:])
        newest[layer] = logits.softmax(dim=-1)[..., 0].mean(dim=0)  # (num_heads,)
    assert newest[18].min() > 0.2  # every head: 0.247 to 0.999
    assert newest[18][8] > 0.99
    assert newest[7].max() < 0.05


def test_no_partition_of_layer_7_can_be_lost_unnoticed(arrays):
    key, _, query, positions = load(arrays, 7)
    attention = scaled_logits(key, query[-1:], positions[-1:]).softmax(dim=-1)  # newest query
    shares = torch.stack([part.sum(dim=-1)[0] for part in attention.split(512, dim=-1)])
    assert shares.min() > 0.01  # every partition, every head
    assert shares.mean(dim=1).min() > 0.1  # every partition, heads together


@pytest.mark.parametrize(
    ("position", "partition_size", "gap"),
    [(1538, 512, 33), (1956, 512, 20), (1956, 256, 21), (1956, 128, 22)],
)
def test_a_merge_that_forgets_the_maxima_fails_where_they_differ_by_20(
    arrays, position, partition_size, gap
):
    key, value, query, positions = load(arrays, 18)
    row = positions.tolist().index(position)
    tokens = position + 1
    logits = scaled_logits(key[:tokens], query[row, None], positions[row, None])
    maxima, sums, outs = partials(logits, value[:tokens], partition_size)
    right = torch.einsum("pht,thd->phd", logits.softmax(dim=-1), value[:tokens])
    merged = average(sums * (maxima - maxima.amax(dim=0)).exp(), outs)
    forgetful = average(sums, outs)

    assert (maxima.amax(dim=0) - maxima.amin(dim=0)).max() > gap
    assert relative_error(merged, right).max() < 1e-12
    assert relative_error(forgetful, right)[0, 8] > 5  # head 8: 6.9 and more


def test_exp_of_a_raw_logit_overflows_float16(arrays):
    key, _, query, positions = load(arrays, 7)
    largest = scaled_logits(key, query, positions).max()
    assert largest > 17.5
    assert largest.exp().half() == torch.inf


@pytest.mark.parametrize("layer", [7, 18])
def test_keys_in_reverse_order_change_every_head(arrays, layer):
    key, value, query, positions = load(arrays, layer)
    outs = [
        torch.einsum(
            "pht,thd->phd", scaled_logits(k, query[-1:], positions[-1:]).softmax(-1), value
        )
        for k in (key, key.flip(0))
    ]
    assert relative_error(outs[1], outs[0]).min() > 0.5
