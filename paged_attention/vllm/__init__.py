"""vLLM's attention operations on this package's kernel, and a plugin for vLLM.

The plugin puts them where a build of vLLM has none. Nothing of vLLM is imported before the plugin
is asked to register.

    attention.py     paged_attention_v1, paged_attention_v2    plugin.py    register, unregister
    states.py        V2's scratch, merge_attn_states           port.py      what a port does itself
    partial.py       the states that the kernel leaves         dispatch.py  forward_decode
    writes.py        reshape_and_cache                         choice.py    when V2 begins
    scales.py        kv_cache_dtype, k_scale, v_scale          vendor.py    CoreX's own V2
    head_mapping.py  num_kv_heads, as CoreX passes it
"""

from paged_attention.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_attention.vllm.choice import takes_v2
from paged_attention.vllm.plugin import register, unregister
from paged_attention.vllm.states import merge_attn_states
from paged_attention.vllm.writes import reshape_and_cache

__all__ = [
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "register",
    "reshape_and_cache",
    "takes_v2",
    "unregister",
]
