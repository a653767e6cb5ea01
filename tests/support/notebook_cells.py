"""A notebook's code cells, and what they print, from their syntax trees."""

from __future__ import annotations

import ast
import json
from typing import NamedTuple

IGNORED = "nbval-ignore-output"


class Cell(NamedTuple):
    number: int  # from 1, among the code cells
    source: str
    tags: tuple[str, ...]
    outputs: list[dict]
    execution_count: int | None

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def is_ignored(self) -> bool:
        return IGNORED in self.tags

    @property
    def is_claim(self) -> bool:
        return bool(self.outputs) and not self.is_ignored


def text_of(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def code_cells(notebook) -> list[Cell]:
    """The code cells of a notebook: a path to one, or its parsed JSON."""
    if not isinstance(notebook, dict):
        notebook = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    return [
        Cell(
            number,
            text_of(c["source"]),
            tuple(c["metadata"].get("tags", ())),
            c["outputs"],
            c["execution_count"],
        )
        for number, c in enumerate(cells, 1)
    ]


def notebook_of(*cells) -> dict:
    """A notebook's JSON, for tests: each cell a source or (source, tag), with an output stored."""
    pairs = [(c, ()) if isinstance(c, str) else (c[0], c[1:]) for c in cells]
    return {
        "cells": [
            {
                "cell_type": "code",
                "source": source.splitlines(keepends=True),
                "metadata": {"tags": list(tags)},
                "outputs": [{"output_type": "stream", "name": "stdout", "text": ["printed\n"]}],
                "execution_count": number,
            }
            for number, (source, tags) in enumerate(pairs, 1)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


# -- what is printed --

CHECKS = {"check", "check_fails"}
LESSON = CHECKS | {"show_diff", "exercise", "write_step", "see", "scoreboard"}
PRINTERS = {"print", "display", "pprint"}


def called(node: ast.AST) -> str | None:
    """`f` for f(...) and for a.b.f(...)."""
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "id", getattr(node.func, "attr", None))


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    if len(call.args) > position:
        return call.args[position]
    return next((k.value for k in call.keywords if k.arg == keyword), None)


def displayed(cell: Cell) -> ast.expr | None:
    """The last expression, if Jupyter shows its value."""
    body = cell.tree.body
    if not body or not isinstance(body[-1], ast.Expr) or cell.source.rstrip().endswith(";"):
        return None
    value = body[-1].value
    return None if called(value) in PRINTERS | LESSON else value


def names_in(node: ast.AST | None, kind: type = ast.expr_context) -> set[str]:
    """The names in a syntax tree. kind: ast.Store for those that are bound there."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name)) if node else ()
    return {n.id for n in names if isinstance(n.ctx, kind)}


def pieces(node: ast.expr):
    """The values that an expression's text is put together from."""
    if isinstance(node, ast.JoinedStr):
        parts = node.values
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        parts = node.elts
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse, node.test]
    elif isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, (ast.FormattedValue, ast.Starred, ast.NamedExpr)):
        parts = [node.value]
    elif (
        isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)) and is_text(node)
    ):
        parts = [node.left, node.right] if isinstance(node.op, ast.Add) else [node.left]
    elif called(node) in {"str", "repr"}:
        parts = node.args
    elif called(node) == "join" and is_text(node.func.value):
        parts = [node.func.value, *node.args]
    else:
        return [node]
    return [piece for part in parts for piece in pieces(part)]


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
