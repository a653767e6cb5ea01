"""What a call takes besides its answer: memory, a workspace, host reads, time."""

from __future__ import annotations

import time
from pathlib import Path

import helpers
import torch
from helpers import NAN, STAGE_NAMES, Pool, oracle, paged, to, uniform
from ways import PLANS, plan_of

from paged_attention import Workspace, paged_attention
from paged_attention.measure.counting import OpCounter, count
from paged_attention.measure.timing import measure
from paged_attention.stages import STAGES

from .judging import answers, case

MEASURE_TESTS = Path(__file__).parents[2] / "measure" / "test_measure.py"


@case("PUB-18", least=2)
def test_grouped_heads_never_copy_keys_or_values_for_each_query_head(judge, layout, path):
    """Temporaries grow with the query heads instead of the KV heads."""
    num_seqs, num_heads, num_kv_heads, head_size, tokens = 8, 32, 4, 128, 4096
    if path in STAGE_NAMES:
        num_seqs = 1  # they work one sequence at a time: a batch would hide the copy
    blocks = num_seqs * tokens // 16
    caches = helpers.empty_caches(
        blocks, 16, num_kv_heads, head_size, layout, torch.float16, judge.device
    )
    caches[0].fill_(0.5)
    caches[1].fill_(1.0)
    table = torch.tensor(helpers.shuffled(blocks, 0), dtype=torch.int32, device=judge.device)
    lens = torch.full((num_seqs,), tokens, dtype=torch.int32, device=judge.device)
    query = torch.ones(num_seqs, num_heads, head_size, dtype=torch.float16, device=judge.device)
    pool = Pool(*caches, table.reshape(num_seqs, -1), lens)
    with OpCounter() as counter:
        outs = list(answers(path, query, pool, layout, scale=0.1, sizes=(512,), capacity=tokens))
    judge.close(outs[0][0], 1.0)
    limit = num_seqs * num_kv_heads * tokens * head_size
    judge.true(counter.largest <= limit, f"{counter.largest:,} elements, above {limit:,}")
    if path == "gqa_broadcast":  # the rung before it does copy, and this test sees it
        call = (query, *pool, 0.1)
        made = count(lambda: STAGES["single_bmm"](*call, partition_size=512)).largest
        judge.true(made >= num_heads * tokens * head_size, made)


@case("PUB-24", least=12)
def test_a_reused_workspace_holds_no_leftovers_and_a_run_no_host_read(judge, layout, path):
    """Leftovers are reduced again; decisions frozen at capture go stale; a sync in each step."""
    device, workspace = judge.device, Workspace()
    pools, right = {}, {4096: 2047.5, 16: 7.5, 1: 0.0}
    for tokens in right:
        dense = to(uniform([tokens]), device=device)
        pools[tokens] = dense.query, paged(dense, 16, layout, device=device)
    capacity = plan_of("capacity", *pools[4096], layout, capacity=4096)
    for tokens in (4096, 16, 4096, 1):
        query, pool = pools[tokens]
        for tensor in workspace.tensors():
            tensor.fill_(NAN)
        how = {"scale": 1.0, "workspace": workspace}
        if path in PLANS:
            plan = capacity if path == "capacity" else plan_of("exact", query, pool, layout)
            out = plan.run(query, *pool, **how)
        else:
            size = {"single tile": tokens, "P=bs": 16, "P=512": 512}[path]
            out = paged_attention(query, *pool, layout=layout, partition_size=size, **how)
        judge.close(out, right[tokens])

    # In place, with every option: what was planned for 4,096 serves 7 and 4,095, whose windows
    # begin elsewhere; nothing is read back and nothing allocated.
    sinks = torch.tensor([1.0], device=device)
    slopes = torch.tensor([0.01], device=device)
    for window, options in (
        (None, {}),
        (1000, {}),
        (300, {"sinks": sinks, "alibi_slopes": slopes, "softcap": 5.0}),
    ):
        dense = to(uniform([4096, 4096]), device=device)
        pool = paged(dense, 16, layout, device=device)
        lens = torch.tensor([7, 4095])
        shorter = pool._replace(seq_lens=lens) if path == "exact" else pool
        kind = path if path in PLANS else "capacity"
        plan = plan_of(kind, dense.query, shorter, layout, capacity=4096, window=window)
        out = torch.empty_like(dense.query)
        how = {"scale": 1.0, "workspace": workspace, "out": out, **options}
        plan.run(dense.query, *pool, **how)
        pool.seq_lens.copy_(lens)
        for tensor in (out, *workspace.tensors()):
            tensor.fill_(NAN)
        with OpCounter() as counter:
            plan.run(dense.query, *pool, **how)
        options = {"slopes" if k == "alibi_slopes" else k: v for k, v in options.items()}
        kept = [[x[:n] for x, n in zip(xs, (7, 4095))] for xs in (dense.keys, dense.values)]
        expected, _ = oracle(dense.query, *kept, 1.0, window=window, **options)
        judge.close(out, expected, extra=3e-6)
        if window is None:
            judge.close(out, torch.tensor([3.0, 2047.0])[:, None, None].expand(2, 1, 16))
        judge.true(counter.host_reads == 0, "no host read")
        judge.true(counter.peak_bytes == 0, f"{counter.peak_bytes} bytes were allocated")


@case("PUB-25", least=4)
def test_a_time_includes_the_work_a_device_still_owes(judge, layout, path):
    """Numbers that only measure the launch: here the work ends 50 ms after it."""
    source = MEASURE_TESTS.read_text(encoding="utf-8")  # which hold the rest of this case
    judge.true("stub" in source and "synchronize" in source, "test_measure tests a stub device")
    done_at, log = 0.0, []

    def launch():
        nonlocal done_at
        log.append("launch")
        done_at = max(done_at, time.perf_counter()) + 0.05

    def synchronize():
        log.append("sync")
        time.sleep(max(0.0, done_at - time.perf_counter()))

    measured = measure(launch, device="stub", synchronize=synchronize, min_seconds=0.1)
    judge.true(0.05 <= measured.seconds < 0.25, f"{measured.seconds} s for work of 0.05 s")
    judge.true(log[-1] == "sync", "waited before the last reading")
    judge.true("sync" in log[: log.index("launch") + 2], "waited around the first launch")
