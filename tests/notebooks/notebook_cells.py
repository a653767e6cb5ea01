"""A notebook's code cells, and what they print, from their syntax trees."""

from __future__ import annotations

import ast
import json
import re
from itertools import chain
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
LESSON = CHECKS | {"show_diff", "exercise"}
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


def printed_by(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(k.value for k in call.keywords if k.arg in {"sep", "end", None})]


def displayed(cell: Cell) -> ast.expr | None:
    """The last expression, if Jupyter shows its value."""
    body = cell.tree.body
    if not body or not isinstance(body[-1], ast.Expr) or cell.source.rstrip().endswith(";"):
        return None
    value = body[-1].value
    return None if called(value) in PRINTERS | LESSON else value


def pieces(node: ast.expr):
    """The values that an expression's text is put together from."""
    if isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from pieces(part.value if isinstance(part, ast.FormattedValue) else part)
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        yield from chain.from_iterable(map(pieces, node.elts))
    elif isinstance(node, ast.Dict):
        yield from chain.from_iterable(pieces(n) for n in (*node.keys, *node.values) if n)
    elif isinstance(node, ast.IfExp):
        yield from chain(pieces(node.body), pieces(node.orelse), [node.test])
    elif isinstance(node, ast.BoolOp):
        yield from chain.from_iterable(map(pieces, node.values))
    elif isinstance(node, (ast.Starred, ast.NamedExpr)):
        yield from pieces(node.value)
    elif isinstance(node, ast.Subscript) and isinstance(
        node.value, (ast.Tuple, ast.List, ast.Dict)
    ):
        yield from pieces(node.value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and is_text(node.left):
        yield ast.Constant(re.sub(r"%[-+ #0-9.*]*[a-zA-Z%]", "", literal_text(node.left)))
        yield from pieces(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_text(node):
        yield from chain(pieces(node.left), pieces(node.right))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and is_text(node):
        yield from pieces(node.left if is_text(node.left) else node.right)
    elif isinstance(node, ast.Call) and called(node) in {"str", "repr", "format", "ascii"}:
        if isinstance(node.func, ast.Attribute):  # "{} ops".format(...)
            yield ast.Constant(re.sub(r"{[^}]*}", "", literal_text(node.func.value)))
        yield from chain.from_iterable(
            map(pieces, [*node.args, *(k.value for k in node.keywords)])
        )
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if is_text(node.func.value):  # " ".join(...), f"...".rjust(...)
            yield from pieces(node.func.value)
            if node.func.attr == "join":
                yield from chain.from_iterable(map(pieces, node.args))
        else:
            yield node
    else:
        yield node


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def literal_text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
