"""What is known of the machine at hand: its name, its free memory, what runs on it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import torch


def device_name(device="cpu") -> str:
    """The device's name as its maker writes it: "Intel(R) Xeon(R) ...", "NVIDIA H200"."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return " ".join((models or [platform.processor()])[0].split()) or platform.machine()


def device_slug(device="cpu") -> str:
    """A short name for a folder: "cpu", "h200", "bi-v100"; the maker's name left out."""
    if torch.device(device).type == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9.]+", device_name(device).lower())
    return "-".join(w for w in words if w not in ("nvidia", "amd", "tesla", "iluvatar"))


def available_bytes(device="cpu") -> int:
    """Memory that a process can still take without swapping, or that is free on a CUDA device.

    On Linux MemAvailable, or what the control group (a container's limit) leaves, if less.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_meminfo_available(), _cgroup_available()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(device="cpu") -> dict:
    """Device, versions, commit and date, for the JSON beside a figure. Names no user, no path."""
    from paged_attention import __version__

    device = torch.device(device)
    commit, modified = _git_commit()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": {
            "type": device.type,
            "name": device_name(device),
            "slug": device_slug(device),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "cpu_capability": cpu_capability(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "paged_attention": __version__,
        },
        "commit": commit,
        "modified": modified,
    }


class OtherLoad:
    """How busy other processes keep the machine, from here on: what spoils a timing."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), self._others()

    def cores(self) -> float | None:
        """Cores that other processes used since then, on average; None where it can't be told."""
        (then, before), (now, after) = self._start, (time.perf_counter(), self._others())
        if before is None or after is None or now == then:
            return None
        return max(0.0, (after - before) / (now - then))

    @staticmethod
    def _others() -> float | None:
        """CPU seconds since the machine started that weren't ours (Linux)."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib[0] * 1024 if kib else None


def _cgroup_available() -> int | None:
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            total = int((root / limit).read_text())  # "max" is no number: no limit
            taken = int((root / used).read_text())
            stat = (root / limit).with_name("memory.stat").read_text().splitlines()
            freeable = sum(int(s.split()[1]) for s in stat if s.split()[0] == cache)
        except (OSError, ValueError):
            continue
        return max(0, total - taken + freeable)
    return None


def cpu_capability() -> str | None:
    """The instructions that ATen's kernels use here: "AVX2", "AVX512"."""
    backend = getattr(torch.backends, "cpu", None)
    return backend.get_cpu_capability() if backend else None


def _git_commit() -> tuple[str | None, bool | None]:
    """The package's commit, if it is a checkout of its own, and whether files differ from it."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None, None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()
            for command in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--", "paged_attention"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return head, bool(changes)
