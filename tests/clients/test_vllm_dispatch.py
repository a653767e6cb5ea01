"""forward_decode chooses between V1 and V2 where it never did, and brings scratch for V2."""

from __future__ import annotations

import threading

import pytest
import torch

from paged_attention.vllm import dispatch, register

LONG = 8200  # tokens, more than V1 is left with


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("lens", [[40], [LONG]])
def test_a_call_by_position_or_by_keyword_is_served(tree, lens, by_keyword):
    vllm = tree("upstream")
    register()
    vllm.assert_ours(lens, by_keyword=by_keyword)


def test_the_least_length_of_v2_is_the_environments(tree, monkeypatch):
    vllm = tree("upstream")
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    calls = vllm.spy("paged_attention_v1", "paged_attention_v2")
    for lens in ([100], [101]):
        vllm.decode(lens)
    assert calls == ["paged_attention_v1", "paged_attention_v2"]


@pytest.mark.parametrize("size", ["48", "256", "512", "2048"])
def test_there_is_scratch_for_any_partition_size(tree, monkeypatch, size):
    vllm = tree("upstream")
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", size)
    register()
    vllm.assert_ours([LONG, 3], dtype=torch.bfloat16)


def test_scratch_is_the_same_memory_from_step_to_step_and_each_thread_has_its_own():
    query, seen = torch.zeros(3, 6, 32), []

    def note_addresses(max_seq_len):
        seen.append([tensor.data_ptr() for tensor in dispatch.scratch(query, max_seq_len)])

    for max_seq_len in (9000, 9001, 9000):
        note_addresses(max_seq_len)
    thread = threading.Thread(target=note_addresses, args=(9000,))
    thread.start()
    thread.join()
    assert seen[0] == seen[1] == seen[2]
    assert not set(seen[0]) & set(seen[3])
    assert len(set(seen[0])) == 3
