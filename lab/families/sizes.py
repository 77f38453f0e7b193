"""How large each part of a tiny model is: one rule for every name that configurations use, and what
single families need beyond the rules. Either their parts would not fit together, or the
configuration leaves out by default what models of the family in use have (experts, windows, layers
that share caches)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


# -- single families ---------------------------------------------------------------------------


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
_TURNS: Options = {name: {"rope_type": "default", "rope_theta": 10000.0} for name in _BOTH}
"""Rotary positions of each type of layer."""
_COMPASS: Options = {"layer_types": _BOTH, "rope_parameters": _TURNS}
_CODES: Options = {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32}
"""Networks that make codes of images, which no prompt here shows."""
_WAVES: Options = {"num_filters": 4, "depths": [1] * 7}
"""Networks that make states of audio, which no prompt here has."""
_NAMED: Options = {"<image>": 60, "<|extra_200|>": 61}
_TILES: Options = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
_SEEING: Options = {"image_token_id": 60}
"""Models in use name the token that stands for an image; the default configuration does not."""
_SHALLOW: Options = {"architecture": "resnet10t", "hidden_size": 512, "model_args": {}}
"""A small network of timm, in the place of one that has half a billion weights in all sizes."""
_PERIODS: Options = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4}

_UNTOLD = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni")
_T5S = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop")

DEFAULTS: Mapping[str, Options] = {
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}},
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
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": _NAMED, "vq_config": _CODES},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cosmos3_edge": _SECTIONS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
    },
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
    "emu3": {"vocabulary_map": _NAMED, "vq_config": {**_CODES, "codebook_size": 64}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
            "moe_intermediate_size": [48, 48],
        }
    },
    "fast_vlm": {"vision_config": _SHALLOW},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "gemma3": {"mm_tokens_per_image": 4, "text_config": {"head_dim": 8}},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": {**_TILES, "vision_feature_select_strategy": "full"},
    "qwen2_5_omni_thinker": {**_SECTIONS, "vision_start_token_id": 62},
    "qwen3_omni_moe_thinker": {**_INTERLEAVED, "vision_start_token_id": 62},
    "qwen2_vl": _SECTIONS,
    "qwen2_5_vl": _SECTIONS,
    "qwen3_vl": _INTERLEAVED,
    "qwen3_vl_moe": _INTERLEAVED,
    **{family: _SECTIONS for family in ("glm4v", "glm46v", "glmga", "glm_ocr")},
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}},
    "gemma3n": {
        "text_config": _SHARED,
        "vision_config": _SHALLOW,
        "vision_soft_tokens_per_image": 1,
    },
    "gemma3n_text": _SHARED,
    "gemma4_text": _SHARED,
    "gemma4_unified": {
        "vision_config": {
            "pooling_kernel_size": 1,
            "mm_embed_dim": HIDDEN,
            "output_proj_dims": HIDDEN,
        }
    },
    "gemma4_unified_text": _SHARED,
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},  # a head of its Q-former has 64 numbers
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "granite_speech": {"encoder_config": {"hidden_dim": HIDDEN}},
    "granite_speech_plus": {"encoder_config": {"hidden_dim": HIDDEN}},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": _ROPE}},
    # With its few heads and only 8 numbers a key the scores of several tokens would be exactly 0,
    # and which of them are picked is a matter of chance, in transformers too.
    "hy_v4": {"index_n_heads": 64, "index_head_dim": HIDDEN},
    "jamba": {**_PERIODS, "use_mamba_kernels": False},
    "janus": {"vq_config": {**_CODES, "num_embeddings": 64}},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": HIDDEN}},
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {
        "text_config": _TUNED,
        "vision_config": {"intermediate_size": 4 * HIDDEN, "projector_input_dim": HIDDEN},
    },
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
    **{family: _SEEING for family in _UNTOLD},
    "mistral4": {"head_dim": 2 * HEAD, "qk_head_dim": 2 * HEAD},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "moshi": {"sliding_window": CONTEXT},  # its models have a window as long as the context
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark": {
        "out_hidden_size": 4 * HIDDEN,
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [HIDDEN] * 4, "depths": [1] * 4},
    },
    "nemo_speechlm": {
        "text_config": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
        "audio_config": {"diarization_config": {"chunk_left_context": 2, "chunk_right_context": 2}},
    },
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "paddleocr_vl": _SECTIONS,
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_tiny_patch16_224",
            "model_args": {
                "img_size": IMAGE,
                "patch_size": PATCH,
                "embed_dim": HIDDEN,
                "depth": 2,
                "num_heads": 2,
            },
        }
    },
    "qwen2": _WINDOWED,
    "qwen2_moe": _WINDOWED,
    "qwen3": _WINDOWED,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},  # in every layer
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2],
        "axial_pos_shape": [8, 16],
    },
    "smollm3": _WINDOWED,
    "step3p7": {
        "text_config": {"sliding_window": WINDOW, "layer_types": _BOTH, "rope_parameters": _TURNS}
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _WAVES,
        "semantic_tokenizer_encoder_config": _WAVES,
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "hybrid_layer_ids": [1, 3]},
}
