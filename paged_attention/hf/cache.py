"""PagedCache: a pool of `PagedKVCache` as the cache of a transformers model."""

from collections.abc import Iterable

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PretrainedConfig,
)
from transformers.cache_utils import CacheLayerMixin

from paged_attention.cache import PagedKVCache
from paged_attention.hf.attention import NAME, attention, mask


def kv_pool(config, num_blocks, block_size=16, **more):
    """A PagedKVCache of the shape that a model's attention layers need.

    Args:    config: the model's;  more: dtype, device and layout, as PagedKVCache takes them
    Raises:  TypeError: config isn't one of transformers; as PagedKVCache
    """
    text = _text(config)
    return PagedKVCache(
        num_blocks,
        block_size,
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        num_layers=len(_attention_layers(DynamicCache(config=config))),
        **more,
    )


class PagedCache(DynamicCache):
    """The cache of one batch, each of whose rows is a sequence of a pool.

    Args:    pool: a PagedKVCache, see `kv_pool`; it may hold other sequences too
             config: the model's
             seq_ids: the rows'. A sequence that the pool has already, a fork of a prompt say, goes
                   on from where it ends
    Raises:  OutOfBlocks: a forward pass needs more blocks than are free. No sequence is extended,
                   and the pass can be tried again (unless the model has layers of another kind)
             ValueError: seq_ids hold tokens already, and the model has layers of another kind,
                   whose state isn't in the pool
    Cost:    padding takes no memory. A forward pass makes one table, and one plan for all layers
             of the same heads and window. A layer with a window keeps all tokens, too
    """

    def __init__(self, pool, config, seq_ids):
        if not isinstance(pool, PagedKVCache):
            raise TypeError(f"pool must be a PagedKVCache, got {pool!r}")
        if not isinstance(seq_ids, Iterable):
            raise TypeError(f"seq_ids must be a list, a name for each row, got {seq_ids!r}")
        self.config = _text(config)
        super().__init__(config=config)
        self.pool, self.seq_ids = pool, list(seq_ids)
        self.pool.extend_all(self.seq_ids, [0] * len(self.seq_ids))  # the new ones exist from now
        self.finished = [False] * len(self.seq_ids)
        self.columns = max(self.pool.seq_lens(self.seq_ids).tolist(), default=0)
        self.step = None  # what the layers of the current forward pass share, a Step
        paged = _attention_layers(self)
        if self.columns and len(paged) < len(self.layers):
            raise ValueError(
                f"seq_ids must be new to a model whose other layers have a state too, got "
                f"{self.seq_ids!r}, which hold tokens"
            )
        for number, i in enumerate(paged):
            self.layers[i] = PagedLayer(self, number)

    def finish(self, row):
        """Free a row's blocks while the others go on; what it is given from now on is dropped."""
        self.finished[row] = True
        self._empty(self.seq_ids[row])

    def reset(self):
        """Free all blocks; the same rows begin again."""
        super().reset()
        for seq_id in self.seq_ids:
            self._empty(seq_id)
        self.finished, self.columns = [False] * len(self.seq_ids), 0

    def reorder_cache(self, beam_idx):
        """Let row i go on from what row beam_idx[i] holds, for beam search; blocks are shared."""
        super().reorder_cache(beam_idx)
        sources = beam_idx.tolist()
        copies = [object() for _ in sources]  # names nobody else uses
        for source, copy in zip(sources, copies):
            self.pool.fork(self.seq_ids[source], copy)
        for seq_id, copy in zip(self.seq_ids, copies):
            self.pool.free(seq_id)
            self.pool.fork(copy, seq_id)
            self.pool.free(copy)
        self.finished = [self.finished[source] for source in sources]

    def _empty(self, seq_id):
        self.pool.free(seq_id)
        self.pool.extend(seq_id, 0)


class PagedLayer(CacheLayerMixin):
    """One attention layer of a PagedCache: `number` of the pool's."""

    def __init__(self, cache, number):
        super().__init__()
        self.cache, self.number = cache, number

    def update(self, key_states, value_states, *args, **kwargs):
        """What came in; `attention` stores it, since it has the mask.

        Raises:  ValueError: the model's attention is another, which would see no more than this
        """
        chosen = self.cache.config._attn_implementation
        if chosen != NAME:
            raise ValueError(
                f'a PagedCache needs model.set_attn_implementation("{NAME}"), got {chosen!r}'
            )
        if self.number == 0:
            self.cache.step = None  # a forward pass begins
        key_states.paged_layer = self
        return key_states, value_states

    def get_seq_length(self):
        """Columns of the batch so far, padding included, as transformers counts."""
        return self.cache.columns

    def get_mask_sizes(self, query_length):
        """(length, offset) of the keys that a mask would cover."""
        if isinstance(query_length, torch.Tensor):  # transformers 4 gives the positions
            query_length = len(query_length)
        return self.cache.columns + query_length, 0

    def get_max_length(self):
        """-1: what the pool holds is for all of its sequences."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def lazy_initialization(self, key_states, value_states):
        """Nothing: the pool is there."""

    def reset(self):
        """Nothing: the cache does it for all layers."""

    def reorder_cache(self, beam_idx):
        """Nothing: the cache does it for all layers."""


def _text(config):
    """The configuration of the model's language part."""
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"config must be a model's configuration, got {type(config).__name__}")
    return config.get_text_config(decoder=True)


def _attention_layers(cache):
    """Where a DynamicCache has layers of keys and values."""
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
