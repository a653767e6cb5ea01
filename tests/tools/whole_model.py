"""`make test-model`: the real model on prompts of one block, many, and more than a partition.

Not collected by `make test`, which runs the short form, `test_hf_smollm2.py`.
"""

import pytest
import torch
from test_hf_smollm2 import captured, check, model, prompts, right, shown  # noqa: F401  (fixtures)

from paged_attention import PagedKVCache

LENGTHS = [5, 500, 1500]
NEW = 64


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_prompt_alone_goes_on_as_by_sdpa(model, prompts, right, row):  # noqa: F811
    check(model, [prompts[row]], [right[row]])


def test_a_ragged_batch_goes_on_as_each_of_its_prompts_does_by_sdpa(model, prompts, right):  # noqa: F811
    check(model, prompts, right)


def test_tokens_that_agree_are_not_enough(model, prompts, right, monkeypatch):  # noqa: F811
    """Keys rounded to bfloat16 give the same words, and logits that the tolerance refuses."""
    write = PagedKVCache.write

    def rounding(self, key, value, slots, layer=0):
        write(self, key.to(torch.bfloat16).float(), value, slots, layer)

    monkeypatch.setattr(PagedKVCache, "write", rounding)
    with pytest.raises(AssertionError):
        check(model, [prompts[1]], [right[1]])
