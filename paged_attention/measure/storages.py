"""How many bytes of storage a piece of code holds at once, told from the tensors that it meets."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the tensors' storages."""
    return {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


class LiveBytes:
    """The bytes of the storages that appeared or grew under our eyes, and their peak.

    A storage counts until nothing refers to it, so a view keeps it counted after its base is gone.
    Of a storage that was there before, only what it grows by counts.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._live: dict[int, _Storage] = {}  # by address
        self._live_bytes = 0  # of _live, dead ones included that weren't noticed yet
        self._watched: set[int] = set()  # ids of tensors whose storage is in _live
        self._orphans: set[int] = set()  # addresses of storages whose tensors are all gone

    @property
    def alive(self) -> int:
        """Bytes of the storages that something refers to now."""
        self._forget_dead()
        return self._live_bytes

    def see(self, tensors: Iterable[torch.Tensor], before: Mapping[int, int]) -> int:
        """Take note of an operation's arguments and results, and raise the peak if need be.

        Args:    before: `storage_bytes` of the arguments, from before the operation
        Returns: bytes that the operation allocated
        """
        grown = 0
        for tensor in tensors:
            storage, address = tensor.untyped_storage(), _address(tensor)
            live = self._live.get(address)
            if live is None:
                outside = before.get(address, 0)
                if storage.nbytes() == outside:
                    continue
                live = self._live[address] = _Storage(StorageWeakRef(storage), outside)
            growth = storage.nbytes() - live.size - live.outside
            live.size += growth
            self._live_bytes += growth
            grown += growth
            self._watch(tensor, address, live)
        if grown > 0 and self._live_bytes > self.peak:
            self.peak = max(self.peak, self.alive)
        return grown

    # A weak reference to a storage calls nobody when the storage dies; one to a tensor does. So a
    # storage is asked whether it is dead once the last tensor seen to refer to it has died.

    def _watch(self, tensor: torch.Tensor, address: int, live: _Storage) -> None:
        if id(tensor) not in self._watched:
            self._watched.add(id(tensor))
            live.tensors += 1
            self._orphans.discard(address)
            weakref.finalize(tensor, self._unwatch, id(tensor), address).atexit = False

    def _unwatch(self, tensor_id: int, address: int) -> None:
        self._watched.discard(tensor_id)
        self._live[address].tensors -= 1
        if self._live[address].tensors == 0:
            self._orphans.add(address)

    def _forget_dead(self) -> None:
        for address in list(self._orphans):  # a copy, because tensors may die meanwhile
            if self._live[address].reference.expired():
                self._orphans.remove(address)
                self._live_bytes -= self._live.pop(address).size


@dataclass
class _Storage:
    """A storage that counts until `reference` expires. Until then its address isn't used again."""

    reference: StorageWeakRef
    outside: int  # bytes that don't count, because they were there before
    size: int = 0  # bytes that count
    tensors: int = 0  # Python tensors that refer to it, as far as they were seen


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
