"""PagedCache: a pool of `PagedKVCache` as the cache of a transformers model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from paged_attention.cache import PagedKVCache
from paged_attention.hf.attention import attention
from paged_attention.hf.forward_pass import ForwardPass
from paged_attention.hf.keywords import NAME
from paged_attention.hf.layer import PagedLayer
from paged_attention.hf.masks import causal_mask, first_positions, new_tokens
from paged_attention.hf.models import attention_layers, text_config
from paged_attention.kernel.checks import refuse
from paged_attention.kernel.transforms import uncompiled


def kv_pool(
    config: PretrainedConfig, num_blocks: int, block_size: int = 16, **more
) -> PagedKVCache:
    """A PagedKVCache of the shape that a model's attention layers need.

    Args:    config: the model's
             more: dtype, device and layout, as PagedKVCache takes them
    Raises:  TypeError: config isn't one of transformers
             NotImplementedError: the model's attention isn't what a pool serves
             TypeError, ValueError: as PagedKVCache
    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> pool = kv_pool(LlamaConfig(**sizes), num_blocks=8, dtype=torch.bfloat16)
        >>> pool.geometry
        Geometry(num_blocks=8, block_size=16, num_kv_heads=2, head_size=16)
    """
    heads, sizes = zip(*attention_layers(config).values())
    return PagedKVCache(num_blocks, block_size, heads, sizes, num_layers=len(heads), **more)


class PagedCache(DynamicCache):
    """The cache of one batch, each of whose rows is a sequence of a pool.

    A forward pass counts once its last layer has attended. If it breaks off before that, the cache
    is as it was before the pass, and the pass can be tried again.

    Args:    pool: a PagedKVCache, as `kv_pool` makes it. It may hold other sequences, too
             config: the model's
             seq_ids: a name for each row. If the pool has a sequence of that name, a fork of a
                   prompt for example, the row goes on from its end
    Raises:  NotImplementedError: the model's attention isn't what a pool serves
             OutOfBlocks: a forward pass needs more blocks than are free. No sequence is extended
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
        >>> with torch.no_grad():
        ...     logits = model(ids, attention_mask=mask, cache=cache).logits
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
        self.config, paged = text_config(config), attention_layers(config)
        if len(paged) != len(pool.geometries):
            rule = f"one of {len(paged)} layers, as kv_pool makes it"
            refuse("pool", rule, f"{len(pool.geometries)} layers")
        super().__init__(config=config)
        self.pool, self.seq_ids = pool, list(seq_ids)
        pool.extend_all(self.seq_ids, [0] * len(self.seq_ids))  # from now on the new ones exist
        self.held = pool.seq_lens(self.seq_ids).tolist()  # the tokens of each row
        self.columns = max(self.held, default=0)  # padding included
        self._begin_anew()
        self.unknown_keywords: set[str] = set()
        self.has_other_layers = len(paged) < len(self.layers)
        if self.columns and self.has_other_layers:
            rule = "new to a model whose other layers have a state too"
            refuse("seq_ids", rule, f"{self.seq_ids!r}, which hold tokens")
        for number, i in enumerate(paged):
            self.layers[i] = PagedLayer(self, number)

    def _begin_anew(self) -> None:
        """The state of rows of which no forward pass is known."""
        self.finished = [False] * len(self.seq_ids)
        # The position of each row's first token. -1 where it isn't known, because the row is new.
        firsts = self.pool.first_positions(self.seq_ids)
        self.first = [first if held else -1 for first, held in zip(firsts, self.held)]
        self.current_pass: ForwardPass | None = None
        self.updated, self.is_whole, self.is_broken = set(), True, False  # of the last pass

    def finish(self, row: int) -> None:
        """Free a row's blocks while the others go on. Its tokens are dropped from now on."""
        self._roll_back()
        self.finished[row] = True
        self._keep(row, 0)

    def reset(self) -> None:
        """Free all blocks. The same rows begin again."""
        self._roll_back()
        super().reset()
        for row, seq_id in enumerate(self.seq_ids):
            self.pool.extend(seq_id, 0)  # it may be gone
            self._keep(row, 0)
        self.columns = 0
        self._begin_anew()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns of all rows, which are tokens, or padding if a row has fewer.

        Args:    tokens_to_remove: minus how many columns to forget, as transformers 5 has it; or
                       how many to keep, as transformers 4 has it; 0 changes nothing
        Raises:  ValueError: there are fewer columns
                 RuntimeError: the model has layers of another kind, which can't go back
        """
        self._roll_back()
        wanted = int(tokens_to_remove)
        fewer = -wanted if wanted <= 0 else max(0, self.columns - wanted)
        if fewer > self.columns:
            refuse("tokens_to_remove", f"at most the cache's {self.columns} columns", fewer)
        super().crop(-fewer)  # what other layers hold
        for row, held in enumerate(self.held):
            self._keep(row, max(0, held - fewer))
        self.columns -= fewer

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """For beam search, let row i go on from what row beam_idx[i] holds. Blocks are shared."""
        self._roll_back()
        sources = beam_idx.tolist()
        if len(sources) != len(self.seq_ids):
            refuse("beam_idx", f"a row for each of {len(self.seq_ids)}", sources)
        super().reorder_cache(beam_idx)
        copies = [object() for _ in sources]  # names nobody else uses
        for source, copy in zip(sources, copies):
            self.pool.fork(self.seq_ids[source], copy)
        for seq_id, copy in zip(self.seq_ids, copies):
            self.pool.free(seq_id)
            self.pool.fork(copy, seq_id)
            self.pool.free(copy)
        self.finished = [self.finished[source] for source in sources]
        self.held = [self.held[source] for source in sources]
        self.first = [self.first[source] for source in sources]

    @uncompiled
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args, **kwargs) -> Tensor:
        """As DynamicCache's, which holds the state of layers of another kind."""
        self.begin_update("conv", layer_idx, *args, *kwargs.items())
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @uncompiled
    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> Tensor:
        """As DynamicCache's, which holds the state of layers of another kind."""
        self.begin_update("recurrent", layer_idx, *args, *kwargs.items())
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def begin_update(self, *what: object) -> None:
        """Note that a layer is about to store something.

        A layer that has done so in this forward pass already begins another pass.

        Raises:  RuntimeError: an earlier pass broke off, and not all layers can go back
        """
        if what in self.updated or not self.updated:
            self._roll_back()
            if self.is_broken:
                raise RuntimeError(
                    "a forward pass broke off, and layers without keys and values can't go back "
                    "to before it: call PagedCache.reset() and begin again"
                )
            self.updated, self.is_whole, self.current_pass = set(), False, None
        self.updated.add(what)

    def forward_pass(
        self, num_rows: int, q_len: int, is_token: Tensor | None, position_ids: Tensor | None
    ) -> ForwardPass:
        """The current forward pass. The first of its layers to attend begins it.

        Args:    is_token: as `CausalMask.is_token`
                 position_ids: (rows or 1, q_len). Those of several dimensions aren't checked
        Raises:  ValueError: rows, mask or positions don't go on from what the cache holds
                 OutOfBlocks: as the class
        """
        if self.current_pass is None:
            if num_rows != len(self.seq_ids):
                refuse("seq_ids", f"a name for each of the {num_rows} rows", self.seq_ids)
            have = self.pool.seq_lens(self.seq_ids).tolist()
            if have != self.held:
                rule = f"of {self.held} tokens in the pool, as this cache left them"
                refuse("seq_ids", rule, f"{have}: somebody else changed {self.seq_ids}")
            held = torch.tensor(self.held, device="cpu")
            live = torch.tensor(self.finished, dtype=torch.bool, device="cpu").logical_not()
            is_new, first = torch.ones(num_rows, q_len, dtype=torch.bool, device="cpu"), self.first
            if is_token is not None:
                is_new = new_tokens(is_token.cpu(), q_len, held, live)
            is_new = is_new & live.unsqueeze(1)
            if position_ids is not None and position_ids.dim() == 2:
                first = first_positions(position_ids.cpu(), is_new, held, first, self.columns)
            self.current_pass = ForwardPass(self.pool, self.seq_ids, is_new, first)
        return self.current_pass

    def layer_is_done(self, number: int) -> None:
        """Note that a layer has stored its keys and values, and attended."""
        this_pass = self.current_pass
        assert this_pass is not None
        this_pass.written.add(number)
        if len(this_pass.written) == len(self.pool.geometries) and not self.is_whole:
            this_pass.commit()
            self.held = [n + more for n, more in zip(self.held, this_pass.counts)]
            self.columns += this_pass.slots.shape[1]
            self.first, self.is_whole = this_pass.first, True

    def _roll_back(self) -> None:
        """Undo the last forward pass, if it broke off."""
        if not self.is_whole:
            if self.current_pass is not None:
                self.current_pass.roll_back()
            self.is_whole, self.is_broken = True, self.has_other_layers
            self.updated, self.current_pass = set(), None

    def _keep(self, row: int, num_tokens: int) -> None:
        """Forget a row's tokens past its first num_tokens."""
        self.pool.truncate(self.seq_ids[row], num_tokens)
        self.held[row] = num_tokens
        if not num_tokens:
            self.first[row] = -1


transformers.AttentionInterface.register(NAME, attention)
transformers.AttentionMaskInterface.register(NAME, causal_mask)
