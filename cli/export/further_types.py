"""Traces architectures of transformers that optimum-intel cannot export in a form that workers can serve.

The exporter loads this file by its path, in a Python of its own, as do the tests that export small models.

- Mixtures of experts visit the experts that the traced tokens chose. Here every expert is visited, with the tokens that
  chose it, which may be none.
- DeepSeek's attention makes keys and values of all heads from one latent vector per token. Here the projections
  that do so are applied to queries and results instead, which gives the same numbers. So the graph has a single head of
  keys and values: the key is the latent vector and the rotated part, the value is the latent vector.
- Llama 4 scales queries by their positions, which optimum-intel's graph counts from the beginning of a step. Here they
  are those of the input.
- Granite 4 without Mamba rotates queries and keys, and optimum-intel's graph counts their positions likewise.
- Gemma 3n's text alone has limits of versions that nearly exclude each other.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch  # type: ignore[import-not-found]
from optimum.exporters.openvino import convert, stateful
from optimum.exporters.openvino.config import TextDecoderWithPositionIdsOpenVINOConfig
from optimum.exporters.openvino.model_configs import (
    Gemma3nTextOpenVINOConfig,
    GraniteMoeHybridOpenVINOConfig,
    Llama4TextOpenVINOConfig,
)
from optimum.exporters.openvino.model_patcher import Llama4TextModelPatcher, OVDecoderModelPatcher
from optimum.exporters.tasks import TasksManager
from optimum.utils.input_generators import DummyTextInputGenerator, MistralDummyPastKeyValuesGenerator
from optimum.utils.normalized_config import NormalizedTextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_TASKS = ("text-generation", "text-generation-with-past")
# Versions of transformers whose modules have the attributes that are used here, and those with Ministral 3.
_LEAST, _MOST = "4.57.0", "4.57.6"
_LEAST_5, _MOST_5 = "5.0.0", "5.5.4"

Forward = Callable[..., Any]


class PlainConfig(TextDecoderWithPositionIdsOpenVINOConfig):
    """The export configuration of decoders that can be traced as they are."""

    MIN_TRANSFORMERS_VERSION = _LEAST
    MAX_TRANSFORMERS_VERSION = _MOST
    DUMMY_INPUT_GENERATOR_CLASSES = (DummyTextInputGenerator, MistralDummyPastKeyValuesGenerator)
    DUMMY_PKV_GENERATOR_CLASS = MistralDummyPastKeyValuesGenerator
    NORMALIZED_CONFIG_CLASS = NormalizedTextConfig
    _MODEL_PATCHER = OVDecoderModelPatcher


def over_experts(
    experts: torch.nn.ModuleList, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts. `states` [tokens, size]; `chosen` and `weights` [tokens, experts of a
    token]."""
    result = torch.zeros_like(states)
    tokens_of = torch.nn.functional.one_hot(chosen, num_classes=len(experts)).permute(2, 1, 0)
    for number, expert in enumerate(experts):
        ranks, tokens = torch.where(tokens_of[number])
        taken = states[None, tokens].reshape(-1, states.shape[-1])
        result.index_add_(0, tokens, (expert(taken) * weights[tokens, ranks, None]).to(result.dtype))
    return result


def routed(self: torch.nn.Module, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Replaces the method `moe` of GLM-4-MoE and DeepSeek."""
    return over_experts(self.experts, states, chosen, weights)


def chosen_in_groups(self: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the method `forward` of DeepSeek V2's choice of experts, with as many experts in a group as the model
    has."""
    logits = torch.nn.functional.linear(states.view(-1, states.shape[-1]).float(), self.weight.float())
    scores = torch.softmax(logits, -1)
    if self.topk_method == "group_limited_greedy":
        groups = scores.view(-1, self.num_group, self.num_experts // self.num_group)
        best = torch.topk(groups.max(-1).values, self.topk_group, dim=-1, sorted=False)[1]
        is_best = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)
        scores = (groups * is_best[..., None]).view(-1, self.num_experts)
    weights, chosen = torch.topk(scores, self.top_k, dim=-1, sorted=False)
    return chosen, weights * self.routed_scaling_factor


def ernie_block(self: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the method `forward` of ERNIE's experts. The correction of scores affects which experts are chosen, but
    not their weights."""
    tokens = states.view(-1, states.shape[-1])
    logits = self.gate(tokens.float())
    scores = torch.softmax(logits, 1)
    chosen = torch.topk(self.moe_statics(scores), self.top_k, dim=-1)[1]
    weights = torch.gather(scores, -1, chosen)
    weights = weights / torch.clamp(weights.sum(-1, keepdim=True), min=self.norm_min)
    result = over_experts(self.experts, tokens, chosen, weights.to(states.dtype))
    if self.shared_experts is not None:
        result = result + self.shared_experts(tokens)
    return result.view(states.shape), logits


def rotary_factors(self: torch.nn.Module, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Replaces the method `forward` of DeepSeek V2's rotary embedding, in real numbers: cosines and sines, each
    twice."""
    angles = positions[:, :, None].float() * self.inv_freq[None, None].float()
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def rotated(numbers: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, in_pairs: bool) -> torch.Tensor:
    """Rotate [batch, heads, tokens, size]. The numbers of a pair are neighbours, or half the size apart, as they are
    afterwards."""
    if in_pairs:
        numbers = torch.cat((numbers[..., 0::2], numbers[..., 1::2]), -1)
    first, second = numbers.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return numbers * cosines[:, None] + turned * sines[:, None]


def latent_attention(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    cache_position: torch.Tensor | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces the method `forward` of DeepSeek's attention, with one latent head of keys and values."""
    batch, length = hidden_states.shape[:2]
    if self.q_lora_rank is None:
        queries = self.q_proj(hidden_states)
    else:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    queries = queries.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
    plain, turning = torch.split(queries, [self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    parts = torch.split(self.kv_a_proj_with_mqa(hidden_states), [self.kv_lora_rank, self.qk_rope_head_dim], -1)
    latent, shared = self.kv_a_layernorm(parts[0])[:, None], parts[1][:, None]
    in_pairs = getattr(self.config, "rope_interleave", True)
    turning, shared = (rotated(part, *position_embeddings, in_pairs=in_pairs) for part in (turning, shared))
    of_heads = self.kv_b_proj.weight.to(queries.dtype).view(
        -1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank
    )
    to_keys, to_values = torch.split(of_heads, [self.qk_nope_head_dim, self.v_head_dim], 1)
    queries = torch.cat((torch.matmul(plain, to_keys), turning), -1)
    keys, values = torch.cat((latent, shared), -1), latent
    if past_key_values is not None:
        keys, values = past_key_values.update(keys, values, self.layer_idx, {"cache_position": cache_position})
    found, _ = sdpa_attention_forward(self, queries, keys, values, attention_mask, scaling=self.scaling)
    results = torch.matmul(found.transpose(1, 2), to_values.transpose(1, 2)).transpose(1, 2)
    return self.o_proj(results.reshape(batch, length, -1)), None


def scaled_attention(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, ...],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    cache_position: torch.Tensor | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces the method `forward` of Llama 4's layers without rotation. The positions follow the rotary factors."""
    batch, length = hidden_states.shape[:2]
    steps = torch.floor((position_embeddings[2].float() + 1.0) / self.floor_scale)
    scales = torch.log1p(steps) * self.attn_scale + 1.0
    queries = self.q_proj(hidden_states) * scales[..., None]
    projected = (queries, self.k_proj(hidden_states), self.v_proj(hidden_states))
    queries, keys, values = (one.view(batch, length, -1, self.head_dim).transpose(1, 2) for one in projected)
    if past_key_values is not None:
        keys, values = past_key_values.update(keys, values, self.layer_idx, {"cache_position": cache_position})
    found, _ = sdpa_attention_forward(self, queries, keys, values, attention_mask, scaling=self.scaling)
    return self.o_proj(found.reshape(batch, length, -1)), None


class Llama4Patcher(Llama4TextModelPatcher):
    """Patches the text model of Llama 4."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        rotary = self._model.model.rotary_emb
        factors = rotary.forward
        rotary.forward = lambda states, positions: (*factors(states, positions), positions)
        for layer in self._model.model.layers:
            attention = layer.self_attn
            if attention.attn_temperature_tuning and not attention.use_rope:
                attention.forward = types.MethodType(scaled_attention, attention)
        return entered


def no_mask(_self: torch.nn.Module, *_of: Any) -> None:
    """Replaces the method `_update_mamba_mask` of Granite 4 without Mamba."""


class Replacing(OVDecoderModelPatcher):
    """Replaces methods of the model's modules while it is traced. `methods`: class -> method -> its replacement."""

    methods: ClassVar[Mapping[str, Mapping[str, Forward]]]

    def __enter__(self) -> Any:
        entered = super().__enter__()
        self._before: list[tuple[Any, str, Any]] = []
        for module in self._model.modules():
            for name, replacement in self.methods.get(type(module).__name__, {}).items():
                self._set(module, name, types.MethodType(replacement, module))
            if type(module).__name__ in _LATENT_ATTENTION:
                self._set(module, "num_key_value_groups", module.num_heads)
        return entered

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        for module, name, value in reversed(self._before):
            setattr(module, name, value)

    def _set(self, module: Any, name: str, value: Any) -> None:
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, value)


_LATENT_ATTENTION = ("DeepseekV2Attention", "DeepseekV3Attention")


class Llama4Config(Llama4TextOpenVINOConfig):
    """The export configuration of Llama 4's text model."""

    _MODEL_PATCHER = Llama4Patcher


class Gemma3nConfig(Gemma3nTextOpenVINOConfig):
    """The export configuration of Gemma 3n's text model."""

    MAX_TRANSFORMERS_VERSION = _MOST_5


class Plain5Config(PlainConfig):
    """The export configuration of plain decoders of transformers 5."""

    MIN_TRANSFORMERS_VERSION = _LEAST_5
    MAX_TRANSFORMERS_VERSION = _MOST_5


class GlmPatcher(Replacing):
    """Patches GLM-4-MoE."""

    methods: ClassVar[Mapping[str, Mapping[str, Forward]]] = {"Glm4MoeMoE": {"moe": routed}}


class ErniePatcher(Replacing):
    """Patches ERNIE 4.5 with experts."""

    methods: ClassVar[Mapping[str, Mapping[str, Forward]]] = {"Ernie4_5_MoeSparseMoeBlock": {"forward": ernie_block}}


class DeepseekPatcher(Replacing):
    """Patches DeepSeek V2 and V3."""

    methods: ClassVar[Mapping[str, Mapping[str, Forward]]] = {
        **{name: {"moe": routed} for name in ("DeepseekV2MoE", "DeepseekV3MoE")},
        **{name: {"forward": latent_attention} for name in _LATENT_ATTENTION},
        "DeepseekV2MoEGate": {"forward": chosen_in_groups},
        "DeepseekV2RotaryEmbedding": {"forward": rotary_factors},
    }


class DenseGranitePatcher(Replacing):
    """Patches Granite 4 without Mamba layers, which asks for a mask of Mamba layers without needing one."""

    methods: ClassVar[Mapping[str, Mapping[str, Forward]]] = {"GraniteMoeHybridModel": {"_update_mamba_mask": no_mask}}


class DenseGraniteConfig(Plain5Config):
    """The export configuration of Granite 4 without Mamba layers."""

    _MODEL_PATCHER = DenseGranitePatcher


class GraniteConfig(GraniteMoeHybridOpenVINOConfig):
    """The export configuration of Granite 4 with Mamba layers, or of a plain decoder if it has none."""

    def __new__(cls, config: Any, *arguments: Any, **options: Any) -> Any:
        """The configuration that fits the model."""
        if "mamba" in config.layer_types:
            return super().__new__(cls)
        return DenseGraniteConfig(config, *arguments, **options)


class GlmConfig(PlainConfig):
    """The export configuration of GLM-4-MoE."""

    _MODEL_PATCHER = GlmPatcher


class ErnieConfig(PlainConfig):
    """The export configuration of ERNIE 4.5 with experts."""

    _MODEL_PATCHER = ErniePatcher


class LatentCache(MistralDummyPastKeyValuesGenerator):
    """Makes example inputs for DeepSeek's keys and values."""

    def __init__(self, task: str, normalized_config: NormalizedTextConfig, **options: Any) -> None:
        super().__init__(task, normalized_config, **options)
        rank: int = normalized_config.kv_lora_rank
        self.sizes = rank + normalized_config.qk_rope_head_dim, rank

    def generate(
        self, input_name: str, framework: str = "pt", int_dtype: str = "int64", float_dtype: str = "fp32"
    ) -> list[tuple[torch.Tensor, ...]]:
        """A pair of tensors per layer: [batch, 1, tokens, size]."""
        shapes = [(self.batch_size, 1, self.sequence_length, size) for size in self.sizes]
        return [
            tuple(self.random_float_tensor(shape, framework=framework, dtype=float_dtype) for shape in shapes)
            for _ in range(self.num_layers)
        ]


class DeepseekConfig(PlainConfig):
    """The export configuration of DeepSeek V2 and V3."""

    DUMMY_INPUT_GENERATOR_CLASSES = (DummyTextInputGenerator, LatentCache)
    DUMMY_PKV_GENERATOR_CLASS = LatentCache
    _MODEL_PATCHER = DeepseekPatcher


TYPES = {
    **dict.fromkeys(("ernie4_5", "ministral", "nemotron", "olmo3", "seed_oss"), PlainConfig),
    "gemma3n_text": Gemma3nConfig,
    "llama4_text": Llama4Config,
    "granitemoehybrid": GraniteConfig,
    "ministral3": Plain5Config,
    "ernie4_5_moe": ErnieConfig,
    "glm4_moe": GlmConfig,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DeepseekConfig),
}


def give_state(config: Any, model: Any) -> None:
    """Turn the inputs and outputs of a graph's cache into its state. optimum-intel looks at the architecture for their
    names, which are those of other decoders in Granite 4 without Mamba."""
    names = {name for port in model.inputs for name in port.get_names()}
    if config.model_type == "granitemoehybrid" and any("past_key_values" in name for name in names):
        stateful.patch_stateful_decoder(config, model)
    else:
        stateful.patch_stateful(config, model)


def register() -> None:
    """Let optimum-intel export these architectures."""
    register_type = TasksManager.create_register("openvino", overwrite_existing=True)
    for model_type, config in TYPES.items():
        register_type(model_type, *_TASKS, library_name="transformers")(config)
    convert.patch_stateful = give_state
    # A list of what optimum-intel exports no more.
    convert.ONNX_SUPPORTED_ARCHITECTURES.difference_update(TYPES)
