"""What single families need beyond the rules of sizes: so that their parts fit together, or so that
a model has what models of the family in use have (experts, windows, layers that share caches) where
the configuration leaves it out by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.audit.families.sizes import CHUNK, CONTEXT, HEADS, HIDDEN, WINDOW

Options = Mapping[str, Any]

_BOTH = ["sliding_attention", "full_attention"]
_WINDOWED: Options = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _BOTH}
_SHARED: Options = {
    "num_hidden_layers": 4,
    "layer_types": _BOTH * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 2 * HIDDEN // HEADS,
}
"""Layers that read what others have cached (Gemma 3n, Gemma 4)."""
_MAMBA: Options = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": CHUNK}
_ASSISTANT: Options = {
    "text_config": {**_SHARED, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0,
                    "vocab_size_per_layer_input": 0},
    "backbone_hidden_size": HIDDEN,
}  # fmt: skip
_QSA: Options = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": CHUNK,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2,
}
_DOTS: Options = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_ZAMBA: Options = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": 2 * HIDDEN // HEADS,
}
_TUNED: Options = {"floor_scale": CHUNK}
"""Queries grow with their position, already in short texts (Llama 4)."""
_STARTS: Options = {"decoder_start_token_id": 0}
"""The published T5s name it; the default configuration does not."""
_ROPE: Options = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SECTIONS: Options = {"text_config": {"rope_parameters": _ROPE}}
_INTERLEAVED: Options = {
    "text_config": {"rope_parameters": {**_ROPE, "mrope_interleaved": True}, "head_dim": 8}
}
_TILES: Options = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
_PERIODS: Options = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4}

_T5S = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop")

DEFAULTS: Mapping[str, Options] = {
    "gemma4": {"vision_config": {}},
    "gemma4_assistant": _ASSISTANT,
}
"""Options without which a configuration cannot even be made with its own default sizes."""

DECODERS: Mapping[str, str] = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Where a configuration holds that of the causal language model, if its class does not tell."""

_ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
)
"""Encoders, which see no later token only if they are told that they are decoders."""

EXCEPTIONS: Mapping[str, Options] = {
    **{family: {"is_decoder": True} for family in _ENCODERS},
    **{family: _STARTS for family in _T5S},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": _BOTH,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0} for name in _BOTH
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        **_WINDOWED,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "doge": {"keep_window_size": CONTEXT},
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _DOTS,
    "gemma3": {"mm_tokens_per_image": 4, "text_config": {"head_dim": 8}},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": {**_TILES, "vision_feature_select_strategy": "full"},
    "qwen2_vl": _SECTIONS,
    "qwen2_5_vl": _SECTIONS,
    "qwen3_vl": _INTERLEAVED,
    "qwen3_vl_moe": _INTERLEAVED,
    **{family: _SECTIONS for family in ("glm4v", "glm46v", "glmga", "glm_ocr")},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}},
    "gemma3n_text": _SHARED,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_text": _SHARED,
    "gemma4_unified_assistant": _ASSISTANT,
    "gemma4_unified_text": _SHARED,
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    # With its few heads and only 8 numbers a key the scores of several tokens would be exactly 0,
    # and which of them are picked is a matter of chance, in transformers too.
    "hy_v4": {"index_n_heads": 64, "index_head_dim": HIDDEN},
    "jamba": {**_PERIODS, "use_mamba_kernels": False},
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": _TUNED},
    "llama4_text": _TUNED,
    "longcat_flash": {"qk_head_dim": None},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "ministral": {"head_dim": 8},
    "moshi": {"sliding_window": CONTEXT},  # its models have a window as long as the context
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2": _WINDOWED,
    "qwen2_moe": _WINDOWED,
    "qwen3": _WINDOWED,
    "qwen3_moe": _WINDOWED,
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2],
        "axial_pos_shape": [8, 16],
    },
    "smollm3": _WINDOWED,
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "hybrid_layer_ids": [1, 3]},
}
