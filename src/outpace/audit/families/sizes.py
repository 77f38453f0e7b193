"""How large each part of a tiny model is: one rule for every name that configurations use."""

from __future__ import annotations

import re
from collections.abc import Mapping

VOCABULARY = 64
CONTEXT = 128
WINDOW = 6
"""Far below the length of the texts, so that every windowed layer forgets."""
CHUNK = 8
HIDDEN = 32
HEADS = 4
HEAD = HIDDEN // HEADS
SHARED_HEADS = 2
"""Key heads of a model in which several query heads share one."""
LAYERS = 2
IMAGE, PATCH = 16, 4
"""Pixels of a side."""

_RULES: Mapping[str, int] = {
    r".*vocab.*": VOCABULARY,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length": CONTEXT,
    r"max_(target|source)_positions|model_max_length|rel_extent": CONTEXT,
    r".*sliding_window(_size)?|window_size|(local_)?attention_window(_size)?": WINDOW,
    r"local_attention|keep_window_size|.*local_attention_window_len": WINDOW,
    r"attention_chunk_size|chunk_size|.*chunk_length|block_size|index_topk": CHUNK,
    r"(num|n)_.*heads?|n_head|.*attention_heads|num_heads": HEADS,
    r"(num_)?hidden_layers|(n|num)_layers?|(num_)?(en|de)coder_layers|num_blocks": LAYERS,
    r".*head_dim|.*head_size|d_head|d_kv|kv_channels|dim_head|.*_d_head|rotary_dim": HEAD,
    r".*hidden_size(_global)?|d_model|n_embd|.*embed_dim|emb_dim|.*embedding_(size|dim)": HIDDEN,
    r"word_embed_proj_dim|lru_width|conv_dim|.*output_dim": HIDDEN,
    r".*intermediate_size(_mlp)?|.*ffn.*(dim|size)|d_inner|dff|dim_ff|feed_forward_size": 48,
    r"(.*_)?(num|n)_.*experts|zero_expert_num": 4,
    r".*experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": 2,
    r"n_group|num_expert_group": 2,
    r"topk_group": 1,
    r".*_rank": 16,
    r".*state_size|.*_d_state": 8,
    r"(.*_)?image_size": IMAGE,
    r"patch_size": PATCH,
    r"depth": LAYERS,
    r"projection_dim": HIDDEN,
}
_COMPILED = [(re.compile(rf"(?:{pattern})\Z"), size) for pattern, size in _RULES.items()]
_TOKEN = re.compile(r".*token_(id|index)\Z")


def tiny(name: str, value: int) -> int:
    """Returns the size of a part in a tiny model: ``value`` for a name that says nothing of size.

    Nothing grows. Token ids stay inside the small vocabulary.
    """
    if _TOKEN.match(name):
        return value % VOCABULARY
    return next((min(size, value) for rule, size in _COMPILED if rule.match(name)), value)
