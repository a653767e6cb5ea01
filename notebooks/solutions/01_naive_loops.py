"""Solutions to 01, naive loops. Read them after you have tried."""

import torch

my_ops = 20_528


def merge_sums(m_a, s_a, acc_a, m_b, s_b, acc_b):
    m = torch.maximum(m_a, m_b).clamp(min=-1e30)  # two empty partitions: -inf - -inf would be NaN
    a, b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, a * s_a + b * s_b, a[:, None] * acc_a + b[:, None] * acc_b


# Larger blocks make the loop shorter, and leave more slots unused in each sequence's last block.
ops_with_blocks_of_256 = 3 * -(-100_000 // 256) + 9 * 196 + 14
