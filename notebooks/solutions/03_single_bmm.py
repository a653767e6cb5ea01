"""Solutions to 03, a single bmm. Read them after you have tried."""

import torch

my_ops = 29
my_ratio = 1.5


def pad_partitions(logits, values, partition_size):
    heads, tokens = logits.shape
    num_partitions = -(-tokens // partition_size)
    padded = num_partitions * partition_size
    padded_logits = logits.new_full((heads, padded), -torch.inf)
    padded_logits[:, :tokens] = logits
    padded_values = values.new_zeros(heads, padded, values.shape[-1])
    padded_values[:, :tokens] = values
    return (
        padded_logits.view(heads, num_partitions, partition_size),
        padded_values.view(heads, num_partitions, partition_size, -1),
    )


# The temporaries of 100,000 tokens are 7,415,305,808 bytes, and K and V are 8,192 bytes a token.
thousands = int(32 * 2**30 / (8192 + 7_415_305_808 / 100_000) / 1000)
