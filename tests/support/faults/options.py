"""Every fault of what a call is told beside its tensors: (argument, what to put there, words).

What to put there is a function of the good call; where it gives a dictionary, that is several
arguments, of which the one named is at fault.
"""

from __future__ import annotations

import torch
from helpers import INF, NAN

from paged_attention import Workspace

from .calls import HEADS, KV_HEADS, zeros


def ones(*shape, **how):
    return torch.ones(*shape, **how)


def not_causal(**option):
    return lambda c: {**option, "causal": False}


# Of `paged_attention`, of a plan's run and of the reference.
LOGIT_FAULTS = {
    "scale a string": ("scale", lambda c: "big", ("big",)),
    "scale a list": ("scale", lambda c: [1.0], ("1.0",)),
    "scale a bool": ("scale", lambda c: True, ("True",)),
    "scale a tensor": ("scale", lambda c: torch.tensor(0.5), ("0.5",)),
    "scale nan": ("scale", lambda c: NAN, ("nan",)),
    "scale infinite": ("scale", lambda c: -INF, ("-inf",)),
    "scale beyond float32": ("scale", lambda c: 1e39, ("1e+39",)),
    "softcap zero": ("softcap", lambda c: 0.0, ("0",)),
    "softcap negative": ("softcap", lambda c: -5.0, ("-5",)),
    "softcap a string": ("softcap", lambda c: "x", ("x",)),
    "softcap a bool": ("softcap", lambda c: True, ("True",)),
    "softcap nan": ("softcap", lambda c: NAN, ("nan",)),
    "softcap infinite": ("softcap", lambda c: INF, ("inf",)),
    "softcap below float32": ("softcap", lambda c: 1e-50, ("1e-50",)),
    "slopes a list": ("alibi_slopes", lambda c: [1.0] * HEADS, ("1.0",)),
    "slopes a float": ("alibi_slopes", lambda c: 0.5, ("0.5",)),
    "slopes for KV heads": ("alibi_slopes", lambda c: ones(KV_HEADS), ("2", "4")),
    "slopes of rank 0": ("alibi_slopes", lambda c: torch.tensor(0.5), ("()",)),
    "slopes of rank 2": ("alibi_slopes", lambda c: ones(HEADS, 1), ("4, 1",)),
    "slopes of int64": ("alibi_slopes", lambda c: ones(HEADS).long(), ("int64",)),
    "slopes on meta": ("alibi_slopes", lambda c: ones(HEADS, device="meta"), ("meta", "cpu")),
    "slopes not causal": ("alibi_slopes", not_causal(alibi_slopes=ones(HEADS)), ("causal", "1.")),
    "sinks a float": ("sinks", lambda c: 1.0, ("1.0",)),
    "sinks for too many heads": ("sinks", lambda c: ones(HEADS + 1), ("5", "4")),
    "sinks for KV heads": ("sinks", lambda c: ones(KV_HEADS), ("2", "4")),
    "sinks of rank 0": ("sinks", lambda c: torch.tensor(1.0), ("()",)),
    "sinks of int32": ("sinks", lambda c: ones(HEADS).int(), ("int32",)),
    "sinks on meta": ("sinks", lambda c: ones(HEADS, device="meta"), ("meta", "cpu")),
    "causal a number": ("causal", lambda c: 1, ("1",)),
    "causal None": ("causal", lambda c: None, ("None",)),
    "causal a string": ("causal", lambda c: "no", ("no",)),
    **{
        f"{name} {what}": (name, lambda c, value=value: value, words)
        for name in ("k_scale", "v_scale")
        for what, value, words in (
            ("a string", "0.5", ("0.5",)),
            ("a list", [1.0], ("1.0",)),
            ("None", None, ("None",)),
            ("a bool", True, ("True",)),
            ("nan", NAN, ("nan",)),
            ("infinite", INF, ("inf",)),
            ("beyond float32", -1e39, ("-1e+39",)),
            ("per query head", ones(HEADS), ("4", "2")),
            ("of rank 2", ones(1, 2), ("1, 2",)),
            ("of no element", ones(0), ("0",)),
            ("of int64", ones(KV_HEADS).long(), ("int64",)),
            ("on meta", ones(KV_HEADS, device="meta"), ("meta", "cpu")),
        )
    },
}

# Likewise, but for who reads what these tensors hold; a plan's run doesn't.
LOGIT_VALUE_FAULTS = {
    f"{name} holding {bad}": (name, lambda c, n=n, bad=bad: ending_in(bad, n), (str(bad),))
    for name, n in (
        ("alibi_slopes", HEADS),
        ("sinks", HEADS),
        ("k_scale", KV_HEADS),
        ("v_scale", KV_HEADS),
        ("k_scale", 1),
    )
    for bad in (NAN, INF)
}


def ending_in(bad, n):
    return torch.tensor([1.0] * (n - 1) + [bad])


# Of `paged_attention` and of the reference; a plan has its own.
WINDOW_FAULTS = {
    "window zero": ("window", lambda c: 0, ("0",)),
    "window negative": ("window", lambda c: -3, ("-3",)),
    "window a float": ("window", lambda c: 2.5, ("2.5",)),
    "window a bool": ("window", lambda c: True, ("True",)),
    "window a string": ("window", lambda c: "4", ("4",)),
    "window nan": ("window", lambda c: NAN, ("nan",)),
    "window not causal": ("window", not_causal(window=3), ("3", "causal")),
}

CACHE_FAULTS = {
    "kv_cache_dtype unknown": ("kv_cache_dtype", lambda c: "fp7", ("fp7",)),
    "kv_cache_dtype None": ("kv_cache_dtype", lambda c: None, ("None",)),
    "kv_cache_dtype a dtype": ("kv_cache_dtype", lambda c: torch.uint8, ("uint8",)),
    "kv_cache_dtype of bytes for floats": ("key_cache", lambda c: {"kv_cache_dtype": "fp8"},
                                           ("float32", "fp8", "uint8")),
    "bytes of no format": ("kv_cache_dtype", lambda c: in_bytes(c), ("uint8", "auto")),
    "float8 with a format": ("key_cache", lambda c: in_bytes(c, torch.float8_e5m2) | {
        "kv_cache_dtype": "fp8_e5m2"}, ("float8_e5m2", "uint8")),
    "bytes beside floats": ("value_cache", lambda c: {
        "key_cache": in_bytes(c)["key_cache"], "kv_cache_dtype": "fp8"}, ("float32", "uint8")),
}  # fmt: skip


def in_bytes(call, dtype=torch.uint8):
    return {
        name: torch.zeros(call[name].shape, dtype=torch.uint8).view(dtype)
        for name in ("key_cache", "value_cache")
    }


LAYOUT_FAULTS = {
    "layout unknown": ("layout", lambda c: "HDN", ("HDN", "HND", "NHD", "vllm")),
    "layout in the wrong case": ("layout", lambda c: "hnd", ("hnd", "HND")),
    "layout missing for a 4-D key": ("layout", lambda c: None, ("HND", "NHD")),
    "layout vllm for a 4-D key": ("layout", lambda c: "vllm", ("vllm", "4")),
    "layout not a string": ("layout", lambda c: 3, ("3",)),
}

# Of `paged_attention` and of a plan's run.
OUT_FAULTS = {
    "out not a tensor": ("out", lambda c: [7.0], ("list",)),
    "out of another shape": ("out", lambda c: zeros(2, 4, 8), ("2, 4, 8", "2, 4, 16")),
    "out of another rank": ("out", lambda c: zeros(2, 64), ("2, 64", "2, 4, 16")),
    "out of float16 for a float32 query": ("out", lambda c: zeros(2, 4, 16).half(), ("float16",)),
    "out of float64": ("out", lambda c: zeros(2, 4, 16).double(), ("float64",)),
    "out of int32": ("out", lambda c: zeros(2, 4, 16).int(), ("int32",)),
    "out on another device": ("out", lambda c: zeros(2, 4, 16, device="meta"), ("meta",)),
    "out wanting a gradient": ("out", lambda c: zeros(2, 4, 16, requires_grad=True), ("grad",)),
    "out's rows all the same memory": ("out", lambda c: zeros(1, 4, 16).expand(2, 4, 16), ()),
    "out the query itself": ("out", lambda c: c["query"], ("query",)),
    "out a piece of the key cache": (
        "out",
        lambda c: c["key_cache"].flatten()[5 : 5 + 128].view(2, 4, 16),
        ("key_cache",),
    ),
    "out a piece of the value cache": (
        "out",
        lambda c: c["value_cache"].flatten()[-128:].view(2, 4, 16),
        ("value_cache",),
    ),
    **{
        f"out over {name}": ("out", lambda c, name=name, n=n: over(name, n), (name,))
        for name, n in (
            ("alibi_slopes", HEADS),
            ("sinks", HEADS),
            ("k_scale", KV_HEADS),
            ("v_scale", KV_HEADS),
            ("k_scale", 1),
        )
    },
    "workspace not one": ("workspace", lambda c: object(), ("object",)),
    "workspace a string": ("workspace", lambda c: "w", ("str",)),
    "workspace elsewhere": ("workspace", lambda c: Workspace("meta"), ("meta", "cpu")),
    "return_lse a number": ("return_lse", lambda c: 1, ("1",)),
    "return_lse None": ("return_lse", lambda c: None, ("None",)),
}


def over(name, numel):
    """`out`, and an option that lies in its memory."""
    out = torch.full((2, 4, 16), 0.5)
    return {"out": out, name: out.flatten()[20 : 20 + numel]}


# Of `paged_attention` alone.
SWITCH_FAULTS = {
    "max_seq_len negative": ("max_seq_len", lambda c: -1, ("-1",)),
    "max_seq_len a float": ("max_seq_len", lambda c: 7.5, ("7.5",)),
    "max_seq_len a string": ("max_seq_len", lambda c: "7", ("7",)),
    "max_seq_len a bool": ("max_seq_len", lambda c: True, ("True",)),
    "partition_size zero": ("partition_size", lambda c: 0, ("0",)),
    "partition_size negative": ("partition_size", lambda c: -16, ("-16",)),
    "partition_size a float": ("partition_size", lambda c: 16.5, ("16.5",)),
    "partition_size a string": ("partition_size", lambda c: "512", ("512",)),
    "partition_size a bool": ("partition_size", lambda c: True, ("True",)),
    "backend unknown": ("backend", lambda c: "flash", ("flash",)),
    "backend empty": ("backend", lambda c: "", ("''",)),
    "backend not a string": ("backend", lambda c: 3, ("3",)),
    "validate a number": ("validate", lambda c: 0, ("0",)),
    "validate None": ("validate", lambda c: None, ("None",)),
}
LENGTH_FAULTS = {"max_seq_len below the longest": ("max_seq_len", lambda c: 6, ("6", "7"))}
