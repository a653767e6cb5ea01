"""The floor: how fast this device reads as many bytes as K and V hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_attention.measure.timing import Measurement, measure

_FLOOR_COLUMNS = 4096


@dataclass(frozen=True)
class Floor:
    """How fast this device reads memory, in the access pattern of decode.

    measurement: of the reading alone
    num_bytes:   bytes read
    """

    measurement: Measurement
    num_bytes: int

    @property
    def seconds(self) -> float:
        return self.measurement.seconds

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.measurement.seconds / 1e9


def floor(num_bytes: int, *, device="cpu", synchronize=None, min_seconds: float = 0.5) -> Floor:
    """The yardstick: no decode step reads K and V faster than `torch.mv` does.

    Args:    num_bytes: of K and V together, see `kv_bytes`
             device, synchronize, min_seconds: as for `measure`
    Returns: Floor, of the bytes rounded up to whole rows of 16 KiB
    Cost:    num_bytes of memory
    """
    read = FloorReader(num_bytes, device=device)
    measurement = measure(read, device=device, synchronize=synchronize, min_seconds=min_seconds)
    return Floor(measurement, read.num_bytes)


class FloorReader:
    """A callable that reads `num_bytes` as the floor does: two `torch.mv`, K's half and V's, each
    viewed as float32 (rows, 4096), against ones, all threads. To be measured beside what it is
    the yardstick for, in the same `interleaved` run."""

    def __init__(self, num_bytes: int, *, device="cpu") -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes} must be at least 1")
        rows = -(-num_bytes // (2 * 4 * _FLOOR_COLUMNS))
        self.key, self.value = (
            torch.ones(rows, _FLOOR_COLUMNS, dtype=torch.float32, device=device)  # real pages
            for _ in range(2)
        )
        self.ones = torch.ones(_FLOOR_COLUMNS, dtype=torch.float32, device=device)
        self.num_bytes = 2 * rows * _FLOOR_COLUMNS * 4

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mv(self.key, self.ones), torch.mv(self.value, self.ones)


def kv_bytes(num_tokens: int, num_kv_heads: int, head_size: int, dtype=torch.float32) -> int:
    """Bytes of K and V together that `num_tokens` cached tokens hold, in one layer."""
    return 2 * num_tokens * num_kv_heads * head_size * dtype.itemsize
