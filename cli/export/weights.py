"""The kinds of exported weights, and the disk space of an export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

INT4 = "int4"
INT8 = "int8"
BF16 = "bf16"
EXPORTED = (INT4, INT8, BF16)
"""Kinds of weights that a checkpoint in safetensors form can be exported with."""
DEFAULT = INT8
DEFAULT_GROUP_SIZE = 128
GROUP_SIZES = (32, 64, 128)
_DEQUANTISED = "mxfp4"
_MXFP4_BYTES = 0.53
_PACKED_BITS = {"awq": (4,), "gptq": (4, 8)}
_READABLE = "weights of 16 or 32 bits, of AWQ (gemm, 4 bits) and of GPTQ (4 or 8 bits) can be exported"
# Bits of a group besides its weights: a scale in float16 and a zero point of 4 bits.
_GROUP_BYTES = 2.5
VISION_KIND = {INT4: INT8, INT8: INT8, BF16: BF16}
"""The kind of the weights for images, beside such weights of the language model."""
# Names of the numbers in vision_config: the width, that of the layers' products, and the number of layers.
_WIDTHS = ("embed_dim", "hidden_size")
_DEPTHS = ("depth", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The kind of weights. With int4, `group_size` weights share a scale, and `ratio` of the layers' weights have 4
    bits, the others 8. Embeddings and vocabulary have 8 bits with int4."""

    kind: str = DEFAULT
    group_size: int = DEFAULT_GROUP_SIZE
    ratio: float = 1.0

    @property
    def mode(self) -> str:
        """The exporter's name: nncf's name of the mode, or bf16."""
        return {INT4: "int4_asym", INT8: "int8_asym", BF16: BF16}[self.kind]

    @property
    def vision_mode(self) -> str:
        """The exporter's name of the mode for the weights for images."""
        return ExportedWeights(VISION_KIND[self.kind]).mode

    @property
    def record(self) -> dict[str, str]:
        """For the manifest."""
        fields = {"weights": self.kind}
        if self.kind == INT4:
            fields |= {"group_size": str(self.group_size), "ratio": f"{self.ratio:g}"}
        return fields

    def bytes_of(self, num_weights: int) -> int:
        """The approximate size of this many weights, in bytes."""
        in_four = self.ratio * (0.5 + _GROUP_BYTES / self.group_size) + (1 - self.ratio)
        return int(num_weights * {INT4: in_four, INT8: 1.0, BF16: 2.0}[self.kind])


def weights_named(quantisation: str | None) -> ExportedWeights:
    """The weights of OWNER/NAME:QUANTISATION; the default ones if it names none."""
    kind = (quantisation or "").lower()
    return ExportedWeights(kind) if kind in EXPORTED else ExportedWeights()


def why_unreadable(config: Mapping[str, object]) -> str:
    """Why the weights of a checkpoint with this config.json cannot be exported, as the end of a sentence that begins
    with them; empty if they can."""
    options = config.get("quantization_config")
    if not isinstance(options, Mapping):
        return ""
    method = str(options.get("quant_method") or "an unknown method")
    if method == _DEQUANTISED:
        return ""
    if options.get("bits") not in _PACKED_BITS.get(method, ()):
        bits = f" with {options['bits']} bits" if "bits" in options else ""
        return f"are quantised by {method}{bits}, and only {_READABLE}"
    if method == "awq" and str(options.get("version", "gemm")).lower() != "gemm":
        return f"are packed by awq for {options['version']}, and only {_READABLE}"
    if options.get("desc_act") and options.get("group_size") != -1:
        return "are quantised by gptq in the order of activations (desc_act), which OpenVINO cannot multiply with"
    if options.get("dynamic"):
        return "are quantised by gptq with other bits in some layers (dynamic), which are not read"
    return ""


@dataclass(frozen=True, slots=True)
class ExportSizes:
    """Approximate bytes of an export: its weights for text and for images, and what it takes temporarily on disk."""

    text_bytes: int
    vision_bytes: int
    scratch_bytes: int


def sizes_of(
    exported: ExportedWeights, config: Mapping[str, object], safetensors_bytes: int, *, with_images: bool = False
) -> ExportSizes:
    """The sizes of a checkpoint's export, with its networks for images or without."""
    num_weights = int(safetensors_bytes / bytes_per_weight(config))
    options = config.get("quantization_config")
    if isinstance(options, Mapping) and options.get("quant_method") in _PACKED_BITS:
        return ExportSizes(safetensors_bytes, 0, 4 * num_weights)
    num_of_images = min(num_weights, num_vision_weights(config)) if with_images else 0
    vision = ExportedWeights(VISION_KIND[exported.kind]).bytes_of(num_of_images)
    return ExportSizes(exported.bytes_of(num_weights - num_of_images), vision, 2 * num_weights)


def num_vision_weights(config: Mapping[str, object]) -> int:
    """The approximate number of weights in the layers of a vision tower: four products of its width, and the two or
    three of its perceptron. The layers have nearly all of them."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0
    width, depth = (_number(vision, names) for names in (_WIDTHS, _DEPTHS))
    inner = _number(vision, ("intermediate_size",)) or width * (_number(vision, ("mlp_ratio",)) or 4)
    num_inner = 3 if vision.get("hidden_act") == "silu" else 2
    return depth * width * (4 * width + num_inner * inner)


def _number(config: Mapping[str, object], names: Iterable[str]) -> int:
    """The first of the values that is a whole number above 0, else 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def bytes_per_weight(config: Mapping[str, object]) -> float:
    """Bytes of a weight in the checkpoint that a config.json describes."""
    options = config.get("quantization_config")
    if isinstance(options, Mapping) and options.get("quant_method") in _PACKED_BITS:
        return int(str(options.get("bits", 4))) / 8
    if options:
        return _MXFP4_BYTES
    return 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
