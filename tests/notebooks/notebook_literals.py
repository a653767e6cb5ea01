"""Which claims are literals of their own cell.

nbval compares what a cell prints with what it printed before. So a cell that prints a constant of
its own always agrees with itself, and proves nothing. A claim must bring in something from outside
the cell, be it a name or a function's result, or apply a formula to inputs that it names, as a
prediction does.

What is a constant is found by trying: each statement of the cell, and each value that it prints,
is run with nothing but the cell's own names. What runs needs nothing from outside.
"""

from __future__ import annotations

import ast
import math
import re

from notebook_cells import (
    CHECKS,
    LESSON,
    PRINTERS,
    Cell,
    argument,
    called,
    displayed,
    names_in,
    pieces,
)

FUNCTIONS = (abs, all, any, bool, dict, divmod, enumerate, float, int, len, list, max, min, pow)
FUNCTIONS += (range, repr, reversed, round, set, sorted, str, sum, tuple, zip)
KNOWN = {f.__name__: f for f in FUNCTIONS} | {"math": math, "__builtins__": {}}
KNOWN |= dict.fromkeys(PRINTERS | CHECKS, lambda *_, **__: None)
NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d")  # one that stands alone: not V2, fp32, H200
NAMES_WITH_NUMBERS = re.compile(r"\b[Pp]hase [12]\b")
VERDICT = re.compile(r"\b(true|false|ok|passed|passes|nan|inf)\b", re.IGNORECASE)
DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def prints(node) -> bool:
    return called(node) in PRINTERS | LESSON


def literals_elsewhere(cells: list[Cell]) -> dict[int, set[str]]:
    """For each cell, the names that other cells bind, and all that do to a literal."""
    literal, other = {}, set()
    for cell in cells:
        for s in ast.walk(cell.tree):
            if isinstance(s, ast.Assign):
                is_plain = Sandbox().runs(s) and not any(map(called, ast.walk(s)))
                for name in names_in(s, ast.Store):
                    literal.setdefault(name, set()).add(cell.number if is_plain else None)
            elif isinstance(s, (ast.AugAssign, ast.For, ast.comprehension)):
                other |= names_in(s.target)
            elif isinstance(s, (ast.arg, ast.alias)):
                other.add(getattr(s, "arg", None) or s.asname or s.name)
    return {
        cell.number: {n for n, where in literal.items() if not where & {None, cell.number}} - other
        for cell in cells
    }


class Sandbox:
    """The names of a cell that its own literals give."""

    def __init__(self):
        self.names = dict(KNOWN)
        self.formulas: set[str] = set()  # names that are worked out from other names

    def runs(self, statement) -> bool:
        """Whether a statement needs nothing from outside. If it does, its names are forgotten."""
        names, bound = dict(self.names), names_in(statement, ast.Store)
        try:
            if isinstance(statement, DEFINITIONS):
                raise NameError
            exec(compile(ast.Module([statement], []), "<cell>", "exec"), names)
        except Exception:
            for name in self.own() & names_in(statement):
                if name in bound or hasattr(self.names[name], "copy"):  # a list may be filled
                    del self.names[name]
            return False
        self.formulas -= bound
        if isinstance(statement, ast.AugAssign) or self.is_formula(statement):
            self.formulas |= bound
        self.names = names
        return True

    def own(self) -> set[str]:
        return self.names.keys() - KNOWN.keys()

    def is_formula(self, node) -> bool:
        """Whether an operator or a function is applied to a name, here or before."""
        steps = (n for n in ast.walk(node) if isinstance(n, (ast.BinOp, ast.Call)))
        steps = (n for n in steps if not prints(n))
        named = set().union(*(names_in(step, ast.Load) for step in steps)) - KNOWN.keys()
        return bool(named or names_in(node) & self.formulas)

    def is_constant(self, node) -> bool:
        if self.is_formula(node):
            return False
        try:
            eval(compile(ast.Expression(node), "<cell>", "eval"), dict(self.names))
        except Exception:
            return False
        return True


class Claims:
    """What the walk through one cell finds: `faults`, and whether anything printed is computed."""

    def __init__(self, elsewhere: set[str]):
        self.elsewhere, self.sandbox = elsewhere, Sandbox()
        self.faults: list[str] = []
        self.prints = self.computed = False

    def fault(self, node, what):
        self.faults.append(f"line {node.lineno} {what}")

    def run(self, statements):
        for s in statements:
            if isinstance(s, ast.With):
                self.run(s.body)
                continue
            if isinstance(s, ast.FunctionDef) and any(map(prints, ast.walk(s))):
                self.fault(s, "prints inside a function, which should return the value instead")
            alone = self.sandbox.runs(s)
            loops = [n for n in ast.walk(s) if isinstance(n, (ast.For, ast.comprehension))]
            labels = set().union(*(names_in(loop.target) for loop in loops))
            for n in filter(prints, ast.walk(s)):
                if called(n) in CHECKS:
                    self.check(n)
                elif called(n) in PRINTERS:
                    values = [*n.args, *(k.value for k in n.keywords)]
                    self.printed(n, values, labels, not alone and not isinstance(s, ast.Expr))
                else:
                    self.prints = self.computed = True

    def check(self, call):
        value, bound = argument(call, 1, "value"), argument(call, 3, "bound")
        self.prints = self.computed = True
        names = names_in(value)
        if self.sandbox.is_constant(value) or (names and names <= self.elsewhere):
            self.fault(call, f"checks a constant, {ast.unparse(value)}")
        elif ast.dump(value) == ast.dump(bound):
            self.fault(call, "checks a value against itself")

    def printed(self, node, values, labels=frozenset(), decided=False):
        """decided: whether something computed decides what is printed."""
        computed, named, texts = False, False, []
        for piece in (p for value in values for p in pieces(value)):
            name = piece.id if isinstance(piece, ast.Name) else None
            value = self.sandbox.names.get(name, getattr(piece, "value", None))
            if isinstance(value, str) and isinstance(piece, (ast.Constant, ast.Name)):
                texts.append(value)
            elif name in labels | self.elsewhere:
                named = True
            elif self.sandbox.is_constant(piece):
                self.fault(node, f"prints a constant of its own cell, {ast.unparse(piece)}")
            else:
                computed = True
        text = " ".join(texts)
        if NUMBER.search(NAMES_WITH_NUMBERS.sub("", text)):
            self.fault(node, f"prints text with a number in it, {text!r}")
        if named and not computed:
            self.fault(node, "prints the variable of a loop over literals, and nothing it gave")
        if VERDICT.search(text) and not computed and not decided:
            self.fault(node, f"prints a verdict that nothing decides, {text!r}")
        self.prints |= bool(values)
        self.computed |= computed or (decided and bool(texts))


def literal_claims(cells: list[Cell]) -> list[str]:
    """Every claim in the notebook that is a literal of its own cell, in words."""
    elsewhere, faults = literals_elsewhere(cells), []
    for cell in cells:
        if cell.is_ignored:
            continue
        claims = Claims(elsewhere[cell.number])
        claims.run(cell.tree.body)
        last = displayed(cell)
        if last is not None and cell.outputs:
            claims.printed(last, [last])
        faults += [f"cell {cell.number}, {fault}" for fault in claims.faults]
        if claims.prints and not claims.computed:
            faults.append(f"cell {cell.number} prints nothing that it computed")
    return faults
