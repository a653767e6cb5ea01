"""The way of K and V through a call, told from the call itself: what each part reads and writes.

cache -> gathered -> reordered -> repeated -> logits -> weights -> states -> result

Each tensor stands at one place of the way. An operation belongs to the part that leads to the
place where it writes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paged_attention.cost.trace import bytes_read, bytes_written
from paged_attention.measure.counting import OpCounter
from paged_attention.measure.profiling import kind_of

CACHE, GATHERED, REORDERED, REPEATED, LOGITS, WEIGHTS, STATES, RESULT = range(8)
PARTS = ("gather", "reorder", "repeat, pad", "Q @ K^T", "softmax", "weights @ V", "merge")


@dataclass(frozen=True)
class Part:
    """What one part of the way costs: operations, and bytes read and written."""

    ops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: Part) -> Part:
        sums = self.ops + other.ops, self.bytes_read + other.bytes_read
        return Part(*sums, self.bytes_written + other.bytes_written)


def way_of(call: Callable[[], object], key_cache: Tensor, value_cache: Tensor) -> dict[str, Part]:
    """What a call of one sequence costs, part by part. It is run once.

    Args:    call: reads the caches; what it returns is dropped
             key_cache, value_cache: the very tensors that the call reads
    Returns: {part: Part} for each of PARTS in their order. Operations that touch neither K and V
             nor what came of them are left out: the plan, the checks, the query's scaling
    Cost:    one call, and some 30 microseconds an operation. On `meta` tensors it computes nothing
    """
    with _Places(key_cache, value_cache) as places:
        call()
    way: dict[str, Part] = dict.fromkeys(PARTS, Part())
    products = [i for i, (place, _) in enumerate(places.seen) if place == STATES]
    for i, (place, cost) in enumerate(places.seen):
        if i > max(products, default=0) and place == WEIGHTS:
            place = RESULT  # maxima and sums, once the states of all partitions are made
        way[PARTS[place - 1]] += cost
    return way


class _Places(OpCounter):
    """An OpCounter that follows at which place of the way each tensor stands."""

    def __init__(self, *caches: Tensor) -> None:
        super().__init__()
        self.seen: list[tuple[int, Part]] = []  # for each operation, the place it leads to
        # Of each storage, the pieces that were written: their first bytes, sorted, and places.
        self._places: dict[int, tuple[list[int], dict[int, int | None]]] = {}
        self._fills: dict[int, Part] = {}  # of a storage that nothing of the way lies in yet
        for cache in caches:
            self._put(cache, CACHE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.removeprefix("aten::").lstrip("_")
        if name.startswith(("empty", "new_empty")):
            self._put(result, None)
        return result

    def see_op(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        super().see_op(name, inputs, outputs)
        cost = Part(1, bytes_read(name, inputs, outputs), bytes_written(name, inputs, outputs))
        read = inputs[1:] if name in ("copy_", "index_copy_") else inputs
        places = [place for place in map(self._place, read) if place is not None]
        filled = any(_storage(output) in self._fills for output in outputs)
        place = _leads_to(name, places, read, filled) if places else None
        for output in outputs:
            storage = _storage(output)
            self._put(output, place)
            if place is None:
                self._fills[storage] = cost
            else:  # what was filled was filled for this
                cost += self._fills.pop(storage, Part())
        if place is not None:
            self.seen.append((place, cost))

    def _put(self, tensor: Tensor, place: int | None) -> None:
        start = int(tensor.storage_offset()) * tensor.element_size()
        if tensor.nbytes == tensor.untyped_storage().nbytes():  # all of it, so it may be new
            self._places.pop(_storage(tensor), None)
        firsts, places = self._places.setdefault(_storage(tensor), ([], {}))
        if start not in places:
            bisect.insort(firsts, start)
        places[start] = place

    def _place(self, tensor: Tensor) -> int | None:
        """Where the piece stands that begins last before the tensor's first byte."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        firsts, places = self._places.get(_storage(tensor), ([], {}))
        before = bisect.bisect(firsts, start)
        return places[firsts[before - 1]] if before else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _leads_to(name: str, places: list[int], read: list[Tensor], filled: bool) -> int:
    """The place where the results of an operation stand that reads what stands at `places`.

    Args:    filled: it writes into a tensor that was filled before, as for padding
    """
    last, is_copy = max(places), kind_of(name) == "copies"
    if kind_of(name) == "GEMMs":
        if last <= REPEATED:
            return LOGITS
        return STATES if min(places) <= REPEATED else RESULT
    if last == CACHE:
        return GATHERED
    if last <= REPEATED:
        if is_copy and (filled or any(0 in x.stride() for x in read)):
            return REPEATED
        return REORDERED if is_copy and last < REPEATED else last
    if last <= WEIGHTS:
        stays = is_copy and last == LOGITS  # into a padded tensor
        return RESULT if name in ("cat", "stack") else LOGITS if stays else WEIGHTS
    return RESULT
