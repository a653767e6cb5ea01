"""What a stored number means: fp8 and its scales, mixed dtypes, metadata, devices."""

from __future__ import annotations

import torch
from helpers import oracle
from pools import NAN, Dense, random, uniform

from .judging import case, per_row

AS_BYTES = {
    torch.float8_e4m3fn: {0.0: 0x00, 1.0: 0x38, 4.0: 0x48, NAN: 0x7F},
    torch.float8_e5m2: {0.0: 0x00, 1.0: 0x3C, 4.0: 0x44, NAN: 0x7F},
}


@case("PUB-19", least=31)
def test_fp8_scales_always_multiply(row):
    """Scales accepted but lost in one calling style; k's and v's swapped."""
    for fp8, names in (
        (torch.float8_e4m3fn, ("fp8", "fp8_e4m3", "auto")),
        (torch.float8_e5m2, ("fp8_e5m2", "auto")),
    ):
        code = AS_BYTES[fp8]
        key, value = (
            torch.tensor([code[number], code[0.0]], dtype=torch.uint8)[:, None, None]
            for number in (1.0, 4.0)
        )
        dense = Dense(torch.ones(1, 1, 16), [key.repeat(1, 1, 16)], [value.repeat(1, 1, 16)])
        pool = row.pool(dense, 1, dtype=torch.uint8, poison=(code[NAN], code[NAN]))
        for name in names:
            caches = [c.view(fp8) if name == "auto" else c for c in pool[:2]]
            named = pool._replace(key_cache=caches[0], value_cache=caches[1])
            for kind in (float, torch.tensor, lambda v: torch.tensor([v])):
                how = {"scale": 1 / 16, "k_scale": kind(0.25), "v_scale": kind(0.5)}
                row.check(dense, named, 1.1243530, 0.8259394, kv_cache_dtype=name, **how)
    # Its cousins: of each KV head its own; of a float cache too; never of the sink.
    dense = random([13, 5], 6, 2, 16, sharp=3.0)
    k_scale, v_scale, sinks = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25]), torch.ones(6)
    scaled = Dense(
        dense.query,
        [k * k_scale[:, None] for k in dense.keys],
        [v * v_scale[:, None] for v in dense.values],
    )
    how = {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "scale": 0.25}
    row.check(dense, 4, *oracle(*scaled, 0.25, sinks=sinks), extra=2e-6, **how)


@case("PUB-20", least=12)
def test_mixed_dtypes_convert_by_value_and_metadata_may_be_int64(row):
    """Bits reinterpreted; int64 lengths make the second sequence zeros; cryptic matmul errors."""
    dense = uniform([3, 5])
    halves = dense._replace(values=[torch.full_like(v, 1.5) for v in dense.values])
    pool = row.pool(halves, 16, dtype=torch.float16)
    for dtype in (torch.bfloat16, torch.float32):
        for out in row.outs(dense.query.to(dtype), pool):
            row.close(out, 1.5)

    pool, right, first = row.pool(dense, 16), per_row(1.0, 2.0), None
    for table in (torch.int32, torch.int64):
        for lens in (torch.int32, torch.int64):
            typed = [pool.block_tables.to(table), pool.seq_lens.to(lens)]
            out = row.check(dense, pool._replace(block_tables=typed[0], seq_lens=typed[1]), right)
            first = out[0] if first is None else first
            row.same(out[0], first)

    def refuses(words, error=(ValueError, TypeError), query=dense.query, **change):
        wrong = pool._replace(**change)
        query, planned = query.to(row.device), dense.query.to(row.device)
        if row.is_plan:  # planned for the right ones
            plan = row.plan(planned, pool)
            row.refuses(words, lambda: plan.run(query, *wrong), error)
        else:
            row.refuses(words, lambda: row.outs(query, wrong), error)

    refuses(("seq_lens", "float"), seq_lens=pool.seq_lens.float())
    refuses(("block_tables", "float"), block_tables=pool.block_tables.float())
    refuses(("block_tables", "meta"), ValueError, block_tables=pool.block_tables.to("meta"))
    refuses(("value_cache",), ValueError, value_cache=pool.value_cache[:-1])
    refuses(("64", "16"), ValueError, query=torch.zeros(2, 1, 64))
    # Its cousin: bytes say nothing of their format.
    key, value = (cache.to(torch.uint8) for cache in pool[:2])
    refuses(("uint8", "auto"), key_cache=key, value_cache=value)
    if row.device == "cuda":  # the planner reads lengths on the host, so they may live there
        row.check(dense, pool._replace(seq_lens=pool.seq_lens.cpu()), right)
