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

from paged_attention.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_attention.vllm.choice import partition_size, v2_min_len
from paged_attention.vllm.dispatch import with_choice, with_v2_above
from paged_attention.vllm.port import (
    always_takes_v1,
    class_with_forward_decode,
    is_beyond,
    is_served,
    lacking,
    limit_of_v1,
)
from paged_attention.vllm.vendor import KERNEL, MODULE, vendors_v2
from paged_attention.vllm.writes import reshape_and_cache, with_fp8

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
    forward_decode takes V2 above what V1 serves. Whatever works stays.

    PAGED_ATTENTION_VLLM=force makes V2 ours in any case, =vendor makes it CoreX's own, and =off
    changes nothing. If anything is not as expected, nothing is changed, a warning says so, and
    vLLM goes on without us.
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
                _set(owner, name, old)
            except Exception as error:  # of any kind, because the others go back, too
                logger.warning("paged_attention leaves %s of %r: %r", name, owner, error)


def _replace(owner: Any, name: str, new: object) -> None:
    """Set an attribute of vLLM's, and keep for `unregister` what stood there first."""
    old = vars(owner).get(name, _MISSING)
    setattr(owner, name, new)
    _replaced.setdefault((owner, name), old)


def _set(owner: Any, name: str, value: object) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _install(mode: str) -> list[str]:
    """Replace what must be replaced. Returns what was done, in words."""
    if mode == "off":
        return ["nothing changed, PAGED_ATTENTION_VLLM=off"]
    if mode not in ("", "force", "vendor"):
        raise ValueError(f"PAGED_ATTENTION_VLLM must be force, vendor or off, got {mode!r}")
    _ = partition_size(), v2_min_len()  # so that a wrong setting is found now, not in a step
    ops = import_module("vllm._custom_ops")
    v1_serves = limit_of_v1(ops)
    said = []
    for ours in (paged_attention_v1, reshape_and_cache):
        name = ours.__name__
        if not is_served(ops, name):
            _replace(ops, name, ours)
            said.append(f"{name} is ours, because there is no native one")
    v2 = vendors_v2() if mode == "vendor" else paged_attention_v2
    attention = class_with_forward_decode()
    always_v1 = attention is not None and always_takes_v1(attention.forward_decode)
    choose = None
    if attention is not None and not always_v1:
        choose = functools.partial(_let_choose, attention, ops, v1_serves)
    if not mode and is_served(ops, "paged_attention_v2"):
        _replace(ops, "paged_attention_v2", _tried_first(ops, choose))
        said.append("paged_attention_v2 stays, if its first call succeeds")
    else:
        _replace(ops, "paged_attention_v2", v2)
        why = f"of PAGED_ATTENTION_VLLM={mode}" if mode else "there is no native one"
        whose = "the vendor's" if mode == "vendor" else "ours"
        said.append(f"paged_attention_v2 is {whose}, because {why}")
        if choose is not None:
            said.append(choose())
    if always_v1:
        said.append(_add_v2(attention, ops, v1_serves, v2))
    elif attention is None:
        said.append("this vLLM has no forward_decode")
    if mode != "vendor" and hasattr(sys.modules.get(MODULE), KERNEL):
        said.append(f"{KERNEL} stays unused without PAGED_ATTENTION_VLLM=vendor")
    return said


def _tried_first(ops: Any, let_choose: Callable[[], str] | None) -> Callable:
    """A stand-in for a native V2, which nobody knows to work before its first call.

    It calls the native V2. If that works, the native V2 is put back in its place. If that raises
    NotImplementedError, V2 becomes ours.

    Args:    let_choose: called when V2 has become ours, for a forward_decode that calls it
    """
    native_v2, served_by = ops.paged_attention_v2, None

    def settle(function: Callable) -> None:
        nonlocal served_by, let_choose
        served_by = function
        with _lock:
            if (ops, "paged_attention_v2") not in _replaced:  # unregistered meanwhile
                return
            if ops.paged_attention_v2 is first_call:
                _replace(ops, "paged_attention_v2", function)
            if function is not native_v2 and let_choose is not None:
                try:
                    logger.info("paged_attention: %s", let_choose())
                except Exception as error:  # as in register
                    logger.warning("forward_decode keeps its own choice: %s", error)
                let_choose = None

    @functools.wraps(native_v2)
    def first_call(*args: Any, **kwargs: Any) -> None:
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


def _let_choose(attention: Any, ops: Any, v1_serves: int) -> str:
    """Let a forward_decode that calls V2, which is ours now, do so for long sequences only.

    Returns: what was done, in words
    """
    if lacking(ops.paged_attention_v1):  # only the port itself knows how to call its V1
        return _add_v2(attention, ops, v1_serves, ops.paged_attention_v2)
    decode = with_choice(attention.forward_decode, ops, v1_serves)
    _replace(attention, "forward_decode", staticmethod(decode))
    return f"forward_decode takes V2 above {v2_min_len(v1_serves)} tokens"


def _add_v2(attention: Any, ops: Any, v1_serves: int, v2: Callable) -> str:
    """Let V2 serve what is too long for V1, and forward_decode the rest.

    It goes back to its place if V2 doesn't work in its first step.

    Returns: what was done, in words
    """
    lacks, warned = lacking(ops.paged_attention_v1), set()

    def failed(error: Exception, has_worked: bool) -> None:
        said = f"{type(error).__name__}: {error}"
        with _lock:
            if not has_worked and vars(attention).get("forward_decode") is decode:
                _set(attention, "forward_decode", _replaced.pop((attention, "forward_decode")))
            if said not in warned:
                warned.add(said)
                logger.warning("forward_decode of the port serves a step, because of %s", said)

    is_beyond_v1 = functools.partial(is_beyond, lacks)
    original = attention.forward_decode
    decode = staticmethod(with_v2_above(original, v2, v1_serves, is_beyond_v1, failed))
    _replace(attention, "forward_decode", decode)
    if "k_scale" in lacks:  # so what ours reads must be ours, too
        _replace(ops, "reshape_and_cache", with_fp8(ops.reshape_and_cache))
    return f"above {v2_min_len(v1_serves)} tokens V2 serves, and up to there the port"
