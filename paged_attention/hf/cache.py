"""PagedCache: a pool of `PagedKVCache` as the cache of a transformers model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from paged_attention.cache import PagedKVCache
from paged_attention.hf.attention import NAME, ForwardPass, attention, causal_mask, new_tokens
from paged_attention.kernel.checks import refuse


def kv_pool(
    config: PretrainedConfig, num_blocks: int, block_size: int = 16, **more
) -> PagedKVCache:
    """A PagedKVCache of the shape that a model's attention layers need.

    Args:    config: the model's
             more: dtype, device and layout, as PagedKVCache takes them
    Raises:  TypeError: config isn't one of transformers
             TypeError, ValueError: as PagedKVCache
    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> pool = kv_pool(LlamaConfig(**sizes), num_blocks=8, dtype=torch.bfloat16)
        >>> pool.geometry
        Geometry(num_blocks=8, block_size=16, num_kv_heads=2, head_size=16)
    """
    text = _text(config)
    num_layers = len(_attention_layers(DynamicCache(config=config)))
    num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return PagedKVCache(
        num_blocks, block_size, num_kv_heads, head_size, num_layers=num_layers, **more
    )


class PagedCache(DynamicCache):
    """The cache of one batch, each of whose rows is a sequence of a pool.

    Args:    pool: a PagedKVCache, as `kv_pool` makes it. It may hold other sequences, too
             config: the model's
             seq_ids: a name for each row. If the pool has a sequence of that name, a fork of a
                   prompt for example, the row goes on from its end
    Raises:  OutOfBlocks: a forward pass needs more blocks than are free. No sequence is extended.
                   The pass can be tried again, unless the model has layers of another kind
             ValueError: seq_ids hold tokens already, and the model has layers of another kind,
                   whose state isn't in the pool
    Cost:    padding takes no memory. A forward pass makes one block table, and one plan for all
             layers of the same heads and window. A layer with a window keeps all its tokens, too
    Example: the forward pass of a batch whose first row has one column of padding.
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99, intermediate_size=40))
        >>> model.set_attn_implementation("paged_attention")
        >>> pool = kv_pool(model.config, num_blocks=8)
        >>> cache = PagedCache(pool, model.config, ["a", "b"])
        >>> ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> logits = model(ids, attention_mask=mask, cache=cache).logits
        >>> pool.seq_lens(["a", "b"]).tolist(), pool.num_free_blocks
        ([2, 3], 6)
    """

    def __init__(
        self, pool: PagedKVCache, config: PretrainedConfig, seq_ids: Iterable[Hashable]
    ) -> None:
        if not isinstance(pool, PagedKVCache):
            refuse("pool", "a PagedKVCache", repr(pool), TypeError)
        if not isinstance(seq_ids, Iterable):
            refuse("seq_ids", "a list, a name for each row", repr(seq_ids), TypeError)
        self.config = _text(config)
        super().__init__(config=config)
        self.pool, self.seq_ids = pool, list(seq_ids)
        pool.extend_all(self.seq_ids, [0] * len(self.seq_ids))  # from now on the new ones exist
        self.finished = [False] * len(self.seq_ids)
        self.columns = max(pool.seq_lens(self.seq_ids).tolist(), default=0)  # padding included
        self.current_pass: ForwardPass | None = None
        paged = _attention_layers(self)
        if self.columns and len(paged) < len(self.layers):
            rule = "new to a model whose other layers have a state too"
            refuse("seq_ids", rule, f"{self.seq_ids!r}, which hold tokens")
        for number, i in enumerate(paged):
            self.layers[i] = PagedLayer(self, number)

    def finish(self, row: int) -> None:
        """Free a row's blocks while the others go on. Its tokens are dropped from now on."""
        self.finished[row] = True
        self._empty(self.seq_ids[row])

    def reset(self) -> None:
        """Free all blocks. The same rows begin again."""
        super().reset()
        for seq_id in self.seq_ids:
            self._empty(seq_id)
        self.finished, self.columns = [False] * len(self.seq_ids), 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """For beam search, let row i go on from what row beam_idx[i] holds. Blocks are shared."""
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

    def forward_pass(self, num_rows: int, q_len: int, is_token: Tensor | None) -> ForwardPass:
        """The current forward pass. The first of its layers to attend begins it."""
        if self.current_pass is None:
            if num_rows != len(self.seq_ids):
                refuse("seq_ids", f"a name for each of the {num_rows} rows", self.seq_ids)
            live = torch.tensor(self.finished, dtype=torch.bool).logical_not()
            is_new = torch.ones(num_rows, q_len, dtype=torch.bool)
            if is_token is not None:
                held = self.pool.seq_lens(self.seq_ids).cpu()
                is_new = new_tokens(is_token.cpu(), q_len, held, live)
            is_new = is_new & live.unsqueeze(1)
            self.current_pass = ForwardPass(self.pool, self.seq_ids, is_new)
            self.columns += q_len
        return self.current_pass

    def _empty(self, seq_id: Hashable) -> None:
        self.pool.free(seq_id)
        self.pool.extend(seq_id, 0)


class PagedLayer(CacheLayerMixin):
    """One attention layer of a PagedCache, and its number among the pool's layers."""

    def __init__(self, cache: PagedCache, number: int) -> None:
        super().__init__()
        self.cache, self.number = cache, number

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Returns its arguments. `attention` stores them, because only it has the mask.

        Raises:  ValueError: the model's attention is another one, which would see only these keys
        """
        chosen = self.cache.config._attn_implementation
        if chosen != NAME:
            raise ValueError(
                f'a PagedCache needs model.set_attn_implementation("{NAME}"), got {chosen!r}'
            )
        if self.number == 0:
            self.cache.current_pass = None  # another one begins
        key_states.paged_layer = self  # pyright: ignore[reportAttributeAccessIssue]: for attention
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


def _text(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the model's language part."""
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"config must be a model's configuration, got {type(config).__name__}")
    return config.get_text_config(decoder=True)


def _attention_layers(cache: DynamicCache) -> list[int]:
    """Which layers of a DynamicCache hold keys and values."""
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


transformers.AttentionInterface.register(NAME, attention)
transformers.AttentionMaskInterface.register(NAME, causal_mask)
