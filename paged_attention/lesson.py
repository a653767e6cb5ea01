"""What a notebook needs to make a claim: check a number without printing it, show what changed.

Both print the same text on every machine, so that a notebook's stored output can be compared with
a fresh run's, character by character.
"""

import difflib
import inspect
import itertools
import linecache
import operator
import reprlib

SERIES = (
    "paged_kv_cache",
    "naive_loops",
    "batched_gather",
    "single_bmm",
    "gqa_broadcast",
    "single_tile",
    "fused_phase2",
    "grid_even_share",
    "final_kernel",
    "real_model",
)

_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
_VARIANTS = itertools.count(1)


def check(label, value, op, bound):
    """Assert `value op bound` and print the claim, never the value.

    A measured error differs from machine to machine, the bound it must keep does not.

    Args:    label: what the value is
             value: a number, or a tensor of one element; NaN fails every check
             op: "<", "<=", "==", ">=" or ">"
             bound: a number; with "==", also a tuple, a string, ...
    Raises:  AssertionError: the claim is wrong; names the value and the bound
             ValueError: op is none of the five
    """
    if op not in _OPERATORS:
        raise ValueError(f"op is {op!r}; it should be one of {', '.join(_OPERATORS)}")
    value, bound = _plain(value), _plain(bound)
    if not _OPERATORS[op](value, bound):
        raise AssertionError(f"{label}: {value!r} is not {op} {bound!r}")
    print(f"{label} {op} {bound!r}  ok")


def check_fails(label, value, op, bound):
    """Show that a wrong value is caught: `check` with the same arguments must raise.

    Raises:  AssertionError: the check passes, so it would not have caught the mistake
    """
    if _OPERATORS[op](_plain(value), _plain(bound)):
        raise AssertionError(f"{label}: the check passes with {_plain(value)!r} {op} {bound!r}")
    print(f"{label} {op} {_plain(bound)!r}  fails: caught")


def variant(function, edits):
    """A stage with pieces of its text replaced, to see what a mistake, or an idea, does.

    Args:    function: a function whose file or notebook cell holds it whole, imports included; or
                   a variant
             edits: {piece: what to put there}; each piece stands in the text once
    Returns: the function of the same name, defined by the changed text; `show_diff` shows it
    Raises:  ValueError: a piece that doesn't stand there once
    """
    text = "\n".join(_text(function)) + "\n"
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"a piece must stand in {function.__name__} once, got {old!r}")
        text = text.replace(old, new)
    filename = f"<variant {next(_VARIANTS)} of {function.__name__}>"
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    names = {"__name__": filename}
    exec(compile(text, filename, "exec"), names)
    return names[function.__name__]


def exercise(name, answer, is_right):
    """Judge a reader's answer to an exercise; None means it hasn't been tried.

    Args:    name: of the exercise
             answer: whatever the reader made; None while there is none
             is_right: called with the answer, true if it is right
    Raises:  AssertionError: the answer is wrong; names it
    """
    if answer is None:
        print(f"{name}: not tried yet")
        return
    shown = reprlib.repr(answer)
    try:
        right = bool(is_right(answer))
    except Exception as error:
        kind = type(answer).__name__
        raise AssertionError(f"{name}: a {kind} can't be checked, {shown}: {error}") from error
    if not right:
        raise AssertionError(f"{name}: {shown} is not right, try again")
    print(f"{name}: right")


def show_diff(before, after):
    """Print what changed between two stages, as a unified diff of their whole texts.

    Args:    before, after: functions or modules; a function stands for the file, or the notebook
                   cell, that defines it
    """
    lines = difflib.unified_diff(_text(before), _text(after), n=1, lineterm="")
    body = list(lines)[2:]  # without the two header lines
    for line in body[1:]:  # ... and without the first separator
        print("..." if line.startswith("@@") else line.rstrip())


def _plain(x):
    return x.item() if hasattr(x, "item") else x


def _text(module_or_function):
    lines, _ = inspect.findsource(module_or_function)
    return [line.rstrip("\n") for line in lines]
