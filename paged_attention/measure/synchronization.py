"""What waits for a device, and which device a call works on: a time must include all its work."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch

Device = str | torch.device
Fn = Callable[[], object]  # what is measured, or what waits for a device


def synchronizer(device: Device | None, synchronize: Fn | None) -> Fn:
    """The callable that returns once the device has done its work.

    Args:    device: None while it isn't known yet: every CUDA device is waited for
             synchronize: the caller's own, which is then returned
    Raises:  ValueError: no such device, or one that needs `synchronize`
             TypeError: synchronize can't be called
    """
    if synchronize is not None:
        if not callable(synchronize):
            raise TypeError(f"synchronize must be a callable, not {synchronize!r}")
        return synchronize
    if device is None:
        return _synchronize_all_cuda
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return lambda: None
    if kind != "cuda":
        raise ValueError(
            f"device={str(device)!r} needs synchronize=, a callable that returns once the device "
            "has done its work: a time that wasn't synchronised is refused"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but PyTorch sees no CUDA device here")
    return lambda: torch.cuda.synchronize(device)


def _synchronize_all_cuda() -> None:
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def device_measured(stated: Device | None, touched: Set[str]) -> str:
    """The one device to wait for.

    Args:    stated: by the caller, if at all
             touched: devices that the call's tensors live on; tensors on the CPU beside another
                   device's don't count
    Raises:  ValueError: the call works on several devices, or on another one than stated
    """
    found = sorted(touched - {"cpu"}) or sorted(touched)
    if stated is None:
        if len(found) > 1:
            raise ValueError(
                f"fn works on {' and '.join(found)}: pass device=, or synchronize= for all"
            )
        return found[0] if found else "cpu"
    wanted = torch.device(stated).type
    if wanted == "cuda":
        index = torch.device(stated).index
        wanted = f"cuda:{torch.cuda.current_device() if index is None else index}"
    wrong = [device for device in found if device != wanted]
    if wrong:
        raise ValueError(
            f"device={str(stated)!r}, but fn works on {' and '.join(wrong)}: "
            "waiting for one device says nothing of another"
        )
    return wanted
