"""Our own kernel, to be timed: in the ladder's layout and, as a peer, in the two plain ones."""

from __future__ import annotations

from typing import Any

import torch

from paged_attention.bench.peers.data import Batch, Call, Unavailable
from paged_attention.inputs import Inputs, pack, unpack
from paged_attention.kernel.compiled.choice import chosen_backend
from paged_attention.kernel.decode import paged_attention
from paged_attention.kernel.plan import plan_decode
from paged_attention.kernel.workspace import Workspace
from paged_attention.measure.counting import count


class KernelCall:
    """A call of our kernel as any user makes it, but with a workspace of its own.

    The workspace keeps its memory between calls. It counts beside what a call allocates.

    Args:    inputs: the call's five tensors
             options: further arguments of `paged_attention`
    """

    def __init__(self, inputs: Inputs, **options: Any) -> None:
        self.inputs, self.options = inputs, options
        self.workspace = Workspace()

    def __call__(self) -> torch.Tensor:
        out = paged_attention(*self.inputs, workspace=self.workspace, **self.options)
        assert isinstance(out, torch.Tensor)  # and not (out, lse), which nobody asked for
        return out

    def first_peak(self) -> int:
        """Bytes that a first call allocates at once, the workspace among them."""
        self.workspace.clear()
        return count(self).peak_bytes


def paged_attention_hnd(batch: Batch) -> tuple[Call, str]:
    """Our kernel in its best layout."""
    return _kernel_call(batch, *batch.hnd, layout="HND"), ""


def paged_attention_numba(batch: Batch) -> tuple[Call, str]:
    """Our compiled kernel for CPUs, in its best layout."""
    try:
        chosen_backend("numba", batch.inputs.query.device)
    except (ImportError, ValueError) as error:
        raise Unavailable(str(error)) from None
    return _kernel_call(batch, *batch.hnd, layout="HND", backend="numba"), ""


def paged_attention_nhd(batch: Batch) -> tuple[Call, str]:
    """Our kernel on a cache whose blocks hold whole tokens."""
    return _kernel_call(batch, *pack(*unpack(*batch.hnd, "HND"), "NHD"), layout="NHD"), ""


def planned_hnd(batch: Batch) -> Call:
    """A run of a plan that was made beforehand, as for the second and later layers of a step."""
    query, key_cache = batch.inputs.query, batch.hnd[0]
    _, num_kv_heads, block_size, head_size = key_cache.shape
    plan = plan_decode(
        num_heads=query.shape[-2], num_kv_heads=num_kv_heads, head_size=head_size,
        block_size=block_size, layout="HND", dtype=key_cache.dtype, device=key_cache.device,
        seq_lens=batch.inputs.seq_lens.cpu(), q_len=batch.q_len,
    )  # fmt: skip
    inputs = batch.inputs._replace(key_cache=key_cache, value_cache=batch.hnd[1])
    given = {"scale": batch.scale, "out": torch.empty_like(query), "workspace": Workspace()}
    return lambda: plan.run(*inputs, **given)  # type: ignore[return-value]


def _kernel_call(batch: Batch, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Call:
    inputs = batch.inputs._replace(key_cache=key, value_cache=value)
    return KernelCall(inputs, scale=batch.scale, **options)
