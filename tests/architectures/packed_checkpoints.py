"""Quantise a small model and write it as AWQ and GPTQ checkpoints are published.

The packing is written out number by number, so that it shares nothing with what reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

GROUP_SIZE = 32
FORMATS = ("awq", "gptq", "gptq_v2", "gptq8")


class _Layer(NamedTuple):
    """Numbers and zero points, i64 `[in, out]` and `[groups, out]`, and scales f16 `[groups, out]`."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor


def write_packed(model: PreTrainedModel, kind: str, directory: Path) -> None:
    """Quantise the linear layers of a model, except its head, and write the checkpoint. The model gets the weights that
    the checkpoint stands for."""
    num_bits = 8 if kind == "gptq8" else 4
    for weights in model.parameters():
        weights.data = weights.data.half().float()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linears.pop("lm_head")
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, linear in linears.items():
            layer = _quantised(linear.weight, num_bits, is_symmetric=kind == "gptq")
            linear.weight.copy_(_weights(layer))
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor for part, tensor in _packed(layer, kind, num_bits).items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    options = {"quant_method": kind.partition("_")[0].rstrip("8"), "bits": num_bits, "group_size": GROUP_SIZE}
    if kind == "awq":
        options |= {"version": "gemm", "zero_point": True}
    else:
        options |= {"desc_act": False, "sym": kind == "gptq"}
        options |= {"checkpoint_format": "gptq_v2"} if kind == "gptq_v2" else {}
    config = {**model.config.to_dict(), "torch_dtype": "float16", "quantization_config": options}
    (directory / "config.json").write_text(json.dumps(config))


def _quantised(weight: torch.Tensor, num_bits: int, *, is_symmetric: bool) -> _Layer:
    groups = weight.T.reshape(-1, GROUP_SIZE, len(weight))
    most = (1 << num_bits) - 1
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(1, most)
    if is_symmetric:
        scales = (groups.abs().amax(1) * 2 / most).half()
        zeros = torch.full_like(zeros, 1 << (num_bits - 1))
    numbers = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, most)
    return _Layer(numbers.reshape(-1, len(weight)).long(), zeros.long(), scales)


def _weights(layer: _Layer) -> torch.Tensor:
    zeros, scales = (value.float().repeat_interleave(GROUP_SIZE, 0) for value in (layer.zeros, layer.scales))
    return ((layer.numbers - zeros) * scales).T


def _packed(layer: _Layer, kind: str, num_bits: int) -> dict[str, torch.Tensor]:
    count = 32 // num_bits
    if kind == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {
            "qweight": _in_rows(layer.numbers, num_bits, order),
            "qzeros": _in_rows(layer.zeros, num_bits, order),
            "scales": layer.scales,
        }
    zeros = layer.zeros if kind == "gptq_v2" else layer.zeros - 1
    return {
        "qweight": _in_rows(layer.numbers.T, num_bits, range(count)).T.contiguous(),
        "qzeros": _in_rows(zeros, num_bits, range(count)),
        "scales": layer.scales,
        "g_idx": (torch.arange(len(layer.numbers)) // GROUP_SIZE).int(),
    }


def _in_rows(numbers: torch.Tensor, num_bits: int, order: Sequence[int]) -> torch.Tensor:
    """Pack the numbers of each row; the bits hold them in this order, from the lowest on."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // len(order), dtype=torch.int64)
    for place, number in enumerate(order):
        packed |= numbers[:, number :: len(order)] << (place * num_bits)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
