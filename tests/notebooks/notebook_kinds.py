"""Which cells print what differs from machine to machine.

A time, a memory figure, a picture and a device's name belong in a cell that nbval ignores, and
nothing else does. `misplaced` follows them from where they are imported, or read off a
measurement, through the names that hold them.
"""

from __future__ import annotations

import ast

from notebook_cells import CHECKS, PRINTERS, Cell, argument, called, displayed, names_in, pieces

TIME, MEMORY, PICTURE, DEVICE = "time", "memory", "picture", "device"
MEASURE = "paged_attention.measure"
PREDICTED = {f"paged_attention.cost.{name}" for name in ("predict", "cost_of")}
ORIGINS = {  # what modules and their functions give; the longest that fits counts
    **dict.fromkeys(["time", "timeit", MEASURE], TIME),
    **dict.fromkeys(["resource", "psutil"], MEMORY),
    **dict.fromkeys(["matplotlib", "IPython.display.Image", "paged_attention.plots"], PICTURE),
    "platform": DEVICE,
    f"{MEASURE}.device_name": DEVICE,
    f"{MEASURE}.profiler_peak_bytes": MEMORY,
    f"{MEASURE}.allocator_peak_bytes": MEMORY,
    **dict.fromkeys([f"{MEASURE}.{name}" for name in ("count", "Counts", "OpCounter")], None),
    f"{MEASURE}.kv_bytes": None,  # exact, and the same everywhere
    "paged_attention.lesson.race": TIME,
}
ATTRIBUTES = {
    **dict.fromkeys(
        ["seconds", "cold_seconds", "spread", "samples", "runs", "gb_per_second"], TIME
    ),
    **dict.fromkeys(["max_memory_allocated", "memory_allocated"], MEMORY),
    **dict.fromkeys(["__version__", "cpu_count", "get_num_threads", "is_available"], DEVICE),
    **dict.fromkeys(["get_device_name", "get_device_properties"], DEVICE),
}
EXACT = {"ops", "gemms", "host_reads", "peak_bytes", "by_op"}  # counted, also in a Measurement


class Origins:
    """Where the names come from, and which hold a time, memory, a picture or a device by now."""

    def __init__(self):
        self.imports: dict[str, str] = {}
        self.names: dict[str, set[str]] = {}

    def follow(self, statement):
        """Learn what a statement imports and binds, also inside loops and functions."""
        for _ in range(2):  # what is bound late in a loop may be used early in it
            held: dict[str, set[str]] = {}
            for n in ast.walk(statement):
                if isinstance(n, ast.Import):
                    for a in n.names:
                        top = a.name.split(".")[0]
                        self.imports[a.asname or top] = a.name if a.asname else top
                elif isinstance(n, ast.ImportFrom):
                    self.imports |= {a.asname or a.name: f"{n.module}.{a.name}" for a in n.names}
                for names, value in bindings(n):
                    for name in names:
                        held.setdefault(name, set()).update(self.kinds(value))
            self.names |= held

    def origin(self, node) -> str:
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        base = self.origin(node.value) if isinstance(node, ast.Attribute) else ""
        return base and f"{base}.{node.attr}"

    def kinds(self, node) -> set[str]:
        """Which of time, memory, picture and device an expression's value holds."""
        if isinstance(node, ast.Attribute) and node.attr in EXACT:
            return set()
        if isinstance(node, ast.Attribute) and self.origin(function_of(node.value)) in PREDICTED:
            # What is predicted of a published profile is the same everywhere.
            return set().union(*map(self.kinds, (*node.value.args, *node.value.keywords)))
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            return {ATTRIBUTES[node.attr]}
        if origin := self.origin(node):
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


def function_of(node):
    return node.func if isinstance(node, ast.Call) else None


def bindings(n):
    """(names, value) for whatever binds names. A function's value is what it returns."""
    if isinstance(n, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and n.value:
        targets = n.targets if isinstance(n, ast.Assign) else [n.target]
        yield set().union(*map(names_in, targets)), n.value
    elif isinstance(n, (ast.For, ast.comprehension)):
        yield names_in(n.target), n.iter
    elif called(n) in {"append", "extend"}:
        yield from ((names_in(n.func.value), value) for value in n.args)
    elif isinstance(n, ast.withitem) and n.optional_vars:
        yield names_in(n.optional_vars), n.context_expr
    elif isinstance(n, ast.FunctionDef):
        yield from (({n.name}, r.value) for r in ast.walk(n) if isinstance(r, ast.Return))


def misplaced(cells: list[Cell]) -> list[str]:
    """Cells ignored without a reason, and cells compared that print what differs by machine."""
    origins, complaints = Origins(), []
    for cell in cells:
        printed, tested, anywhere = [], [], set()
        for statement in cell.tree.body:
            origins.follow(statement)
            anywhere |= origins.kinds(statement)
            for n in ast.walk(statement):
                if isinstance(n, ast.Assert):
                    tested.append(n.test)
                elif called(n) in CHECKS:
                    tested.append(argument(n, 1, "value"))
                elif called(n) in PRINTERS | {"see", "scoreboard"}:
                    printed += [*n.args, *(k.value for k in n.keywords)]
        printed += [displayed(cell)] if displayed(cell) else []
        parts = (piece for value in printed for piece in pieces(value))
        shown = set().union(*map(origins.kinds, parts))
        where = f"cell {cell.number}"
        if cell.is_ignored and not (anywhere - {DEVICE}) and DEVICE not in shown:
            complaints.append(f"{where} is ignored, but prints no time, picture or device")
        if shown and not cell.is_ignored:
            complaints.append(f"{where} is compared, but prints {' and '.join(sorted(shown))}")
        if TIME in set().union(*map(origins.kinds, tested)):
            complaints.append(f"{where} asserts a time, and a busy machine fails")
    return complaints
