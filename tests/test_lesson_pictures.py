"""The pictures and tables that every notebook has: what they say is what was counted."""

from __future__ import annotations

import base64
import re
import struct

import pytest
import torch

from paged_attention import paged_attention
from paged_attention.cost import PROFILES, Shape, cost_of, parts_of, predict, way_of
from paged_attention.inputs import random_inputs
from paged_attention.lesson import costs, scoreboard, see, stages_before
from paged_attention.lesson.scoreboard import quietness, spread
from paged_attention.measure.timing import Measurement
from paged_attention.plots import draw_explained, draw_verdict, draw_way, explained
from paged_attention.stages import STAGES

pytestmark = pytest.mark.quick
TOKENS = 1300


def took(seconds, low=None, high=None):
    quartiles = (low or seconds, high or seconds)
    return Measurement(seconds, quartiles, seconds, 9, 1, 1, 0, 8, "cpu", (seconds,))


def way_through(stage):
    inputs = Shape([TOKENS]).inputs()
    return way_of(lambda: stage(*inputs, 1.0), inputs.key_cache, inputs.value_cache)


def multiples(way):
    num_bytes = Shape([TOKENS]).kv_bytes
    return {
        name: (round(part.bytes_read / num_bytes, 1), round(part.bytes_written / num_bytes, 1))
        for name, part in way.items()
    }


@pytest.mark.parametrize("name", STAGES)
def test_the_parts_of_the_way_are_all_operations_but_the_querys(name):
    inputs = Shape([TOKENS]).inputs()
    way, cost = way_through(STAGES[name]), cost_of(lambda: STAGES[name](*inputs, 1.0))
    apart = cost.ops - cost.host_reads - sum(part.ops for part in way.values())
    assert 0 <= apart <= 4  # the length, the block ids as int64, the scaled query
    read, written = (
        sum(getattr(part, field) for part in way.values())
        for field in ("bytes_read", "bytes_written")
    )
    assert 0 <= cost.bytes_read - read < 0.01 * cost.bytes_read
    assert 0 <= cost.bytes_written - written < 0.01 * cost.bytes_written


def test_each_stage_goes_the_way_that_its_notebook_tells():
    gather = {"gather": (1.0, 1.0), "reorder": (1.0, 1.0)}
    naive = multiples(way_through(STAGES["naive_loops"]))
    assert naive | {"reorder": (0, 0), "gather": (1.0, 1.0), "repeat, pad": (1.0, 6.0)} == naive
    batched = multiples(way_through(STAGES["batched_gather"]))
    assert batched | gather | {"repeat, pad": (1.0, 6.0)} == batched
    bmm = multiples(way_through(STAGES["single_bmm"]))
    assert bmm | gather == bmm
    assert bmm["repeat, pad"][0] == 4.0 and 12.0 <= bmm["repeat, pad"][1] <= 13.5
    gqa = multiples(way_through(STAGES["gqa_broadcast"]))
    assert gqa | gather == gqa
    assert gqa["repeat, pad"][0] == 0.5 and gqa["Q @ K^T"] == (0.5, 0.0)


def test_the_kernels_way_has_one_copy_and_no_repetition():
    inputs = random_inputs([5000], num_heads=6, num_kv_heads=2, head_size=64)
    way = way_of(lambda: paged_attention(*inputs), inputs.key_cache, inputs.value_cache)
    num_bytes = 2 * 5000 * 2 * 64 * 4
    assert way["gather"].bytes_written == pytest.approx(num_bytes, rel=0.02)
    assert way["repeat, pad"].ops == way["reorder"].ops == 0
    assert way["weights @ V"].ops > 1 and way["merge"].ops > 0


def test_the_picture_of_the_way_says_what_each_part_moves_and_what_changed():
    before, now = way_through(STAGES["batched_gather"]), way_through(STAGES["single_bmm"])
    alt = draw_way(now, Shape([TOKENS]).kv_bytes, before=before).alt
    assert "gather: reads 1.0, writes 1.0;" in alt and re.search("pad: .*, changed", alt)


def test_a_picture_is_sharp_and_has_its_words():
    picture = draw_way(way_through(STAGES["single_bmm"]), Shape([TOKENS]).kv_bytes)
    data, metadata = picture._repr_mimebundle_()
    width, height = struct.unpack(">II", base64.b64decode(data["image/png"])[16:24])
    size = metadata["image/png"]
    assert (size["width"], size["height"]) == (width // 2, height // 2) and width > 1520
    assert size["alt"] == data["text/plain"] == picture.alt


@pytest.mark.parametrize("device", ["H200", "BI-V100"])
def test_the_parts_of_a_prediction_add_up_to_it(device):
    cost = predict("single_bmm", Shape([TOKENS]), PROFILES[device])
    parts = parts_of(cost.steps, PROFILES[device])
    assert sum(parts.values()) == pytest.approx((cost.seconds.low + cost.seconds.high) / 2)
    assert all(seconds >= 0 for seconds in parts.values())


def test_what_the_parts_leave_is_unexplained_and_may_be_negative():
    parts = {"a": {"operations": 1.0, "streamed bytes": 2.0}}
    parts["a"] |= {"rearranged bytes": 0.0, "fresh pages": 0.5}
    for measured, left in ((4.0, 0.5), (3.0, -0.5)):
        bars = explained({"a": measured}, parts)
        assert bars["a"]["unexplained"] == left
        sign = "-" * (left < 0)
        assert f"unexplained {sign}500 ms" in draw_explained(bars, caption="x").alt


def test_the_verdict_compares_here_and_elsewhere():
    band = PROFILES["H200"].bandwidth
    picture = draw_verdict({64: (took(2.0), took(3.0))}, {"H200": {64: (band, band)}}, ("a", "b"))
    assert "here, measured, 64 tokens: 1.50 times" in picture.alt
    assert "H200, predicted, 64 tokens: 1.00 times" in picture.alt


def test_the_scoreboard_has_a_row_for_each_stage(capsys):
    scoreboard(costs(stages_before("single_bmm"), 1000))
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["naive_loops", "batched_gather"]
    assert {len(row) for row in rows} == {len(head)}
    inputs = Shape([1000]).inputs()
    assert rows[0].split()[1] == str(cost_of(lambda: STAGES["naive_loops"](*inputs, 1.0)).ops)


def test_stages_before_are_those_before():
    assert list(stages_before("naive_loops")) == []
    assert list(stages_before("final_kernel")) == list(STAGES)


def test_a_busy_machine_is_named_and_a_quiet_one_too():
    assert quietness([took(1.0, 0.98, 1.02)]).startswith("The machine was quiet: quartiles")
    busy = quietness([took(1.0), took(1.0, 0.8, 1.2)])
    assert busy.startswith("The machine was busy: quartiles lie up to 50% apart")
    assert spread(took(1.0, 0.8, 1.2)) == "(800 ms to 1.20 s)"


def test_a_prediction_stands_beside_what_turned_out(capsys):
    see("ops", None, formula=29, counted=1029)
    see("ms", 0.5, measured=2.0)
    said = "ops: you said nothing yet, formula 29, counted 1,029\n"
    assert capsys.readouterr().out == said + "ms: you said 0.50 (0.25 times), measured 2.00\n"
    with pytest.raises(TypeError, match="ops: write a number"):
        see("ops", "many", counted=3)
    see("zero", 3, counted=0)
    assert capsys.readouterr().out == "zero: you said 3, counted 0\n"


def test_writing_over_what_was_gathered_moves_it_along():
    key, value = torch.ones(3, 2, 4, 2, 4), torch.ones(3, 2, 16, 2)
    buffer = torch.empty(2, 2, 16, 2)

    def call():
        torch.index_select(value, 0, torch.tensor([2, 0]), out=buffer)
        return buffer.transpose(2, 3).contiguous().mul_(2.0)

    way = way_of(call, key, value)
    assert [name for name, part in way.items() if part.ops] == ["gather", "reorder"]
    assert way["reorder"].ops == 2
