"""The floor: how fast this device reads as many bytes as K and V hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_attention.measure.synchronization import Device, Fn
from paged_attention.measure.timing import Measurement, measure

_COLUMNS = 4096


@dataclass(frozen=True)
class Floor:
    """How fast this device reads memory, in the access pattern of decode.

    measurement: of one reading of all the bytes
    num_bytes:   how many bytes are read
    """

    measurement: Measurement
    num_bytes: int

    @property
    def seconds(self) -> float:
        return self.measurement.seconds

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.seconds / 1e9


def floor(
    num_bytes: int,
    *,
    device: Device = "cpu",
    synchronize: Fn | None = None,
    min_seconds: float = 0.5,
) -> Floor:
    """Measure the floor: a decode step that reads K and V takes at least as long as `torch.mv`.

    Args:    num_bytes: of K and V together, see `kv_bytes`
             device, synchronize, min_seconds: as for `measure`
    Returns: Floor, of the bytes rounded up to whole rows of 16 KiB
    Raises:  ValueError: num_bytes < 1, or as `measure`
    Cost:    num_bytes of memory
    """
    read = FloorReader(num_bytes, device=device)
    measurement = measure(read, device=device, synchronize=synchronize, min_seconds=min_seconds)
    return Floor(measurement, read.num_bytes)


class FloorReader:
    """A callable that reads `num_bytes` as the floor does, to be timed beside other calls.

    It multiplies two float32 matrices, one as large as K and one as large as V, by a vector of
    ones. Both matrices have 4,096 columns.

    Args:    num_bytes: of K and V together; rounded up to whole rows
             device: where the matrices lie
    Raises:  ValueError: num_bytes < 1
    """

    def __init__(self, num_bytes: int, *, device: Device = "cpu") -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes} must be at least 1")
        rows = -(-num_bytes // (2 * 4 * _COLUMNS))
        # Ones, because memory that was never written has no pages of its own to be read.
        self.key = torch.ones(rows, _COLUMNS, dtype=torch.float32, device=device)
        self.value = torch.ones_like(self.key)
        self.ones = torch.ones_like(self.key[0])
        self.num_bytes = 2 * self.key.nbytes

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mv(self.key, self.ones), torch.mv(self.value, self.ones)


def kv_bytes(
    num_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of K and V together that cached tokens hold in one layer.

    Example:
        >>> kv_bytes(100_000, num_kv_heads=4, head_size=256)
        819200000
    """
    return 2 * num_tokens * num_kv_heads * head_size * dtype.itemsize
