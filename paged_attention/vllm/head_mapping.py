"""num_kv_heads, which CoreX's port passes as a tensor, each query head's KV head.

What such a head_mapping holds is read once, and not again while the tensor stays as it is. So a
mapping on a device costs one host read in its first step, and none afterwards.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from paged_attention.kernel.checks import INTS, refuse, require_tensor, required_count
from paged_attention.kernel.transforms import is_traced

_checked = WeakIdKeyDictionary()  # mapping -> (its version, num_kv_heads), when it was right


def check_num_kv_heads(given: object, num_heads: int, num_kv_heads: int) -> None:
    """Check that a call means the caches' KV heads, each shared by equally many query heads.

    Args:    given: num_kv_heads, or a head_mapping, (num_heads,), int32/int64, on any device
             num_kv_heads: the caches'
    Raises:  TypeError, ValueError: it is another number, or another mapping
    Cost:    for a mapping that wasn't seen before, one read by the host
    """
    if not isinstance(given, Tensor):
        if required_count("num_kv_heads", given) != num_kv_heads:
            refuse("num_kv_heads", f"the caches' {num_kv_heads}", given)
        return
    like = "query's heads, because a tensor is a head_mapping"
    require_tensor("num_kv_heads", given, INTS, (num_heads,), like=like)
    # An inference tensor has no version, so it is taken to stay as it was.
    seen = (None if given.is_inference() else given._version, num_kv_heads)
    if given.is_meta or is_traced(given) or _checked.get(given) == seen:
        return
    usual = usual_mapping(num_heads, num_kv_heads)
    for head, (got, wanted) in enumerate(zip(given.tolist(), usual)):
        if got != wanted:
            rule = f"{wanted}, because {num_heads} query heads share {num_kv_heads} KV heads"
            refuse(f"num_kv_heads[{head}] in a head_mapping", f"{rule} evenly, in order", got)
    _checked[given] = seen


def usual_mapping(num_heads: int, num_kv_heads: int) -> list[int]:
    """The KV head of each query head: 0, 0, 0, 1, 1, 1 for 6 heads on 2."""
    return [head * num_kv_heads // num_heads for head in range(num_heads)]


@functools.lru_cache(maxsize=16)
def head_mapping(num_heads: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """The same as CoreX's kernels take it, (num_heads,), int32."""
    return torch.tensor(usual_mapping(num_heads, num_kv_heads), dtype=torch.int32, device=device)
