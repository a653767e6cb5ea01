"""What notebooks claim with: check, check_fails, variant. (show_diff: test_notebook_runs.)"""

import pytest
import torch

from paged_attention.lesson import check, check_fails, show_diff, variant
from paged_attention.stages import naive_loops

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "value, op, bound", [(1e-7, "<=", 1e-6), (torch.tensor(3), "==", 3), (2, ">", 1), (1, "<", 2)]
)
def test_a_true_claim_prints_the_bound_and_not_the_value(value, op, bound, capsys):
    check("label", value, op, bound)
    assert capsys.readouterr().out == f"label {op} {bound!r}  ok\n"
    with pytest.raises(AssertionError, match="label: the check passes"):
        check_fails("label", value, op, bound)


@pytest.mark.parametrize("op", ["<", "<=", "==", ">=", ">"])
@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan"))])
def test_nan_fails_every_check(value, op, capsys):
    with pytest.raises(AssertionError, match="label: nan is not"):
        check("label", value, op, 0.0)
    assert capsys.readouterr().out == ""
    check_fails("label", value, op, 0.0)
    assert capsys.readouterr().out == f"label {op} 0.0  fails: caught\n"


@pytest.mark.parametrize(
    "value, op, bound", [(2e-6, "<=", 1e-6), (1.0, "<", 1.0), (3, "==", 4), (1, ">", 1)]
)
def test_a_false_claim_raises_with_value_and_bound(value, op, bound):
    with pytest.raises(AssertionError, match=f"label: {value} is not {op} {bound}"):
        check("label", value, op, bound)


def test_a_variant_is_the_stage_with_pieces_replaced(capsys):
    inputs = torch.ones(1, 2, 4), torch.zeros(1, 1, 1, 4, 4), torch.ones(1, 1, 4, 4)
    args = *inputs, torch.tensor([[0]]), torch.tensor([3]), 1.0
    assert (naive_loops(*args) == 1).all()
    empty = variant(naive_loops, {"if seq_len == 0": "if True"})
    assert (empty(*args) == 0).all()
    both = {"if seq_len == 0": "if True", "torch.zeros_like(query)": "torch.ones_like(query) * 5"}
    assert (variant(naive_loops, both)(*args) == 5).all()
    of_a_variant = variant(empty, {"torch.zeros_like(query)": "torch.ones_like(query) * 5"})
    assert (of_a_variant(*args) == 5).all()
    show_diff(naive_loops, empty)
    diff = capsys.readouterr().out.splitlines()
    assert [line.strip("-+ ") for line in diff if line[0] in "-+"] == [
        "if seq_len == 0:",
        "if True:",
    ]
    with pytest.raises(ValueError, match="must stand in naive_loops once"):
        variant(naive_loops, {"no such piece": ""})
    with pytest.raises(ValueError, match="must stand in naive_loops once"):
        variant(naive_loops, {"seq_len": "n"})
