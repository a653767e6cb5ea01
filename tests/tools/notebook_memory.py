"""How much memory each notebook's kernel holds at most, because Binder gives 2 GB to all of it.

.venv/bin/python tests/tools/notebook_memory.py [notebooks/00_paged_kv_cache.ipynb ...]

The exit status is 1 if a kernel held more than LIMIT.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
LIMIT = 1_300_000_000

# A process's own mark of the most that was resident. Linux counts it in KiB, macOS in bytes.
ASK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes(path: Path) -> int:
    """The most memory that was resident in the kernel while it ran the notebook.

    Raises:  CellExecutionError: a cell failed
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=None, kernel_name="python3", resources=place).execute()
    return int(notebook.cells[-1].outputs[0].text) * UNIT


def main(paths: list[Path]) -> int:
    worst = 0
    print(f"{'notebook':28} {'peak, MB':>9} {'seconds':>8}")
    for path in paths:
        start = time.perf_counter()
        try:
            peak = peak_bytes(path)
        except CellExecutionError as error:
            print(f"{path.stem:28} failed: {str(error).strip().splitlines()[-1]}")
            worst = LIMIT + 1
            continue
        seconds, too_much = time.perf_counter() - start, peak > LIMIT
        print(
            f"{path.stem:28} {peak / 1e6:9,.0f} {seconds:8,.0f}{' too much' * too_much}",
            flush=True,
        )
        worst = max(worst, peak)
    return int(worst > LIMIT)


if __name__ == "__main__":
    named = [Path(name).resolve() for name in sys.argv[1:]]
    sys.exit(main(named or sorted((ROOT / "notebooks").glob("*.ipynb"))))
