"""Stages side by side: each at each length, on the same inputs, with the floor of that length."""

import pytest

from paged_attention.measure.comparison import compare
from paged_attention.measure.yardstick import kv_bytes
from paged_attention.stages import gqa_broadcast, single_bmm

pytestmark = pytest.mark.quick
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_size": 8}


def test_each_stage_is_measured_at_each_length_on_the_same_inputs():
    seen = {"a": set(), "b": set()}

    def stage(name, function):
        def call(*inputs):
            seen[name].add((int(inputs[4]), inputs[1].data_ptr(), inputs[-1]))
            return function(*inputs)

        return call

    stages = {"a": stage("a", single_bmm), "b": stage("b", gqa_broadcast)}
    measured, floors = compare(stages, (40, 700), **SHAPE, min_seconds=0.0)
    assert seen["a"] == seen["b"]
    assert sorted((n, scale) for n, _, scale in seen["a"]) == [(40, 8**-0.5), (700, 8**-0.5)]
    assert list(measured) == ["a", "b"]
    for by_length in measured.values():
        assert list(by_length) == [40, 700]
        assert all(m.seconds > 0 and m.runs >= 3 for m in by_length.values())
    assert measured["a"][700].peak_bytes > measured["b"][700].peak_bytes


def test_the_floor_reads_the_bytes_of_its_length():
    _, floors = compare({"a": gqa_broadcast}, (400, 4000), **SHAPE, min_seconds=0.0)
    assert list(floors) == [400, 4000]
    for tokens, floor in floors.items():
        assert 0 <= floor.num_bytes - kv_bytes(tokens, 2, 8) < 2 * 4 * 4096
        assert floor.seconds > 0


def test_a_name_that_would_hide_the_floor_is_refused():
    with pytest.raises(ValueError, match="floor"):
        compare({"floor": gqa_broadcast}, (40,), **SHAPE)
