"""What becomes of each keyword that transformers gives to an attention function.

docs/transformers.md has the same list in words, and a test holds the two together.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import warnings

from torch import Tensor

NAME = "paged_attention"  # of the attention and the mask, as transformers knows them

# `attention` reads these itself. It passes them to the kernel, or holds them against the cache.
HEEDED = "attention_mask position_ids s_aux scaling sliding_window softcap".split()

# Served with these values. Another value would change the result, so it is refused by name.
NONE_ONLY = """
    block_indices cu_seq_lens_k cu_seq_lens_q encoder_attention_mask encoder_hidden_states
    head_mask indices max_length_k max_length_q position_bias seq_idx sinks
""".split()
SERVED = dict.fromkeys(NONE_ONLY, (None,)) | {
    "dropout": (0,),
    "is_causal": (None, True),
    "output_attentions": (None, False),
    "use_cache": (None, True),
}

# For other parts of a model. They change nothing in attention.
WITHOUT_EFFECT = """
    cache_position deterministic labels logits_to_keep num_items_in_batch output_hidden_states
    output_router_logits return_dict
""".split()


def check_keywords(given: dict[str, object], module: object, unknown: set[str]) -> None:
    """Check what else an attention function was given.

    Args:    module: the model's attention, which gave it
             unknown: the unknown keywords that were named already. New ones are added
    Raises:  NotImplementedError: a value that isn't served
    """
    for name, value in given.items():
        served = SERVED.get(name, (None,))
        if value is None or any(not isinstance(value, Tensor) and value == v for v in served):
            continue
        if name == "use_cache" and not _passes_on_use_cache(type(module).__module__):
            continue
        if name in SERVED:
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}={got} is not served by {NAME}, only {served}")
        if name not in WITHOUT_EFFECT and name not in unknown:
            unknown.add(name)
            warnings.warn(
                f"{NAME} doesn't know the keyword {name!r} and leaves it out", stacklevel=3
            )


@functools.cache
def _passes_on_use_cache(module_name: str) -> bool:
    """Whether a model tells its layers what the caller said of use_cache.

    The layers of many models say False by themselves. So look for a call of a layer, which is a
    local variable there, with that keyword.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    except (KeyError, OSError, TypeError):
        return False
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    return any(keyword.arg == "use_cache" for call in calls for keyword in call.keywords)
