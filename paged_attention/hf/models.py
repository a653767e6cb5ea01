"""Which models can run on a pool, and what each of their layers stores there."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import transformers
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from paged_attention.hf.keywords import NAME

# Whether a DynamicCache of this transformers holds the state of layers of another kind.
KNOWS_OTHERS = hasattr(DynamicCache, "update_conv_state")
ATTENTION = {"attention", "full_attention", "sliding_attention", "DynamicLayer"}
ATTENTION |= {"DynamicSlidingWindowLayer"}


class Heads(NamedTuple):
    """What one attention layer stores of a token."""

    num_kv_heads: int
    head_size: int


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the model's language part."""
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"config must be a model's configuration, got {type(config).__name__}")
    return config.get_text_config(decoder=True)


def attention_layers(config: PretrainedConfig) -> dict[int, Heads]:
    """The layers of a model that store keys and values, by their number in the model.

    Raises:  TypeError: config isn't one of transformers
             NotImplementedError: what the model's attention has that a pool doesn't serve
    """
    text = text_config(config)
    models = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model = models.get(type(text), None) or models.get(type(config), None)
    can_change = getattr(model, "_can_set_attn_implementation", None)
    if can_change is not None and not can_change():
        _refuse(text, "its code has an attention of its own, which can't be replaced")
    if not hasattr(text, "num_hidden_layers"):
        _refuse(text, "its configuration doesn't say how many layers it has")
    layers = DynamicCache(config=text).layers
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    kinds = kinds or [type(layer).__name__ for layer in layers]
    configs = getattr(text, "per_layer_config", None) or [text] * len(layers)
    found = {}
    for i, (layer, kind, layer_config) in enumerate(zip(layers, kinds, configs)):
        if getattr(layer_config, "kv_lora_rank", None):
            _refuse(text, "it stores keys and values compressed (MLA, kv_lora_rank)")
        if kind == "chunked_attention" or getattr(layer_config, "attention_chunk_size", None):
            _refuse(text, "it attends in chunks (attention_chunk_size), which are no window")
        if not KNOWS_OTHERS and (kind not in ATTENTION or hasattr(text, "mamba_d_state")):
            _refuse(text, f"this transformers keeps its layer {i} ({kind}) in a cache of its own")
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            found[i] = _heads(layer_config)
        elif isinstance(layer, CacheLayerMixin):
            _refuse(text, f"its layer {i} ({kind}) holds more than keys and values")
    if not found:
        _refuse(text, "it has no attention layers")
    return found


def _heads(config: PretrainedConfig) -> Heads:
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        _refuse(config, "it has no attention heads")
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    value_size = getattr(config, "v_head_dim", None) or head_size
    if value_size != head_size:
        _refuse(config, f"its keys have {head_size} lanes, its values {value_size}")
    return Heads(num_kv_heads, head_size)


def _refuse(config: PretrainedConfig, why: str) -> NoReturn:
    raise NotImplementedError(f"{config.model_type!r} is not served by {NAME}: {why}")
