"""Faults that users of other paged-attention kernels reported in public, restated as small inputs.

Each test is one fault, PUB-nn its number, with the cousins of that fault; `tests/field_cases/` has
them by theme. Each runs in every layout and on every path that could have the fault
(`field_cases/rows.py`). A row counts as run only if its test came to its end having judged
something; the last test of this file compares the rows that ran with those that must and prints
them as a table: a case that quietly didn't run is a failure.
"""

# ruff: noqa: F401  (the tests are imported for pytest to find them here)

from __future__ import annotations

import os
import sys

import pytest
import torch
from field_cases.dtypes import (
    test_fp8_scales_always_multiply,
    test_mixed_dtypes_convert_by_value_and_metadata_may_be_int64,
)
from field_cases.ends import (
    test_empty_sequences_give_zero_and_disturb_nobody,
    test_max_seq_len_below_the_longest_sequence_loses_no_token,
    test_nan_and_inf_in_the_last_page_never_reach_the_result,
    test_padding_ids_are_never_followed_and_bad_live_ids_never_clamped,
)
from field_cases.judging import JUDGED
from field_cases.logits import (
    test_a_sink_is_counted_once,
    test_alibi_distance_is_measured_from_the_query_token,
    test_several_query_tokens_see_the_history_and_not_the_future,
    test_softcap_comes_after_scale_before_the_mask_and_never_overflows,
    test_very_negative_logits_are_still_logits,
    test_window_counts_the_newest_token,
)
from field_cases.merging import (
    test_a_rows_bits_do_not_depend_on_its_batch,
    test_lse_is_a_natural_log_for_producer_and_merger,
    test_merge_of_empty_states_is_empty,
    test_partials_are_not_rounded_before_the_merge,
)
from field_cases.reading import (
    test_a_partition_that_does_not_divide_the_page_loses_no_tail,
    test_a_query_head_uses_its_own_groups_kv_head,
    test_block_offsets_beyond_32_bits,
    test_head_size_need_not_be_a_power_of_two,
    test_plain_tensors_reach_the_op_through_a_worked_layout,
    test_strided_views_are_read_and_written_by_their_strides,
)
from field_cases.rows import ROWS, THE_WHOLE_LIST, required_rows, table_of
from field_cases.running import (
    test_a_reused_workspace_holds_no_leftovers_and_a_run_no_host_read,
    test_a_time_includes_the_work_a_device_still_owes,
    test_grouped_heads_never_copy_keys_or_values_for_each_query_head,
)

STARTED: set[str] = set()  # node ids of this file's tests that ran in this process


@pytest.fixture(autouse=True)
def _started(request):
    STARTED.add(request.node.nodeid)


def chosen_by_hand(config):
    """What on the command line picked some of the tests, if anything did."""
    picks = [f"-k {config.option.keyword}"] if config.option.keyword else []
    picks += [f"-m {config.option.markexpr}"] if config.option.markexpr else []
    picks += [arg for arg in config.args if "::" in str(arg)]
    picks += [
        name for name in ("lf", "last_failed", "stepwise") if getattr(config.option, name, False)
    ]
    return ", ".join(picks + [str(d) for d in config.option.deselect or ()])


def test_the_matrix_of_cases_is_complete(request, capsys):
    def fail(text):
        pytest.fail(text, pytrace=False)

    mine = [i for i in request.session.items if i.path == request.node.path]
    rows = {i.callspec.id: i.nodeid for i in mine if hasattr(i, "callspec")}
    if not torch.cuda.is_available():
        rows = {row: node for row, node in rows.items() if not row.endswith("-cuda")}
    required = {"-".join(row) for row in required_rows()}
    ran = {"-".join(row) for row in JUDGED}
    with capsys.disabled():  # an xdist worker's stdout goes nowhere
        stream = sys.stderr if "PYTEST_XDIST_WORKER" in os.environ else sys.stdout
        print("\n" + "\n".join(table_of(JUDGED)), file=stream, flush=True)

    if list(ROWS) != THE_WHOLE_LIST:
        fail("a case is in no list")
    if extra := sorted(ran - required):
        fail(f"rows nobody asked for: {extra}")
    if elsewhere := sorted(row for row, node in rows.items() if node not in STARTED):
        fail(f"ran in another process or not at all (with xdist: --dist loadfile): {elsewhere}")
    if missing := sorted(set(rows) - ran):
        fail(f"{len(missing)} rows did not come to their end: {missing}")
    if missing := sorted(required - ran):
        by_hand = chosen_by_hand(request.config)
        if by_hand and not os.environ.get("CI"):
            pytest.skip(f"{len(ran)} of {len(required)} rows, those chosen by {by_hand}")
        fail(f"{len(missing)} of {len(required)} rows were not run: {missing}")
