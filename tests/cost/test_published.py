"""The model beside what others measured, and the wave that it says is the fastest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paged_attention.cost import PROFILES, Figure, Shape, predict
from paged_attention.cost import published as p
from paged_attention.kernel.device import MOST_MEMORY
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.shape import StepShape

quick = pytest.mark.quick
ROOT = Path(__file__).parents[2]
PUBLISHED = json.loads((ROOT / "figures" / "published.json").read_text(encoding="utf-8"))
ROWS = PUBLISHED["rows"]
EAGER = [row for row in ROWS if row["kind"] == "eager"]
FIELDS = {"device", "kind", "what", "num_seqs", "tokens", "num_heads", "num_kv_heads", "head_size"}
FIELDS |= {"dtype", "block_size", "clock", "us", "source"}


def named(row):
    return f"{row['device']}-{row['what'][:14]}-{row['num_seqs']}x{row['tokens']}-{row['us']}"


@quick
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_has_a_shape_a_time_a_clock_and_a_public_source(row):
    program = {"program"} if row["kind"] == "eager" else set()
    assert row.keys() == FIELDS | program and row["kind"] in ("eager", "compiled")
    assert row["clock"] in ("call", "device") and row["source"].startswith("https://github.com/")
    assert row["device"] in PROFILES or PUBLISHED["devices"][row["device"]]["source"]
    assert row["num_heads"] % row["num_kv_heads"] == 0 and hasattr(torch, row["dtype"])
    profile = p.profile_for(row, PUBLISHED["devices"])
    assert 1e-6 * row["us"] > p.floor_of(row, profile)  # nobody reads faster than the memory


@quick
@pytest.mark.parametrize("row", EAGER, ids=named)
def test_the_model_is_within_a_factor_of_2_of_every_eager_row(row):
    band = p.predicted(row, p.profile_for(row, PUBLISHED["devices"]))
    assert 0.5 <= 1e-6 * row["us"] / p.middle(band) <= 2


def test_twenty_rows_at_least_and_three_devices_in_eager_mode():
    assert len(EAGER) >= 20 and len({row["device"] for row in EAGER}) >= 3


def test_the_page_has_the_tables_that_are_made_from_the_rows():
    page = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    for kind in ("eager", "compiled"):
        assert p.table(PUBLISHED, kind) in page
    assert p.table(PUBLISHED, "eager").count("\n") == len(EAGER) + 1


@quick
def test_a_program_computes_what_attention_is():
    """On data, all four give the softmax of the logits times the values."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, 6), torch.randn(3, 2, 7, 6), torch.randn(3, 2, 7, 6)
    shape = Shape([7] * 3, num_heads=2, num_kv_heads=2, head_size=8)
    for program, scale in ((p.dense, 1.0), (p.dense_softmax_in_fp32, 0.1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(p, "_dense_inputs", lambda shape: [q, k, v])
            got = program(shape)()
        want = torch.softmax(q @ k.mT * scale, -1) @ v
        torch.testing.assert_close(got, want)


def wave_memory(num_heads, num_kv_heads, budget):
    """Bytes that a plan holds for a wave of an fp8 cache, which takes the most: K as float32, as
    bytes, and as float16 on the way. What grows with the length is taken off."""
    shape = StepShape(num_heads, num_kv_heads, 256, 16, torch.uint8, 1, None)
    where = shape, "HND", torch.device("meta")
    once, twice = (
        DecodePlan.exact(*where, [tokens], wave_budget=budget).workspace_bytes
        for tokens in (2**20, 2**21)
    )
    return 2 * once - twice


@pytest.mark.parametrize("device", ["BI-V100", "H200"])
@pytest.mark.parametrize("heads", [(24, 4), (6, 1)])
def test_the_kernels_wave_is_the_fastest_of_those_that_the_memory_allows(device, heads):
    """By the model, of waves of 4 to 512 MB of K as float32."""
    profile = PROFILES[device]
    shape = Shape([100_000], *heads, dtype=torch.float16, layout="HND")
    seconds = {}
    for budget in (n * 1_000_000 for n in (4, 8, 16, 32, 64, 128, 160, 256, 512)):
        if wave_memory(*heads, budget) <= MOST_MEMORY:
            wave = Figure(budget, budget, "B", "")
            cost = predict(p.KERNEL, shape, replace(profile, wave=wave))
            seconds[budget] = p.middle(cost.seconds)
    assert profile.wave_bytes == max(seconds)
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    assert seconds[4_000_000] > 1.5 * seconds[profile.wave_bytes]  # a CPU's would launch too much
    assert predict(p.KERNEL, shape, profile).temporary_bytes <= MOST_MEMORY
