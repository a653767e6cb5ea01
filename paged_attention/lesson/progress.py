"""A bar above a slow cell, while it runs. Nothing of it is stored."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def shown(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Go through items with a bar in a notebook, and plainly elsewhere.

    The bar clears what the cell has printed so far when it ends. So print after the loop.

    Args:    what: what is being done, in words
    """
    items = list(items)
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import clear_output
        from tqdm import tqdm
    except ImportError:
        yield from items
        return
    if not hasattr(get_ipython(), "kernel"):
        yield from items
        return
    yield from tqdm(items, desc=what, file=sys.stdout, ncols=70, leave=False)
    clear_output()
