"""Every fault of the five tensors that a call reads: (argument, what to put there, words)."""

from __future__ import annotations

import torch

from .calls import ids, zeros

# What shows without reading a value: type, rank, shape, dtype, device.
INPUT_FAULTS = {
    # query
    "query of rank 2": ("query", lambda c: c["query"][0], ("4, 16",)),
    "query of rank 5": ("query", lambda c: c["query"][None, None], ("1, 1, 2, 4, 16",)),
    "query not a tensor": ("query", lambda c: c["query"].tolist(), ("list",)),
    "query None": ("query", lambda c: None, ("None",)),
    "query of float64": ("query", lambda c: c["query"].double(), ("float64",)),
    "query of int64": ("query", lambda c: c["query"].long(), ("int64",)),
    "query of bool": ("query", lambda c: c["query"] > 0, ("bool",)),
    "query of complex": ("query", lambda c: c["query"].to(torch.complex64), ("complex64",)),
    "query on another device": ("query", lambda c: c["query"].to("meta"), ("meta", "cpu")),
    "query with another head size": ("query", lambda c: zeros(2, 4, 8), ("8", "16")),
    "query with too few heads": ("query", lambda c: zeros(2, 3, 16), ("3", "2")),
    "query with fewer heads than kv heads": ("query", lambda c: zeros(2, 1, 16), ("1", "2")),
    "query without heads": ("query", lambda c: zeros(2, 0, 16), ("0",)),
    "query with a sequence too many": ("query", lambda c: zeros(3, 4, 16), ("3", "2")),
    # key_cache
    "key_cache of rank 3": ("key_cache", lambda c: c["key_cache"][0], ("2, 4, 16",)),
    "key_cache of rank 5": ("key_cache", lambda c: c["key_cache"][None], ("1, 6, 2, 4, 16",)),
    "key_cache not a tensor": ("key_cache", lambda c: [1.0], ("list",)),
    "key_cache of int32": ("key_cache", lambda c: c["key_cache"].int(), ("int32",)),
    "key_cache of float64": ("key_cache", lambda c: c["key_cache"].double(), ("float64",)),
    "key_cache on another device": ("key_cache", lambda c: c["key_cache"].to("meta"), ("meta",)),
    "key_cache without blocks of tokens": ("key_cache", lambda c: zeros(6, 2, 0, 16), ("0",)),
    "key_cache without kv heads": ("key_cache", lambda c: zeros(6, 0, 4, 16), ("0",)),
    # value_cache
    "value_cache of rank 3": ("value_cache", lambda c: c["value_cache"][0], ("2, 4, 16",)),
    "value_cache not a tensor": ("value_cache", lambda c: None, ("None",)),
    "value_cache of another dtype": (
        "value_cache",
        lambda c: c["value_cache"].half(),
        ("float16", "float32"),
    ),
    "value_cache on another device": (
        "value_cache",
        lambda c: c["value_cache"].to("meta"),
        ("meta",),
    ),
    "value_cache with fewer blocks": (
        "value_cache",
        lambda c: c["value_cache"][:-1],
        ("5, 2, 4, 16", "6"),
    ),
    "value_cache with smaller blocks": (
        "value_cache",
        lambda c: c["value_cache"][:, :, :3],
        ("6, 2, 3, 16",),
    ),
    "value_cache with fewer heads": (
        "value_cache",
        lambda c: c["value_cache"][:, :1],
        ("6, 1, 4, 16",),
    ),
    "value_cache with smaller heads": (
        "value_cache",
        lambda c: c["value_cache"][..., :8],
        ("6, 2, 4, 8",),
    ),
    # block_tables
    "block_tables of rank 1": ("block_tables", lambda c: c["block_tables"][0], ("4,",)),
    "block_tables of rank 3": ("block_tables", lambda c: c["block_tables"][None], ("1, 2, 4",)),
    "block_tables not a tensor": ("block_tables", lambda c: c["block_tables"].tolist(), ("list",)),
    "block_tables of float32": ("block_tables", lambda c: c["block_tables"].float(), ("float32",)),
    "block_tables of bool": ("block_tables", lambda c: c["block_tables"] > 0, ("bool",)),
    "block_tables of uint8": (
        "block_tables",
        lambda c: c["block_tables"].to(torch.uint8),
        ("uint8",),
    ),
    "block_tables on another device": (
        "block_tables",
        lambda c: c["block_tables"].to("meta"),
        ("meta",),
    ),
    "block_tables with a row missing": (
        "block_tables",
        lambda c: c["block_tables"][:1],
        ("1", "2"),
    ),
    # seq_lens
    "seq_lens of rank 0": ("seq_lens", lambda c: c["seq_lens"][0], ("()",)),
    "seq_lens of rank 2": ("seq_lens", lambda c: c["seq_lens"][None], ("1, 2",)),
    "seq_lens not a tensor": ("seq_lens", lambda c: 7, ("int",)),
    "seq_lens of float32": ("seq_lens", lambda c: c["seq_lens"].float(), ("float32",)),
    "seq_lens of bool": ("seq_lens", lambda c: c["seq_lens"] > 0, ("bool",)),
    "seq_lens with one too many": ("seq_lens", lambda c: torch.tensor([7, 3, 1]), ("3", "2")),
    "seq_lens on meta": ("seq_lens", lambda c: c["seq_lens"].to("meta"), ("meta",)),
    "query without rows": ("query", lambda c: zeros(2, 0, 4, 16), ("0", "2, 0, 4, 16")),
    # none of them is anything but dense
    **{
        f"{name} sparse": (name, lambda c, name=name: c[name].to_sparse(), ("sparse",))
        for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    },
}

# What shows only to who reads ids and lengths.
VALUE_FAULTS = {
    "a live id equal to the pool's size": (
        "block_tables",
        lambda c: ids(c["block_tables"], ((0, 1), 6)),
        ("0", "1", "6"),
    ),
    "a live id far beyond the pool": (
        "block_tables",
        lambda c: ids(c["block_tables"], ((1, 0), 2**31 - 1)),
        ("1", "0", "2147483647", "6"),
    ),
    "a live id of -1": (
        "block_tables",
        lambda c: ids(c["block_tables"], ((0, 1), -1)),
        ("0", "1", "-1", "6"),
    ),
    "a very negative live id": (
        "block_tables",
        lambda c: ids(c["block_tables"], ((1, 0), -(2**31))),
        ("1", "0", "-2147483648", "6"),
    ),
    "an int64 id that would wrap to a good one": (
        "block_tables",
        lambda c: ids(c["block_tables"].long(), ((0, 0), 2**32)),
        ("0", "4294967296", "6"),
    ),
    "a negative length": ("seq_lens", lambda c: torch.tensor([7, -3]), ("1", "-3")),
    "a length above what its table covers": (
        "seq_lens",
        lambda c: torch.tensor([7, 17]),
        ("1", "17", "16"),
    ),
}
