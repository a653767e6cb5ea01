"""Which cells print what differs from machine to machine. Used by test_notebooks.py.

A time, a memory figure, a picture and a device's name belong in a cell that nbval ignores, and
nothing else does. `misplaced` follows them from where they are imported, or read off a
measurement, through the names that hold them.
"""

from __future__ import annotations

import ast

from notebook_cells import CHECKS, PRINTERS, Cell, argument, called, displayed, pieces, printed_by

TIME, MEMORY, PICTURE, DEVICE = "time", "memory", "picture", "device"
_MEASURE = "paged_attention.measure"
ORIGINS = {  # the longest that fits counts
    "time": TIME,
    "timeit": TIME,
    "paged_attention.timing": TIME,
    "paged_attention.breakdown": TIME,
    "paged_attention.compare": TIME,
    _MEASURE: TIME,
    f"{_MEASURE}.profiler_peak_bytes": MEMORY,
    f"{_MEASURE}.allocator_peak_bytes": MEMORY,
    f"{_MEASURE}.device_name": DEVICE,
    f"{_MEASURE}.count": None,  # exact, and the same everywhere
    f"{_MEASURE}.Counts": None,
    f"{_MEASURE}.OpCounter": None,
    f"{_MEASURE}.kv_bytes": None,
    "matplotlib": PICTURE,
    "IPython.display.Image": PICTURE,
    "paged_attention.plots": PICTURE,
    "paged_attention.lengths_plot": PICTURE,
    "resource": MEMORY,
    "psutil": MEMORY,
    "platform": DEVICE,
}
ATTRIBUTES = {
    "seconds": TIME,
    "cold_seconds": TIME,
    "spread": TIME,
    "samples": TIME,
    "runs": TIME,
    "gb_per_second": TIME,
    "max_memory_allocated": MEMORY,
    "memory_allocated": MEMORY,
    "__version__": DEVICE,
    "cpu_count": DEVICE,
    "get_num_threads": DEVICE,
    "get_device_name": DEVICE,
    "get_device_properties": DEVICE,
    "is_available": DEVICE,
}
PREDICT = "paged_attention.cost.predict"
EXACT = {"ops", "gemms", "host_reads", "peak_bytes", "by_op"}  # counted, also in a Measurement


class Origins:
    """Where the names come from, and which hold a time, memory, a picture or a device by now."""

    def __init__(self):
        self.imports: dict[str, str] = {}
        self.names: dict[str, set[str]] = {}

    def follow(self, statement):
        """Learn what a statement imports and binds, also inside loops and functions."""
        held: dict[str, set[str]] = {}
        for _ in range(2):  # what is bound late in a loop may be used early in it
            for n in ast.walk(statement):
                if isinstance(n, ast.Import):
                    for a in n.names:
                        top = a.name.split(".")[0]
                        self.imports[a.asname or top] = a.name if a.asname else top
                elif isinstance(n, ast.ImportFrom):
                    for a in n.names:
                        self.imports[a.asname or a.name] = f"{n.module}.{a.name}"
                for target, value in bindings(n):
                    for name in {target} if isinstance(target, str) else names_in(target):
                        held.setdefault(name, set()).update(self.kinds(value))
            self.names.update(held)

    def origin(self, node) -> str:
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value)
            return base and f"{base}.{node.attr}"
        return ""

    def kinds(self, node) -> set[str]:
        """Which of time, memory, picture and device an expression's value holds."""
        if isinstance(node, ast.Attribute) and node.attr in EXACT:
            return set()
        if isinstance(node, ast.Attribute) and self.origin(called_by(node.value)) == PREDICT:
            # What is predicted of a published profile is the same everywhere.
            return set().union(*map(self.kinds, (*node.value.args, *node.value.keywords)))
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            return {ATTRIBUTES[node.attr]}
        origin = self.origin(node)
        if origin:
            if origin.startswith("paged_attention.") and ".draw" in origin:
                return {PICTURE}
            known = [o for o in ORIGINS if f"{origin}.".startswith(f"{o}.")]
            return {ORIGINS[max(known, key=len)]} - {None} if known else set()
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        found = set().union(*map(self.kinds, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Call):  # being on a device is not naming it
            given = set().union(*map(self.kinds, (*node.args, *node.keywords)))
            found -= given & {DEVICE} - self.kinds(node.func)
        return found


def called_by(node):
    return node.func if isinstance(node, ast.Call) else None


def names_in(target) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def bindings(n):
    """(target, value) for whatever binds a name; a function's value is what it returns."""
    if isinstance(n, ast.Assign):
        yield from ((target, n.value) for target in n.targets)
    elif isinstance(n, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and n.value:
        yield n.target, n.value
    elif isinstance(n, (ast.For, ast.comprehension)):
        yield n.target, n.iter
    elif isinstance(n, ast.withitem) and n.optional_vars:
        yield n.optional_vars, n.context_expr
    elif isinstance(n, ast.FunctionDef):
        for r in ast.walk(n):
            if isinstance(r, ast.Return) and r.value:
                yield n.name, r.value


def printed_by_statement(statement) -> list[ast.expr]:
    """What it prints, less what `check` keeps to itself."""
    calls = [n for n in ast.walk(statement) if called(n) in PRINTERS]
    return [p for c in calls for a in printed_by(c) for p in pieces(a)]


def misplaced(cells: list[Cell]) -> list[str]:
    """Cells ignored without a reason, and cells compared that print what differs by machine."""
    origins = Origins()
    complaints = []
    for cell in cells:
        printed, anywhere, tested = set(), set(), set()
        for statement in cell.tree.body:
            origins.follow(statement)
            printed = printed.union(*map(origins.kinds, printed_by_statement(statement)))
            anywhere |= origins.kinds(statement)
            for n in ast.walk(statement):
                if isinstance(n, ast.Assert):
                    tested |= origins.kinds(n.test)
                elif called(n) in CHECKS and argument(n, 1, "value"):
                    tested |= origins.kinds(argument(n, 1, "value"))
        last = displayed(cell)
        if last is not None:
            printed = printed.union(*map(origins.kinds, pieces(last)))
        if cell.is_ignored:
            if not (anywhere - {DEVICE}) and DEVICE not in printed:
                complaints.append(
                    f"cell {cell.number} is ignored, but times nothing, plots nothing "
                    "and names no device"
                )
        elif printed:
            what = " and ".join(sorted(printed))
            complaints.append(f"cell {cell.number} is compared, but prints {what}")
        if TIME in tested:
            complaints.append(f"cell {cell.number} asserts a time: busy machines fail")
    return complaints
