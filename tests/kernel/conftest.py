"""The files below run their tests once with each backend that a CPU has."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from paged_attention.kernel.compiled import choice

EACH_BACKEND = {"test_field_cases", "test_differential", "test_invariance", "test_run"}


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__ in EACH_BACKEND:
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", choice.BACKENDS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def backend(request):
    """What None means, for a while."""
    if request.param == "numba" and find_spec("numba") is None:
        pytest.skip("numba is not installed")
    before, choice.DEFAULT = choice.DEFAULT, request.param
    yield request.param
    choice.DEFAULT = before
