"""Quantise a small model and write it as quantised checkpoints are published.

The packing is written out number by number, so that it shares nothing with what reads it. FORMATS says how each is
quantised. `write_packed` gives the model the weights that the checkpoint stands for, computed as the reference of the
format does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

GROUP_SIZE = 32
# Rows and columns of weights that share a scale; the layers' sizes are no multiples of all of them.
BLOCK = (128, 128)
_MOST_FP8 = 448.0


class _Layer(NamedTuple):
    """Numbers and zero points, i64 `[in, out]` and `[groups, out]`, and scales `[groups, out]`."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor


class Format(NamedTuple):
    """How the linear layers of a model are stored, and what config.json says of it. `write` turns a weight `[out, in]`
    into the tensors of its layer, and the weight that they stand for."""

    write: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
    options: dict[str, Any]
    dtype: torch.dtype = torch.float16


def write_packed(model: PreTrainedModel, kind: str, directory: Path) -> dict[str, torch.Tensor]:
    """Quantise the linear layers of a model, except its head, and write the checkpoint. The model gets the weights that
    the checkpoint stands for, which are returned by name. In MXFP4, experts are quantised instead of linear layers."""
    found = FORMATS[kind]
    for weights in model.parameters():
        weights.data = weights.data.to(found.dtype).float()
    tensors = {name: tensor.to(found.dtype) for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        quantised = _quantised_parameters(model, is_experts=kind == "mxfp4")
        for name, weights in quantised:
            parts, stands_for = found.write(weights.data)
            weights.copy_(stands_for)
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}{part}": tensor for part, tensor in parts.items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    dtype = str(found.dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "torch_dtype": dtype, "quantization_config": found.options}
    (directory / "config.json").write_text(json.dumps(config))
    return {name: weights.data for name, weights in quantised}


def _quantised_parameters(model: PreTrainedModel, *, is_experts: bool) -> list[tuple[str, torch.nn.Parameter]]:
    if is_experts:
        named = model.named_parameters()
        return [
            (name, weights) for name, weights in named if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        ]
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return [(f"{name}.weight", module.weight) for name, module in linears.items() if name != "lm_head"]


def _quantised(
    weight: torch.Tensor,
    num_bits: int,
    *,
    is_symmetric: bool,
    group_size: int = GROUP_SIZE,
    dtype: torch.dtype = torch.float16,
) -> _Layer:
    groups = weight.T.reshape(-1, group_size, len(weight))
    most = (1 << num_bits) - 1
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / most).to(dtype)
    zeros = (-low / scales.float()).round().clamp(1, most)
    if is_symmetric:
        scales = (groups.abs().amax(1) * 2 / most).to(dtype)
        zeros = torch.full_like(zeros, 1 << (num_bits - 1))
    numbers = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, most)
    return _Layer(numbers.reshape(-1, len(weight)).long(), zeros.long(), scales)


def _weights(layer: _Layer) -> torch.Tensor:
    """The weights `[out, in]`."""
    group_size = len(layer.numbers) // len(layer.scales)
    zeros, scales = (value.float().repeat_interleave(group_size, 0) for value in (layer.zeros, layer.scales))
    return ((layer.numbers - zeros) * scales).T


def _awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    layer = _quantised(weight, 4, is_symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = {
        ".qweight": _in_rows(layer.numbers, 4, order),
        ".qzeros": _in_rows(layer.zeros, 4, order),
        ".scales": layer.scales,
    }
    return packed, _weights(layer)


def _gptq(num_bits: int, *, is_symmetric: bool, is_v2: bool) -> Format:
    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        layer = _quantised(weight, num_bits, is_symmetric=is_symmetric)
        zeros = layer.zeros if is_v2 else layer.zeros - 1
        packed = {
            ".qweight": _in_rows(layer.numbers.T, num_bits, range(32 // num_bits)).T.contiguous(),
            ".qzeros": _in_rows(zeros, num_bits, range(32 // num_bits)),
            ".scales": layer.scales,
            ".g_idx": (torch.arange(len(layer.numbers)) // GROUP_SIZE).int(),
        }
        return packed, _weights(layer)

    options = {"quant_method": "gptq", "bits": num_bits, "group_size": GROUP_SIZE, "desc_act": False}
    options |= {"sym": is_symmetric, **({"checkpoint_format": "gptq_v2"} if is_v2 else {})}
    return Format(write, options)


def _compressed(num_bits: int, strategy: str, *, is_symmetric: bool = True, is_packed: bool = True) -> Format:
    """compressed-tensors with integers."""

    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        group_size = GROUP_SIZE if strategy == "group" else weight.shape[1]
        options = {"group_size": group_size, "dtype": torch.bfloat16}
        layer = _quantised(weight, num_bits, is_symmetric=is_symmetric, **options)
        parts = {".weight_scale": layer.scales.T.contiguous()}
        if is_packed:
            order = range(32 // num_bits)
            parts[".weight_packed"] = _in_rows(layer.numbers.T, num_bits, order)
            parts[".weight_shape"] = torch.tensor(weight.shape)
            if not is_symmetric:
                parts[".weight_zero_point"] = _in_rows(layer.zeros, num_bits, order).T.contiguous()
        else:
            parts[".weight"] = (layer.numbers.T - (1 << (num_bits - 1))).to(torch.int8).contiguous()
        return parts, _weights(layer)

    weights = {"num_bits": num_bits, "type": "int", "symmetric": is_symmetric, "strategy": strategy, "actorder": None}
    weights |= {"group_size": GROUP_SIZE if strategy == "group" else None, "dynamic": False}
    return Format(write, _options_of("pack-quantized" if is_packed else "int-quantized", weights), torch.bfloat16)


def _options_of(stated: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    options = {"quant_method": "compressed-tensors", "format": stated, "config_groups": {"group_0": group}}
    return {**options, "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None}


def _fp8(strategy: str, name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Format:
    """Floats of 8 bits with scales in a tensor `name`: one for the tensor, for each row, or for each block."""

    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": BLOCK}[strategy]
        numbers, stands_for = torch.empty_like(weight), torch.empty_like(weight)
        scales = []
        for top in range(0, weight.shape[0], rows):
            for left in range(0, weight.shape[1], columns):
                place = slice(top, top + rows), slice(left, left + columns)
                scale = (weight[place].abs().max() / _MOST_FP8).to(dtype)
                numbers[place] = (weight[place] / scale.float()).to(torch.float8_e4m3fn).float()
                stands_for[place] = (numbers[place] * scale.float()).bfloat16().float()
                scales.append(scale)
        shape = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)] if strategy != "tensor" else []
        parts = {".weight": numbers.to(torch.float8_e4m3fn), name: torch.stack(scales).reshape(shape)}
        return {**parts, ".input_scale": torch.ones(1)}, stands_for

    return Format(write, options, torch.bfloat16)


def _compressed_fp8(strategy: str) -> Format:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": list(BLOCK)} if strategy == "block" else {}
    return _fp8(strategy, ".weight_scale", _options_of("float-quantized", weights), torch.bfloat16)


def _mxfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Experts `[experts, in, out]`: powers of 2 for 32 inputs each, which are stored last, and numbers of 4 bits."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, GROUP_SIZE)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / torch.exp2(exponents)[..., None]
    places = (scaled.abs()[..., None] - values).abs().argmin(-1)
    stands_for = values[places] * scaled.sign() * torch.exp2(exponents)[..., None]
    bits = (places + 8 * (scaled < 0)).to(torch.uint8)
    parts = {"_blocks": bits[..., ::2] | bits[..., 1::2] << 4, "_scales": (exponents + 127).to(torch.uint8)}
    return parts, stands_for.flatten(2).transpose(1, 2)


def _in_rows(numbers: torch.Tensor, num_bits: int, order: Sequence[int]) -> torch.Tensor:
    """Pack the numbers of each row; the bits hold them in this order, from the lowest on."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // len(order), dtype=torch.int64)
    for place, number in enumerate(order):
        packed |= numbers[:, number :: len(order)] << (place * num_bits)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


_DYNAMIC = {"activation_scheme": "dynamic"}
FORMATS: dict[str, Format] = {
    "awq": Format(
        _awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm", "zero_point": True}
    ),
    "gptq": _gptq(4, is_symmetric=True, is_v2=False),
    "gptq_v2": _gptq(4, is_symmetric=False, is_v2=True),
    "gptq8": _gptq(8, is_symmetric=False, is_v2=False),
    "compressed_tensors_w4a16": _compressed(4, "group"),
    "compressed_tensors_w4a16_asym": _compressed(4, "group", is_symmetric=False),
    "compressed_tensors_w4a16_channel": _compressed(4, "channel"),
    "compressed_tensors_w8a16": _compressed(8, "channel"),
    "compressed_tensors_w8a16_group_asym": _compressed(8, "group", is_symmetric=False),
    "compressed_tensors_int8": _compressed(8, "channel", is_packed=False),
    "compressed_tensors_fp8": _compressed_fp8("channel"),
    "compressed_tensors_fp8_tensor": _compressed_fp8("tensor"),
    "compressed_tensors_fp8_block": _compressed_fp8("block"),
    "fp8": _fp8("block", ".weight_scale_inv", {"quant_method": "fp8", **_DYNAMIC, "weight_block_size": list(BLOCK)}),
    "fbgemm_fp8": _fp8("channel", ".weight_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt_fp8": _fp8("tensor", ".weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "mxfp4": Format(_mxfp4, {"quant_method": "mxfp4"}, torch.bfloat16),
}
