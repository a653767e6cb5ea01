"""What a stored number means: fp8 and its scales, mixed dtypes, metadata, devices."""

from __future__ import annotations

import functools

import torch
from helpers import NAN, Dense, oracle, paged, random, to, uniform
from ways import PLANS, plan_of

from .judging import answers, case, check

AS_BYTES = {
    torch.float8_e4m3fn: {0.0: 0x00, 1.0: 0x38, 4.0: 0x48, NAN: 0x7F},
    torch.float8_e5m2: {0.0: 0x00, 1.0: 0x3C, 4.0: 0x44, NAN: 0x7F},
}


@case("PUB-19", least=31)
def test_fp8_scales_always_multiply(judge, layout, path):
    """Scales accepted but lost in one calling style; k's and v's swapped."""
    scale = 1 / 16
    right, right_lse = 1.1243530, 0.8259394
    number = functools.partial(torch.tensor, device=judge.device)
    query = torch.ones(1, 1, 16, device=judge.device)
    for fp8, names in (
        (torch.float8_e4m3fn, ("fp8", "fp8_e4m3", "auto")),
        (torch.float8_e5m2, ("fp8_e5m2", "auto")),
    ):
        code = AS_BYTES[fp8]
        key = torch.tensor([code[1.0], code[0.0]], dtype=torch.uint8)[:, None, None]
        value = torch.tensor([code[4.0], code[0.0]], dtype=torch.uint8)[:, None, None]
        dense = Dense(query, [key.repeat(1, 1, 16)], [value.repeat(1, 1, 16)])
        poison = (code[NAN], code[NAN])
        pool = paged(dense, 1, layout, dtype=torch.uint8, poison=poison, device=judge.device)
        for name in names:
            caches = [c.view(fp8) if name == "auto" else c for c in pool[:2]]
            named = pool._replace(key_cache=caches[0], value_cache=caches[1])
            for kind in (float, number, lambda v: number([v])):
                how = {"scale": scale, "k_scale": kind(0.25), "v_scale": kind(0.5)}
                how["kv_cache_dtype"] = name
                check(judge, path, layout, dense, named, right, right_lse, **how)
    # Its cousins: of each KV head its own; of a float cache too; never of the sink.
    dense = to(random([13, 5], 6, 2, 16, sharp=3.0), device=judge.device)
    k_scale, v_scale, sinks = number([0.5, 2.0]), number([3.0, 0.25]), number([1.0] * 6)
    scaled = dense._replace(
        keys=[k * k_scale[:, None] for k in dense.keys],
        values=[v * v_scale[:, None] for v in dense.values],
    )
    pool = paged(dense, 4, layout, device=judge.device)
    how = {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "scale": 0.25}
    check(judge, path, layout, dense, pool, *oracle(*scaled, 0.25, sinks=sinks), extra=2e-6, **how)


@case("PUB-20", least=12)
def test_mixed_dtypes_convert_by_value_and_metadata_may_be_int64(judge, layout, path):
    """Bits reinterpreted; int64 lengths make the second sequence zeros; cryptic matmul errors."""
    device = judge.device
    dense = to(uniform([3, 5]), device=device)
    halves = dense._replace(values=[torch.full_like(v, 1.5) for v in dense.values])
    pool = paged(halves, 16, layout, dtype=torch.float16, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        for out, _ in answers(path, dense.query.to(dtype), pool, layout):
            judge.close(out, 1.5)

    right = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 1, 16)
    pool = paged(dense, 16, layout, device=device)
    outs = {}
    for table_dtype in (torch.int32, torch.int64):
        for lens_dtype in (torch.int32, torch.int64):
            typed = pool._replace(
                block_tables=pool.block_tables.to(table_dtype),
                seq_lens=pool.seq_lens.to(lens_dtype),
            )
            outs[table_dtype, lens_dtype] = check(judge, path, layout, dense, typed, right)
    for others in outs.values():
        judge.same(others[0], outs[torch.int32, torch.int32][0])

    def refused(words, error=(ValueError, TypeError), query=dense.query, **change):
        wrong = pool._replace(**change)
        if path in PLANS:  # planned for the right ones
            plan = plan_of(path, dense.query, pool, layout)
            judge.refused(lambda: plan.run(query, *wrong), words, error)
        else:
            judge.refused(lambda: list(answers(path, query, wrong, layout)), words, error)

    refused(("seq_lens", "float"), seq_lens=pool.seq_lens.float())
    refused(("block_tables", "float"), block_tables=pool.block_tables.float())
    refused(("block_tables", "meta"), ValueError, block_tables=pool.block_tables.to("meta"))
    refused(("value_cache",), ValueError, value_cache=pool.value_cache[:-1])
    refused(("64", "16"), ValueError, query=torch.zeros(2, 1, 64, device=device))
    # Its cousin: bytes say nothing of their format.
    refused(
        ("uint8", "auto"),
        key_cache=pool.key_cache.to(torch.uint8),
        value_cache=pool.value_cache.to(torch.uint8),
    )
    if device == "cuda":  # the planner reads lengths on the host, so they may live there
        check(judge, path, layout, dense, pool._replace(seq_lens=pool.seq_lens.cpu()), right)
