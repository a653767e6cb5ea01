"""What is known of the machine at hand: its name, its free memory, what else runs on it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from paged_attention.measure.synchronization import Device


def device_name(device: Device = "cpu") -> str:
    """The device's name as its maker writes it: "Intel(R) Xeon(R) ...", "NVIDIA H200"."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    cpuinfo = _lines("/proc/cpuinfo")
    models = [line.partition(":")[2] for line in cpuinfo if line.startswith("model name")]
    return " ".join([*models, platform.processor()][0].split()) or platform.machine()


def device_slug(device: Device = "cpu") -> str:
    """A short name for a device, without its maker's: "cpu", "h200", "bi-v100"."""
    if torch.device(device).type == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9.]+", device_name(device).lower())
    return "-".join(w for w in words if w not in ("nvidia", "amd", "tesla", "iluvatar"))


def cpu_capability() -> str | None:
    """The instructions that ATen's kernels use here: "AVX2", "AVX512"."""
    backend = getattr(torch.backends, "cpu", None)
    return backend.get_cpu_capability() if backend else None


def describe(device: Device = "cpu") -> dict[str, Any]:
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


def _git_commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that the package lies in, and whether the package differs."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None, None

    def git(*command: str) -> str:
        git_here = ["git", "-C", str(root), *command]
        done = subprocess.run(git_here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", "paged_attention")
        return git("rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.SubprocessError):
        return None, None


def available_bytes(device: Device = "cpu") -> int:
    """Memory that a process can still take without swapping, or that is free on a CUDA device.

    On Linux it is MemAvailable, or what the control group (a container's limit) leaves, if less.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [
        line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")
    ]
    limits = [1024 * int(kib) for kib in free] + _left_by_control_group()
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(limits, default=whole)


def _left_by_control_group() -> list[int]:
    """What is left of a control group's limit, version 2 or 1; empty if there is no limit."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            total = int((root / limit).read_text())  # "max" is no number: no limit
            taken = int((root / used).read_text())
            stat = (root / limit).with_name("memory.stat").read_text().split()
            freeable = int(stat[stat.index(cache) + 1])
        except (OSError, ValueError):
            continue
        return [max(0, total - taken + freeable)]
    return []


class OtherLoad:
    """How busy other processes keep the machine from here on, which spoils a timing."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), _others_cpu_seconds()

    def cores(self) -> float | None:
        """Cores that other processes used since then, on average; None where it can't be told."""
        (then, before), (now, after) = self._start, (time.perf_counter(), _others_cpu_seconds())
        if before is None or after is None or now == then:
            return None
        return round(max(0.0, (after - before) / (now - then)), 2)


def _others_cpu_seconds() -> float | None:
    """CPU seconds since the machine started that weren't ours; None if this isn't Linux."""
    lines = _lines("/proc/stat")
    if not lines:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, lines[0].split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _lines(path: str) -> list[str]:
    """The lines of a file of /proc; none where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
