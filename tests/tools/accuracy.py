"""Errors against float64 beside those of PyTorch's own attention on the same data.

`make accuracy` writes docs/accuracy.md. The data: a real model's keys, values and queries
(notebooks/data), gone through again and again for longer contexts, and made-up ones that are hard
on a softmax.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pools import Dense, paged

from paged_attention import paged_attention

ROOT = Path(__file__).parents[2]
TOKENS = 1957  # of the real text
DTYPES = {  # of the caches; the query's is float32 beside fp8
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
}
LENGTHS = (64, TOKENS, 16_384, 100_000)


QUERIES = 8


class Errors(NamedTuple):
    """The root mean square of all lanes' errors, as a part of the largest value."""

    ours: float
    in_float32: float  # the same inputs, `out` in float32
    sdpa: float


def real(layer, tokens):
    """(query (queries, heads, head_size), key, value (tokens, kv_heads, head_size), scale): the
    newest queries of the text, and its keys and values over and over."""
    with np.load(ROOT / "notebooks/data/smollm2.npz") as file:
        key, value, query = (
            torch.from_numpy(file[f"layer{layer}_{name}"]).float()
            for name in ("key", "value", "query")
        )
    again = torch.arange(tokens) % TOKENS
    return query[-QUERIES:], key[again], value[again], 0.125


def made_up(tokens):
    """As `real`, of normal noise, 6 heads of 64 on 2."""
    rng = torch.Generator().manual_seed(tokens)
    shapes = (QUERIES, 6, 64), (tokens, 2, 64), (tokens, 2, 64)
    return *(torch.randn(*shape, generator=rng) for shape in shapes), 0.125


def logits_of_10000(tokens):
    """One lane makes logits of +1e4 and -1e4 in turn. The other lanes change them by a few."""
    query, key, value, _ = made_up(tokens)
    query, key = query / 16, key.clone()
    query[..., 0], key[..., 0] = 100.0, 100.0
    key[1::2, :, 0] = -100.0
    return query, key, value, 1.0


def one_dominant_key(tokens):
    """One key in the middle outweighs each of the others by about e to the 15."""
    query, key, value, scale = made_up(tokens)
    query[..., 0], key[..., 0], key[tokens // 2, :, 0] = 11.0, 0.0, 11.0
    return query, key, value, scale


def all_equal(tokens):
    """All keys are the same, so the result is the mean of the values."""
    query, key, value, scale = made_up(tokens)
    return query, key[:1].expand_as(key).contiguous(), value + 1.0, scale


def beyond_fp16(tokens):
    """Products of query and key of up to a million, which float16 can't hold."""
    query, key, value, _ = made_up(tokens)
    return 300 * query, 300 * key, value, 5e-6


DATA = {
    "SmolLM2, layer 7": partial(real, 7),
    "SmolLM2, layer 18": partial(real, 18),
    "normal noise": made_up,
    "logits of 1e4 and -1e4": logits_of_10000,
    "one dominant key": one_dominant_key,
    "all keys equal": all_equal,
    "products beyond fp16": beyond_fp16,
}


def errors(data, tokens, dtype):
    """Errors of one step on DATA[data]. It is rounded to the dtype first, which is no error."""
    query, key, value, scale = DATA[data](tokens)
    fp8 = dtype.itemsize == 1
    if fp8:
        stored = [x.clamp(-448, 448).to(dtype).view(torch.uint8) for x in (key, value)]
        key, value = (x.view(dtype).float() for x in stored)
    else:
        query, key, value = (x.to(dtype) for x in (query, key, value))
        stored = key, value
    dense = Dense(query[:1], *([x] for x in stored))
    pool = paged(dense, 16, "HND", extra_columns=0, poison=(0x7F, 0x7F))
    pool = pool._replace(
        block_tables=pool.block_tables.expand(QUERIES, -1), seq_lens=pool.seq_lens.expand(QUERIES)
    )
    right = by_definition(query.double(), key.double(), value.double(), scale)
    most = value.abs().max().item()

    def error(out):
        return (out.double() - right).square().mean().sqrt().item() / most

    how = {"layout": "HND", "scale": scale, "kv_cache_dtype": "fp8" if fp8 else "auto"}
    wide = torch.empty(query.shape, dtype=torch.float32)
    return Errors(
        error(paged_attention(query, *pool, **how)),
        error(paged_attention(query, *pool, **how, out=wide)),
        error(sdpa(query, key, value, scale)),
    )


def by_definition(query, key, value, scale):
    """(queries, heads, head_size), a query at a time."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    logits = (torch.einsum("hd,thd->ht", q, key) * scale for q in query)
    return torch.stack([torch.einsum("ht,thd->hd", row.softmax(-1), value) for row in logits])


def sdpa(query, key, value, scale):
    """(queries, heads, head_size), in the inputs' dtype: a batch of one-token steps."""
    group = query.shape[1] // key.shape[1]
    key, value = (
        x.transpose(0, 1).repeat_interleave(group, 0).expand(QUERIES, -1, -1, -1)
        for x in (key, value)
    )
    return F.scaled_dot_product_attention(query.unsqueeze(2), key, value, scale=scale).squeeze(2)


PROSE = """# Accuracy

This page has the errors of `paged_attention` against float64. Beside them stand the errors of
`scaled_dot_product_attention` on the same keys and values, one query a sequence. All numbers are
rounded to the dtype first, so that this rounding is no error. `make accuracy` wrote the page, with
torch {torch} on a CPU with {capability} instructions.

An error is the root mean square over all lanes of {queries} queries, divided by the largest value.
The column "out fp32" is the same call with `out` in float32. Its error is what is left if the
result isn't rounded to the inputs' dtype. Beside fp8 caches the query is float32, and SDPA is
given the widened numbers.

* **A longer context is hardly worse.** The kernel sums each partition of 1,024 tokens on its own
  and merges the sums. So its error grows more slowly than SDPA's, and on most rows not at all.
* **Half precision costs its own rounding**, of inputs and of the result, and nothing else. With
  `out` in float32 an fp16 cache is as good as an fp32 one.
* **Large logits lose what float32 can't hold of them.** A logit of 1e4 is known to 1e-3, so its
  exponential is known to a part in 1,000, whoever computes it.
* **The kernel is never worse than SDPA** where that means something. One float32 step of the
  largest value is {step:.1e}. Of two errors below it, or within a tenth of each other, chance
  decides which is smaller. Tests hold the kernel to this on the shorter contexts, and the table
  on all of them.

The first rows are a real model's: the keys, values and newest queries of
[SmolLM2](../notebooks/data/README.md) after a text of {tokens:,} tokens, which is repeated where
the context is longer. Then comes noise, and then what is hard on a softmax:
{meanings}
"""
FLOAT32_STEP = torch.finfo(torch.float32).eps


CHANCE = 1.1  # The order in which a CPU sums moves such a mean by a few per cent.


def report():
    """docs/accuracy.md, line by line."""
    meanings = "".join(f"\n* {name}: {DATA[name].__doc__}" for name in list(DATA)[3:])
    yield PROSE.format(
        torch=torch.__version__.split("+")[0],
        capability=torch.backends.cpu.get_cpu_capability(),
        queries=QUERIES,
        step=FLOAT32_STEP,
        tokens=TOKENS,
        meanings=meanings,
    )
    columns = [c for d, dtype in DTYPES.items() for c in (d, *_wide(dtype, "out fp32"), "SDPA")]
    yield "| data | tokens | " + " | ".join(columns) + " |"
    yield "|---|---:|" + "---:|" * len(columns)
    for data in DATA:
        for tokens in LENGTHS:
            cells = []
            for dtype in DTYPES.values():
                ours, in_float32, sdpa = errors(data, tokens, dtype)
                cells += [ours, *_wide(dtype, in_float32), sdpa]
            yield f"| {data} | {tokens:,} | " + " | ".join(f"{x:.1e}" for x in cells) + " |"


def _wide(dtype, cell):
    """A cell that only half precision has, because elsewhere the result is float32 anyway."""
    return [cell] if dtype in (torch.float16, torch.bfloat16) else []


if __name__ == "__main__":
    (ROOT / "docs/accuracy.md").write_text("\n".join(report()) + "\n", encoding="utf-8")
