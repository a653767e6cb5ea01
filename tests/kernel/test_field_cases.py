"""Faults that users of other paged-attention kernels reported in public, restated as small inputs.

Each test is one fault, PUB-nn its number, with the cousins of that fault. The tests are in
`tests/support/field_cases/`, by theme. Each runs in every layout and on every path that could have
the fault (`rows.py` there). The last test of this file prints the rows that judged something and
compares them with those that must run, so that a case that quietly didn't run is a failure.
"""

# ruff: noqa: F403  (the tests are imported for pytest to find them here)

from __future__ import annotations

import os
import sys

import pytest
from field_cases.dtypes import *
from field_cases.ends import *
from field_cases.judging import JUDGED
from field_cases.logits import *
from field_cases.merging import *
from field_cases.reading import *
from field_cases.rows import ROWS, THE_WHOLE_LIST, required_rows, table_of
from field_cases.running import *


def test_the_matrix_of_cases_is_complete(request, capsys):
    required = required_rows()
    with capsys.disabled():  # an xdist worker's stdout goes nowhere
        stream = sys.stderr if "PYTEST_XDIST_WORKER" in os.environ else sys.stdout
        print("\n" + "\n".join(table_of(JUDGED)), file=stream, flush=True)
    assert list(ROWS) == THE_WHOLE_LIST, "a case is in no list"
    chosen = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    if not {"-".join(row) for row in required} <= chosen and "CI" not in os.environ:
        pytest.skip(f"some of the {len(required)} rows were chosen by hand")
    missing = sorted(required - JUDGED.keys())
    assert not missing, "these rows judged nothing (with xdist: --dist loadfile)"
    assert JUDGED.keys() == required, "rows nobody asked for"
