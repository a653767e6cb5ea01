"""Matrix products whose bits do not depend on what else is in the batch."""

import torch
from torch import Tensor


def aligned(columns: int) -> int:
    """The number of float32 columns, rounded up so that each row begins at a multiple of 16 bytes.

    MKL may add up a row in another order if it begins elsewhere (on an AMD CPU it does). A row's
    result would then depend on its position in the batch.
    """
    return -(-columns // 4) * 4


def room_for(matrices: int) -> int:
    """How many matrices the output of `batched_gemm` must have room for."""
    return max(2, matrices)


def batched_gemm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b for each matrix of a batch, written to the first matrices of `out`.

    MKL uses a different code path for a batch of one, which rounds differently. So a single matrix
    is computed twice, as a batch of two.

    Args:    a: (n, rows, k);  b: (n, k, columns)
             out: (room_for(n) or more, rows, columns)
    Returns: (n, rows, columns), a view of out
    """
    num = a.shape[0]
    if num == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1), out=out[:2])[:1]
    return torch.bmm(a, b, out=out if out.shape[0] == num else out[:num])
