"""Every Example in a docstring runs and prints what it says, and the public names have one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import paged_attention as package

MODULES = ["paged_attention"]
MODULES += [m.name for m in pkgutil.walk_packages(package.__path__, "paged_attention.")]
WITH_EXAMPLES = "paged_attention plan_decode DecodePlan merge_states PagedKVCache OutOfBlocks"
WITH_EXAMPLES += " Workspace reference_attention"


@pytest.mark.parametrize("name", [m for m in MODULES if not m.endswith("__main__")])
def test_a_modules_examples_print_what_they_say(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("name", WITH_EXAMPLES.split())
def test_a_public_name_has_an_example(name):
    found = doctest.DocTestFinder().find(getattr(package, name), name)
    assert any(test.examples for test in found)
