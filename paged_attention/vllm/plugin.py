"""The plugin: our operations put behind vLLM's names where vLLM has none, and taken away again.

vLLM calls `register` in each of its processes (entry point group vllm.general_plugins). Callers
look the operations up in vllm._custom_ops, and forward_decode in its class, at each call, so it
is enough to set attributes there. What was there is kept, for `unregister`.
"""

import functools
import inspect
import logging
import os
import sys
import threading
from importlib import import_module

import torch

from paged_attention.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_attention.vllm.choice import partition_size, takes_v2, upstream_takes_v2, v2_min_len
from paged_attention.vllm.dispatch import always_takes_v1, choosing
from paged_attention.vllm.writes import reshape_and_cache

logger = logging.getLogger("vllm.plugins.paged_attention")  # vLLM shows what is below "vllm"

_lock = threading.RLock()
_kept = {}  # (owner, name) -> what was there; of the process, as vLLM's modules are
_MISSING = object()


def register():
    """Serve what this vLLM can't: says in one log line what it changed. Twice is once.

    paged_attention_v1 and reshape_and_cache become ours where the native operation is missing; so
    does paged_attention_v2, and also where its first call raises NotImplementedError (that call is
    served already). Where V2 is ours, or a port always takes V1, forward_decode chooses: V2 above
    PAGED_ATTENTION_V2_MIN_LEN tokens. What works stays.

    PAGED_ATTENTION_VLLM=force makes V2 ours in any case, =off changes nothing. Whatever is not as
    expected is a warning, and nothing is changed: vLLM goes on without us.
    """
    with _lock:
        if _kept:
            return
        try:
            said = _install(os.environ.get("PAGED_ATTENTION_VLLM", ""))
        except Exception as error:  # of any kind: a plugin must not take its host down
            unregister()
            logger.warning("paged_attention changes nothing: %s: %s", type(error).__name__, error)
        else:
            logger.info("paged_attention: %s", "; ".join(said) or "nothing to change")


def unregister():
    """Put back all that `register` replaced; what can't be put back is a warning."""
    with _lock:
        while _kept:
            (owner, name), old = _kept.popitem()
            try:
                if old is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
            except Exception as error:  # of any kind: the others go back, too
                logger.warning("paged_attention leaves %s of %r: %r", name, owner, error)


def _install(mode):
    """Returns what was done, in words."""
    if mode == "off":
        return ["nothing changed, PAGED_ATTENTION_VLLM=off"]
    if mode not in ("", "force"):
        raise ValueError(f"PAGED_ATTENTION_VLLM must be force or off, got {mode!r}")
    partition_size(), v2_min_len()  # what the environment sets is looked at now, not in a step
    ops = import_module("vllm._custom_ops")
    said = []
    for name, ours in (
        ("paged_attention_v1", paged_attention_v1),
        ("reshape_and_cache", reshape_and_cache),
    ):
        if not _exists(ops, name):
            _set(ops, name, ours)
            said.append(f"{name} is ours, there is no native one")
    attention = _class_with_forward_decode()
    if mode == "force" or not _exists(ops, "paged_attention_v2"):
        _set(ops, "paged_attention_v2", paged_attention_v2)
        why = "PAGED_ATTENTION_VLLM=force" if mode else "there is no native one"
        said += [f"paged_attention_v2 is ours, {why}", *_choose(attention, ops, native_v2=None)]
    else:
        native_v2 = ops.paged_attention_v2
        _set(ops, "paged_attention_v2", _until_known(attention, ops, native_v2))
        said.append("paged_attention_v2 stays, if its first call succeeds")
        if attention is not None and always_takes_v1(attention.forward_decode):
            said += _choose(attention, ops, native_v2)
    unused = _unused_v2()
    return said + [f"{name} is there and stays unused" for name in unused]


def _until_known(attention, ops, native_v2):
    """V2 until its first call has shown whether there is one behind the name."""
    served_by = None

    def settle(function):
        nonlocal served_by
        served_by = function
        with _lock:
            if (ops, "paged_attention_v2") not in _kept:  # unregistered meanwhile
                return
            if ops.paged_attention_v2 is first_call:
                _set(ops, "paged_attention_v2", function)
            if function is not native_v2 and (attention, "forward_decode") not in _kept:
                try:
                    logger.info("paged_attention: %s", *_choose(attention, ops, native_v2=None))
                except Exception as error:  # as in register
                    logger.warning("forward_decode keeps its own choice: %s", error)

    @functools.wraps(native_v2)
    def first_call(*args, **kwargs):
        if served_by is not None:  # called by one who had looked it up before
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


def _check_arguments(function, args, kwargs):
    """NotImplementedError for a function that can't be called so: it isn't vLLM's operation."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise NotImplementedError(str(error)) from error
    except ValueError:  # compiled, it doesn't tell
        pass


def _choose(attention, ops, native_v2):
    """Let forward_decode choose between V1 and V2; native_v2: None, or one that may yet work."""
    if attention is None:
        return ["this vLLM has no forward_decode"]

    def rule(max_seq_len, num_seqs, num_heads):
        if ops.paged_attention_v2 is native_v2:
            return upstream_takes_v2(max_seq_len, num_seqs, num_heads)
        return takes_v2(max_seq_len)

    original = attention.forward_decode
    _set(attention, "forward_decode", staticmethod(choosing(original, ops, rule)))
    was = " (it took V1 always)" if always_takes_v1(original) else ""
    return [f"forward_decode takes V2 above {v2_min_len()} tokens{was}"]


def _exists(ops, name):
    """Whether an operation of vllm._custom_ops has something behind it: what calls a PyTorch
    operation that isn't registered hasn't; what calls anything else is a port's own."""
    function = inspect.unwrap(getattr(ops, name, None))
    called = getattr(getattr(function, "__code__", None), "co_names", ())
    spaces = [space for space in ("_C", "_C_cache_ops") if space in called and name in called]
    return function is not None and all(hasattr(getattr(torch.ops, s), name) for s in spaces)


def _class_with_forward_decode():
    """vLLM's PagedAttention, or None where it has no forward_decode (0.12)."""
    try:
        module = import_module("vllm.attention.ops.paged_attn")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm.attention"):
            raise
        return None
    attention = getattr(module, "PagedAttention", None)
    return attention if hasattr(attention, "forward_decode") else None


def _unused_v2():
    """Names of a vendor's V2 kernels (CoreX's ixformer) that the port has loaded."""
    modules = sorted(name for name in [*sys.modules] if name.split(".")[0] == "ixformer")
    found = {}  # a kernel is exported by several modules
    for module in modules:
        for name in getattr(sys.modules[module], "__dict__", ()):
            if name.endswith("attention_v2"):
                found.setdefault(name, f"{module}.{name}")
    return [*found.values()]


def _set(owner, name, new):
    old = vars(owner).get(name, _MISSING)
    setattr(owner, name, new)
    _kept.setdefault((owner, name), old)
