"""What a call takes besides its answer: memory, a workspace, host reads, time."""

from __future__ import annotations

import time
from pathlib import Path

import pools
import torch
from helpers import oracle
from pools import NAN, Pool, uniform
from ways import plan_of

from paged_attention import Workspace, paged_attention
from paged_attention.measure.counting import OpCounter, count
from paged_attention.measure.timing import measure
from paged_attention.stages import STAGES

from .judging import case

MEASURE_TESTS = Path(__file__).parents[2] / "measure" / "test_timing.py"


@case("PUB-18", least=2)
def test_grouped_heads_never_copy_keys_or_values_for_each_query_head(row):
    """Temporaries grow with the query heads instead of the KV heads."""
    num_heads, num_kv_heads, head_size, tokens = 32, 4, 128, 4096
    num_seqs = 1 if row.is_stage else 8  # a stage works one sequence at a time
    blocks, sizes = num_seqs * tokens // 16, (16, num_kv_heads, head_size)
    caches = pools.empty_caches(blocks, *sizes, row.layout, torch.float16, row.device)
    caches[0].fill_(0.5)
    caches[1].fill_(1.0)
    table = torch.tensor(pools.shuffled(blocks, 0), dtype=torch.int32, device=row.device)
    lens = torch.full((num_seqs,), tokens, dtype=torch.int32, device=row.device)
    query = torch.ones(num_seqs, num_heads, head_size, dtype=torch.float16, device=row.device)
    pool = Pool(*caches, table.reshape(num_seqs, -1), lens)
    with OpCounter() as counter:
        outs = row.outs(query, pool, scale=0.1, sizes=(512,), capacity=tokens)
    row.close(outs[0], 1.0)
    limit = num_seqs * num_kv_heads * tokens * head_size
    row.true(counter.largest <= limit, f"{counter.largest:,} elements, above {limit:,}")
    if row.path == "gqa_broadcast":  # the rung before it does copy, and this test sees it
        call = (query, *pool, 0.1)
        made = count(lambda: STAGES["single_bmm"](*call, partition_size=512)).largest
        row.true(made >= num_heads * tokens * head_size, made)


@case("PUB-24", least=12)
def test_a_reused_workspace_holds_no_leftovers_and_a_run_no_host_read(row):
    """Leftovers are reduced again; decisions frozen at capture go stale; a sync in each step."""
    workspace, query = Workspace(), torch.zeros(1, 1, 16, device=row.device)
    pools = {tokens: row.pool(uniform([tokens]), 16) for tokens in (4096, 16, 1)}
    capacity = plan_of("capacity", query, pools[4096], row.layout, capacity=4096)
    for tokens, right in ((4096, 2047.5), (16, 7.5), (4096, 2047.5), (1, 0.0)):
        pool, how = pools[tokens], {"scale": 1.0, "workspace": workspace}
        for tensor in workspace.tensors():
            tensor.fill_(NAN)
        if row.is_plan:
            plan = capacity if row.path == "capacity" else row.plan(query, pool)
            out = plan.run(query, *pool, **how)
        else:
            size = {"single tile": tokens, "P=bs": 16, "P=512": 512}[row.path]
            out = paged_attention(query, *pool, layout=row.layout, partition_size=size, **how)
        row.close(out, right)

    # In place, with every option: what was planned for 4,096 serves 7 and 4,095, whose windows
    # begin elsewhere; nothing is read back and nothing allocated.
    sinks, slopes = torch.tensor([1.0]), torch.tensor([0.01])
    lens, dense = torch.tensor([7, 4095]), uniform([4096, 4096])
    kept = [[x[:n] for x, n in zip(xs, lens)] for xs in (dense.keys, dense.values)]
    query, kind = dense.query.to(row.device), row.path if row.is_plan else "capacity"
    for window, options in (
        (None, {}),
        (1000, {}),
        (300, {"sinks": sinks, "slopes": slopes, "softcap": 5.0}),
    ):
        expected, _ = oracle(*dense[:1], *kept, 1.0, window=window, **options)
        if options:
            options = {"sinks": sinks.to(row.device), "alibi_slopes": slopes.to(row.device)}
            options["softcap"] = 5.0
        pool = row.pool(dense, 16)
        shorter = pool._replace(seq_lens=lens) if row.path == "exact" else pool
        plan = plan_of(kind, query, shorter, row.layout, capacity=4096, window=window)
        out = torch.empty_like(query)
        how = {"scale": 1.0, "workspace": workspace, "out": out, **options}
        plan.run(query, *pool, **how)
        pool.seq_lens.copy_(lens)
        for tensor in (out, *workspace.tensors()):
            tensor.fill_(NAN)
        with OpCounter() as counter:
            plan.run(query, *pool, **how)
        row.close(out, expected, extra=3e-6)
        if window is None:
            row.close(out, torch.tensor([3.0, 2047.0])[:, None, None].expand(2, 1, 16))
        row.true(counter.host_reads == 0, "no host read")
        row.true(counter.peak_bytes == 0, f"{counter.peak_bytes} bytes were allocated")


@case("PUB-25", least=4)
def test_a_time_includes_the_work_a_device_still_owes(row):
    """Numbers that only measure the launch: here the work ends 50 ms after it."""
    source = MEASURE_TESTS.read_text(encoding="utf-8")  # which hold the rest of this case
    row.true("stub" in source and "synchronize" in source, "test_timing tests a stub device")
    done_at, log = 0.0, []

    def launch():
        nonlocal done_at
        log.append("launch")
        done_at = max(done_at, time.perf_counter()) + 0.05

    def synchronize():
        log.append("sync")
        time.sleep(max(0.0, done_at - time.perf_counter()))

    measured = measure(launch, device="stub", synchronize=synchronize, min_seconds=0.1)
    row.true(0.05 <= measured.seconds < 0.25, f"{measured.seconds} s for work of 0.05 s")
    row.true(log[-1] == "sync", "waited before the last reading")
    row.true("sync" in log[: log.index("launch") + 2], "waited around the first launch")
