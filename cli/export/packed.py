"""Weights of quantised checkpoints, with unchanged values. The exporter loads this file; it imports nothing of
headrace.

A linear layer has other tensors instead of its weight `[out, in]`. Integers stay as they are; the weight is
(number - zero point) * scale, by group:

    GPTQ   qweight i32 [in / 8, out]    eight inputs in a number, the first in the lowest bits
           qzeros  i32 [groups, out / 8]   eight outputs in a number; one less than the zero point, unless it is gptq_v2
           scales  f16 [groups, out]
    AWQ    qweight i32 [in, out / 8]    eight outputs in a number, in the order of _AWQ_OUTPUTS
           qzeros  i32 [groups, out / 8]   the same
           scales  f16 [groups, out]
    compressed-tensors, pack-quantized
           weight_packed      i32 [out, in / 8]    eight inputs in a number; half of the numbers' range is added to each
           weight_zero_point  i32 [out / 8, groups]    eight outputs in a number, the same; i8 [out, groups] in early
                                                       versions; without it, all are 0
           weight_scale       [out, groups], or [out, 1], or [1]
           weight_shape       [2]
    compressed-tensors, int-quantized
           weight             i8 [out, in]
           weight_scale, weight_zero_point i8     as above

GPTQ and compressed-tensors also have 8 bits, with four numbers instead of eight.

Floats of 8 bits (fp8, fbgemm_fp8, modelopt, compressed-tensors) become 16 bits, as in the reference of each format: the
product with the scale in float32, rounded to bfloat16.

           weight             f8e4m3 [out, in]
           weight_scale_inv, or weight_scale     [1], [out], [out, 1], or one for each block of weights

Experts of gpt-oss in MXFP4 become integers of 8 bits, with the same values: twice the number is whole.

           gate_up_proj_blocks  u8 [experts, out, groups, 16]    two inputs in a byte, the first in the lower bits
           gate_up_proj_scales  u8 [experts, out, groups]        the power of 2, plus 127
           down_proj_*          the same

optimum-intel needs a library for GPUs to read these. So they are written as a plain checkpoint in 16 bits, which is
exported. In its graph, each product with integers then gets the exact numbers of the original checkpoint.
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

_WEIGHT = ".weight"
# The tensor of a layer that says that its weight is packed, and those beside it.
_QWEIGHT, _QZEROS, _SCALES, _G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
_PACKED, _ZERO_POINT, _SHAPE, _WEIGHT_G_IDX = ".weight_packed", ".weight_zero_point", ".weight_shape", ".weight_g_idx"
_SCALE, _SCALE_INV = ".weight_scale", ".weight_scale_inv"
_OF_LAYERS = (_QZEROS, _SCALES, _G_IDX, _ZERO_POINT, _SHAPE, _WEIGHT_G_IDX, _SCALE, _SCALE_INV)
# Scales of activations and of the KV cache, which are computed here with more bits.
_OF_ACTIVATIONS = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale"),
)
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
# Twice the numbers of 4 bits (e2m1), by their bits.
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
# The products of gpt-oss's experts in optimum-intel's graph, and their weights.
_PRODUCTS = {"bmm/MatMul": ".gate_up_proj", "bmm/MatMul_1": ".down_proj"}
# Kinds of numbers in safetensors files.
_INTEGERS, _FLOATS = "I8", "F8_E4M3"
_SHORT_FLOATS = ("F4", "F6", "F8")
# The order in which eight outputs are packed, from the lowest bits on.
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_FILE_BYTES = 1 << 30
_INDEX = "model.safetensors.index.json"
# The suffix that tracing adds to the name of a weight.
_NAMES = (_WEIGHT, "._openvino_orig_weight")
# The maximum change by rounding to 16 bits, relative to the largest weight of a row.
_ROUNDING = 2**-7


Numbers = npt.NDArray[Any]


class PackedError(Exception):
    """Why packed weights cannot be kept, as the end of a sentence about the checkpoint."""


class Packed(NamedTuple):
    """The weights of one linear layer: numbers u8 `[out, groups, group size]`, zero points u8 and scales f16 or f32
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
        """The weights as a graph of constants. The plugin keeps the packed numbers and multiplies with them."""
        half = 1 << (self.num_bits - 1)
        kind = "f16" if self.scales.dtype == np.float16 else "f32"
        numbers, zeros, scales = self.numbers, self.zeros, self.scales
        is_grouped = numbers.shape[1] > 1
        if not is_grouped:
            numbers, zeros, scales = numbers[:, 0], zeros[:, 0], scales[:, 0]
        if np.all(zeros == half):
            signed = ov.Type.i4 if self.num_bits == 4 else ov.Type.i8
            values = opset13.convert(_constant(numbers ^ np.uint8(half), signed), kind)
        else:
            unsigned = ov.Type.u4 if self.num_bits == 4 else ov.Type.u8
            values = opset13.convert(_constant(numbers, unsigned), kind)
            values = opset13.subtract(values, opset13.convert(_constant(zeros, unsigned), kind))
        values = opset13.multiply(values, opset13.constant(scales))
        if is_grouped:
            shape = opset13.constant(np.array([len(numbers), -1]))
            values = opset13.reshape(values, shape, special_zero=False)
        return opset13.convert(values, "f32") if kind == "f16" else values


class Experts(NamedTuple):
    """The weights of all experts of a layer: numbers i8 `[experts, out, groups, group size]`, and scales f16 or f32
    `[experts, out, groups, 1]`, which are powers of 2."""

    numbers: Numbers
    scales: Numbers

    def weights(self) -> torch.Tensor:
        """The weights, bf16 `[experts, out, in]`. They are exact."""
        numbers, scales = (torch.from_numpy(values).to(torch.bfloat16) for values in self)
        return (numbers * scales).flatten(2)

    def node(self) -> ov.Node:
        """The weights as a graph of constants."""
        kind = "f16" if self.scales.dtype == np.float16 else "f32"
        values = opset13.convert(_constant(self.numbers.view(np.uint8), ov.Type.i8), kind)
        values = opset13.multiply(values, opset13.constant(self.scales))
        shape = opset13.constant(np.array([*self.numbers.shape[:2], -1]))
        values = opset13.reshape(values, shape, special_zero=False)
        return opset13.convert(values, "f32") if kind == "f16" else values


class Checkpoint:
    """A checkpoint of quantised weights in safetensors files. `layers` are those whose integers are kept, and `experts`
    are those of gpt-oss."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
        self._options: Mapping[str, Any] = self.config["quantization_config"]
        self._method = str(self._options["quant_method"])
        self._files: dict[str, Path] = {}
        kinds: dict[str, str] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    self._files[name] = path
                    kinds[name] = opened.get_slice(name).get_dtype()
        packed = {
            name: name.removesuffix(part) for name in kinds for part in (_QWEIGHT, _PACKED) if name.endswith(part)
        }
        integers = [name for name, kind in kinds.items() if kind == _INTEGERS and name.endswith(_WEIGHT)]
        self.layers = [*packed.values(), *(name.removesuffix(_WEIGHT) for name in integers)]
        floats = [name for name, kind in kinds.items() if kind == _FLOATS and name.endswith(_WEIGHT)]
        self._floats = [name.removesuffix(_WEIGHT) for name in floats]
        for name, kind in kinds.items():
            if kind.startswith(_SHORT_FLOATS) and name not in floats and not name.endswith((_SCALE, _SCALE_INV)):
                raise PackedError(f"its tensor {name} is of the kind {kind}, which is not read")
        blocks = [name for name in kinds if name.endswith(_BLOCKS)] if self._method == "mxfp4" else []
        self.experts = [name.removesuffix(_BLOCKS) for name in blocks]
        if not self.layers and not self._floats and not self.experts:
            raise PackedError("none of its tensors is quantised")
        of_layers = {layer + part for layer in (*self.layers, *self._floats) for part in _OF_LAYERS}
        of_layers |= {name + part for name in self.experts for part in (_BLOCKS, _BLOCK_SCALES)}
        self._left_out = {*packed, *integers, *floats, *of_layers}

    @property
    def dtype(self) -> torch.dtype:
        """The 16 bits of the plain checkpoint: bfloat16 if that is what the checkpoint has."""
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        is_wide = bool(self._floats or self.experts)
        return torch.bfloat16 if is_wide or stated == "bfloat16" else torch.float16

    def has_kept(self, mode: str) -> bool:
        """Whether numbers of the checkpoint are kept when the others get weights of this mode. Experts have 8 bits, so
        they are not kept where 4 are wanted."""
        return bool(self.layers) or (bool(self.experts) and not mode.startswith("int4"))

    def write_plain(self, directory: Path) -> None:
        """Write the checkpoint with its weights in 16 bits."""
        directory.mkdir()
        for path in self._directory.iterdir():
            if path.suffix != ".safetensors" and path.name not in ("config.json", _INDEX):
                (directory / path.name).symlink_to(path.resolve())
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        kind = str(self.dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": kind, "dtype": kind}))
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
        for name in self._files:
            if name not in self._left_out and not name.endswith(_OF_ACTIVATIONS):
                yield name, self._tensor(name)
        for layer in self.layers:
            yield f"{layer}.weight", torch.from_numpy(self.packed(layer).weights()).to(self.dtype)
        for layer in self._floats:
            yield f"{layer}.weight", self._of_floats(layer)
        for name in self.experts:
            yield name, self.packed_experts(name).weights().transpose(1, 2).contiguous()

    def _of_floats(self, layer: str) -> torch.Tensor:
        """An 8-bit float weight, converted to 16 bits. PackedError if the shape of its scales does not fit."""
        weight = self._tensor(layer + _WEIGHT).float()
        scale = self._tensor(layer + (_SCALE_INV if layer + _SCALE_INV in self._files else _SCALE)).float()
        length = weight.shape[0]
        if scale.numel() == 1:
            scale = scale.reshape(1, 1)
        elif scale.dim() == 1:
            scale = scale[:, None]
        if scale.dim() != 2:
            raise PackedError(f"its tensors {layer}.* do not fit together")
        if scale.shape[0] not in (1, length) or scale.shape[1] != 1:
            rows, columns = self._block_of(layer)
            if scale.shape != (-(-length // rows), -(-weight.shape[1] // columns)):
                raise PackedError(f"its tensors {layer}.* do not fit together")
            scale = scale.repeat_interleave(rows, 0)[:length]
            scale = scale.repeat_interleave(columns, 1)[:, : weight.shape[1]]
        elif scale.shape[0] == 1 < scale.numel():
            raise PackedError(f"its tensors {layer}.* do not fit together")
        return (weight * scale).to(torch.bfloat16)

    def _block_of(self, layer: str) -> tuple[int, int]:
        """The rows and columns of weights that share a scale. PackedError if the configuration does not state them."""
        stated = self._options.get("weight_block_size")
        for group in (self._options.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            size = weights.get("group_size")
            stated = stated or weights.get("block_structure") or ((1, size) if size and size > 0 else None)
        if isinstance(stated, str):
            stated = stated.split("x")
        if not stated or len(stated) != 2:
            raise PackedError(f"its config.json does not say which weights of {layer} share a scale")
        return int(stated[0]), int(stated[1])

    def packed(self, layer: str) -> Packed:
        """The integers of one layer. PackedError if they are of an unknown form."""
        return self._of_groups(layer) if layer + _QWEIGHT in self._files else self._compressed(layer)

    def _of_groups(self, layer: str) -> Packed:
        """The weights of a layer in the format of AWQ or GPTQ."""
        num_bits = int(self._options["bits"])
        packed, zeros = (self._tensor(layer + part).numpy() for part in (_QWEIGHT, _QZEROS))
        scales = self._scales(layer + _SCALES)
        if self._method == "awq":
            numbers, zeros = (_unpacked(values, num_bits, _AWQ_OUTPUTS) for values in (packed, zeros))
        else:
            numbers, zeros = _unpacked(packed.T, num_bits).T, _unpacked(zeros, num_bits)
            if self._options.get("checkpoint_format", "gptq") != "gptq_v2":
                zeros = (zeros + 1) & ((1 << num_bits) - 1)
        length, groups = len(numbers), len(scales)
        if numbers.shape[1:] != scales.shape[1:] or zeros.shape != scales.shape or length % groups:
            raise PackedError(f"its tensors {layer}.* do not fit together")
        self._check_order(layer, _G_IDX, length, groups)
        by_group = np.ascontiguousarray(numbers.T).reshape(scales.shape[1], groups, -1)
        zeros, scales = (np.ascontiguousarray(values.T)[..., None] for values in (zeros, scales))
        return Packed(by_group, zeros, scales, num_bits)

    def _compressed(self, layer: str) -> Packed:
        """A layer of compressed-tensors."""
        scales = self._scales(layer + _SCALE)
        if layer + _PACKED in self._files:
            packed = self._tensor(layer + _PACKED).numpy()
            rows, columns = self._tensor(layer + _SHAPE).tolist()
            num_bits = next((bits for bits in (4, 8) if packed.shape == (rows, -(-columns * bits // 32))), 0)
            if not num_bits:
                raise PackedError(f"its tensors {layer}.* do not have 4 or 8 bits")
            numbers = _unpacked(packed, num_bits)[:, :columns]
        else:
            num_bits = 8
            numbers = _unsigned(self._tensor(layer + _WEIGHT).numpy(), num_bits)
            rows, columns = numbers.shape
        zeros: Numbers = np.full(1, 1 << (num_bits - 1), np.uint8)
        if layer + _ZERO_POINT in self._files:
            stored = self._tensor(layer + _ZERO_POINT).numpy()
            is_packed = stored.dtype == np.int32
            zeros = _unpacked(stored.T, num_bits).T[:rows] if is_packed else _unsigned(stored, num_bits)
        scales, zeros = (values if values.ndim == 2 else values.reshape(-1, 1) for values in (scales, zeros))
        groups = scales.shape[1]
        if {len(scales), len(zeros)} - {1, rows} or zeros.shape[1] not in (1, groups) or columns % groups:
            raise PackedError(f"its tensors {layer}.* do not fit together")
        scales, zeros = (np.broadcast_to(values, (rows, groups)) for values in (scales, zeros))
        self._check_order(layer, _WEIGHT_G_IDX, columns, groups)
        zeros, scales = (np.ascontiguousarray(values)[..., None] for values in (zeros, scales))
        return Packed(np.ascontiguousarray(numbers).reshape(rows, groups, -1), zeros, scales, num_bits)

    def packed_experts(self, name: str) -> Experts:
        """The experts `name` of gpt-oss. PackedError if their tensors do not fit together."""
        blocks, exponents = (self._tensor(name + part) for part in (_BLOCKS, _BLOCK_SCALES))
        if blocks.dim() != 4 or exponents.shape != blocks.shape[:3]:
            raise PackedError(f"its tensors {name}_* do not fit together")
        pairs = blocks.numpy()
        numbers = np.stack((_TWICE_E2M1[pairs & 15], _TWICE_E2M1[pairs >> 4]), axis=-1)
        # One more than 127, because the numbers are twice what they stand for.
        scales = _short(torch.ldexp(torch.ones(()), exponents.int() - 128))
        return Experts(numbers.reshape(*pairs.shape[:3], -1), scales[..., None])

    def _scales(self, name: str) -> Numbers:
        return _short(self._tensor(name).float())

    def _check_order(self, layer: str, part: str, length: int, groups: int) -> None:
        """Raise PackedError if the inputs of a layer are not in the order of their groups. -1 says that they are."""
        if layer + part not in self._files:
            return
        found = self._tensor(layer + part).numpy()
        if not np.array_equal(found, np.arange(length) // (length // groups)) and not np.all(found == -1):
            raise PackedError(f"the inputs of {layer} are not in the order of their groups (desc_act, actorder)")

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise PackedError(f"it lacks the tensor {name}")
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)


def check_plain(directory: Path) -> None:
    """Raise PackedError if a checkpoint whose config.json names no quantisation has quantised weights."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                kind = opened.get_slice(name).get_dtype()
                if kind.startswith(_SHORT_FLOATS):
                    raise PackedError(f"its tensor {name} is of the kind {kind}, which config.json does not explain")


def _short(values: torch.Tensor) -> Numbers:
    """Numbers of float32 in float16 if that changes none of them."""
    small = values.half()
    found: Numbers = (small if torch.equal(small.float(), values) else values).numpy()
    return found


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
    _keep_experts(graph, checkpoint)


def _keep_experts(graph: ov.Model, checkpoint: Checkpoint) -> None:
    left = set(checkpoint.experts)
    for node in graph.get_ordered_ops():
        module, _, product = node.get_friendly_name().removeprefix("__module.").partition("/")
        weights = _PRODUCTS.get(product.rpartition("::")[2])
        if weights is None or node.get_type_name() != "MatMul":
            continue
        expert = module + weights
        if expert not in left:
            continue
        left.remove(expert)
        packed = checkpoint.packed_experts(expert)
        stored = node.input_value(1).get_node()
        stored = stored.input_value(0).get_node() if stored.get_type_name() == "Convert" else stored
        if stored.get_type_name() != "Constant":
            raise PackedError(f"optimum-intel changes the weights of {expert}")
        is_transposed = node.get_attributes()["transpose_b"]
        found = torch.from_numpy(stored.get_data(dtype=np.float32))
        if not torch.equal(found if is_transposed else found.transpose(1, 2), packed.weights().float()):
            raise PackedError(f"optimum-intel changes the weights of {expert}")
        product = opset13.matmul(node.input_value(0), packed.node(), False, True)
        product.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(product.output(0))
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


def _unsigned(values: Numbers, num_bits: int) -> Numbers:
    """Signed numbers of so many bits, shifted by half of their range."""
    return (values.astype(np.int16) + (1 << (num_bits - 1))).astype(np.uint8)


def _constant(numbers: Numbers, kind: ov.Type) -> ov.Node:
    """A constant of 4 or 8 bits. With 4 bits, the first of two numbers is in the lower bits."""
    if kind in (ov.Type.u8, ov.Type.i8):
        return opset13.constant(numbers if kind == ov.Type.u8 else numbers.view(np.int8))
    flat = numbers.reshape(-1)
    tensor = ov.Tensor(kind, ov.Shape(list(numbers.shape)))
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    tensor.data.reshape(-1).view(np.uint8)[:] = flat[::2] | flat[1::2] << 4
    return ov.op.Constant(tensor, shared_memory=False)
