"""Reads heads in the format of EAGLE-3: config.json and *.safetensors in a directory.

    fc.weight                          [size, 3 x target's size]   mixes the target's hidden states of three layers
    midlayer.self_attn.q_proj.weight   [heads x head size, 2 x size], and k_proj, v_proj: of embedding and mixed states
    midlayer.self_attn.o_proj.weight, midlayer.mlp.{gate,up,down}_proj.weight
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight, norm.weight
    lm_head.weight                     [draft vocabulary, size]
    d2t                                [draft vocabulary]   the target's token id less the draft's
    t2d                                [vocabulary]         which tokens are in the draft vocabulary
    embed_tokens.weight                [vocabulary, size]   not there if the target's embeddings are used

The layer may also be called layers.0. Heads of the speculators library have the layer's settings in
`transformer_layer_config`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.common.model_files.heads import HEADS_CONFIG, heads_weights
from headrace.common.model_files.safetensors import FLOATS, SafetensorsError, floats, tensors_of
from headrace.worker.config import ConfigurationError

_Array = npt.NDArray[Any]
_KINDS = (*FLOATS, "I64", "I32", "BOOL")
_LAYER = "midlayer."


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Dimensions of heads. The target has hidden states of `target_size` and `vocab_size` tokens. `layers`: those whose
    input is read, None for the usual ones. `norms_residual`: the residual connection begins after `hidden_norm`."""

    size: int
    target_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    frequencies: npt.NDArray[np.float64]
    layers: tuple[int, ...] | None = None
    norms_residual: bool = False


@dataclass(frozen=True, slots=True)
class EagleFiles:
    """Heads as they are in the files. `weights` maps names, without the layer's prefix, to arrays; bfloat16 as its
    bits. `token_ids` [draft vocabulary] are the target's."""

    path: Path
    shape: EagleShape
    weights: Mapping[str, _Array]
    token_ids: npt.NDArray[np.int64]

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """The weights of this name as float32, in the shape of the file."""
        return floats(self.weights[name])


def layers_to_read(shape: EagleShape, num_layers: int) -> tuple[int, ...]:
    """The layers of a target with `num_layers` whose input the heads read."""
    return shape.layers or tuple(sorted((2, num_layers // 2, num_layers - 3)))


def read_eagle(path: Path) -> EagleFiles:
    """Read heads. ConfigurationError if they are incomplete, damaged or of another kind."""
    config = read_config(path)
    found = read_weights(path, "model.safetensors", ".bin", _KINDS)
    weights = {_plain(name): values for name, values in found.items()}
    shape = shape_of(config, weights, path)
    if shape.layers is not None and len(shape.layers) != 3:
        raise ConfigurationError(f"{path / HEADS_CONFIG} names {len(shape.layers)} layers to read; EAGLE-3 reads three")
    check_weights(weights, _shapes(shape, weights), path, "EAGLE-3")
    biases = [name for name in weights if name.endswith(".bias")]
    if biases:
        raise ConfigurationError(f"the heads in {path} have {biases[0]}; heads with biases are not supported")
    num_draft = weights["lm_head.weight"].shape[0]
    shift = weights.get("d2t")
    if shift is None and num_draft != shape.vocab_size:
        raise ConfigurationError(f"the heads in {path} have a draft vocabulary of {num_draft} tokens, but no d2t")
    token_ids = np.arange(num_draft) + (0 if shift is None else shift.astype(np.int64))
    if token_ids.min() < 0 or token_ids.max() >= shape.vocab_size or len(np.unique(token_ids)) != num_draft:
        raise ConfigurationError(f"d2t of the heads in {path} does not map to tokens; copy the file again")
    return EagleFiles(path, shape, weights, token_ids)


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of heads, with the settings of their layer beside the others. ConfigurationError."""
    try:
        config = json.loads((path / HEADS_CONFIG).read_bytes())
    except OSError:
        raise ConfigurationError(
            f"there is no {path / HEADS_CONFIG}; heads have one, and a model.safetensors"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{path / HEADS_CONFIG} is not JSON ({error}); copy it again") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path / HEADS_CONFIG} is not an object; copy it again")
    nested = config.get("transformer_layer_config")
    return {**nested, **config} if isinstance(nested, dict) else config


def read_weights(
    path: Path,
    name: str,
    unsafe: str,
    kinds: Collection[str],
    is_wanted: Callable[[str], bool] = lambda _name: True,
) -> dict[str, _Array]:
    """The tensors of heads that are wanted, of these kinds, by their names in the files, which stay mapped.
    ConfigurationError. Without a file such as `name`, it says what to do with one of the format `unsafe`."""
    files = heads_weights(path)
    if not files:
        hint = (
            f"; save the weights with safetensors, since {unsafe} files may run code"
            if [*path.glob(f"*{unsafe}")]
            else ""
        )
        raise ConfigurationError(f"there is no {name} in {path}{hint}")
    found: dict[str, _Array] = {}
    try:
        for file in files:
            with file.open("rb") as opened:
                found |= tensors_of(mmap(opened.fileno(), 0, access=ACCESS_READ), file, kinds, is_wanted)
    except (OSError, SafetensorsError) as error:
        raise ConfigurationError(str(error)) from error
    except ValueError as error:  # of an empty file
        raise ConfigurationError(f"{file} is no whole safetensors file ({error}); copy it again") from error
    return found


def _plain(name: str) -> str:
    return name.removeprefix("model.").removeprefix(_LAYER).removeprefix("layers.0.")


def shape_of(config: Mapping[str, Any], weights: Mapping[str, _Array], path: Path) -> EagleShape:
    """The dimensions of heads, or of a layer like theirs. ConfigurationError."""

    def number(name: str, default: Any = None) -> Any:
        value = config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigurationError(f"{path / HEADS_CONFIG} must have the number {name}")
        return value

    if config.get("num_hidden_layers", 1) != 1:
        raise ConfigurationError(f"the heads in {path} have {config['num_hidden_layers']} layers; one is supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigurationError(f"the heads in {path} have the activation {config['hidden_act']}; silu is supported")
    size, num_heads = number("hidden_size"), number("num_attention_heads")
    head_size = number("head_dim", size // num_heads)
    vocabulary = weights["t2d"].shape[0] if "t2d" in weights else number("vocab_size")
    return EagleShape(
        size=size,
        target_size=number("target_hidden_size", size),
        vocab_size=vocabulary,
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads", num_heads),
        head_size=head_size,
        epsilon=number("rms_norm_eps", 1e-6),
        frequencies=_frequencies(config, head_size, path),
        layers=_layers(config),
        norms_residual=bool(config.get("norm_before_residual")),
    )


def _layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose input is read. `eagle_config` names the previous layers, whose outputs these inputs are."""
    nested = config.get("eagle_config")
    of_output = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    if of_output:
        return tuple(sorted(int(layer) + 1 for layer in of_output))
    of_input = config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(sorted(int(layer) for layer in of_input)) if of_input else None


def _frequencies(config: Mapping[str, Any], head_size: int, path: Path) -> npt.NDArray[np.float64]:
    """The angle by which each pair of a head turns from one position to the next."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = config.get("rope_theta") or scaling.get("rope_theta") or 10_000.0
    found: npt.NDArray[np.float64] = base ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return found
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return found / factor
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = float(scaling["original_max_position_embeddings"]) * found / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return share * found + (1 - share) * found / factor
    raise ConfigurationError(
        f"{path / HEADS_CONFIG} has rotary factors of the type {kind!r}; default, linear and llama3 are supported"
    )


def layer_shapes(shape: EagleShape, weights: Mapping[str, _Array], *, inputs: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer and their shapes. Its attention projects states of the size `inputs`."""
    size = shape.size
    of_heads = shape.num_heads * shape.head_size
    of_kv_heads = shape.num_kv_heads * shape.head_size
    inner = weights["mlp.gate_proj.weight"].shape[0] if "mlp.gate_proj.weight" in weights else 0
    return {
        "self_attn.q_proj.weight": (of_heads, inputs),
        "self_attn.k_proj.weight": (of_kv_heads, inputs),
        "self_attn.v_proj.weight": (of_kv_heads, inputs),
        "self_attn.o_proj.weight": (size, of_heads),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }


def _shapes(shape: EagleShape, weights: Mapping[str, _Array]) -> dict[str, tuple[int, ...]]:
    size = shape.size
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * shape.target_size),
        **layer_shapes(shape, weights, inputs=2 * size),
        "lm_head.weight": (weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else 0, size),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
    wanted |= {f"{name}.weight": (size,) for name in norms}
    if "d2t" in weights:
        wanted["d2t"] = wanted["lm_head.weight"][:1]
    if "embed_tokens.weight" in weights:
        wanted["embed_tokens.weight"] = (shape.vocab_size, size)
    return wanted


def check_weights(weights: Mapping[str, _Array], wanted: Mapping[str, tuple[int, ...]], path: Path, what: str) -> None:
    """ConfigurationError unless there are weights of these shapes, which `what` has."""
    for name, expected in wanted.items():
        if name not in weights:
            raise ConfigurationError(f"the heads in {path} have no {name}, which {what} has; name other heads")
        if weights[name].shape != expected:
            raise ConfigurationError(
                f"the heads in {path} have {name} of shape {list(weights[name].shape)}, and config.json makes it "
                f"{list(expected)}; the files do not belong together"
            )
