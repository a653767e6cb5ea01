"""The plugin: our operations put behind vLLM's names where vLLM has none, and taken away again.

vLLM calls `register` in each of its processes (entry point group vllm.general_plugins). Callers
look the operations up in vllm._custom_ops, and forward_decode in its class, at each call. So it is
enough to set attributes there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from paged_attention.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_attention.vllm.choice import partition_size, takes_v2, upstream_takes_v2, v2_min_len
from paged_attention.vllm.dispatch import always_takes_v1, with_choice
from paged_attention.vllm.writes import reshape_and_cache

logger = logging.getLogger("vllm.plugins.paged_attention")  # vLLM shows what is below "vllm"

# What stood in the attributes that `register` has replaced: (owner, name) -> value. It belongs to
# the process, as vLLM's modules do.
_replaced: dict[tuple[Any, str], Any] = {}
_MISSING = object()
_lock = threading.RLock()


def register() -> None:
    """Serve what this vLLM can't, and say in one log line what was changed. Twice is once.

    paged_attention_v1 and reshape_and_cache become ours where the native operation is missing.
    So does paged_attention_v2, also where the native one raises NotImplementedError at its first
    call, and that call is served already. Where V2 is ours, or where a port always takes V1,
    forward_decode chooses V2 above PAGED_ATTENTION_V2_MIN_LEN tokens. Whatever works stays.

    PAGED_ATTENTION_VLLM=force makes V2 ours in any case, and =off changes nothing. If anything is
    not as expected, nothing is changed, a warning says so, and vLLM goes on without us.
    """
    with _lock:
        if _replaced:
            return
        try:
            said = _install(os.environ.get("PAGED_ATTENTION_VLLM", ""))
        except Exception as error:  # of any kind, because a plugin must not take its host down
            unregister()
            logger.warning("paged_attention changes nothing: %s: %s", type(error).__name__, error)
        else:
            logger.info("paged_attention: %s", "; ".join(said) or "nothing to change")


def unregister() -> None:
    """Put back all that `register` replaced. A warning names what can't be put back."""
    with _lock:
        while _replaced:
            (owner, name), old = _replaced.popitem()
            try:
                if old is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
            except Exception as error:  # of any kind, because the others go back, too
                logger.warning("paged_attention leaves %s of %r: %r", name, owner, error)


def _replace(owner: Any, name: str, new: object) -> None:
    """Set an attribute of vLLM's, and keep for `unregister` what stood there first."""
    old = vars(owner).get(name, _MISSING)
    setattr(owner, name, new)
    _replaced.setdefault((owner, name), old)


def _install(mode: str) -> list[str]:
    """Replace what must be replaced. Returns what was done, in words."""
    if mode == "off":
        return ["nothing changed, PAGED_ATTENTION_VLLM=off"]
    if mode not in ("", "force"):
        raise ValueError(f"PAGED_ATTENTION_VLLM must be force or off, got {mode!r}")
    _ = partition_size(), v2_min_len()  # so that a wrong setting is found now, not in a step
    ops = import_module("vllm._custom_ops")
    said = []
    for ours in (paged_attention_v1, reshape_and_cache):
        name = ours.__name__
        if not _is_served(ops, name):
            _replace(ops, name, ours)
            said.append(f"{name} is ours, because there is no native one")
    attention = _class_with_forward_decode()
    if mode == "force" or not _is_served(ops, "paged_attention_v2"):
        _replace(ops, "paged_attention_v2", paged_attention_v2)
        why = "of PAGED_ATTENTION_VLLM=force" if mode else "there is no native one"
        said += [f"paged_attention_v2 is ours, because {why}", _let_choose(attention, ops, None)]
    else:
        native_v2 = ops.paged_attention_v2
        _replace(ops, "paged_attention_v2", _tried_first(attention, ops, native_v2))
        said.append("paged_attention_v2 stays, if its first call succeeds")
        if attention is not None and always_takes_v1(attention.forward_decode):
            said.append(_let_choose(attention, ops, native_v2))
    return said + [f"{name} is there and stays unused" for name in _unused_v2_kernels()]


def _is_served(ops: Any, name: str) -> bool:
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


def _tried_first(attention: Any, ops: Any, native_v2: Callable) -> Callable:
    """A stand-in for a native V2, which nobody knows to work before its first call.

    It calls the native V2. If that works, the native V2 is put back in its place. If that raises
    NotImplementedError, V2 becomes ours, and forward_decode chooses.
    """
    served_by = None

    def settle(function: Callable) -> None:
        nonlocal served_by
        served_by = function
        with _lock:
            if (ops, "paged_attention_v2") not in _replaced:  # unregistered meanwhile
                return
            if ops.paged_attention_v2 is first_call:
                _replace(ops, "paged_attention_v2", function)
            if function is not native_v2 and (attention, "forward_decode") not in _replaced:
                try:
                    logger.info("paged_attention: %s", _let_choose(attention, ops, None))
                except Exception as error:  # as in register
                    logger.warning("forward_decode keeps its own choice: %s", error)

    @functools.wraps(native_v2)
    def first_call(*args, **kwargs) -> None:
        if served_by is not None:  # the caller had looked V2 up before it was settled
            return served_by(*args, **kwargs)
        try:
            _check_arguments(native_v2, args, kwargs)
            native_v2(*args, **kwargs)
        except NotImplementedError as error:
            logger.info("paged_attention: paged_attention_v2 is ours, the native one: %r", error)
            settle(paged_attention_v2)
            paged_attention_v2(*args, **kwargs)
        else:
            settle(native_v2)

    return first_call


def _check_arguments(function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """NotImplementedError if a function can't take vLLM's arguments, so isn't vLLM's operation."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise NotImplementedError(str(error)) from error
    except ValueError:  # a compiled function doesn't tell
        pass


def _let_choose(attention: Any, ops: Any, native_v2: Callable | None) -> str:
    """Let forward_decode choose between V1 and V2. Returns what was done, in words.

    Args:    native_v2: one that may yet turn out to work, and then has upstream's rule
    """
    if attention is None:
        return "this vLLM has no forward_decode"

    def rule(max_seq_len: int, num_seqs: int, num_heads: int) -> bool:
        if ops.paged_attention_v2 is native_v2:
            return upstream_takes_v2(max_seq_len, num_seqs, num_heads)
        return takes_v2(max_seq_len)

    original = attention.forward_decode
    _replace(attention, "forward_decode", staticmethod(with_choice(original, ops, rule)))
    was = " (it took V1 always)" if always_takes_v1(original) else ""
    return f"forward_decode takes V2 above {v2_min_len()} tokens{was}"


def _class_with_forward_decode() -> Any:
    """vLLM's PagedAttention, or None where it has no forward_decode, as in vLLM 0.12."""
    try:
        module = import_module("vllm.attention.ops.paged_attn")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm.attention"):
            raise
        return None
    attention = getattr(module, "PagedAttention", None)
    return attention if hasattr(attention, "forward_decode") else None


def _unused_v2_kernels() -> list[str]:
    """Names of a vendor's V2 kernels, CoreX's ixformer has one, that the port has loaded."""
    modules = sorted(name for name in [*sys.modules] if name.split(".")[0] == "ixformer")
    found = {}  # a kernel is exported by several modules
    for module in modules:
        for name in getattr(sys.modules[module], "__dict__", ()):
            if name.endswith("attention_v2"):
                found.setdefault(name, f"{module}.{name}")
    return [*found.values()]
