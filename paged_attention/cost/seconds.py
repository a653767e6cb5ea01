"""From operations and bytes to seconds, as a device's profile has them."""

from __future__ import annotations

from collections.abc import Iterable

from paged_attention.cost.trace import Step
from paged_attention.measure.profiles import DeviceProfile, Figure


def seconds_of(steps: Iterable[Step], profile: DeviceProfile) -> Figure:
    """How long steps take that follow each other, as the profile has their operations and bytes.

    The host spends `op_cost` on an operation and `host_read` where it waits for a value. The
    device spends `launch` on an operation, and moves bytes at the bandwidth of their kind: a copy
    that rearranges, a gather, a product, anything else. Fresh bytes cost `fresh_page_cost` on top,
    at both ends of the band. Without that, the low end would be 0.4 times what gqa_broadcast takes
    at 32,768 tokens on a CPU. With it, it is 0.9 times.

    A device works while its host prepares what follows, so the longer of the two decides. Where a
    profile has no launch, as a CPU's, host and device are one and take turns. So the times of
    single steps add up to the whole on a CPU, and to more than the whole on a GPU.

    The model leaves out
      - Python between operations, beyond its part of op_cost;
      - arithmetic;
      - how few rows a reduction has to share among a GPU's multiprocessors;
      - temporaries smaller than `fresh_from` that malloc gives back to the system all the same.
        Which ones it keeps depends on what was allocated before;
      - caches. On a CPU the kernel's waves stay in them, so its prediction is up to 1.7 times too
        slow in the layouts HND and NHD;
      - what the host of a virtual machine does with freed memory. If it takes the memory back
        within seconds, the next first write costs several times as much. single_bmm at 32,768
        tokens frees 3 GB a call: it took 0.9 s when called again at once, and 3.1 s when other
        stages ran in between.

    Args:    steps: some of `predict(name, shape, profile).steps`, for the same profile
    Returns: seconds, as a band from the profile's best figures together to its worst
    Raises:  ValueError: the profile has no bandwidth or no op_cost
    """
    if profile.bandwidth is None or profile.op_cost is None:
        missing = "bandwidth" if profile.bandwidth is None else "op_cost"
        raise ValueError(
            f"profile {profile.name!r} has no {missing}, which measure.calibrate measures"
        )
    steps = list(steps)
    return _band(_seconds(steps, profile, "low"), _seconds(steps, profile, "high"), profile)


def parts_of(steps: Iterable[Step], profile: DeviceProfile) -> dict[str, float]:
    """What the seconds of `seconds_of` are made of, in the middle of its band.

    Returns: {"operations": .., "streamed bytes": .., "rearranged bytes": .., "fresh pages": ..}.
             Operations are all that the bytes don't explain, so that the parts add up
    Raises:  as `seconds_of`
    """
    steps = list(steps)
    whole = seconds_of(steps, profile)
    ends = [_bytes_seconds(steps, profile, end) for end in ("low", "high")]
    parts = {name: (ends[0][name] + ends[1][name]) / 2 for name in ends[0]}
    return {"operations": (whole.low + whole.high) / 2 - sum(parts.values()), **parts}


def _seconds(steps: list[Step], profile: DeviceProfile, end: str) -> float:
    """The same, by the best figures or the worst.

    Args:    end: of the costs, "low" or "high"; bandwidths have the other
    """
    ops, reads = sum(step.ops for step in steps), sum(step.host_reads for step in steps)
    host = ops * _cost(profile.op_cost, end) + reads * _cost(profile.host_read, end)
    device = ops * _cost(profile.launch, end) + sum(_bytes_seconds(steps, profile, end).values())
    return host + device if profile.launch is None else max(host, device)


def _bytes_seconds(steps: list[Step], profile: DeviceProfile, end: str) -> dict[str, float]:
    def seconds(num_bytes: int, bandwidth: Figure | None) -> float:
        rate = bandwidth or profile.bandwidth
        assert rate is not None
        return num_bytes / (rate.high if end == "low" else rate.low)

    of_kind = {"gather": profile.gather_bandwidth, "GEMMs": profile.gemm_bandwidth}
    streamed = rearranged = fresh = 0.0
    for step in steps:
        in_order = step.bytes_moved - step.rearranged_bytes
        streamed += seconds(in_order, of_kind.get(step.label))
        rearranged += seconds(step.rearranged_bytes, profile.rearrange_bandwidth)
        fresh += step.fresh_bytes * _cost(profile.fresh_page_cost, end)
    return {"streamed bytes": streamed, "rearranged bytes": rearranged, "fresh pages": fresh}


def _cost(figure: Figure | None, end: str) -> float:
    return 0.0 if figure is None else getattr(figure, end)


def _band(low: float, high: float, profile: DeviceProfile) -> Figure:
    return Figure(low, high, "s", f"predicted from the profile of {profile.name}")
