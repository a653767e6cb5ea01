"""PagedLayer: what transformers' code for a layer sees of a PagedCache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from paged_attention.hf.keywords import NAME
from paged_attention.kernel.transforms import uncompiled


class PagedLayer(CacheLayerMixin):
    """One attention layer of a PagedCache, `cache`, and its number among the pool's layers."""

    is_croppable = True

    def __init__(self, cache: Any, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number

    def __deepcopy__(self, memo: dict) -> PagedLayer:
        if id(self.cache) not in memo:
            raise NotImplementedError(
                "a layer of a PagedCache can't be copied without the others, as Dory does it"
            )
        return PagedLayer(memo[id(self.cache)], self.number)

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Returns its arguments. `attention` stores them, because only it has the mask.

        Raises:  ValueError: the model's attention is another one, which would see only these keys
        """
        chosen = self.cache.config._attn_implementation
        if chosen != NAME:
            raise ValueError(
                f'a PagedCache needs model.set_attn_implementation("{NAME}"), got {chosen!r}'
            )
        self.cache.begin_update(self.number)
        for states in (key_states, value_states):
            states.paged_layer = self  # pyright: ignore[reportAttributeAccessIssue]: for attention
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns of the batch so far, padding included, as transformers counts."""
        return self.cache.columns

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(length, offset) of the keys that a mask would cover."""
        if isinstance(query_length, Tensor):  # transformers 4 gives the positions
            query_length = len(query_length)
        return self.cache.columns + query_length, 0

    def get_max_length(self) -> int:
        """-1, which means no maximum, because all the pool's sequences share its blocks."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing, because the pool is there already."""

    def reset(self) -> None:
        """Does nothing, because the cache does it for all layers."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Does nothing, because the cache does it for all layers."""

    def crop(self, tokens_to_remove: int) -> None:
        """Does nothing, because the cache does it for all layers."""
