"""A client of `transformers`: a model writes to a PagedKVCache and decodes through the kernel.

    pool = kv_pool(model.config, num_blocks=512)
    model.set_attn_implementation("paged_attention")
    model.generate(**inputs, cache=PagedCache(pool, model.config, ["a", "b"]))

Importing this module registers "paged_attention" with transformers: the attention, and its mask.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from .cache import PagedKVCache
from .plan import plan_decode

NAME = "paged_attention"


def kv_pool(config, num_blocks, block_size=16, **more):
    """A PagedKVCache of the shape that a model's attention layers need.

    Args:    config: the model's;  more: dtype, device and layout, as PagedKVCache takes them
    """
    text = config.get_text_config(decoder=True)
    return PagedKVCache(
        num_blocks,
        block_size,
        text.num_key_value_heads,
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
    Raises:  OutOfBlocks: a forward pass needs more blocks than are free; no sequence is extended
    Cost:    padding takes no memory. A forward pass makes one table, and one plan for all layers
             of the same heads and window
    """

    def __init__(self, pool, config, seq_ids):
        super().__init__(config=config)
        self.pool, self.seq_ids = pool, list(seq_ids)
        self.config = config.get_text_config(decoder=True)
        self.pool.extend_all(self.seq_ids, [0] * len(self.seq_ids))  # the new ones exist from now
        self.finished = [False] * len(self.seq_ids)
        self.columns = max(self.pool.seq_lens(self.seq_ids).tolist(), default=0)
        self.step = None
        for number, i in enumerate(_attention_layers(self)):
            self.layers[i] = PagedLayer(self, number)

    def finish(self, row):
        """Free a row's blocks while others go on: later tokens of it are dropped, and see nothing."""
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
        key_states.paged_layer = self
        return key_states, value_states

    def get_seq_length(self):
        """Columns of the batch so far, padding included, as transformers counts."""
        return self.cache.columns

    def get_mask_sizes(self, query_length):
        """(length, offset) of the keys that a mask would cover."""
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


class Mask(NamedTuple):
    """What the model's mask becomes: the kernel needs no more to know which keys a query sees."""

    tokens: torch.Tensor | None  # (rows, columns), bool, what is no padding; None: everything
    window: int | None


class Step:
    """One forward pass: where its tokens go, and how all of its layers attend.

    Args:    num_rows, q_len: rows and columns of the pass, padding included
             tokens: (rows, columns so far), bool, or None, as in Mask
    """

    def __init__(self, cache, num_rows, q_len, tokens):
        pool, seq_ids = cache.pool, cache.seq_ids
        if len(seq_ids) != num_rows:
            raise ValueError(
                f"seq_ids must name each row of the batch, got {len(seq_ids)} for {num_rows}"
            )
        counts = torch.full((len(seq_ids),), q_len)
        if tokens is not None:
            tokens = tokens.cpu()
            counts = tokens[:, -q_len:].sum(dim=1)
        live = ~torch.tensor(cache.finished, dtype=torch.bool)
        new = torch.arange(q_len) >= q_len - counts.unsqueeze(1)  # (rows, q_len): padding is left
        if tokens is not None:
            seen = pool.seq_lens(seq_ids).cpu() + counts
            wrong = (tokens[:, -q_len:] != new).any(dim=1) | (tokens.sum(dim=1) != seen)
            for row in (wrong & live).nonzero().flatten().tolist():
                raise ValueError(
                    f"attention_mask[{row}] must be 0 on padding, which is on the left, and 1 on "
                    f"each of the sequence's {int(seen[row])} tokens, new ones included, got "
                    f"{_shortened(tokens[row])}"
                )
        counts = counts.where(live, 0)
        new &= live.unsqueeze(1)
        slots = pool.extend_all(seq_ids, counts.tolist())
        self.slots = torch.full((len(seq_ids), q_len), -1, dtype=torch.int64, device=slots.device)
        self.slots[new] = slots
        cache.columns += q_len
        self.pool, self.q_len, self.counts = pool, q_len, counts.tolist()
        self.tables, self.lens = pool.block_tables(seq_ids), pool.seq_lens(seq_ids)
        self.lengths = self.lens.tolist()
        self.is_prompt = q_len > 1 and self.lengths == self.counts
        self.plans = {}

    def plan(self, num_heads, window):
        """The kernel's plan, made once for all layers alike."""
        if (num_heads, window) not in self.plans:
            _, block_size, num_kv_heads, head_size = self.pool.geometry
            self.plans[num_heads, window] = plan_decode(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=block_size,
                layout=self.pool.layout,
                dtype=self.pool.key_cache().dtype,
                device=self.lens.device,
                seq_lens=self.lengths,
                q_len=self.q_len,
                window=window,
            )
        return self.plans[num_heads, window]


def mask(*args, attention_mask=None, local_size=None, allow_is_causal_skip=True, **kwargs):
    """What transformers' mask functions are given, less what follows from causality.

    Raises:  NotImplementedError: a mask of other than causal attention to tokens or to a window
    """
    if not allow_is_causal_skip or kwargs.get("use_vmap"):
        raise NotImplementedError(
            "paged_attention serves causal attention, whole or to a window, and the model asks "
            "for another mask"
        )
    return Mask(attention_mask, local_size)


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=True,
    position_bias=None,
    **kwargs,
):
    """Store a layer's new keys and values in the pool, and attend to all that it holds.

    Args:    query: (rows, num_heads, q_len, head_size)
             key, value: (rows, num_kv_heads, q_len, head_size), as PagedCache's update gave them
             attention_mask: a Mask
             s_aux: the sinks
    Returns: (rows, q_len, num_heads, head_size), 0 where a query is padding; and None, for the
             weights, which are never whole
    """
    layer = getattr(key, "paged_layer", None)
    if layer is None or not isinstance(attention_mask, Mask):
        raise ValueError(
            "paged_attention needs a model's cache to be a PagedCache, and its attention_mask to "
            f"have two dimensions, got a mask of {type(attention_mask).__name__} and keys "
            f"{'of a PagedCache' if layer else 'of no PagedCache'}"
        )
    if dropout or is_causal is False or position_bias is not None:
        raise NotImplementedError(
            f"paged_attention serves causal attention without dropout or bias, got "
            f"dropout={dropout}, is_causal={is_causal}, position_bias={position_bias}"
        )
    if attention_mask.window != sliding_window:
        raise NotImplementedError(
            f"paged_attention serves a window that slides, got sliding_window={sliding_window} "
            f"and a mask for {attention_mask.window}"
        )
    cache, q_len = layer.cache, query.shape[2]
    if layer.number == 0:
        cache.step = Step(cache, len(query), q_len, attention_mask.tokens)
    step, pool = cache.step, cache.pool
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    pool.write(key.flatten(0, 1), value.flatten(0, 1), step.slots.flatten(), layer.number)
    window = (
        None if sliding_window is None or sliding_window >= max(step.lengths) else sliding_window
    )
    if step.is_prompt and window is None and softcap is None and s_aux is None:
        return prompt_attention(query, key, value, step.counts, scaling), None
    out = step.plan(query.shape[2], window).run(
        query,
        pool.key_cache(layer.number),
        pool.value_cache(layer.number),
        step.tables,
        step.lens,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None


def prompt_attention(query, key, value, counts, scale):
    """Each row's newest `count` tokens' attention to themselves, by PyTorch, without padding."""
    out = torch.zeros_like(query)
    for row, count in enumerate(counts):
        if count:
            q, k, v = (t[row, -count:].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
            own = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            out[row, -count:] = own[0].transpose(0, 1)
    return out


def _attention_layers(cache):
    """Where a DynamicCache has layers of keys and values, and no other state."""
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
