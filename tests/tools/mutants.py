"""Do the tests notice? Put one fault at a time into a copy of the project, and run the tests that
ought to fail: python tests/tools/mutants.py

The faults are in `mutations.py`. Each gets a line, which says whether it was noticed, in how many
seconds, and by which test. The exit status is 0, or 1 if a fault was missed.

    --only WORD   the faults whose name, file or target holds WORD, lower case or not
    --json FILE   the results, too, written anew after each fault
    --list        say what faults there are, and run nothing
    --trust       don't try first whether the targets pass without a fault
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import FAULTS
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "shared")
MOST_SECONDS = 120  # that a target may take; a fault that makes it hang is noticed, too
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # pytest's exit statuses; 2 where a file can't be imported


def main(argv=None):
    options = parsed(argv)
    word = options.only.lower()
    chosen = [f for f in FAULTS if word in " ".join([f.name, f.file, *f.targets]).lower()]
    if not chosen:
        sys.exit(f"--only {options.only}: no fault of that name")
    for fault in chosen:
        changed(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
    if options.list:
        print("\n".join(f"{f.file}: {f.name}{f.note and f' ({f.note})'}" for f in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        refuse_another_package(copy)
        if not options.trust:
            try_without_a_fault(copy, dict.fromkeys(t for f in chosen for t in f.targets))
        results = []
        for fault in tqdm(chosen, desc="faults", disable=None):
            results.append(result_of(copy, fault))
            tqdm.write(line_of(results[-1]))
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    missed = [r["name"] for r in results if not r["noticed"]]
    seconds = sum(r["seconds"] for r in results)
    print(f"{len(results) - len(missed)} noticed, {len(missed)} missed, in {seconds:.0f} s")
    return 1 if missed else 0


def parsed(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--trust", action="store_true")
    return parser.parse_args(argv)


def changed(fault, text):
    """A file's text with the fault in it; an error unless there is one place for it."""
    if text.count(fault.old) != 1:
        sys.exit(
            f"{fault.name}: {fault.file} must hold this once, and has it "
            f"{text.count(fault.old)} times: {fault.old!r}"
        )
    return text.replace(fault.old, fault.new)


def refuse_another_package(copy):
    """An installed package, or another checkout's, would be tested instead of the copy's."""
    found = subprocess.run(
        [sys.executable, "-c", "import paged_attention; print(paged_attention.__file__)"],
        cwd=copy,
        env=surroundings(copy),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(found).resolve().is_relative_to(copy.resolve()):
        sys.exit(f"the tests would import {found}, not the copy's package")


def try_without_a_fault(copy, targets):
    for target in tqdm(targets, desc="without a fault", disable=None):
        status, by, output = run(copy, target)
        if status != PASSED:
            sys.exit(f"{output}\n{target}: {by} fails without a fault")


def result_of(copy, fault):
    """{name, noticed, by, seconds} of one fault; its targets run until one notices."""
    path, start, by = copy / fault.file, time.perf_counter(), None
    right = path.read_text(encoding="utf-8")
    path.write_text(changed(fault, right), encoding="utf-8")
    try:
        for target in fault.targets:
            status, by, output = run(copy, target)
            if status not in (PASSED, FAILED, INTERRUPTED) and by is None:
                sys.exit(f"{output}\n{target}: pytest ended with {status}, no test of it ran")
            if status != PASSED:
                break
    finally:
        path.write_text(right, encoding="utf-8")
    seconds = round(time.perf_counter() - start, 1)
    return {"name": fault.name, "noticed": status != PASSED, "by": by, "seconds": seconds}


def line_of(result):
    verdict = "noticed" if result["noticed"] else "MISSED "
    by = f"  ({result['by']})" if result["noticed"] else ""
    return f"{verdict} {result['seconds']:6.1f} s  {result['name']}{by}"


def run(copy, target):
    """(pytest's exit status, the first test that failed, what was printed) of one target."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += shlex.split(target)
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=surroundings(copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None, f"{target} did not end in {MOST_SECONDS} s", ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    by = failed.group(1) if failed else None
    if done.returncode < 0:
        by = f"{target} ended by signal {-done.returncode}"
    return done.returncode, by, done.stdout


def surroundings(copy):
    """No .pyc: two versions of a file, of one size and second, would be taken for the same."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HYPOTHESIS"))},
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
