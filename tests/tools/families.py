"""Every causal language model of the installed transformers, at tiny sizes, on a PagedCache.

    python tests/tools/families.py             # all of them, as the list of docs/transformers.md
    python tests/tools/families.py llama phi3  # some, with what each of them gives

A family is right if the logits of ten tokens, of a batch padded on the left, are those of the same
text in float64: eager, without a cache, each row alone, one forward pass for each token. A family
that miscounts positions beside padding is compared with what its own cache gives it.
"""

from __future__ import annotations

import copy
import sys
import textwrap
import warnings
from collections import defaultdict

import torch
from hf_models import SMALL, awkward_pool, batch_of, greedy, hf, transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PROMPTS = [[5, 17, 3], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [60]]
NEW = 10
LARGEST = 3e7  # parameters
PROJECTIONS = ("q_proj", "k_proj", "qkv", "query_key_value", "Wqkv", "c_attn", ".query", ".key")

# Whatever of these a configuration has is set.
SIZES = {k: v for k, v in SMALL.items() if k != "attn_implementation"} | {
    "num_hidden_layers": 4,
    **dict.fromkeys(("n_embd", "d_model", "embedding_size", "emb_dim", "lru_width"), 48),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size"), 48),
    **dict.fromkeys(("n_head", "n_heads", "attention_heads"), 6),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 6),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 40),
    **dict.fromkeys(("ffn_hidden_size", "dff", "dim_ff", "d_inner"), 40),
    **dict.fromkeys(("num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("top_k_experts", "mamba_expand"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "first_k_dense_replace", "n_groups"), 1),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "num_kv_shared_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 5),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "mamba_d_state"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 12),
    **dict.fromkeys(("vocab_size_per_layer_input", "audio_vocab_size"), 97),
    "mamba_d_ssm": 96,
    "local_attention": 10,
    "attn_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 20,
}
TWO_WINDOWS = ["sliding_attention", "full_attention"] * 2
# What some need besides.
SPECIAL = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {"layer_types": TWO_WINDOWS},
    "dots3_note_text": {"num_key_value_heads": 6},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma4_text": {"layer_types": TWO_WINDOWS, "global_head_dim": 24, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": TWO_WINDOWS, "global_head_dim": 24},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "helium": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers")


def config_of(family):
    """The family's configuration at tiny sizes; None if it is another family's text and more."""
    default = CONFIG_MAPPING[family]()
    text = default.get_text_config(decoder=True)
    if text.model_type != family and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    names = default.to_dict().keys() - default.attribute_map.keys()
    sizes = {name: size for name, size in SIZES.items() if name in names}
    derived = {n: None for n in LISTS if n in names and isinstance(getattr(default, n, 0), list)}
    settable = {n: v for n, v in derived.items() if not is_computed(type(default), n)}
    config = CONFIG_MAPPING[family](**{**sizes, **settable, **SPECIAL.get(family, {})})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def is_computed(kind, name):
    return isinstance(getattr(kind, name, None), property)


def model_of(config):
    """A model of random weights, large enough for a softmax with peaks; None if it is large."""
    make = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(p.numel() for p in make(config, attn_implementation="eager").parameters())
    if size > LARGEST:
        return None
    torch.manual_seed(0)
    model = make(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and any(part in name for part in PROJECTIONS):
                weight.mul_(12)
    return model


@torch.no_grad()
def judge(model, tokens, dtype=torch.float64):
    """(rows, NEW, vocab_size), the logits of each of the tokens that were generated."""
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    rows = []
    for prompt, generated in zip(PROMPTS, tokens.tolist()):
        texts = [torch.tensor([prompt + generated[:n]]) for n in range(NEW)]
        rows.append(torch.stack([model(t, use_cache=False).logits[0, -1] for t in texts]))
    return torch.stack(rows)


def outcome(family):
    """(heading, why): what becomes of a family."""
    try:
        config = config_of(family)
        if config is None:
            return "language models of other families, and more", ""
        hf.kv_pool(config, 1)
    except NotImplementedError as refusal:
        return "refused", str(refusal).split(": ", 1)[1]
    except Exception as error:
        return "not tried", brief(error)
    try:
        model = model_of(config)
        if model is None:
            return "not tried", "its smallest size is large"
        own = greedy(model, batch_of(PROMPTS), NEW, "eager")
    except Exception as error:
        return "not tried", f"transformers' own: {brief(error)}"
    cache = hf.PagedCache(awkward_pool(model, 60, 4), model.config, range(len(PROMPTS)))
    try:
        tokens, logits = greedy(model, batch_of(PROMPTS), NEW, "paged_attention", cache)
    except Exception as error:
        return "refused", brief(error)
    held = [len(prompt) + NEW - 1 for prompt in PROMPTS]
    if cache.pool.seq_lens(cache.seq_ids).tolist() != held:
        return "WRONG", "the pool was left out"
    try:
        right = judge(model, tokens)
    except RuntimeError:  # some mixtures of experts have no float64
        right = judge(model, tokens, torch.float32)
    error, size = (logits - right).abs().max().item(), right.std().item()
    if error < 1e-3 * size:
        return "right", f"off by {error:.0e}"
    if tokens.equal(own[0]) and (logits - own[1]).abs().max() < 1e-3 * size:
        return "right", "as its own cache, which counts positions beside padding otherwise"
    return "WRONG", f"off by {error:.1e}, its own cache by {(own[1] - right).abs().max():.1e}"


def brief(error):
    return textwrap.shorten(f"{type(error).__name__}: {error}", 150)


def main(families):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = defaultdict(lambda: defaultdict(list))
    for family in families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        heading, why = outcome(family)
        if families:
            print(f"{family}: {heading}, {why}")
        found[heading]["" if heading == "right" else why].append(f"`{family}`")
    if families:
        return
    print(f"### transformers {transformers.__version__}")
    for heading, reasons in sorted(found.items(), reverse=True):
        print(f"\n**{heading.capitalize()}**: {sum(map(len, reasons.values()))}\n")
        for why, names in reasons.items():
            text = f"- {why}: {', '.join(names)}" if why else ", ".join(names)
            indent = "  " if why else ""
            print(textwrap.fill(text, 118, subsequent_indent=indent, break_on_hyphens=False))
    assert "WRONG" not in found


if __name__ == "__main__":
    main(sys.argv[1:])
