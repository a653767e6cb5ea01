"""The faults that `mutants.py` puts into a copy of the project, one at a time.

Each is small, and such as somebody could write. The targets are what ought to notice it, the
quickest first; where one has noticed, the others don't run.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str  # what is broken, as the end of "it would go unnoticed that ..."
    file: str  # within the project
    old: str  # stands in the file once
    new: str
    targets: tuple[str, ...]  # pytest's arguments: a file, or "file -k expression"
    note: str = ""


def of(folder, *targets):
    """A maker of faults in one folder; these are the targets of those that name no others."""

    def fault(name, file, old, new, *others, note=""):
        return Fault(name, folder + file, old, new, others or targets, note)

    return fault


T = "tests/kernel/test_"
DECODE, PLAN, ISOLATION = f"{T}decode.py", f"{T}plan.py", f"{T}invariance.py"
INVARIANCE, DIFFERENTIAL = f"{T}invariance.py", f"{T}differential.py"
FIELD_CASES, AROUND = f"{T}field_cases.py", f"{T}surroundings.py"
MALFORMED, MALFORMED_OUT, PARTITION = (
    f"{T}malformed.py",
    f"{T}aliasing.py",
    f"{T}partition.py",
)
MALFORMED_PLANS, COST, MEASURE = (
    f"{T}malformed_plans.py",
    "tests/cost",
    "tests/measure",
)

kernel = of("paged_attention/kernel/", DECODE, PLAN, DIFFERENTIAL)
KERNEL = [
    # -- what a query sees
    kernel(
        "the slot after a sequence's end is seen",
        "mask.py",
        "past_end = torch.ge(",
        "past_end = torch.gt(",
    ),
    # -- shared prefixes
    *(
        kernel(name, file, old, new, f"{T}shared_prefix.py -k 'not threads'")
        for name, file, old, new in (
            (
                "a partition that a window cuts is shared",
                "sharing.py",
                "low = whole_blocks(seen_from, partition_size)",
                "low = seen_from // partition_size * partition_size",
            ),
            (
                "a partition that the newest tokens cut is shared",
                "sharing.py",
                "prefix if prefix <= seen_to else",
                "prefix if prefix <= end else",
            ),
            (
                "of a shared wave, ALiBi begins one token off",
                "sharing.py",
                "position = ends - q_len + torch",
                "position = ends - q_len + 1 + torch",
            ),
            (
                "ALiBi takes a query token's number for a query head's",
                "sharing.py",
                "% shape.num_rows // q_len",
                "% shape.num_rows // group * group // q_len",
            ),
            (
                "the bits of a shared row depend on how many rows there are",
                "gemm.py",
                "return max(4, rows)",
                "return rows",
            ),
            (
                "the padding of a shared wave writes over a sequence's state",
                "schedule.py",
                "sharing(shape, wave, cuts, first_states, own_states)",
                "sharing(shape, wave, cuts, first_states, 0)",
            ),
            (
                "a prefix is read from the table of a sequence that doesn't see all of it",
                "sharing.py",
                "item = SharedItem(some[0], start, width, some)",
                "item = SharedItem(seqs[0], start, width, some)",
            ),
            (
                "each member of a group reads the prefix for itself",
                "sharing.py",
                "most = max(1, floats // (width * shape.num_rows))",
                "most = 1",
            ),
            (
                "the suffix is written over the last block of the prefix",
                "shared_prefix.py",
                "places = blocks.unsqueeze(1) + torch.arange(columns",
                "places = blocks.unsqueeze(1) - 1 + torch.arange(columns",
            ),
        )
    ),
    kernel(
        "a last block that lacks one token isn't masked",
        "schedule.py",
        "else min(to_end) + 1",
        "else min(to_end) + 2",
    ),
    kernel(
        "a window is one key too wide",
        "mask.py",
        "torch.clamp(distance, 0, window - 1, out=",
        "torch.clamp(distance, 0, window, out=",
        FIELD_CASES + " -k window",
        DIFFERENTIAL,
    ),
    kernel(
        "a wave is windowed only if its shortest sequence is",
        "schedule.py",
        "least - width, max(to_end)",
        "least - width, min(to_end)",
        FIELD_CASES + " -k window",
        DIFFERENTIAL,
        INVARIANCE,
    ),
    kernel(
        "a window is dropped where the batch's shortest sequence fits it",
        "plan.py",
        "shape.window >= self.longest:",
        "shape.window >= min(lengths, default=0):",
        FIELD_CASES + " -k window",
        DIFFERENTIAL,
    ),
    kernel(
        "of several query rows only the last one's window decides which blocks are read",
        "partition.py",
        "seq_len - (window + q_len - 1)",
        "seq_len - window",
        DIFFERENTIAL,
    ),
    kernel(
        "a capacity plan has no room for what precedes a window in its first block",
        "shape.py",
        "return self.window + self.q_len - 1 + self.block_size - 1",
        "return self.window + self.q_len - 1",
        FIELD_CASES + " -k window",
        DIFFERENTIAL,
    ),
    kernel(
        "a sequence's query rows stand in reverse order",
        "schedule.py",
        "self.distance_offsets = self.distance_offsets.flip(0)",
        "self.distance_offsets = self.distance_offsets.flip(1)[:, :widest]",
        FIELD_CASES + " -k several_query",
        DIFFERENTIAL,
    ),
    kernel(
        "a query sees the token after its own",
        "schedule.py",
        "(shape.q_len, widest), (1, 1), 1)",
        "(shape.q_len, widest), (1, 1), 0)",
        FIELD_CASES + " -k several_query",
        DIFFERENTIAL,
    ),
    kernel(
        "causal=False is not heeded",
        "mask.py",
        "rows = shape.q_len if options.causal else 1",
        "rows = shape.q_len",
        FIELD_CASES + " -k several_query",
        DIFFERENTIAL,
    ),
    # -- logits
    kernel(
        "ALiBi favours what is far",
        "mask.py",
        "slopes, value=-1)",
        "slopes, value=1)",
        FIELD_CASES + " -k alibi",
        DIFFERENTIAL,
    ),
    kernel(
        "softcap comes after ALiBi's bias",
        "mask.py",
        """    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)  # each reads and writes the logits
    if slopes is not None and mask.bias_distance is not None:
        distance = mask.bias_distance
        _by_head(logits, distance).addcmul_(distance.unsqueeze(1), slopes, value=-1)
""",
        """    if slopes is not None and mask.bias_distance is not None:
        distance = mask.bias_distance
        _by_head(logits, distance).addcmul_(distance.unsqueeze(1), slopes, value=-1)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
""",
        FIELD_CASES + " -k softcap",
        DIFFERENTIAL,
    ),
    kernel(
        "a scale of 0 is taken for none",
        "options.py",
        "geometry.head_size**-0.5 if given.scale is None else",
        "geometry.head_size**-0.5 if not given.scale else",
        DECODE + " -k scale_defaults",
    ),
    kernel(
        "slopes and scales of NaN are accepted",
        "options.py",
        "if not abs(x) <= LARGEST]",
        "if abs(x) > LARGEST]",
        MALFORMED,
    ),
    kernel(
        "a k_scale that is a tensor is ignored",
        "execute.py",
        "    factor = options.k_scale\n    if isinstance(factor, Tensor):",
        "    factor = options.k_scale\n    if isinstance(factor, Tensor):\n        factor = 1.0\n    if isinstance(factor, Tensor):",  # noqa: E501
        FIELD_CASES + " -k fp8",
        DIFFERENTIAL,
    ),
    kernel(
        "a sink is dropped",
        "execute.py",
        "if options.sinks is not None:",
        "if False:",
        FIELD_CASES + " -k sink",
        DIFFERENTIAL,
    ),
    kernel(
        "a sink is merged once per partition, too",
        "phase1.py",
        "s.index_copy_(0, wave.state_rows, buffers.wave_s(rows, 1))",
        "s.index_copy_(0, wave.state_rows, buffers.wave_s(rows, 1) if options.sinks is None "
        "else (buffers.wave_s(wave.num_items, shape.num_heads, shape.q_len) + ("
        "options.sinks.float().view(-1, 1) - buffers.wave_m(wave.num_items, shape.num_heads, "
        "shape.q_len)).exp()).view(-1, 1))",
        FIELD_CASES + " -k sink",
    ),
    # -- phase 1
    kernel(
        "logits that are all -inf have a maximum of -inf",
        "phase1.py",
        "m.clamp_(min=LOWEST)",
        "m",
        AROUND,
        PLAN,
    ),
    kernel(
        "a value that no row sees is multiplied by 0, not made 0",
        "mask.py",
        "    if masked is None:\n        return\n",
        "    return\n",
    ),
    kernel(
        "a block's ids are followed to the first one past a sequence's end",
        "phase1.py",
        "torch.ge(starts, ends, out=",
        "torch.gt(starts, ends, out=",
        PLAN,
        DIFFERENTIAL,
    ),
    kernel(
        "no block takes the place of one past a sequence's end",
        "phase1.py",
        "out=buffers.past_end()), 0)",
        "out=buffers.past_end()), -1)",
        PLAN,
        DIFFERENTIAL,
    ),
    kernel(
        "a sequence longer than its capacity passes for whole",
        "execute.py",
        "    if too_long is not None:",
        "    if False:",
        PLAN + " -k becomes_nan",
    ),
    kernel(
        "a sequence longer than its row of the table passes for whole",
        "execute.py",
        "most = min(schedule.longest, call.covered if key_cache.numel() else 0)",
        "most = schedule.longest",
        PLAN + " -k becomes_nan",
    ),
    kernel(
        "a wave's states are written side by side",
        "schedule.py",
        "state_rows = items.first_states.unsqueeze(1) + steps",
        "state_rows = items.first_states.unsqueeze(1) + self.arange[: shape.num_rows]",
    ),
    # -- phase 2
    kernel(
        "states are merged without bringing them to one maximum",
        "merge.py",
        "torch.sub(m, out_m.unsqueeze(1), out=weights).exp_()",
        "torch.sub(m, m, out=weights).exp_()",
        f"{T}merge.py",
    ),
    kernel(
        "the lse is of base 2",
        "merge.py",
        "torch.log(s, out=lse).add_(m)",
        "torch.log2(s, out=lse).add_(m)",
        f"{T}merge.py",
    ),
    kernel(
        "an empty sequence's state is what the workspace held",
        "phase2.py",
        "            out_acc_s.zero_()\n",
        "",
    ),
    kernel(
        "results stay in the order of the merge",
        "phase2.py",
        "if schedule.inverse is None:",
        "if True:",
    ),
    kernel(
        "the order of the merge is applied again, not undone",
        "schedule.py",
        "_int64(self.order).argsort().to(device)",
        "_int64(self.order).to(device)",
    ),
    kernel(
        "v_scale counts twice",
        "execute.py",
        "    _multiply(step, result, options.v_scale)",
        "    [_multiply(step, result, options.v_scale) for _ in range(2)]",
        FIELD_CASES + " -k fp8",
        DIFFERENTIAL,
    ),
    kernel(
        "a matrix alone in its batch is not computed as one of two",
        "gemm.py",
        "    if num == 1:",
        "    if False:",
        INVARIANCE + " -k bits_do_not_depend",
        ISOLATION,
        INVARIANCE,
    ),
    kernel(
        "a product has any number of columns",
        "gemm.py",
        "return -(-columns // 16) * 16",
        "return -(-columns // 4) * 4",
        INVARIANCE + " -k own_03",
        DIFFERENTIAL,
        ISOLATION,
    ),
    # -- layouts and fp8
    kernel(
        "KV heads are taken to lie side by side",
        "gather.py",
        "if steps == [1]:",
        "if len(steps) == 1:",
    ),
    kernel(
        "fp8's e4m3 has another bias",
        "fp8.py",
        "2.0 ** (15 - 7)",
        "2.0 ** (15 - 8)",
        FIELD_CASES + " -k fp8",
        DIFFERENTIAL,
    ),
    kernel(
        "fp8's NaN is 480",
        "fp8.py",
        "fp16_bits.add_(is_nan, alpha=0x4000)",
        "fp16_bits.add_(is_nan, alpha=0)",
        INVARIANCE + " -k a_live_nan",
    ),
    # -- plan, workspace, surroundings
    kernel(
        "a partition size isn't rounded up to whole blocks",
        "plan.py",
        "self.partition_size = whole_blocks(partition_size, shape.block_size)",
        "self.partition_size = partition_size",
    ),
    kernel(
        "how a sequence is cut depends on its neighbours' number",
        "plan.py",
        "partition_size = min(PARTITION_SIZE, wave_tokens)",
        "partition_size = max(1, min(PARTITION_SIZE, wave_tokens) // max(1, len(lengths)))",
        ISOLATION,
    ),
    kernel(
        "a wave has no limit",
        "partition.py",
        "ceil_div(len(alike), max(1, wave_tokens // width))",
        "1",
        PARTITION,
    ),
    kernel(
        "the merge writes a row past its memory",
        "step.py",
        "declare(float32, seqs * rows + 1, 1, columns)",
        "declare(float32, seqs * rows, 1, columns)",
        DECODE,
        PLAN,
        DIFFERENTIAL,
        INVARIANCE,
        ISOLATION,
    ),
    kernel(
        "a product of one matrix writes past its memory",
        "gemm.py",
        "return max(2, matrices)",
        "return matrices",
        DECODE,
        PLAN,
        DIFFERENTIAL,
        ISOLATION,
        INVARIANCE,
        "tests/cost",
    ),
    kernel(
        "a workspace never grows",
        "workspace.py",
        "if memory is None or self.nbytes < buffers.nbytes:",
        "if memory is None:",
        PLAN,
    ),
    kernel(
        "all threads share a workspace",
        "workspace.py",
        "_own = threading.local()",
        '_own = type("Shared", (), {})()',
        INVARIANCE + " -k two_threads",
        INVARIANCE,
    ),
    kernel(
        "autocast reaches the products",
        "gemm.py",
        "return torch.bmm(a, b, out=out if out.shape[0] == num else out[:num])",
        "return out[:num].copy_(torch.bmm(a, b))",
        AROUND + " -k autocast",
    ),
    kernel(
        "a GPU's waves leave no room for what is gathered before it is converted",
        "device.py",
        "memory // SHARE_OF_MEMORY) // 2",
        "memory // SHARE_OF_MEMORY)",
        PARTITION,
    ),
    kernel(
        "a default partition's logits exceed the wave's budget",
        "plan.py",
        "partition_size = min(PARTITION_SIZE, wave_tokens)",
        "partition_size = PARTITION_SIZE",
        PARTITION,
        PLAN,
    ),
    # -- checks
    kernel(
        "block ids go unchecked",
        "decode.py",
        "            check_values(call, lengths)",
        "            pass",
        MALFORMED,
    ),
    kernel(
        "negative block ids are accepted",
        "call.py",
        "outside = (table < 0) | (table >= num_blocks)",
        "outside = table >= num_blocks",
        MALFORMED,
    ),
    kernel(
        "a sequence may be one token longer than its table covers",
        "call.py",
        "if seq_len > call.covered:",
        "if seq_len > call.covered + 1:",
        MALFORMED,
    ),
    kernel(
        "validate=False skips the lengths, too",
        "decode.py",
        "lengths = lengths_on_host(call, max_seq_len)",
        "lengths = lengths_on_host(call, max_seq_len) if validate else seq_lens.tolist()",
        AROUND,
        MALFORMED,
    ),
    kernel(
        "lengths on the host count as unknown where there is a bound",
        "decode.py",
        "and not validate and not seq_lens.is_cpu:",
        "and not validate:",
        f"{T}plain_call.py",
    ),
    kernel(
        "out may lie over an input",
        "plan.py",
        'check_out(out, query, given | dict(zip(["workspace"], workspace.tensors())))',
        "check_out(out, query, {})",
        MALFORMED_OUT,
        MALFORMED,
    ),
    kernel(
        "out may lie over an input's last element",
        "aliasing.py",
        "a.data_ptr() >= _end(b) or",
        "a.data_ptr() >= _end(b) - b.element_size() or",
        MALFORMED_OUT,
        MALFORMED,
        MALFORMED_PLANS,
        PLAN,
        AROUND,
    ),
    kernel(
        "out may lie in the workspace",
        "plan.py",
        'given | dict(zip(["workspace"], workspace.tensors())))',
        "given)",
        MALFORMED_OUT,
    ),
]

# The state machine shrinks what it finds for up to a minute: the plain tests come first.
CACHE_TESTS = "tests/test_cache.py"
cache = of("paged_attention/", CACHE_TESTS + " -k 'not AgainstAModel'", CACHE_TESTS)
CACHE = [
    cache(
        "freeing a fork gives its parent's blocks back",
        "blocks.py",
        "if self._owners[block] == 0:",
        "if self._owners[block] >= 0:",
    ),
    cache(
        "a fork doesn't count as an owner",
        "blocks.py",
        "self._owners[block] += 1",
        "self._owners[block] += 0",
    ),
    cache(
        "a fork gets the blocks that its parent reserved, too",
        "blocks.py",
        "shared = blocks[: ceil_div(have, self.block_size)]",
        "shared = list(blocks)",
    ),
    cache(
        "a step that lacks one block extends some of its sequences",
        "blocks.py",
        "if needed > len(self.free):",
        "if needed > len(self.free) + 1:",
    ),
    cache(
        "copies on write are not counted among the blocks that a step needs",
        "blocks.py",
        "return new + sum(min(n, self._owners[block] - 1) for block, n in writers.items())",
        "return new",
    ),
    cache(
        "a block shared by two is written to without a copy",
        "blocks.py",
        "and self._owners[blocks[last]] > 1:",
        "and self._owners[blocks[last]] > 2:",
    ),
    cache(
        "reserved tokens count at once",
        "blocks.py",
        "old._replace(blocks=blocks)",
        "old._replace(blocks=blocks, num_tokens=start + count)",
    ),
    cache(
        "a fork forgets where its text begins",
        "blocks.py",
        "Sequence(shared, have, first)",
        "Sequence(shared, have)",
        "tests/clients/test_hf_odd_orders.py",
    ),
    cache(
        "a copy on write leaves out the values",
        "cache.py",
        "for cached in (*self._keys, *self._values):",
        "for cached in (*self._keys,):",
        CACHE_TESTS + " -k 'not AgainstAModel'",
        CACHE_TESTS,
        "tests/clients/test_hf.py",
    ),
    cache(
        "slots are off by one in their block",
        "cache.py",
        "* block_size + positions % block_size",
        "* block_size + (positions + 1) % block_size",
    ),
    cache(
        "values go to the first layer",
        "cache.py",
        "self.key_cache(layer), self.value_cache(layer)",
        "self.key_cache(layer), self.value_cache(0)",
    ),
]

judge = of("paged_attention/", "tests/test_second_witness.py")
REFERENCE = [
    judge(
        "the reference's window is one key too wide",
        "reference.py",
        "(positions <= newest - window)",
        "(positions < newest - window)",
    ),
    judge(
        "the reference gives a query head another group's KV head",
        "reference.py",
        "kv_head = head // (num_heads // num_kv_heads)",
        "kv_head = head % num_kv_heads",
    ),
    judge(
        "the reference forgets v_scale",
        "reference.py",
        "v = value[slots].view(dtype).double() * v_scale",
        "v = value[slots].view(dtype).double()",
        "tests/test_second_witness.py",
        FIELD_CASES + " -k fp8",
        DIFFERENTIAL,
    ),
]

stage = of("paged_attention/stages/", "tests/stages")
STAGES = [
    stage(
        "naive_loops drops the last partition",
        "naive_loops.py",
        "for p in range(num_partitions):",
        "for p in range(max(1, num_partitions - 1)):",
    ),
    stage(
        "batched_gather sees the slots after a sequence's end",
        "batched_gather.py",
        "min((p + 1) * partition_size, seq_len)",
        "(p + 1) * partition_size",
    ),
    stage(
        "single_bmm repeats KV heads in another order",
        "single_bmm.py",
        "k = k[:, :seq_len].float().repeat_interleave(num_queries_per_kv, dim=0)",
        "k = k[:, :seq_len].float().repeat(num_queries_per_kv, 1, 1)",
    ),
    stage(
        "gqa_broadcast pads logits with 0",
        "gqa_broadcast.py",
        "padded), -torch.inf)",
        "padded), 0.0)",
    ),
    stage(
        "single_tile forgets the maxima in the merge",
        "single_tile.py",
        "rescaled = s * torch.exp(m - global_m)",
        "rescaled = s * torch.exp(m - m)",
    ),
    stage(
        "single_tile has no single tile",
        "single_tile.py",
        "if num_partitions == 1:",
        "if False:",
        COST,
    ),
    stage(
        "fused_phase2 weighs partitions without their sums",
        "fused_phase2.py",
        "rescale = s * torch.exp(",
        "rescale = torch.exp(",
    ),
]

pricing = of("paged_attention/cost/", COST)
PRICING = [
    pricing(
        "a GPU's host and device take turns",
        "seconds.py",
        "host + device if profile.launch is None else max(host, device)",
        "host + device",
    ),
    pricing(
        "a product moves its bytes as a gather does",
        "seconds.py",
        '"GEMMs": profile.gemm_bandwidth',
        '"GEMMs": profile.gather_bandwidth',
    ),
    pricing(
        "a row timed by the device's clock pays for the host",
        "published.py",
        'row["clock"] == "device"',
        'row["clock"] == "none"',
    ),
]

measuring = of("paged_attention/measure/", MEASURE)
MEASURING = [
    measuring(
        "nonzero doesn't count as a host read",
        "counting.py",
        'frozenset({"_local_scalar_dense", "equal", "nonzero"})',
        'frozenset({"_local_scalar_dense", "equal"})',
    ),
    measuring("baddbmm doesn't count as a GEMM", "counting.py", '"bmm", "baddbmm",', '"bmm",'),
    measuring(
        "memory that was given back still counts towards the peak",
        "storages.py",
        "self.alive -= self._live.pop(address).size",
        "self._live.pop(address)",
    ),
    measuring(
        "the floor reads half of the bytes it says",
        "yardstick.py",
        "rows = -(-num_bytes // (2 * 4 * _COLUMNS))",
        "rows = -(-num_bytes // (4 * 4 * _COLUMNS))",
    ),
    measuring(
        "a time ends before the device has done its work",
        "timing.py",
        "self._synchronize()  # what we launched is",
        "pass",
        MEASURE + " -k every_sample_synchronises",
    ),
    measuring(
        "an operation's reads are predicted once, however often it runs",
        "../cost/trace.py",
        "        step.bytes_read += read\n",
        "        step.bytes_read = read\n",
        COST,
    ),
]

INTERRUPTED = "tests/bench/test_cli_interrupted.py"
bench = of("paged_attention/bench/", INTERRUPTED)
BENCH = [
    bench(
        "a table that a full disk lost is no failure",
        "streams.py",
        "return status or 1",
        "return status",
    ),
    bench(
        "a pipe that closes ends the run",
        "streams.py",
        "except OSError as error:\n            self.error",
        "except ZeroDivisionError as error:\n            self.error",
    ),
    bench(
        "an older picture stays beside a new JSON",
        "cli.py",
        "forget(path)  # the pictures of an older run",
        "pass",
    ),
    bench(
        "a folder on a full disk is taken",
        "files.py",
        "file.write(bytes(2**20))",
        "pass",
    ),
    bench(
        "a time that beats the floor is believed",
        "check.py",
        'result["spread"][1] < floor["spread"][0]',
        'result["spread"][1] < 0',
        "tests/project/test_device.py -k cannot_be_believed",
    ),
    bench(
        "make device succeeds though a part failed",
        "../../tests/tools/device.py",
        'any(part["status"] != "fine" for part in done)',
        "False",
        "tests/project/test_device.py -k status_is_true",
    ),
    bench(
        "Ctrl-C while the JSON is written loses it",
        "files.py",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.getsignal(signal.SIGINT)",
    ),
]

vllm = of("paged_attention/vllm/", "tests/clients/test_vllm_ops.py")
SCRATCH, WRITES = "tests/clients/test_vllm_scratch.py", "tests/clients/test_vllm_writes.py"
PLUGIN, COREX = "tests/clients/test_vllm_plugin.py", "tests/clients/test_vllm_corex.py"
PORT = "tests/clients/test_vllm_port.py"
VLLM = [
    vllm(
        "scratch is written in the partition that begins at a sequence's end",
        "states.py",
        "live = starts < seq_lens[seqs]",
        "live = starts <= seq_lens[seqs]",
        SCRATCH,
    ),
    vllm(
        "exp_sum is relative to 0, not to the partition's largest logit",
        "states.py",
        "(scratch.exp_sum, s, live),",
        "(scratch.exp_sum, s * m.exp(), live),",
        SCRATCH,
    ),
    vllm(
        "PAGED_ATTENTION_V2_MIN_LEN is ignored",
        "choice.py",
        "return max_seq_len > v2_min_len(v1_serves)",
        "return max_seq_len > V2_MIN_LEN",
    ),
    vllm(
        "a port that returns early passes for one that always takes V1",
        "port.py",
        "if any(isinstance(n, ast.Return) for n in inside):",
        "if isinstance(statement, ast.Return):",
        PORT,
    ),
    vllm(
        "a use_v1 that is given another value stays True",
        "port.py",
        "true -= stored",
        "true -= set()",
        PORT,
    ),
    vllm(
        "V1 called under a condition passes for a V1 that is always called",
        "port.py",
        "if not isinstance(value, ast.Call):",
        "if value is statement:",
        PORT,
    ),
    vllm(
        "CoreX's V1 loses what is above 8,192 tokens",
        "port.py",
        "return COREX_V1 if is_served",
        "return V2_MIN_LEN if is_served",
        PORT,
    ),
    vllm(
        "an fp8 cache goes to a V1 that has no scales",
        "port.py",
        "return is_fp8 or any(",
        "return any(",
        COREX,
    ),
    vllm(
        "a V2 that failed in its first step is tried again",
        "dispatch.py",
        "given_up = not has_worked",
        "given_up = False",
        COREX,
    ),
    vllm(
        "a V2 that failed later is given up",
        "dispatch.py",
        "given_up = not has_worked",
        "given_up = True",
        COREX,
    ),
    vllm(
        "only some exceptions of V2 are the port's to serve",
        "dispatch.py",
        "except Exception as error:  # of any kind, because without us the step would be served",
        "except NotImplementedError as error:",
        COREX,
    ),
    vllm(
        "two first steps that fail warn twice",
        "plugin.py",
        "warned.add(said)",
        "warned.add(error)",
        COREX,
    ),
    vllm(
        "a head_mapping's values aren't looked at",
        "head_mapping.py",
        "if got != wanted:",
        "if got > num_kv_heads:",
    ),
    vllm(
        "a head_mapping is read at every call",
        "head_mapping.py",
        "_checked[given] = seen",
        "_checked[given] = None",
    ),
    vllm(
        "a head_mapping that was changed isn't read again",
        "head_mapping.py",
        "None if given.is_inference() else given._version",
        "None",
    ),
    vllm(
        "the vendor's V2 follows what a table holds past a sequence's end",
        "vendor.py",
        "table.masked_fill(past_end, 0).flatten()",
        "table.masked_fill(past_end & False, 0).flatten()",
        COREX,
    ),
    vllm(
        "an fp8 scale of 0 is taken",
        "scales.py",
        "if not SMALLEST <= abs(value) <= LARGEST:",
        "if not abs(value) <= LARGEST:",
        WRITES,
    ),
    vllm(
        "any of several tokens for one slot may stay",
        "writes.py",
        "tokens = _last_of_each_slot(slot_mapping.long().clamp(min=-1))[tokens]",
        "tokens = tokens.clone()",
        WRITES,
    ),
    vllm(
        "unregister leaves something behind",
        "plugin.py",
        "while _replaced:",
        "while len(_replaced) > 1:",
        PLUGIN,
    ),
    vllm(
        "a token with a slot of -1 is written",
        "writes.py",
        "kept = slot_mapping >= 0",
        "kept = slot_mapping >= -1",
        WRITES,
    ),
    vllm(
        "what fp8 can't hold becomes NaN",
        "writes.py",
        ".clamp(-largest, largest)",
        ".clamp(-2 * largest, 2 * largest)",
        WRITES,
    ),
]

CASES = "tests/clients/test_hf_field_cases.py"
ODD = "tests/clients/test_hf_odd_orders.py"
model = of("paged_attention/hf/", "tests/clients/test_hf.py", CASES, ODD)
FAMILIES = "tests/clients/test_hf_families.py -k logits_of_a_ragged"
HF = [
    model(
        "padding is written and seen",
        "masks.py",
        "    new = is_token[:, -q_len:]\n",
        "    new = is_token[:, -q_len:] | True\n",
    ),
    model(
        "a prompt's first piece sees what follows it",
        "forward_pass.py",
        "lens = (self.lens - (q_len - end)).clamp_min_(0)",
        "lens = self.lens.clone()",
        "tests/clients/test_hf_smollm2.py",
    ),
    model(
        "a model's window is dropped",
        "forward_pass.py",
        "window=window,",
        "window=None,",
        FAMILIES,
    ),
    model(
        "a model's scaling is ignored",
        "attention.py",
        '"scale": scaling,',
        '"scale": None,',
        FAMILIES,
    ),
    model(
        "a row that finished keeps its blocks",
        "cache.py",
        "        self._keep(row, 0)\n\n    def reset",
        "        pass\n\n    def reset",
    ),
    model(
        "a forward pass counts before its last layer has attended",
        "cache.py",
        "if len(this_pass.written) == len(self.pool.geometries) and",
        "if len(this_pass.written) and",
        CASES + " -k pub_27",
    ),
    model(
        "a pass that broke off keeps its blocks",
        "cache.py",
        "                self.current_pass.roll_back()",
        "                pass",
        CASES + " -k pub_27",
    ),
    model(
        "a pass that broke off is continued",
        "cache.py",
        "self.updated, self.is_whole, self.current_pass = set(), False, None",
        "self.updated, self.is_whole = set(), False",
        CASES,
    ),
    model(
        "states of other layers are taken for whole after a pass that broke off",
        "cache.py",
        "self.is_whole, self.is_broken = True, self.has_other_layers",
        "self.is_whole, self.is_broken = True, False",
        CASES + " -k another_kind",
    ),
    model(
        "a row that somebody else made longer goes on",
        "cache.py",
        "if have != self.held:",
        "if len(have) != len(self.held):",
        ODD,
    ),
    model(
        "values that the cache wasn't given are read",
        "attention.py",
        'or getattr(value, "paged_layer", None) is not layer:',
        "or False:",
        CASES + " -k pub_28",
    ),
    model(
        "positions that jump are taken",
        "masks.py",
        "wrong = ((position_ids != right) & is_new).any(dim=1)",
        "wrong = ((position_ids < right) & is_new).any(dim=1)",
        CASES + " -k pub_33",
    ),
    model(
        "a text may begin at any position",
        "masks.py",
        "start = torch.where(start == columns + index, start, 0)",
        "start = start + 0",
        CASES + " -k pub_33",
    ),
    model(
        "chunks are taken for a window",
        "masks.py",
        "is_plain = _is_causal(mask_function, local_size)",
        "is_plain = True",
        "tests/clients/test_hf.py",
    ),
    model(
        "crop leaves the columns as they were counted",
        "cache.py",
        "        self.columns -= fewer\n",
        "",
        CASES + " -k pub_37",
    ),
    model(
        "a layer that shares keys attends from the wrong positions",
        "attention.py",
        "this_pass.pieces(num_heads, q_len, mask.window, geometry)",
        "this_pass.pieces(num_heads, columns, mask.window, geometry)",
        CASES + " -k pub_34",
    ),
]

cuda = of("paged_attention/kernel/compiled/", "tests/kernel/test_cuda_source.py")
CUDA = [
    cuda(
        "CUDA: a partition's last token isn't seen",
        "paged_decode.cu",
        "min(step.partition_size, seq_len - start)",
        "min(step.partition_size, seq_len - start) - 1",
    ),
    cuda(
        "CUDA: ALiBi's distance is counted within a partition",
        "paged_decode.cu",
        "(start + token - (seq_len - 1))",
        "(token - (seq_len - 1))",
    ),
    cuda(
        "CUDA: an offset into the pool wraps at 32 bits",
        "paged_decode.cu",
        "block * step.value_stride",
        "(int)(block * step.value_stride)",
    ),
    cuda(
        "CUDA: a block id outside the pool becomes block 0",
        "paged_decode.cu",
        "id < step.num_blocks ? id : -1",
        "id < step.num_blocks ? id : 0",
    ),
    cuda(
        "CUDA: a group's second part has the first one's heads",
        "paged_decode.cu",
        "first_head = kv_head * group + in_group",
        "first_head = kv_head * group",
    ),
    cuda(
        "CUDA: the merge weighs partitions without their sums",
        "paged_decode.cu",
        "attention += exp_sums[p] * expf(",
        "attention += expf(",
    ),
    cuda(
        "CUDA: lse is a logarithm to the base 2",
        "paged_decode.cu",
        "largest + logf(sum)",
        "largest + log2f(sum)",
    ),
    cuda(
        "CUDA: bf16 results are cut off, not rounded",
        "paged_decode.cu",
        "(bits + 0x7fff + odd) >> 16",
        "bits >> 16",
    ),
    cuda(
        "CUDA: a length beyond max_seq_len is cut off",
        "paged_decode.cu",
        "needed <= step.num_partitions",
        "needed >= 0",
    ),
    cuda(
        "CUDA: a library of another ABI is taken",
        "library.py",
        "if about[:2] != [ABI, ctypes.sizeof(Step)]:",
        "if about[1] != ctypes.sizeof(Step):",
        "tests/kernel/test_cuda_source_loading.py",
    ),
    cuda(
        "CUDA: loads cross the end of a block's row",
        "cuda_source.py",
        "if block_size % lanes:",
        "if block_size % 2:",
        "tests/kernel/test_cuda_source_loading.py",
    ),
]

NAIVE = "notebooks/01_naive_loops.ipynb"
notebook = of("", "tests/notebooks/test_notebooks.py")
NOTEBOOKS = [
    notebook(
        "a stage's cell differs from its file",
        NAIVE,
        "# Phase 1: one partition at a time, heads repeated",
        "# Phase 1: a partition at a time, heads repeated",
    ),
    notebook(
        "a notebook stores a number that its cell doesn't print",
        NAIVE,
        "operations: 20528  as predicted: True",
        "operations: 20529  as predicted: True",
        f"--nbval --nbval-current-env {NAIVE}",
    ),
    notebook(
        "a lesson's check passes always",
        "paged_attention/lesson/claims.py",
        "if not _OPERATORS[op](value, bound):",
        "if False:",
        "tests/test_lesson.py",
    ),
    notebook(
        "an exercise takes any answer",
        "paged_attention/lesson/claims.py",
        "    if not right:",
        "    if False:",
        "tests/notebooks/test_notebook_runs.py",
    ),
]

FAULTS = [
    *KERNEL,
    *CACHE,
    *REFERENCE,
    *STAGES,
    *PRICING,
    *MEASURING,
    *BENCH,
    *VLLM,
    *HF,
    *CUDA,
    *NOTEBOOKS,
]
