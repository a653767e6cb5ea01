"""Where hypothesis isn't installed, as on a borrowed device, tests that draw their inputs skip.

All others run. `make test` never gets here, because it asks for hypothesis first.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

import pytest


class Anything:
    """Stands for a strategy, and for whatever else is made of one."""

    def __call__(self, *arguments, **named):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other):
        return self

    def __iter__(self):
        return iter(())


class Settings:
    """Stands for `settings`, which changes no test that runs without hypothesis."""

    max_examples = 0
    register_profile = load_profile = staticmethod(lambda *_, **__: None)

    def __init__(self, *_, **__):
        pass

    def __call__(self, test):
        return test


class Machine:
    """Stands for a RuleBasedStateMachine, whose test case has no tests."""

    class TestCase:
        settings = None


def given(*_, **__):
    return pytest.mark.skip(reason="draws its inputs, which needs hypothesis")


def attribute(name):
    """Of a module: what is known by that name, or a stand-in for it."""
    if name.startswith("__"):
        raise AttributeError(name)
    return {"given": given, "settings": Settings, "RuleBasedStateMachine": Machine}.get(
        name, Anything()
    )


def stand_in():
    """Put modules of these names where an import finds them."""
    root, *others = (
        module_from_spec(ModuleSpec(name, None))
        for name in ("hypothesis", "hypothesis.strategies", "hypothesis.stateful")
    )
    for module in (root, *others):
        module.__getattr__ = attribute
        sys.modules[module.__name__] = module
    root.strategies, root.stateful = others
