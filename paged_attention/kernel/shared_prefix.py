"""A decode step of sequences that share prefixes: each prefix is read once.

The plan does the work (see `sharing.py`). This is the call that makes one from two block tables.
"""

import torch
from torch import Tensor

from .call import Call, Inputs, check_block_ids, check_call
from .checks import FLOATS, INTS, check_flag, refuse, require_tensor
from .compiled.choice import sharing_backend
from .options import Options, check_option_values
from .partition import first_needed
from .plan import DecodePlan
from .planned import check_prefixes
from .sharing import Prefixes
from .transforms import refuse_transforms, uncompiled
from .workspace import Workspace


@uncompiled
def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_tables: Tensor,
    prefix_lens: Tensor,
    suffix_tables: Tensor,
    suffix_lens: Tensor,
    group_of: Tensor,
    *,
    layout: str | None = None,
    scale: float | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    partition_size: int | None = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` of sequences that begin with the same tokens, which are read once.

    A sequence's tokens are those of its group's prefix, and then those of its suffix. Every option
    means what it means for `paged_attention` with the two tables one after the other.

    Args:    prefix_tables: (num_groups, max_blocks), int32/int64
             prefix_lens: (num_groups,), int32/int64, tokens of whole blocks
             suffix_tables: (num_seqs, max_blocks), int32/int64
             suffix_lens: (num_seqs,), int32/int64, tokens, the new ones included. It may be 0
             group_of: (num_seqs,), int32/int64, the group of each sequence, or -1 for no prefix.
                   A group may have any number of sequences, 0 and 1 included
             the others: as `paged_attention`. What tensors hold of prefix_lens, suffix_lens and
                   group_of is always checked
    Returns: as `paged_attention`
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Numbers: within 2e-6 of `paged_attention`. A sequence's bits depend on its own tokens and on
             the length of its prefix, never on who shares it, nor on how many do
    Cost:    K and V of a prefix are read once for as many sequences as the logits of a wave allow
             (85 of 24 heads on a CPU), and their product with all queries is one matrix product.
             A sequence reads alone what a window or its newest tokens cut of the prefix. On an
             accelerator three tensors are read back to the host, and as in `paged_attention` the
             tables and options unless validate=False
    Source:  FlashInfer, "cascade inference"; Hydragen (Juravsky et al., 2024)
    Example: two sequences share a block of 4 tokens. Each has one more token.
        >>> pool = torch.arange(12.0).view(3, 1, 4, 1).expand(3, 1, 4, 16)  # blocks of 4 tokens
        >>> prefix = torch.tensor([[0]]), torch.tensor([4])
        >>> suffix = torch.tensor([[1], [2]]), torch.tensor([1, 1])
        >>> step = torch.zeros(2, 1, 16), pool, pool, *prefix, *suffix, torch.tensor([0, 0])
        >>> shared_prefix_attention(*step, layout="HND")[:, 0, 0]  # means of 0, 1, 2, 3 and 4 or 8
        tensor([2.0000, 2.8000])
    """
    require_tensor("query", query, FLOATS)
    num_seqs = len(query) if query.dim() else 0
    require_tensor("prefix_lens", prefix_lens, INTS)
    num_groups = len(prefix_lens) if prefix_lens.dim() else 0
    for name, tensor, shape, like in (
        ("prefix_lens", prefix_lens, (num_groups,), "groups"),
        ("prefix_tables", prefix_tables, (num_groups,), "prefix_lens"),
        ("suffix_lens", suffix_lens, (num_seqs,), "query"),
        ("suffix_tables", suffix_tables, (num_seqs,), "query"),
        ("group_of", group_of, (num_seqs,), "query"),
    ):
        _check_table(name, tensor, shape, query.device, like)
    given = Options(scale, k_scale, v_scale, alibi_slopes, window, softcap, sinks, causal)
    inputs = Inputs(query, key_cache, value_cache, suffix_tables, suffix_lens)
    call = check_call(inputs, layout, kv_cache_dtype, given)
    check_flag("return_lse", return_lse)
    check_flag("validate", validate)
    served_by = sharing_backend(backend, query.device)

    prefixes = Prefixes(prefix_lens.tolist(), group_of.tolist())
    block_size = call.geometry.block_size
    check_prefixes(*prefixes, block_size)
    _check_lengths("prefix", prefixes.lens, prefix_tables, block_size)
    suffixes = suffix_lens.tolist()
    _check_lengths("suffix", suffixes, suffix_tables, block_size)
    before = [prefixes.lens[group] if group >= 0 else 0 for group in prefixes.group_of]
    lengths = [n + more for n, more in zip(before, suffixes)]
    if not call.geometry.num_blocks and any(lengths):
        refuse("key_cache", "large enough for the batch's tokens", tuple(key_cache.shape))
    if validate:
        check_option_values(call.options)
        _check_ids(call, prefix_tables, prefixes, before, lengths)
    tables = _joined(prefix_tables, suffix_tables, prefixes.group_of, before, block_size)
    lens = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    call = call._replace(inputs=inputs._replace(block_tables=tables, seq_lens=lens))
    how = {"partition_size": partition_size, "prefixes": prefixes, "backend": served_by}
    plan = DecodePlan.exact(call.shape, call.layout, query.device, lengths, **how)
    return plan.run_checked(call, out, workspace, return_lse)


def _check_table(
    name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device, like: str
) -> None:
    """Check one of the integer tensors. A table has columns, too, as many as it likes."""
    require_tensor(name, tensor, INTS)
    refuse_transforms(name, tensor)
    is_table = name.endswith("tables")
    if is_table and tensor.dim() == 2:
        shape = (*shape, tensor.shape[1])
    if tensor.shape != shape:
        size = f"({shape[0]}, max_blocks)" if is_table else f"({shape[0]},)"
        refuse(name, f"{size} like {like}", tuple(tensor.shape))
    if tensor.device != device and (is_table or not tensor.is_cpu):
        refuse(name, f"on {device} like query", tensor.device)


def _check_lengths(of: str, lengths: list[int], tables: Tensor, block_size: int) -> None:
    columns = tables.shape[1]
    for row, tokens in enumerate(lengths):
        if not 0 <= tokens <= columns * block_size:
            covers = f"{columns} columns x block size {block_size} = {columns * block_size}"
            rule = f"at least 0, and at most what its row of {of}_tables covers, {covers}"
            refuse(f"{of}_lens[{row}]", rule, tokens)


def _check_ids(
    call: Call, prefix_tables: Tensor, prefixes: Prefixes, before: list[int], lengths: list[int]
) -> None:
    """Check the ids of all blocks that some query token sees."""
    (_, _, _, suffix_tables, _), geometry = call.inputs, call.geometry
    q_len, window = call.shape.q_len, call.options.window
    firsts = [first_needed(n, q_len, window, geometry.block_size) for n in lengths]
    of_groups = list(prefixes.lens)  # where nobody needs a prefix
    for first, group in zip(firsts, prefixes.group_of):
        if group >= 0:
            of_groups[group] = min(of_groups[group], first)
    check_block_ids("prefix_tables", prefix_tables, of_groups, prefixes.lens, geometry, "group")
    of_suffixes = [max(0, first - n) for first, n in zip(firsts, before)]
    ends = [n - prefix for n, prefix in zip(lengths, before)]
    check_block_ids("suffix_tables", suffix_tables, of_suffixes, ends, geometry)


def _joined(
    prefix_tables: Tensor,
    suffix_tables: Tensor,
    group_of: list[int],
    before: list[int],
    block_size: int,
) -> Tensor:
    """(num_seqs, columns), int64: each sequence's blocks, those of its prefix first."""
    device, columns = suffix_tables.device, suffix_tables.shape[1]
    blocks = torch.tensor(before, dtype=torch.int64, device="cpu") // block_size
    most = max(before, default=0) // block_size
    joined = suffix_tables.new_zeros((len(before), most + columns), dtype=torch.int64)
    if most:
        groups = torch.tensor(group_of, device="cpu").clamp(min=0).to(device)
        joined[:, :most] = prefix_tables[groups, :most]
    places = blocks.unsqueeze(1) + torch.arange(columns, device="cpu")
    return joined.scatter_(1, places.to(device), suffix_tables.long())
