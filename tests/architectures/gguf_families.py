"""Small models whose weights become GGUF files: what transformers makes them of, and what llama.cpp's converter writes
of them. Data only; both environments read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.architectures.families import CONTEXT, Family

_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ORIGINAL = 512
_HEADS = {**_GROUPED, "head_dim": 32}
_GEMMA3 = {**_HEADS, "sliding_window": 64, "query_pre_attn_scalar": 32, "rope_theta": 1_000_000.0}
_PHI3 = {"sliding_window": None, "rope_theta": 10_000.0}
_OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
_OF_MULTIPLIERS = {"attention.scale": 0.3, "embedding_scale": 2.0, "residual_scale": 0.7, "logit_scale": 0.5}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + index / 100 for index in range(pairs)],
        "long_factor": [1.5 + index / 4 for index in range(pairs)],
    }


_LONGROPE = {"original_max_position_embeddings": _ORIGINAL, **_PHI3}
_OF_LONGROPE = {
    "rope.scaling.original_context_length": _ORIGINAL,
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(CONTEXT / _ORIGINAL) / math.log(_ORIGINAL)),
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family, the architecture of its files, and the metadata that not every file has. `window_layers` are those with
    a window of 64 tokens."""

    architecture: str
    family: Family
    metadata: Mapping[str, Any] = field(default_factory=dict)
    window_layers: tuple[int, ...] = ()


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "qwen2": GgufFamily("qwen2", Family("qwen2", _GROUPED)),
    "qwen3": GgufFamily("qwen3", Family("qwen3", _HEADS)),
    "gemma": GgufFamily("gemma", Family("gemma", _HEADS)),
    # Both sides leave out the cap of attention scores, as transformers' SDPA attention does.
    "gemma2": GgufFamily(
        "gemma2",
        Family("gemma2", {**_HEADS, "sliding_window": 64, "query_pre_attn_scalar": 32}),
        {"attention.sliding_window": 64, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        (0,),
    ),
    "gemma3": GgufFamily(
        "gemma3",
        Family("gemma3_text", {**_GEMMA3, "num_hidden_layers": 6}),
        {"attention.sliding_window": 64},
        (0, 1, 2, 3, 4),
    ),
    # As the files of larger models: positions of layers without a window are scaled. Layers are named one by one.
    "gemma3-scaled": GgufFamily(
        "gemma3",
        Family(
            "gemma3_text",
            {
                **_GEMMA3,
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        {
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": [False, True],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        (1,),
    ),
    "qwen3moe": GgufFamily(
        "qwen3moe",
        Family("qwen3_moe", {**_HEADS, **_EXPERTS, "norm_topk_prob": True}),
        {**_OF_EXPERTS, "expert_feed_forward_length": 64},
    ),
    "mixtral": GgufFamily("llama", Family("mixtral", {**_GROUPED, **_EXPERTS, "sliding_window": None}), _OF_EXPERTS),
    "phi3": GgufFamily("phi3", Family("phi3", {**_PHI3, "num_hidden_layers": 2})),
    "phi3-window": GgufFamily(
        "phi3", Family("phi3", {**_PHI3, "sliding_window": 64}), {"attention.sliding_window": 64}, (0, 1)
    ),
    "phi3-longrope": GgufFamily("phi3", Family("phi3", {**_LONGROPE, "rope_scaling": _longrope(16)}), _OF_LONGROPE),
    "phi4-mini": GgufFamily(
        "phi3",
        Family(
            "phi3",
            {
                **_LONGROPE,
                **_GROUPED,
                "rope_scaling": _longrope(12),
                "partial_rotary_factor": 0.75,
                "tie_word_embeddings": True,
            },
        ),
        {**_OF_LONGROPE, "rope.dimension_count": 24},
    ),
    "granite": GgufFamily("granite", Family("granite", {**_GROUPED, **_MULTIPLIERS}), _OF_MULTIPLIERS),
    "granitemoe": GgufFamily(
        "granitemoe", Family("granitemoe", {**_GROUPED, **_EXPERTS, **_MULTIPLIERS}), {**_OF_EXPERTS, **_OF_MULTIPLIERS}
    ),
    "smollm3": GgufFamily(
        "smollm3", Family("smollm3", {**_GROUPED, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]})
    ),
    "glm4": GgufFamily(
        "glm4",
        Family("glm4", {**_HEADS, "partial_rotary_factor": 0.5, "attention_bias": True}),
        {"rope.dimension_count": 16},
    ),
    # Half of the frequencies are in the ramp of YaRN.
    "gpt-oss": GgufFamily(
        "gpt-oss",
        Family(
            "gpt_oss",
            {
                **_HEADS,
                **_EXPERTS,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": CONTEXT // 4,
                },
            },
        ),
        {
            **_OF_EXPERTS,
            "expert_feed_forward_length": 192,
            "attention.sliding_window": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": CONTEXT // 4,
        },
        (0,),
    ),
    "llama-yarn": GgufFamily(
        "llama",
        Family(
            "llama",
            {
                **_GROUPED,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4},
            },
        ),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": CONTEXT // 4,
        },
    ),
}
