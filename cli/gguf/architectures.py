"""Derives the dimensions and constants of a model's graph from the metadata of a GGUF file, by architecture.

The rules are llama.cpp's, with which files are made and tried. What a graph would not honour is refused by name
(docs/decisions/models.md#gguf).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.common.model_files.gguf_files import INTERLEAVED
from headrace.common.model_files.score_cap import SCORE_CAP, WITHOUT_SCORE_CAP, needs_score_cap

_Array = npt.NDArray[Any]
_ROPE = "rope.scaling"
_TYPES_OF_SCALING = ("none", "linear", "yarn", "longrope")
_LOCAL_BASE = 10_000.0
_LAYERS_OF_LARGEST_GEMMA3 = 62
_TABLE = r"(token_embd|output_norm|output|rope_freqs|rope_factors_(short|long))\.weight"
_ATTENTION = r"attn_(q|k|v|qkv|output)\.(weight|bias)|attn_(norm|q_norm|k_norm)\.weight"
_FEED_FORWARD = r"ffn_(gate|up|down)\.(weight|bias)|ffn_norm\.weight"
_EXPERTS = r"ffn_(gate_inp|(gate|up|down)_exps)\.(weight|bias)"
_NORMS_BEHIND = r"post_(attention|ffw)_norm\.weight"


class ArchitectureError(Exception):
    """The graph of a file cannot be built. The text says why, as the end of a sentence that begins with the file."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How queries and keys are rotated: `frequencies` f64 [pairs], in radians for each position. If there are
    `long_frequencies`, these are for contexts of more than `original_context` tokens. `scale` multiplies what is
    rotated."""

    frequencies: _Array
    long_frequencies: _Array | None = None
    original_context: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """`window`: the number of tokens that a query sees, its own included; 0 if it sees all. `rotation` is None for
    layers without positions."""

    window: int
    rotation: Rotation | None


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions and constants.

    `has_interleaved_heads`: rows of queries and keys are stored so that rotated pairs are neighbours. `rotated` numbers
    of each head are rotated, the first ones. `attention_scale` multiplies the scores of attention, `embedding_scale`
    the embeddings, `residual_scale` what a layer adds to its states, `logit_scale` the logits. Logits are capped at
    `logit_cap`, unless that is 0. Of `experts`, each token uses `used_experts`; without experts, both are 0.
    `feed_forward_norm` is the name of the norm before feed-forward layers. With `has_norms_behind`, what attentions and
    feed-forward layers give is normalised too.
    """

    layers: tuple[Layer, ...]
    heads: int
    kv_heads: int
    head_size: int
    rotated: int
    epsilon: float
    has_interleaved_heads: bool
    activation: str
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    experts: int = 0
    used_experts: int = 0
    feed_forward_norm: str = "ffn_norm"
    has_norms_behind: bool = False

    @property
    def window(self) -> int:
        """The window of the layers that have one; 0 if there are none."""
        return max(layer.window for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Family:
    """What distinguishes an architecture. `model_type` is its name in transformers. `window_period`: every layer of
    that number sees all tokens, and the others a window; with 1, no layer has a window, and with 0 all layers have it.
    With `has_local_rotation`, layers with a window have other rotary frequencies. `unrotated_period`: every layer of
    that number is without positions, if it is not 0. `scales_embeddings`: by the root of their width. `has_sinks`:
    queries may attend to nothing, and the norm before the feed-forward layer has another name. `truncates_yarn`: the
    bounds of YaRN's ramp are whole numbers. `window`, `logit_cap` and `score_cap` are those of files that do not say
    them: tokens of the window, the cap of logits, and the cap of the scores of attention, which the graph leaves
    out."""

    model_type: str
    activation: str = "swish"
    window_period: int = 1
    unrotated_period: int = 0
    has_local_rotation: bool = False
    scales_embeddings: bool = False
    has_multipliers: bool = False
    may_have_experts: bool = False
    has_norms_behind: bool = False
    has_sinks: bool = False
    truncates_yarn: bool = True
    window: int = 0
    logit_cap: float = 0.0
    score_cap: float = 0.0

    @property
    def tensors_of_layers(self) -> str:
        """An expression for the names of a layer's tensors."""
        parts = [_ATTENTION, _FEED_FORWARD]
        parts += [_EXPERTS] * self.may_have_experts + [_NORMS_BEHIND] * self.has_norms_behind
        return "|".join([*parts, *[r"(attn_sinks|post_attention_norm)\.weight"] * self.has_sinks])


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", may_have_experts=True),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "qwen3moe": _Family("qwen3_moe", may_have_experts=True),
    "gemma": _Family("gemma", activation="gelu", scales_embeddings=True),
    "gemma2": _Family(
        "gemma2",
        activation="gelu",
        scales_embeddings=True,
        window_period=2,
        has_norms_behind=True,
        window=4096,
        logit_cap=30.0,
        score_cap=50.0,
    ),
    "gemma3": _Family(
        "gemma3_text",
        activation="gelu",
        scales_embeddings=True,
        window_period=6,
        has_local_rotation=True,
        has_norms_behind=True,
    ),
    "phi3": _Family("phi3", window_period=0),
    "granite": _Family("granite", has_multipliers=True),
    "granitemoe": _Family("granitemoe", has_multipliers=True, may_have_experts=True),
    "smollm3": _Family("smollm3", unrotated_period=4),
    "glm4": _Family("glm4", has_norms_behind=True),
    "gpt-oss": _Family(
        "gpt_oss", activation="clamped", window_period=2, may_have_experts=True, has_sinks=True, truncates_yarn=False
    ),
}
ARCHITECTURES = tuple(_FAMILIES)
"""The architectures that can be converted."""
_MULTIPLIERS = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")
# Values with which a key has no effect.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "expert_gating_func": (1, 3),  # softmax before or behind the choice, which is the same for weights that add up to 1
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "attention.causal": (True,),
    "attention.temperature_scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    SCORE_CAP: (0.0,),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
}


def model_type_of(architecture: str) -> str:
    """The name of an architecture in transformers."""
    return _FAMILIES[architecture].model_type


def unknown_tensor(architecture: str, names: Iterable[str]) -> str | None:
    """The first of these tensors that the architecture's graphs do not use; None if there is none."""
    known = re.compile(rf"{_TABLE}|blk\.\d+\.({_FAMILIES[architecture].tensors_of_layers})")
    return next((name for name in sorted(names) if not known.fullmatch(name)), None)


class Metadata:
    """The numbers of a file's metadata, by their names without the architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.architecture = str(metadata.get("general.architecture"))
        self._metadata = metadata

    def get(self, name: str) -> Any:
        """The value; None if there is none."""
        return self._metadata.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: float = 0.0) -> float:
        """A number, or the default if there is none."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ArchitectureError(f"its {self.architecture}.{name} is no number")
        return float(value)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; where layers have a number each, they must be equal. Without it, the default."""
        value = self.get(name)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise ArchitectureError(f"its layers differ in {self.architecture}.{name}")
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArchitectureError(f"its metadata has no {self.architecture}.{name}")
        return value


def head_size_of(metadata: Metadata, part: str = "key") -> int:
    """The size of a head of keys, or of values."""
    stated = metadata.get(f"attention.{part}_length")
    return int(stated or metadata.whole("embedding_length") // metadata.whole("attention.head_count"))


def score_cap_of(metadata: Metadata) -> float:
    """The cap of the scores of attention, which graphs leave out; 0 without one."""
    return metadata.number(SCORE_CAP, _FAMILIES[metadata.architecture].score_cap)


def check_shape(metadata: Mapping[str, Any]) -> None:
    """Raise ArchitectureError if the metadata require something that the graph would not have."""
    values = Metadata(metadata)
    name = values.architecture
    if name not in _FAMILIES:
        raise ArchitectureError(
            f"its architecture is {name}, and GGUF files of {', '.join(ARCHITECTURES)} can be converted"
        )
    family = _FAMILIES[name]
    cap = {SCORE_CAP: score_cap_of(values)}
    if needs_score_cap({"model_type": family.model_type, "num_hidden_layers": values.whole("block_count"), **cap}):
        raise ArchitectureError(WITHOUT_SCORE_CAP)
    for key, harmless in _WITHOUT_EFFECT.items():
        value = values.get(key)
        is_left_out = key == SCORE_CAP and family.score_cap
        if value is not None and value not in harmless and not is_left_out:
            raise ArchitectureError(f"it has {name}.{key} {value}, which is not supported")
    multipliers = [key for key in _MULTIPLIERS if values.get(key) and not family.has_multipliers]
    if values.number("expert_count") and not family.may_have_experts:
        multipliers.append("expert_count")
    if multipliers:
        raise ArchitectureError(f"it has {name}.{multipliers[0]}, which a plain {name} model does not have")
    scaling = values.get(f"{_ROPE}.type") or "linear"
    if scaling not in _TYPES_OF_SCALING:
        raise ArchitectureError(
            f"its rotary frequencies are scaled by {scaling}, and {', '.join(_TYPES_OF_SCALING[1:])} and Llama 3's "
            "factors can be converted"
        )
    values.whole("attention.head_count_kv", values.whole("attention.head_count"))
    size = head_size_of(values)
    if size != head_size_of(values, "value"):
        raise ArchitectureError("its keys and values differ in size")
    rotated = values.whole("rope.dimension_count", size)
    if rotated > size or rotated % 2:
        raise ArchitectureError(f"it rotates {rotated} numbers of heads of {size}")
    window = values.number("attention.sliding_window")
    if family.window_period == 1 and 0 < window < values.whole("context_length"):
        raise ArchitectureError(f"it has {name}.attention.sliding_window, which a plain {name} model does not have")


def shape_of(metadata: Mapping[str, Any], vectors: Mapping[str, _Array]) -> Shape:
    """The shape of the model. `vectors` may have factors for the rotary frequencies. Raises ArchitectureError."""
    check_shape(metadata)
    values = Metadata(metadata)
    family = _FAMILIES[values.architecture]
    width, heads, head_size = (
        values.whole("embedding_length"),
        values.whole("attention.head_count"),
        head_size_of(values),
    )
    scale = 1 / math.sqrt(width // heads if _is_largest_gemma3(values) else head_size)
    experts = values.whole("expert_count", 0) if values.number("expert_count") else 0
    multiplier = {key: values.number(key) if family.has_multipliers else 0.0 for key in _MULTIPLIERS}
    return Shape(
        layers=tuple(_layers(values, family, vectors)),
        heads=heads,
        kv_heads=values.whole("attention.head_count_kv", heads),
        head_size=head_size,
        rotated=values.whole("rope.dimension_count", head_size),
        epsilon=values.number("attention.layer_norm_rms_epsilon", 1e-5),
        has_interleaved_heads=values.architecture in INTERLEAVED,
        activation=family.activation,
        attention_scale=multiplier["attention.scale"] or scale,
        embedding_scale=math.sqrt(width) if family.scales_embeddings else multiplier["embedding_scale"] or 1.0,
        residual_scale=multiplier["residual_scale"] or 1.0,
        logit_scale=1 / (multiplier["logit_scale"] or 1.0),
        logit_cap=values.number("final_logit_softcapping", family.logit_cap),
        experts=experts,
        used_experts=values.whole("expert_used_count") if experts else 0,
        feed_forward_norm="post_attention_norm" if family.has_sinks else "ffn_norm",
        has_norms_behind=family.has_norms_behind,
    )


def _is_largest_gemma3(values: Metadata) -> bool:
    """Whether the model is Gemma 3 27B, which divides attention scores by the root of another number than the size of
    its heads. No key in the file says so."""
    return values.architecture == "gemma3" and values.whole("block_count") == _LAYERS_OF_LARGEST_GEMMA3


def _layers(values: Metadata, family: _Family, vectors: Mapping[str, _Array]) -> Iterable[Layer]:
    window = int(values.number("attention.sliding_window", family.window))
    has_window = _has_window(values, family.window_period) if window else [False] * values.whole("block_count")
    if window >= values.whole("context_length"):
        window = 0
    everywhere = _rotation(values, vectors)
    in_windows = _local_rotation(values) if family.has_local_rotation else everywhere
    # To Granite, this key tells whether there are positions at all.
    is_rotated = values.get(f"{_ROPE}.finetuned") is not False or not family.has_multipliers
    for number, is_local in enumerate(has_window):
        is_plain = bool(family.unrotated_period) and (number + 1) % family.unrotated_period == 0
        rotation = in_windows if is_local else everywhere
        yield Layer(window if is_local else 0, rotation if is_rotated and not is_plain else None)


def _has_window(values: Metadata, period: int) -> list[bool]:
    """Whether each layer has a window, if the model has one."""
    layers = values.whole("block_count")
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise ArchitectureError(f"its {values.architecture}.attention.sliding_window_pattern is not of its layers")
        return [bool(entry) for entry in pattern]
    period = values.whole("attention.sliding_window_pattern", period) if period > 1 else period
    return [period == 0 or layer % period < period - 1 for layer in range(layers)]


def _frequencies(base: float, rotated: int) -> _Array:
    found: _Array = 1.0 / base ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    return found


def _local_rotation(values: Metadata) -> Rotation:
    """The rotation of layers with a window, if they have their own."""
    base = values.number("rope.freq_base_swa", _LOCAL_BASE)
    return Rotation(_frequencies(base, values.whole("rope.dimension_count", head_size_of(values))))


def _rotation(values: Metadata, vectors: Mapping[str, _Array]) -> Rotation:
    rotated = values.whole("rope.dimension_count", head_size_of(values))
    base = values.number("rope.freq_base", 10_000.0)
    frequencies = _frequencies(base, rotated)
    kind = values.get(f"{_ROPE}.type") or "linear"
    factor = values.number(f"{_ROPE}.factor") or values.number("rope.scale_linear") or 1.0
    if kind == "none":
        factor = 1.0
    original = values.whole(f"{_ROPE}.original_context_length", values.whole("context_length"))
    scale = values.number(f"{_ROPE}.attn_factor", 1.0) or 1.0
    if "rope_freqs.weight" in vectors:
        return Rotation(_scaled(frequencies / _factors(vectors, "rope_freqs", rotated), factor), scale=scale)
    if kind == "yarn":
        ramp = _yarn_ramp(values, rotated, base, original)
        mixed = frequencies * ramp + frequencies / factor * (1 - ramp)
        return Rotation(mixed, scale=scale * (1 + 0.1 * math.log(factor)))
    if "rope_factors_long.weight" in vectors or "rope_factors_short.weight" in vectors or kind == "longrope":
        short, long = (frequencies / _factors(vectors, f"rope_factors_{name}", rotated) for name in ("short", "long"))
        return Rotation(_scaled(short, factor), _scaled(long, factor), original, scale)
    return Rotation(_scaled(frequencies, factor), scale=scale)


def _scaled(frequencies: _Array, factor: float) -> _Array:
    found: _Array = frequencies / factor
    return found


def _factors(vectors: Mapping[str, _Array], name: str, rotated: int) -> _Array:
    found = vectors[f"{name}.weight"]
    if len(found) != rotated // 2:
        raise ArchitectureError(f"its {name}.weight has {len(found)} factors for {rotated // 2} frequencies")
    return found


def _yarn_ramp(values: Metadata, rotated: int, base: float, original: int) -> _Array:
    """The part of each frequency that YaRN keeps: 1 for the fast ones, 0 for the slow ones."""

    def turning(turns: float) -> float:
        """The index of the frequency that makes `turns` turns in the original context."""
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        turning(values.number(f"{_ROPE}.yarn_beta_fast", 32.0)),
        turning(values.number(f"{_ROPE}.yarn_beta_slow", 1.0)),
    )
    if _FAMILIES[values.architecture].truncates_yarn:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(rotated - 1.0, high)
    ramp = (np.arange(rotated // 2) - low) / max(0.001, high - low)
    found: _Array = 1 - np.clip(ramp, 0, 1)
    return found
