"""What becomes of each keyword that transformers gives to an attention function.

docs/transformers.md has the same list in words, and a test holds the two together.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

NAME = "paged_attention"  # of the attention and the mask, as transformers knows them

# `attention` reads these itself. It passes them to the kernel, or holds them against the cache.
HEEDED = {"attention_mask", "position_ids", "s_aux", "scaling", "sliding_window", "softcap"}

# Served with these values. Another value would change the result, so it is refused by name.
SERVED = {
    "block_indices": (None,),
    "cu_seq_lens_k": (None,),
    "cu_seq_lens_q": (None,),
    "dropout": (0,),
    "encoder_attention_mask": (None,),
    "encoder_hidden_states": (None,),
    "head_mask": (None,),
    "indices": (None,),
    "is_causal": (None, True),
    "max_length_k": (None,),
    "max_length_q": (None,),
    "output_attentions": (None, False),
    "position_bias": (None,),
    "seq_idx": (None,),
    "sinks": (None,),
    "use_cache": (None, True),
}

# For other parts of a model. They change nothing in attention.
WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}

# Their layers are told use_cache=False whatever the caller says. tests/tools/families.py found
# them. There only the positions show that a caller sends the whole text again.
SAY_NO_CACHE = {
    "cwm",
    "hrm_text",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "nanochat",
    "olmo3",
}


def check_keywords(given: dict[str, object], model_type: str, unknown: set[str]) -> None:
    """Check what else an attention function was given.

    Args:    model_type: as in transformers' configurations
             unknown: the unknown keywords that were named already. New ones are added
    Raises:  NotImplementedError: a value that isn't served
    """
    for name, value in given.items():
        if name == "use_cache" and model_type in SAY_NO_CACHE:
            continue
        served = SERVED.get(name, (None,))
        if value is None or any(not isinstance(value, Tensor) and value == v for v in served):
            continue
        if name in SERVED:
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}={got} is not served by {NAME}, only {served}")
        if name not in WITHOUT_EFFECT and name not in unknown:
            unknown.add(name)
            warnings.warn(
                f"{NAME} doesn't know the keyword {name!r} and leaves it out", stacklevel=3
            )


def check_no_gradients(**tensors: Tensor) -> None:
    """Raises:  NotImplementedError: autograd is on, and an input requires a gradient"""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            rule = "call the model under torch.no_grad() or torch.inference_mode()"
            raise NotImplementedError(f"{name} requires gradients, and {NAME} has none: {rule}")
