"""Matrix products whose bits do not depend on what else is in the batch."""

import torch
from torch import Tensor


def padded(columns: int) -> int:
    """The number of columns of a product's result, rounded up to a multiple of 16.

    MKL cuts matrices where it has more threads than matrices, and on some CPUs it adds up a row in
    another order if that begins at an unaligned address. A row's result would then depend on the
    other matrices of the batch. With 16 columns, which are 64 bytes, it never did.
    """
    return -(-columns // 16) * 16


def enough_rows(rows: int) -> int:
    """The number of rows of a matrix whose other rows may be more or fewer, padding included.

    MKL computes a product of fewer than 4 rows in another way, which rounds differently. From 4 on
    a row's bits don't depend on how many others there are.
    """
    return max(4, rows)


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
