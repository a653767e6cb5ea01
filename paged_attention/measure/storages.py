"""How many bytes of storage a piece of code holds at once, told from the tensors that it meets."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the tensors' storages."""
    return {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


class LiveBytes:
    """The bytes of the storages that appeared or grew under our eyes, and their peak.

    A storage counts until all tensors that were seen to refer to it are gone, so a view keeps it
    counted after its base is gone. Of a storage that was there before, only what it grows by
    counts.
    """

    def __init__(self) -> None:
        self.alive = self.peak = 0
        self._live: dict[int, _Storage] = {}  # by address
        self._watched: set[int] = set()  # ids of tensors whose storage is in _live

    def see(self, tensors: Iterable[torch.Tensor], before: Mapping[int, int]) -> int:
        """Take note of an operation's arguments and results, and raise the peak if need be.

        Args:    before: `storage_bytes` of the arguments, from before the operation
        Returns: bytes that the operation allocated
        """
        grown = 0
        for tensor in tensors:
            size, address = tensor.untyped_storage().nbytes(), _address(tensor)
            if address not in self._live:
                if size == before.get(address, 0):
                    continue
                self._live[address] = _Storage(before.get(address, 0))
            live = self._live[address]
            grown += size - live.outside - live.size
            live.size = size - live.outside
            if id(tensor) not in self._watched:
                self._watched.add(id(tensor))
                live.tensors += 1
                weakref.finalize(tensor, self._forget, id(tensor), address).atexit = False
        self.alive += grown
        self.peak = max(self.peak, self.alive)
        return grown

    def _forget(self, tensor_id: int, address: int) -> None:
        self._watched.discard(tensor_id)
        live = self._live[address]
        live.tensors -= 1
        if live.tensors == 0:
            self.alive -= self._live.pop(address).size


@dataclass
class _Storage:
    """A storage that counts while `tensors` refer to it."""

    outside: int  # bytes that don't count, because they were there before
    size: int = 0  # bytes that count
    tensors: int = 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
