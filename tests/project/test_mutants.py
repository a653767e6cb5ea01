"""The faults of `tests/tools/mutants.py` stay faults of the code as it is."""

from pathlib import Path

from mutations import FAULTS

ROOT = Path(__file__).parents[2]


def test_each_fault_changes_one_place_of_its_file():
    texts = {fault.file: (ROOT / fault.file).read_text(encoding="utf-8") for fault in FAULTS}
    gone = {f.name for f in FAULTS if texts[f.file].count(f.old) != 1 or f.old == f.new}
    assert not gone
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 100
