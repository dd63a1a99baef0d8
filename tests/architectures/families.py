"""Small models of the architectures that people serve: what transformers makes them of. Data only.

Weights are random, so a model is known by its configuration alone. Both environments read this: the one that exports
models, and the one that serves them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 512
CONTEXT = 4096
# Up to this position the models with two sets of rotary factors use the first.
ORIGINAL_CONTEXT = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# What `cli/export/further_types.py` lets optimum-intel export.
FURTHER_TYPES = frozenset(
    (
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "gemma3n_text",
        "glm4_moe",
        "granitemoehybrid",
        "llama4_text",
        "ministral",
        "ministral3",
        "nemotron",
        "olmo3",
        "seed_oss",
    )
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers, and the values of its configuration that are not the common ones. `refused` is what
    the refusal has to mention, of a model that cannot be served. `is_short` families are tested in every run. `weights`
    is f32, f16 or bf16, one of nncf's modes (int4 ones in groups of 32), or the format of a quantised checkpoint. Some
    layers of `is_recurrent` families keep a state instead of keys and values. `transformers` is the version that
    exports the model, if it is not the one in requirements.txt. `vision` describes the vision tower of a multimodal
    model, and `around` what is beside both parts; `config` is of its text."""

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    is_short: bool = False
    refused: str = ""
    weights: str = "f32"
    is_recurrent: bool = False
    transformers: str = ""
    vision: Mapping[str, Any] | None = None
    around: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_further(self) -> bool:
        """Whether `cli/export/further_types.py` traces it, or its text."""
        kinds = (self.model_type, f"{self.model_type}_text", self.config.get("model_type"))
        return not FURTHER_TYPES.isdisjoint(kinds)

    @property
    def whole_config(self) -> dict[str, Any]:
        """The complete configuration, of a multimodal model that of its text. None removes a common value."""
        special = {} if self.vision is None else {"vocab_size": VOCABULARY + _NUM_SPECIAL}
        merged = {**_COMMON, **special, **self.config}
        return {key: value for key, value in merged.items() if value is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for the configuration in transformers."""
        if self.vision is None:
            return self.whole_config
        return {"text_config": self.whole_config, "vision_config": {**_VISION, **self.vision}, **self.around}


def _longrope(short: float, long: float) -> dict[str, Any]:
    """Factors of 16 rotary frequencies, for short and for long contexts."""
    return {
        "type": "longrope",
        "short_factor": [short + index / 100 for index in range(16)],
        "long_factor": [long + index / 4 for index in range(16)],
    }


_LONGROPE = {
    "rope_scaling": _longrope(1.0, 1.5),
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
    "sliding_window": None,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GPT2 = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    "max_position_embeddings": None,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
}
_SLIDING = {"sliding_window": 64, "head_dim": 32, **_GROUPED}
_GEMMA3 = {**_SLIDING, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]}
# Of multimodal models. No text has their special tokens, which follow the vocabulary (image_processing.py).
_NUM_SPECIAL = 64
_VISION = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
_PICTURES = {**_VISION, "image_size": 56, "patch_size": 14}
_CLIP = {**_PICTURES, "model_type": "clip_vision_model", "projection_dim": 64}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "out_hidden_size": 128}
_IMAGE = {"image_token_index": VOCABULARY}
_QWEN_IMAGES = {
    name: VOCABULARY + index
    for index, name in enumerate(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))
}

_GEMMA4 = {
    **_SLIDING,
    "model_type": "gemma4_text",
    "global_head_dim": 64,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
}
_GEMMA4_LARGE = {
    **_GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 80,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA4_VISION = {
    **_VISION,
    "model_type": "gemma4_vision",
    "num_key_value_heads": 2,
    "head_dim": 32,
    "position_embedding_size": 512,
}
_GEMMA4_IMAGES = {
    **{
        name: VOCABULARY + index
        for index, name in enumerate(
            ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id")
        )
    },
    "audio_config": None,
    "tie_word_embeddings": False,
}

# Within a chunk, its attention is that of other models. Queries of layers without rotation grow with their positions.
_LLAMA4 = {
    "head_dim": 32,
    "intermediate_size_mlp": 192,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": CONTEXT,
    "max_position_embeddings": 4 * CONTEXT,
    "no_rope_layers": [1, 0],
    "floor_scale": 64,
}
_SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT = {
    **_SHARED_EXPERTS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
# Its queries grow with their positions.
_MINISTRAL3 = {
    **_GROUPED,
    "head_dim": 32,
    "sliding_window": None,
    "rope_parameters": {
        **_YARN,
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
    },
}
_TWO_KINDS = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}

_GATED_DELTA = {
    **_GROUPED,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_INTERLEAVED = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _GROUPED, is_short=True),
    "llama3-rope": Family("llama", {**_GROUPED, "rope_scaling": _LLAMA3_ROPE}),
    "llama-dynamic-rope": Family(
        "llama",
        {
            **_GROUPED,
            "max_position_embeddings": ORIGINAL_CONTEXT,
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        },
    ),
    "llama-yarn": Family(
        "llama",
        {
            **_GROUPED,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "llama-f16": Family("llama", _GROUPED, weights="f16"),
    "llama-bf16": Family("llama", _GROUPED, weights="bf16"),
    "llama-awq": Family("llama", _GROUPED, weights="awq", is_short=True),
    "llama-gptq": Family("llama", _GROUPED, weights="gptq"),
    "llama-gptq-v2": Family("llama", _GROUPED, weights="gptq_v2"),
    "llama-gptq-8-bits": Family("llama", _GROUPED, weights="gptq8"),
    "phi3-awq": Family("phi3", weights="awq"),
    "llama-w4a16": Family("llama", _GROUPED, weights="compressed_tensors_w4a16", is_short=True),
    "llama-w4a16-asymmetric": Family("llama", _GROUPED, weights="compressed_tensors_w4a16_asym"),
    "llama-w4a16-channel": Family("llama", _GROUPED, weights="compressed_tensors_w4a16_channel"),
    "llama-w8a16": Family("llama", _GROUPED, weights="compressed_tensors_w8a16"),
    "llama-w8a16-group": Family("llama", _GROUPED, weights="compressed_tensors_w8a16_group_asym"),
    "llama-w8a8": Family("llama", _GROUPED, weights="compressed_tensors_int8"),
    "llama-compressed-fp8": Family("llama", _GROUPED, weights="compressed_tensors_fp8"),
    "llama-compressed-fp8-tensor": Family("llama", _GROUPED, weights="compressed_tensors_fp8_tensor"),
    "llama-compressed-fp8-block": Family("llama", _GROUPED, weights="compressed_tensors_fp8_block"),
    "llama-fp8-block": Family("llama", _GROUPED, weights="fp8", is_short=True),
    "llama-fbgemm-fp8": Family("llama", _GROUPED, weights="fbgemm_fp8"),
    "llama-modelopt-fp8": Family("llama", _GROUPED, weights="modelopt_fp8"),
    "llama-int8": Family("llama", _GROUPED, weights="int8_asym"),
    "llama-int8-symmetric": Family("llama", _GROUPED, weights="int8_sym"),
    "llama-int4": Family("llama", _GROUPED, is_short=True, weights="int4_asym"),
    "llama-int4-symmetric": Family("llama", _GROUPED, weights="int4_sym"),
    "qwen2": Family("qwen2", _GROUPED, is_short=True),
    "qwen3": Family("qwen3", {**_GROUPED, "head_dim": 32}),
    "qwen3_moe": Family("qwen3_moe", {**_GROUPED, "head_dim": 32, **_MOE}),
    "qwen3_moe-int4": Family("qwen3_moe", {**_GROUPED, "head_dim": 32, **_MOE}, weights="int4_asym"),
    "mistral": Family("mistral", {**_GROUPED, "sliding_window": None}),
    "mistral-sliding": Family("mistral", _SLIDING),
    "mixtral": Family("mixtral", {**_GROUPED, **_MOE, "sliding_window": None}),
    "gemma": Family("gemma", {**_GROUPED, "head_dim": 32}),
    "gemma2": Family("gemma2", {**_SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3_text": Family("gemma3_text", _GEMMA3, is_short=True),
    "gemma3": Family(
        "gemma3",
        {**_GEMMA3, "model_type": "gemma3_text", "tie_word_embeddings": False},
        is_short=True,
        vision={**_PICTURES, "image_size": 112, "model_type": "siglip_vision_model"},
        around={
            **_IMAGE,
            "mm_tokens_per_image": 16,
            "boi_token_index": VOCABULARY + 1,
            "eoi_token_index": VOCABULARY + 2,
            "tie_word_embeddings": False,
        },
    ),
    # As the small ones: layers have embeddings of their own, and the last ones use others' keys and values.
    "gemma4": Family(
        "gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY + _NUM_SPECIAL,
            "num_kv_shared_layers": 2,
        },
        transformers="5.5.4",
        vision=_GEMMA4_VISION,
        around=_GEMMA4_IMAGES,
    ),
    # As the large ones: tokens of an image see each other in layers with a window; values are keys.
    "gemma4-both-directions": Family(
        "gemma4",
        _GEMMA4_LARGE,
        transformers="5.5.4",
        vision={**_GEMMA4_VISION, "standardize": True},
        around=_GEMMA4_IMAGES,
    ),
    # As the one with experts, which are beside a product that all tokens have.
    "gemma4-experts": Family(
        "gemma4",
        {
            **_GEMMA4_LARGE,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        transformers="5.5.4",
        vision={**_GEMMA4_VISION, "standardize": True},
        around=_GEMMA4_IMAGES,
    ),
    "phi": Family("phi"),
    "phi3": Family("phi3", {"sliding_window": None}),
    "phi3-int4": Family("phi3", {"sliding_window": None}, weights="int4_sym"),
    "phi3-longrope": Family("phi3", _LONGROPE, is_short=True),
    "phi4-mini": Family("phi3", {**_LONGROPE, **_GROUPED, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}),
    # Its rotary factors are those of the step's own places, not of positions.
    "phimoe": Family("phimoe", {**_GROUPED, **_MOE, "sliding_window": None}, refused="over all tokens"),
    "gpt2": Family("gpt2", _GPT2, is_short=True),
    "gpt_bigcode": Family("gpt_bigcode", {**_GPT2, "multi_query": True}),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 64,
        },
        refused="window",
    ),
    "gptj": Family("gptj", {**_GPT2, "rotary_dim": 16}),
    "codegen": Family("codegen", {**_GPT2, "rotary_dim": 16}),
    "gpt_neox": Family("gpt_neox"),
    "bloom": Family("bloom", {"n_head": 4, "n_layer": 2, "num_attention_heads": None, "num_hidden_layers": None}),
    "falcon": Family("falcon", {"multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "falcon-alibi": Family(
        "falcon", {"multi_query": True, "new_decoder_architecture": False, "alibi": True}, refused="ALiBi"
    ),
    "mpt": Family(
        "mpt",
        {
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
            "max_position_embeddings": None,
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": CONTEXT,
        },
        refused="ALiBi",
        is_short=True,
    ),
    "granite": Family("granite", {**_GROUPED, "logits_scaling": 4.0, "attention_multiplier": 0.1}),
    "granitemoe": Family("granitemoe", {**_GROUPED, **_MOE}),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2", _GROUPED),
    "stablelm": Family("stablelm", _GROUPED),
    "starcoder2": Family("starcoder2", {**_GROUPED, "sliding_window": None}),
    "smollm3": Family("smollm3", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "cohere": Family("cohere", _GROUPED),
    "cohere2": Family("cohere2", {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm": Family("glm", {**_GROUPED, "head_dim": 32}),
    "glm4": Family("glm4", {**_GROUPED, "head_dim": 32}),
    "exaone4": Family("exaone4", {**_GROUPED, "sliding_window": None, "sliding_window_pattern": None}),
    "arcee": Family("arcee", _GROUPED),
    "persimmon": Family("persimmon"),
    "opt": Family(
        "opt", {"ffn_dim": 192, "word_embed_proj_dim": 128, "intermediate_size": None, "do_layer_norm_before": True}
    ),
    "gpt_oss": Family("gpt_oss", {**_SLIDING, **_MOE, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss-mxfp4": Family(
        "gpt_oss",
        {**_SLIDING, **_MOE, "layer_types": ["sliding_attention", "full_attention"]},
        weights="mxfp4",
        is_short=True,
    ),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", {**_GROUPED, "head_dim": 32}),
    "mamba": Family("mamba", {"state_size": 16}, refused="recurrent"),
    "falcon_mamba": Family("falcon_mamba", {"state_size": 16}, refused="recurrent"),
    "zamba2": Family(
        "zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "num_key_value_heads": 4,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
        },
        refused="cannot page",
    ),
    "qwen2_vl": Family(
        "qwen2_vl",
        {**_GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        is_short=True,
        vision={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2},
        around=_QWEN_IMAGES,
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {**_GROUPED, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        vision={**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 56},
        around=_QWEN_IMAGES,
    ),
    "qwen3_vl": Family(
        "qwen3_vl",
        {
            **_GROUPED,
            "head_dim": 32,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        },
        is_short=True,
        vision={**_QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        around=_QWEN_IMAGES,
    ),
    "llava": Family(
        "llava",
        {**_GROUPED, "model_type": "llama"},
        is_short=True,
        vision=_CLIP,
        around={**_IMAGE, "image_seq_length": 16},
    ),
    "llava-pixtral": Family(
        "llava",
        {**_GROUPED, "model_type": "mistral", "head_dim": 32, "sliding_window": None},
        vision={**_PICTURES, "image_size": 140, "model_type": "pixtral", "head_dim": 32},
        around={**_IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": Family(
        "llava_next",
        {**_GROUPED, "model_type": "llama"},
        vision=_CLIP,
        around={**_IMAGE, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]},
    ),
    "idefics3": Family(
        "idefics3",
        {**_GROUPED, "model_type": "llama"},
        vision={**_PICTURES, "model_type": "idefics3_vision"},
        around={"image_token_id": VOCABULARY, "scale_factor": 2},
    ),
    "smolvlm": Family(
        "smolvlm",
        {**_GROUPED, "model_type": "llama"},
        vision={**_PICTURES, "model_type": "smolvlm_vision"},
        around={"image_token_id": VOCABULARY, "scale_factor": 2},
    ),
    "llama4": Family(
        "llama4",
        {
            **_GROUPED,
            **_LLAMA4,
        },
        vision={
            **_PICTURES,
            "image_size": 28,
            "intermediate_size": 256,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        around=_IMAGE,
    ),
    "llama4_text": Family("llama4_text", {**_GROUPED, **_LLAMA4}),
    "mistral3": Family(
        "mistral3",
        {**_GROUPED, "model_type": "mistral", "head_dim": 32, "sliding_window": None},
        vision={**_PICTURES, "image_size": 168, "model_type": "pixtral", "head_dim": 32},
        around={**_IMAGE, "spatial_merge_size": 2},
    ),
    "ministral3": Family("ministral3", _MINISTRAL3, transformers="5.5.4"),
    "mistral3-ministral3": Family(
        "mistral3",
        {**_MINISTRAL3, "model_type": "ministral3"},
        transformers="5.5.4",
        vision={**_PICTURES, "image_size": 168, "model_type": "pixtral", "head_dim": 32},
        around={**_IMAGE, "spatial_merge_size": 2},
    ),
    "lfm2": Family(
        "lfm2",
        {**_GROUPED, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
        is_short=True,
        is_recurrent=True,
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {
            **_GROUPED,
            **_MOE,
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
        is_recurrent=True,
        transformers="5.2.0",
    ),
    "qwen3_next": Family(
        "qwen3_next", {**_GATED_DELTA, **_MOE, "shared_expert_intermediate_size": 64}, is_recurrent=True
    ),
    "qwen3_5_text": Family("qwen3_5_text", _GATED_DELTA, is_recurrent=True, transformers="5.2.0"),
    "qwen3_5": Family(
        "qwen3_5",
        {**_GATED_DELTA, "rope_parameters": _INTERLEAVED},
        is_recurrent=True,
        transformers="5.2.0",
        vision={**_QWEN_VISION, "num_position_embeddings": 16},
        around=_QWEN_IMAGES,
    ),
    "qwen3_5_moe": Family(
        "qwen3_5_moe",
        {**_GATED_DELTA, **_MOE, "shared_expert_intermediate_size": 64, "rope_parameters": _INTERLEAVED},
        is_recurrent=True,
        transformers="5.2.0",
        vision={**_QWEN_VISION, "num_position_embeddings": 16},
        around=_QWEN_IMAGES,
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            **_GROUPED,
            **_MOE,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "position_embedding_type": "nope",
        },
        is_recurrent=True,
        transformers="5.5.4",
    ),
    # The small ones of Granite 4: attention in all layers, and no experts.
    "granitemoehybrid-dense": Family(
        "granitemoehybrid",
        {
            **_GROUPED,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["attention", "attention"],
            "shared_intermediate_size": 192,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
        },
        transformers="5.5.4",
    ),
    "gemma3n_text": Family(
        "gemma3n_text",
        {
            **_SLIDING,
            "intermediate_size": [192] * 6,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 2,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        },
        transformers="5.5.4",
    ),
    "glm4_moe": Family("glm4_moe", {**_GROUPED, **_SHARED_EXPERTS, "head_dim": 32, "use_qk_norm": True}),
    "deepseek_v2": Family(
        "deepseek_v2",
        {
            **_LATENT,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "head_dim": 16,
        },
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": 48, "head_dim": 16, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ministral": Family("ministral", _TWO_KINDS),
    "ernie4_5": Family("ernie4_5", {**_GROUPED, "head_dim": 32, "use_bias": True}),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {
            **_GROUPED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "seed_oss": Family("seed_oss", {**_GROUPED, "head_dim": 32, "attention_bias": True, "attention_out_bias": False}),
    "olmo3": Family("olmo3", {**_TWO_KINDS, "head_dim": None, "rope_scaling": _YARN}),
    "nemotron": Family("nemotron", {**_GROUPED, "head_dim": 32, "partial_rotary_factor": 0.5}),
}


def directory_name(name: str) -> str:
    """The directory of a family's model. Another configuration has another one."""
    digest = hashlib.sha256(repr(FAMILIES[name]).encode()).hexdigest()
    return f"{name}-{digest[:8]}"
