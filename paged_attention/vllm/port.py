"""What can be told about a port of vLLM without running any of its kernels."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from paged_attention.vllm.choice import V2_MIN_LEN

COREX_V1 = 32_768  # tokens that ixformer's V1 serves on a BI-V100. It hangs or fails above
SPARSE = ("blocksparse_local_blocks", "blocksparse_vert_stride", "blocksparse_head_sliding_step")


def is_served(ops: Any, name: str) -> bool:
    """Whether there is an operation behind a name of vllm._custom_ops.

    vLLM's own functions call a PyTorch operation of the same name, and a build may lack it. A
    port's function that calls anything else is taken to work.
    """
    function = getattr(ops, name, None)
    if function is None:
        return False
    called = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())
    spaces = [space for space in ("_C", "_C_cache_ops") if space in called and name in called]
    return all(hasattr(getattr(torch.ops, space), name) for space in spaces)


def class_with_forward_decode() -> Any:
    """vLLM's PagedAttention, or None where it has no forward_decode, as in vLLM 0.12."""
    try:
        module = import_module("vllm.attention.ops.paged_attn")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm.attention"):
            raise
        return None
    attention = getattr(module, "PagedAttention", None)
    return attention if hasattr(attention, "forward_decode") else None


def is_corex() -> bool:
    """Whether this is CoreX, the software of Iluvatar's cards.

    Its builds of torch and vLLM have "corex" in their versions, and its vLLM has imported
    ixformer, the package of its kernels.
    """
    modules = (sys.modules.get(name) for name in ("torch", "vllm"))
    versions = (str(getattr(module, "__version__", "")) for module in modules)
    return "ixformer" in sys.modules or any("corex" in version for version in versions)


def limit_of_v1(ops: Any) -> int:
    """Tokens up to which V1 takes a sequence: 8,192, or what CoreX's native V1 serves."""
    return COREX_V1 if is_served(ops, "paged_attention_v1") and is_corex() else V2_MIN_LEN


def lacking(v1: Callable) -> list[str]:
    """Arguments for fp8 caches and block-sparse attention that a V1 can't be given.

    CoreX's V1 has none of them, and its forward_decode leaves them out. So it reads fp8 caches as
    if they were none, and attends to all blocks, and says nothing.
    """
    try:
        parameters = inspect.signature(v1).parameters
    except ValueError:  # a compiled function doesn't tell
        return []
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return [] if takes_any else [n for n in ("k_scale", *SPARSE) if n not in parameters]


def is_beyond(lacks: Sequence[str], given: Mapping[str, Any]) -> bool:
    """Whether a V1 that lacks these arguments would serve such a step wrongly.

    Args:    given: forward_decode's arguments
    """
    is_fp8 = "k_scale" in lacks and given["key_cache"].element_size() == 1
    return is_fp8 or any(given.get(name) not in (0, None) for name in lacks if name in SPARSE)


def always_takes_v1(forward_decode: Callable) -> bool:
    """Whether a port's forward_decode calls V1 whatever it is given, as CoreX's vLLM 0.6.3 does.

    Its source tells, as far as it is plain: one call of V1 that every path passes, and no V2 or
    return before it. `if use_v1` counts as a path where `use_v1 = True` stands before it. A port
    whose source is missing, decorated or harder to read than that counts as one that chooses.
    """
    if hasattr(forward_decode, "__wrapped__"):
        return False
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(forward_decode))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    return isinstance(function, ast.FunctionDef) and _is_v1_alone(function.body)


def _is_v1_alone(body: list[ast.stmt]) -> bool:
    rest, true, called = list(body), set(), False
    while rest:
        statement = rest.pop(0)
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            if statement.test.id in true:
                rest = statement.body + rest
                continue
        inside = list(ast.walk(statement))
        names = {n.attr for n in inside if isinstance(n, ast.Attribute)}
        names |= {n.id for n in inside if isinstance(n, ast.Name)}
        value = getattr(statement, "value", None)
        if any(name.endswith("attention_v2") for name in names):
            return False
        if "paged_attention_v1" in names:
            if not isinstance(value, ast.Call):
                return False  # under a condition
            called = True
        if any(isinstance(n, ast.Return) for n in inside):
            return called and isinstance(statement, ast.Return)
        stored = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        true -= stored
        if isinstance(statement, ast.Assign) and isinstance(value, ast.Constant):
            true |= stored if value.value is True else set()
    return called
