"""Solutions to 00, the paged KV cache. Read them after you have tried."""

my_bytes = 2 * 4 * 256 * 4
my_ratio = 8.0


def token_in(slot, row, block_size):
    block, offset = divmod(slot, block_size)
    return row.index(block) * block_size + offset if block in row else None
