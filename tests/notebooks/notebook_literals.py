"""Which claims are literals of their own cell. Used by test_notebooks.py.

nbval compares what a cell prints with what it printed before, so a cell that prints a constant of
its own always agrees with itself and proves nothing. `literal_claims` finds those: it folds every
expression a cell prints, following names, loops and branches as far as the cell's own literals
reach. A claim must bring in something from outside the cell, be it a name or a function's result;
or apply a formula to inputs that it names, as a prediction does, with a result that isn't itself
written in the cell.
"""

from __future__ import annotations

import ast
import copy
import math
import re
from itertools import chain

from notebook_cells import CHECKS, PRINTERS, Cell, argument, called, displayed, pieces, printed_by


class UNKNOWN:
    """The worth of what is computed: not to be had from the cell's literals alone."""


SAFE = {
    f.__name__: f
    for f in (
        abs,
        all,
        any,
        bool,
        dict,
        divmod,
        enumerate,
        float,
        format,
        int,
        len,
        list,
        max,
        min,
    )
    + (pow, range, repr, reversed, round, set, sorted, str, sum, tuple, zip)
} | {"math": math, "True": True, "False": False, "None": None}
# Calls that hand on what they are given: torch.tensor(27).item() is 27.
WRAPPERS = {"tensor", "as_tensor", "array", "asarray", "int32", "int64", "float32", "float64"}
WRAPPERS |= {"HTML", "Markdown", "Pretty", "Latex", "Fraction", "Decimal"}
UNWRAPPERS = {"item", "tolist", "numpy"}

NEVER_HANDED_ON = {"print", "display", *CHECKS}  # only called, by these names
REFUSED = {"exec", "eval", "get_ipython", "compile", "__import__"}

NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d")  # one that stands alone: not V2, fp32, H200
NAMES_WITH_NUMBERS = re.compile(r"\b[Pp]hase [12]\b")
VERDICT = re.compile(r"\b(true|false|ok|passed|passes|nan|inf)\b", re.IGNORECASE)


class Scope(dict):
    """What each name is worth: a value, or UNKNOWN. Names that aren't here come from elsewhere."""

    def __init__(self, values=(), labels=(), formulas=(), written=frozenset()):
        super().__init__(values)
        self.labels = set(labels)  # variables of loops over literals
        self.formulas = set(formulas)  # names whose values were worked out from other names
        self.written = written  # the numbers that stand in the cell

    def copy(self):
        return Scope(copy.deepcopy(dict(self)), self.labels, self.formulas, self.written)


class _Unwrap(ast.NodeTransformer):
    def visit_Call(self, node):
        self.generic_visit(node)
        name = called(node)
        if name in WRAPPERS and len(node.args) == 1:
            return node.args[0]
        if name in UNWRAPPERS and isinstance(node.func, ast.Attribute) and not node.args:
            return node.func.value
        return node


def fold(node: ast.expr, scope: Scope):
    """The expression's value, if the cell's own literals give it; else UNKNOWN."""
    node = _Unwrap().visit(copy.deepcopy(node))
    local = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    } | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    for n in ast.walk(node):
        if isinstance(n, ast.Name) and n.id not in local:
            if scope.get(n.id, SAFE.get(n.id, UNKNOWN)) is UNKNOWN:
                return UNKNOWN
        elif isinstance(n, (ast.Await, ast.Yield, ast.YieldFrom)):
            return UNKNOWN
    try:
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<cell>", "eval")
        return eval(code, {"__builtins__": {}, **SAFE, **scope})
    except Exception:
        return UNKNOWN


def is_formula(node: ast.expr, scope: Scope) -> bool:
    """Whether a value is worked out from names: by an operator or a function, here or before."""
    node = _Unwrap().visit(copy.deepcopy(node))
    if names_in(node) & scope.formulas:
        return True
    steps = [n for n in ast.walk(node) if isinstance(n, (ast.BinOp, ast.Call))]
    return any(
        isinstance(n, ast.Name) and n.id not in SAFE and not callable(scope.get(n.id))
        for step in steps
        for n in ast.walk(step)
    )


def constant(node: ast.expr, scope: Scope):
    """The value, if it is a constant of its cell, as written or once folded; else UNKNOWN."""
    value = fold(node, scope)
    if value is UNKNOWN or not is_formula(node, scope):
        return value
    parts = list(value) if isinstance(value, (list, tuple, set)) else [value]
    is_written = parts and all(type(p) in (int, float) and p in scope.written for p in parts)
    return value if is_written else UNKNOWN


def numbers_written(cell: Cell) -> frozenset:
    """The numbers in a cell's source, small ones and those that `check` compares with aside."""
    tree = cell.tree
    exempt = {
        id(n)
        for c in ast.walk(tree)
        if called(c) in CHECKS
        for a in [*c.args, *(k.value for k in c.keywords)]
        for n in ast.walk(a)
    }
    found = {
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and type(n.value) in (int, float) and id(n) not in exempt
    }
    return frozenset(x for n in found if n >= 10 for x in (n, -n))


class LiteralClaims:
    """Walks one cell in order; `complaints` is what it found, `computed` whether anything printed
    came from outside the cell."""

    def __init__(self, elsewhere: set[str], printing: dict[str, set[int]]):
        self.elsewhere = elsewhere  # names that other cells bind to a literal, and never to else
        self.printing = printing  # functions of the notebook: which arguments they print
        self.complaints: list[str] = []
        self.prints = self.computed = False

    # statements

    def run(self, statements, scope: Scope, chosen=False):
        """`chosen`: these run or not depending on something computed."""
        for s in statements:
            self.statement(s, scope, chosen)

    def statement(self, s, scope, chosen):
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.function(s, scope)
        elif isinstance(s, ast.ClassDef):
            self.run(s.body, scope.copy(), chosen)
        elif isinstance(s, (ast.For, ast.AsyncFor, ast.While)):
            self.loop(s, scope, chosen)
        elif isinstance(s, ast.If):
            self.expression(s.test, scope, chosen)
            chosen = chosen or fold(s.test, scope) is UNKNOWN
            self.branches([s.body, s.orelse], scope, chosen)
        elif isinstance(s, ast.Try):
            self.branches([s.body + s.orelse, *(h.body for h in s.handlers)], scope, True)
            self.run(s.finalbody, scope, chosen)
        elif isinstance(s, (ast.With, ast.AsyncWith)):
            for item in s.items:
                self.expression(item.context_expr, scope, chosen)
                forget(item.optional_vars, scope)
            self.run(s.body, scope, chosen)
        elif isinstance(s, ast.Assign):
            self.expression(s.value, scope, chosen)
            for target in s.targets:
                bind(target, s.value, scope)
        elif isinstance(s, ast.AnnAssign) and s.value:
            self.expression(s.value, scope, chosen)
            bind(s.target, s.value, scope)
        elif isinstance(s, ast.AugAssign):
            self.expression(s.value, scope, chosen)
            if isinstance(s.target, ast.Name):
                old = ast.Name(s.target.id, ast.Load())
                bind(s.target, ast.BinOp(old, s.op, s.value), scope)
            else:
                forget(s.target, scope)
        elif isinstance(s, (ast.Import, ast.ImportFrom)):
            for alias in s.names:
                scope[(alias.asname or alias.name).split(".")[0]] = UNKNOWN
        else:
            for child in ast.iter_child_nodes(s):
                if isinstance(child, ast.expr):
                    self.expression(child, scope, chosen)

    def loop(self, s, scope, chosen):
        for name in bound_in(s.body):
            if name in scope:
                scope[name] = UNKNOWN
        if isinstance(s, ast.While):
            self.expression(s.test, scope, chosen)
            chosen = chosen or fold(s.test, scope) is UNKNOWN
        else:
            self.expression(s.iter, scope, chosen)
            items = fold(s.iter, scope)
            forget(s.target, scope)
            if items is UNKNOWN:
                chosen = True
            else:
                try:
                    items = list(items)
                except TypeError:
                    items = []
                if len(items) == 1:
                    bind(s.target, ast.Constant(items[0]), scope, items[0])
                else:
                    scope.labels |= names_in(s.target)
        self.branches([s.body], scope, chosen)
        self.run(s.orelse, scope, chosen)

    def branches(self, bodies, scope, chosen):
        """Run each on its own; keep what they agree on."""
        ends = []
        for body in bodies:
            end = scope.copy()
            self.run(body, end, chosen)
            ends.append(end)
        scope.formulas |= set().union(*(end.formulas for end in ends))
        scope.labels |= set().union(*(end.labels for end in ends))
        for name in set().union(*ends):
            values = [end[name] for end in ends if name in end]
            scope[name] = values[0] if all(same(v, values[0]) for v in values) else UNKNOWN

    def function(self, f, scope):
        parameters = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        inner = scope.copy()
        inner.update(dict.fromkeys(parameters, UNKNOWN))
        self.run(f.body, inner, chosen=True)
        returns = [n.value for n in ast.walk(f) if isinstance(n, ast.Return)]
        values = [UNKNOWN if r is None else fold(r, inner) for r in returns]
        agree = values and all(same(v, values[0]) for v in values)
        scope[f.name] = (lambda *_, value=values[0], **__: value) if agree else UNKNOWN

    # expressions

    def expression(self, node, scope, chosen):
        for n in ast.walk(node):
            if isinstance(
                n, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
            ):
                if any(called(c) in PRINTERS | CHECKS for c in ast.walk(n)):
                    self.complain(n, "prints inside a comprehension or lambda: write a loop")
            if isinstance(n, ast.NamedExpr):
                bind(n.target, n.value, scope)
            if isinstance(n, ast.Call):
                self.call(n, scope, chosen)
        functions = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        for n in ast.walk(node):
            if isinstance(n, ast.Name) and id(n) not in functions and n.id in NEVER_HANDED_ON:
                self.complain(n, f"{n.id} is handed on instead of called")
            if isinstance(n, ast.Name) and n.id in REFUSED:
                self.complain(n, f"{n.id} hides what it does")

    def call(self, call, scope, chosen):
        name = called(call)
        if name in CHECKS:
            self.check(call, scope)
        elif name in {"show_diff", "exercise"}:
            self.prints = self.computed = True
        elif name in PRINTERS:
            self.printed(call, printed_by(call), scope, chosen)
        elif name in self.printing:
            shown = [a for i, a in enumerate(call.args) if i in self.printing[name]]
            shown += [k.value for k in call.keywords if k.arg in self.printing[name]]
            self.printed(call, shown, scope, chosen)
            self.computed = True  # what else it prints was looked at where it is defined
        elif fold(call, scope) is UNKNOWN:
            for n in ast.walk(call):  # whoever is handed a list may fill it
                if isinstance(n, ast.Name) and isinstance(scope.get(n.id), (list, dict, set)):
                    scope[n.id] = UNKNOWN

    def check(self, call, scope):
        value, bound = argument(call, 1, "value"), argument(call, 3, "bound")
        self.prints = True
        if value is None or bound is None:
            self.complain(call, "check takes a label, a value, an operator and a bound")
        elif constant(value, scope) is not UNKNOWN:
            self.complain(call, f"checks a constant, {ast.unparse(value)}")
        elif isinstance(value, ast.Name) and value.id in self.elsewhere:
            self.complain(call, f"checks {value.id}, which the notebook sets to a literal")
        elif ast.dump(value) == ast.dump(bound):
            self.complain(call, "checks a value against itself")
        else:
            self.computed = True

    def printed(self, call, arguments, scope, chosen):
        found = [(p, constant(p, scope)) for a in arguments for p in pieces(a)]
        labels = [p for p, _ in found if isinstance(p, ast.Name) and p.id in scope.labels]
        computed = [
            p
            for p, value in found
            if value is UNKNOWN
            and p not in labels
            and getattr(p, "id", None) not in self.elsewhere
        ]
        texts = [v for _, v in found if isinstance(v, str)]
        self.prints = self.prints or bool(found)
        self.computed = self.computed or bool(computed) or (chosen and bool(texts))
        for p, value in found:
            if isinstance(value, str):
                if NUMBER.search(NAMES_WITH_NUMBERS.sub("", value)):
                    self.complain(call, f"prints text with a number in it, {value!r}")
            elif value is not UNKNOWN:
                self.complain(call, f"prints a constant of its own cell, {ast.unparse(p)}")
        if labels and not computed:
            self.complain(call, "prints the variable of a loop over literals, and nothing it gave")
        if not computed and not chosen and any(map(VERDICT.search, texts)):
            self.complain(call, f"prints a verdict that nothing decides, {' '.join(texts)!r}")

    def complain(self, node, what):
        message = f"line {getattr(node, 'lineno', 1)} {what}"
        if message not in self.complaints:
            self.complaints.append(message)


def same(a, b) -> bool:
    return a is b or (UNKNOWN not in (a, b) and type(a) is type(b) and bool(a == b))


def names_in(target) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target else set()


def bound_in(statements) -> set[str]:
    """Names that these statements bind, or may fill through a method."""
    found = set()
    for n in chain.from_iterable(map(ast.walk, statements)):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            found.add(n.id)
        elif isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store):
            found |= names_in(n.value)
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
            found |= names_in(n.func.value)
    return found


def forget(target, scope):
    for name in names_in(target):
        scope[name] = UNKNOWN
        scope.labels.discard(name)


def bind(target, value: ast.expr, scope, known=UNKNOWN):
    """`known`: the value, where the caller has it already."""
    if isinstance(target, ast.Name):
        is_worked_out = is_formula(value, scope)
        scope[target.id] = fold(value, scope) if known is UNKNOWN else known
        scope.formulas.discard(target.id)
        scope.formulas |= {target.id} if is_worked_out else set()
        scope.labels.discard(target.id)
        if isinstance(value, ast.Name) and value.id in scope.labels:
            scope.labels.add(target.id)
    elif isinstance(target, (ast.Tuple, ast.List)):
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            values = [fold(v, scope) for v in value.elts]
            for t, node, v in zip(target.elts, value.elts, values):
                bind(t, node, scope, v)
            return
        whole = fold(value, scope) if known is UNKNOWN else known
        try:
            parts = list(whole)
        except TypeError:
            parts = []
        if len(parts) != len(target.elts):
            forget(target, scope)
        else:
            for t, part in zip(target.elts, parts):
                bind(t, ast.Constant(None), scope, part)
    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        holder, key = scope.get(target.value.id), fold(target.slice, scope)
        item = fold(value, scope) if known is UNKNOWN else known
        if isinstance(holder, (list, dict)) and UNKNOWN not in (key, item):
            holder[key] = item
        else:
            forget(target, scope)
    else:
        forget(target, scope)


def literals_by_cell(cells) -> dict[int, set[str]]:
    """For each cell, the names that other cells bind to a plain literal and no cell to else."""
    literal: dict[str, set[int]] = {}
    other = set()
    for cell in cells:
        for n in ast.walk(cell.tree):
            if isinstance(n, ast.Assign):
                pairs = []
                for t in n.targets:
                    if isinstance(t, ast.Tuple) and isinstance(n.value, ast.Tuple):
                        pairs += zip(t.elts, n.value.elts)
                    else:
                        pairs.append((t, n.value))
                for t, v in pairs:
                    if isinstance(t, ast.Name) and isinstance(v, (ast.Constant, ast.UnaryOp)):
                        if fold(v, Scope()) is not UNKNOWN:
                            literal.setdefault(t.id, set()).add(cell.number)
                            continue
                    other |= names_in(t)
            elif isinstance(n, (ast.AugAssign, ast.For)):
                other |= names_in(n.target)
            elif isinstance(n, ast.AnnAssign) and n.value is not None:
                other |= names_in(n.target)
            elif isinstance(n, (ast.arg, ast.alias)):
                other.add(getattr(n, "arg", None) or n.asname or n.name)
    return {
        c.number: {n for n, where in literal.items() if n not in other and c.number not in where}
        for c in cells
    }


def printing_functions(cells) -> dict[str, set]:
    """The notebook's own functions that print, and which arguments, by position and by name."""
    found = {}
    for cell in cells:
        for f in ast.walk(cell.tree):
            if not isinstance(f, ast.FunctionDef):
                continue
            calls = [c for c in ast.walk(f) if isinstance(c, ast.Call)]
            shown = [a for c in calls if called(c) in PRINTERS for a in printed_by(c)]
            shown += [v for c in calls if called(c) in CHECKS if (v := argument(c, 1, "value"))]
            if shown:
                direct = {p.id for a in shown for p in pieces(a) if isinstance(p, ast.Name)}
                names = [a.arg for a in (*f.args.posonlyargs, *f.args.args)]
                names_kw = [a.arg for a in f.args.kwonlyargs]
                found[f.name] = {i for i, n in enumerate(names) if n in direct} | (
                    direct & {*names, *names_kw}
                )
    return found


def literal_claims(cells: list[Cell]) -> list[str]:
    """Every claim in the notebook that is a literal of its own cell, in words."""
    elsewhere, printing = literals_by_cell(cells), printing_functions(cells)
    complaints = []
    for cell in cells:
        if cell.is_ignored:
            continue
        walk = LiteralClaims(elsewhere[cell.number], printing)
        scope = Scope(written=numbers_written(cell))
        walk.run(cell.tree.body, scope)
        last = displayed(cell)
        if last is not None and fold(last, scope) is not None:  # None shows nothing
            if not isinstance(last, ast.Call) or cell.outputs:
                walk.printed(last, [last], scope, chosen=False)
        complaints += [f"cell {cell.number}, {c}" for c in walk.complaints]
        only_defines = all(isinstance(s, (ast.FunctionDef, ast.Import)) for s in cell.tree.body)
        if walk.prints and not walk.computed and not only_defines:
            complaints.append(f"cell {cell.number} prints nothing that it computed")
    return complaints
