"""Weights of AWQ and GPTQ checkpoints, with unchanged values. The exporter loads this file; it imports nothing of
headrace.

A linear layer has three tensors instead of its weight `[out, in]`, which is (qweight - qzeros) * scales by group:

    GPTQ   qweight i32 [in / 8, out]    eight inputs in a number, the first in the lowest bits
           qzeros  i32 [groups, out / 8]   eight outputs in a number; one less than the zero point, unless it is gptq_v2
           scales  f16 [groups, out]
    AWQ    qweight i32 [in, out / 8]    eight outputs in a number, in the order of _AWQ_OUTPUTS
           qzeros  i32 [groups, out / 8]   the same
           scales  f16 [groups, out]

GPTQ also has 8 bits, with four numbers instead of eight.

optimum-intel needs a library for GPUs to read these. So they are written as a plain checkpoint in 16 bits, which is
exported. In its graph, each product of such a layer then gets the exact numbers of the original checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch  # type: ignore[import-not-found]
from openvino import opset13
from safetensors import safe_open  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

_PACKED = ".qweight"
_ZEROS = ".qzeros"
_SCALES = ".scales"
_GROUPS = ".g_idx"
# The order in which eight outputs are packed, from the lowest bits on.
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_FILE_BYTES = 1 << 30
_INDEX = "model.safetensors.index.json"
# The suffix that tracing adds to the name of a weight.
_NAMES = (".weight", "._openvino_orig_weight")
# The maximum change by rounding to 16 bits, relative to the largest weight of a row.
_ROUNDING = 2**-7


Numbers = npt.NDArray[Any]


class PackedError(Exception):
    """Why packed weights cannot be kept, as the end of a sentence about the checkpoint."""


class Packed(NamedTuple):
    """The weights of one linear layer: numbers u8 `[out, groups, group size]`, zero points u8 and scales f16
    `[out, groups, 1]`."""

    numbers: Numbers
    zeros: Numbers
    scales: Numbers
    num_bits: int

    def weights(self) -> Numbers:
        """The weights, f32 `[out, in]`."""
        values: Numbers = (self.numbers.astype(np.float32) - self.zeros) * self.scales.astype(np.float32)
        return values.reshape(len(values), -1)

    def node(self) -> ov.Node:
        """The same as a graph of constants. The plugin keeps the packed numbers and multiplies with them."""
        num_bits = self.num_bits
        if num_bits == 4 and np.all(self.zeros == 8):
            values = opset13.convert(_constant((self.numbers ^ 8), ov.Type.i4), "f16")
        else:
            kind = ov.Type.u4 if num_bits == 4 else ov.Type.u8
            zeros = opset13.convert(_constant(self.zeros, kind), "f16")
            values = opset13.subtract(opset13.convert(_constant(self.numbers, kind), "f16"), zeros)
        values = opset13.multiply(values, opset13.constant(self.scales))
        flat = opset13.reshape(values, opset13.constant(np.array([len(self.numbers), -1])), special_zero=False)
        return opset13.convert(flat, "f32")


class Checkpoint:
    """A checkpoint of packed weights in safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        self._options: Mapping[str, Any] = self.config["quantization_config"]
        self._files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as opened:
                self._files.update(dict.fromkeys(opened.keys(), path))
        self.layers = [name.removesuffix(_PACKED) for name in self._files if name.endswith(_PACKED)]
        if not self.layers:
            raise PackedError("none of its tensors is packed")

    def write_plain(self, directory: Path) -> None:
        """Write the checkpoint with its weights in float16."""
        directory.mkdir()
        for path in self._directory.iterdir():
            if path.suffix != ".safetensors" and path.name not in ("config.json", _INDEX):
                (directory / path.name).symlink_to(path.resolve())
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16", "dtype": "float16"}))
        places: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self._plain():
            tensors[name] = tensor
            if sum(value.nbytes for value in tensors.values()) > _FILE_BYTES:
                self._write(tensors, directory, places)
        self._write(tensors, directory, places)
        (directory / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    @staticmethod
    def _write(tensors: dict[str, torch.Tensor], directory: Path, places: dict[str, str]) -> None:
        path = directory / f"model-{len(set(places.values())) + 1:05}.safetensors"
        if tensors:
            save_file(tensors, path, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, path.name))
        tensors.clear()

    def _plain(self) -> Iterator[tuple[str, torch.Tensor]]:
        of_layers = {layer + part for layer in self.layers for part in (_PACKED, _ZEROS, _SCALES, _GROUPS)}
        for name in self._files:
            if name not in of_layers:
                yield name, self._tensor(name)
        for layer in self.layers:
            yield f"{layer}.weight", torch.from_numpy(self.packed(layer).weights().astype(np.float16))

    def packed(self, layer: str) -> Packed:
        """The weights of one layer. PackedError if they are of an unknown form."""
        is_awq = self._options["quant_method"] == "awq"
        num_bits = int(self._options["bits"])
        packed, zeros = (self._tensor(layer + part).numpy() for part in (_PACKED, _ZEROS))
        scales = self._tensor(layer + _SCALES).to(torch.float16).numpy()
        if is_awq:
            numbers, zeros = (_unpacked(values, num_bits, _AWQ_OUTPUTS) for values in (packed, zeros))
        else:
            numbers, zeros = _unpacked(packed.T, num_bits).T, _unpacked(zeros, num_bits)
            if self._options.get("checkpoint_format", "gptq") != "gptq_v2":
                zeros = (zeros + 1) & ((1 << num_bits) - 1)
        length, groups = len(numbers), len(scales)
        if numbers.shape[1:] != scales.shape[1:] or zeros.shape != scales.shape or length % groups:
            raise PackedError(f"its tensors {layer}.* do not fit together")
        if layer + _GROUPS in self._files:
            found = self._tensor(layer + _GROUPS).numpy()
            if not np.array_equal(found, np.arange(length) // (length // groups)):
                raise PackedError(f"the inputs of {layer} are not in the order of their groups (desc_act)")
        by_group = np.ascontiguousarray(numbers.T).reshape(scales.shape[1], groups, -1)
        zeros, scales = (np.ascontiguousarray(values.T)[..., None] for values in (zeros, scales))
        return Packed(by_group, zeros, scales, num_bits)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise PackedError(f"it lacks the tensor {name}")
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)


def keep_packed(graph: ov.Model, checkpoint: Checkpoint) -> None:
    """Replace the 16-bit weights of packed layers in the graph by the packed ones. PackedError if the graph does not
    multiply with the weights unchanged."""
    left = set(checkpoint.layers)
    for node in graph.get_ordered_ops():
        layer = _layer_of(node)
        if layer not in left:
            continue
        left.remove(layer)
        packed = checkpoint.packed(layer)
        found, expected = node.get_data(dtype=np.float32), packed.weights()
        if found.shape != expected.shape or np.any(np.abs(found - expected) > _ROUNDING * np.abs(expected).max()):
            raise PackedError(f"optimum-intel changes the weights of {layer}")
        for target in node.output(0).get_target_inputs():
            user = target.get_node()
            is_convert = user.get_type_name() == "Convert"
            (user.output(0) if is_convert else node.output(0)).replace(packed.node().output(0))
            break
    if left:
        raise PackedError(f"optimum-intel's graph has no product with the weights of {min(left)}")


def _layer_of(node: ov.Node) -> str:
    name = node.get_friendly_name().removeprefix("self.")
    if node.get_type_name() == "Constant":
        for ending in _NAMES:
            if name.endswith(ending):
                return str(name.removesuffix(ending))
    return ""


def _unpacked(values: Numbers, num_bits: int, order: tuple[int, ...] | None = None) -> Numbers:
    """The u8 numbers in the bits of i32 `[rows, columns]`: `[rows, columns * 32 / num_bits]`."""
    count = 32 // num_bits
    shifts = np.empty(count, np.uint32)
    shifts[list(order or range(count))] = np.arange(count, dtype=np.uint32) * num_bits
    numbers = (values.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << num_bits) - 1)
    return numbers.astype(np.uint8).reshape(len(values), -1)


def _constant(numbers: Numbers, kind: ov.Type) -> ov.Node:
    """A constant of 4 or 8 bits. With 4 bits, the first of two numbers is in the lower bits."""
    if kind == ov.Type.u8:
        return opset13.constant(numbers)
    flat = numbers.reshape(-1)
    tensor = ov.Tensor(kind, ov.Shape(list(numbers.shape)))
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    tensor.data.reshape(-1).view(np.uint8)[:] = flat[::2] | flat[1::2] << 4
    return ov.op.Constant(tensor, shared_memory=False)
