"""The kinds of exported weights, and the disk space of an export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

INT4 = "int4"
INT8 = "int8"
FP16 = "fp16"
BF16 = "bf16"
EXPORTED = (INT4, INT8, FP16, BF16)
"""Kinds of weights that a checkpoint in safetensors form can be exported with."""
DEFAULT = INT8
DEFAULT_GROUP_SIZE = 128
WHOLE_ROWS = -1
GROUP_SIZES = (32, 64, 128, WHOLE_ROWS)
"""How many weights may share a scale; `WHOLE_ROWS`: all of a row, which makes one output."""
_MXFP4 = "mxfp4"
_MXFP4_BYTES = 0.53
_COMPRESSED = "compressed-tensors"
_PACKED_BITS = {"awq": (4,), "gptq": (4, 8)}
# Methods whose weights are 8-bit floats.
_FLOATS = ("fp8", "fbgemm_fp8", "modelopt")
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_GROUPED_ORDERS = ("group", "dynamic", True)
_READABLE = (
    "weights of 16 or 32 bits, AWQ (gemm, 4 bits), GPTQ (4 or 8 bits), compressed-tensors (integers of 4 or 8 bits, "
    "FP8), FP8 and MXFP4 can be exported"
)
# Bits of a group besides its weights: a scale in float16 and a zero point of 4 bits.
_GROUP_BYTES = 2.5
VISION_KIND = {INT4: INT8, INT8: INT8, FP16: FP16, BF16: BF16}
"""The kind of the weights for images, beside such weights of the language model."""
# Names of the numbers in vision_config: the width, that of the layers' products, and the number of layers.
_WIDTHS = ("embed_dim", "hidden_size")
_DEPTHS = ("depth", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The kind of weights. With int4, `group_size` weights share a scale, and `ratio` of the layers' weights have 4
    bits, the others 8. Embeddings and vocabulary have 8 bits with int4. `awq` and `scale_estimation` are nncf's methods
    that choose the numbers of 4 bits with more care, by the texts in the file `dataset`."""

    kind: str = DEFAULT
    group_size: int = DEFAULT_GROUP_SIZE
    ratio: float = 1.0
    awq: bool = False
    scale_estimation: bool = False
    dataset: Path | None = None

    @property
    def mode(self) -> str:
        """The exporter's name: nncf's name of the mode, or the kind of 16 bits."""
        return {INT4: "int4_asym", INT8: "int8_asym"}.get(self.kind, self.kind)

    @property
    def vision_mode(self) -> str:
        """The exporter's name of the mode for the weights for images."""
        return ExportedWeights(VISION_KIND[self.kind]).mode

    @property
    def record(self) -> dict[str, str]:
        """The fields that describe the weights in the manifest."""
        fields = {"weights": self.kind}
        if self.kind == INT4:
            fields |= {"group_size": str(self.group_size), "ratio": f"{self.ratio:g}"}
            methods = (("awq", self.awq), ("scale_estimation", self.scale_estimation))
            fields |= {name: "yes" for name, is_used in methods if is_used}
            if self.dataset is not None:
                fields["dataset_sha256"] = sha256(self.dataset.read_bytes()).hexdigest()
        return fields

    @property
    def methods(self) -> str:
        """How the numbers are chosen, as the end of a phrase; empty in the usual way."""
        names = [name for name, is_used in (("AWQ", self.awq), ("scale estimation", self.scale_estimation)) if is_used]
        by = f" by the texts in {self.dataset.name}" if self.dataset is not None else ""
        return f", with {' and '.join(names) or 'mixed precision'}{by}" if names or by else ""

    def bytes_of(self, num_weights: int) -> int:
        """The approximate size of this many weights, in bytes."""
        of_scales = _GROUP_BYTES / self.group_size if self.group_size > 0 else 0.0
        in_four = self.ratio * (0.5 + of_scales) + (1 - self.ratio)
        return int(num_weights * {INT4: in_four, INT8: 1.0}.get(self.kind, 2.0))


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
    if config.get("kv_lora_rank") and keeps_integers(config):
        return f"are quantised by {method}, and the integers of its latent attention cannot be kept"
    if method == _MXFP4:
        known = config.get("model_type") == "gpt_oss"
        return "" if known else f"are quantised by mxfp4, which is read of gpt_oss only, and otherwise {_READABLE}"
    if method == _COMPRESSED:
        return _why_not_compressed(options)
    if method in _FLOATS:
        return _why_no_floats(method, options)
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


def _why_no_floats(method: str, options: Mapping[str, object]) -> str:
    kind = str(options.get("quant_algo") or "FP8") if method == "modelopt" else str(options.get("fmt") or "e4m3")
    if kind.lower() in ("fp8", "e4m3", "float8_e4m3fn"):
        return ""
    return f"are quantised by {method} as {kind}, and only {_READABLE}"


def _why_not_compressed(options: Mapping[str, object]) -> str:
    if options.get("sparsity_config") and _of(options, "sparsity_config").get("format") not in (None, "dense"):
        return f"are stored without their zeros (compressed-tensors, sparsity_config), and only {_READABLE}"
    if options.get("transform_config"):
        return "are rotated while the model runs (compressed-tensors, transform_config), which is not done here"
    for stated, weights in _groups(options):
        bits, kind = weights.get("num_bits"), str(weights.get("type", "int"))
        is_known = (kind == "int" and bits in (4, 8)) or (kind == "float" and bits == 8)
        if stated not in _COMPRESSED_FORMATS or not is_known:
            return f"are quantised by compressed-tensors as {stated} with {bits} bits ({kind}), and only {_READABLE}"
        if weights.get("actorder") in _GROUPED_ORDERS and weights.get("strategy") == "group":
            return (
                "are quantised by compressed-tensors in the order of activations (actorder), which OpenVINO cannot "
                "multiply with"
            )
    has_groups = bool(_groups(options))
    return "" if has_groups else f"are quantised by compressed-tensors without config_groups, and only {_READABLE}"


def _groups(options: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    """The format of each group of layers in compressed-tensors, and how its weights are quantised."""
    groups = [group for group in _of(options, "config_groups").values() if isinstance(group, Mapping)]
    return [(str(group.get("format") or options.get("format")), _of(group, "weights")) for group in groups]


def _of(options: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = options.get(name)
    return value if isinstance(value, Mapping) else {}


def keeps_integers(config: Mapping[str, object]) -> bool:
    """Whether a checkpoint with this config.json has integers that an export keeps as they are."""
    return _kept_bits(config) is not None


def has_exact_experts(config: Mapping[str, object]) -> bool:
    """Whether a checkpoint with this config.json has experts whose values integers of 8 bits keep."""
    return _of(config, "quantization_config").get("quant_method") == _MXFP4


def _kept_bits(config: Mapping[str, object]) -> int | None:
    """The bits of the integers that an export keeps; None without such."""
    options = _of(config, "quantization_config")
    if options.get("quant_method") in _PACKED_BITS:
        return int(str(options.get("bits", 4)))
    bits = [weights.get("num_bits") for _, weights in _groups(options) if weights.get("type", "int") == "int"]
    known = [number for number in bits if isinstance(number, int)]
    return max(known, default=None)


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
    if keeps_integers(config):
        return ExportSizes(safetensors_bytes, 0, 4 * num_weights)
    num_of_images = min(num_weights, num_vision_weights(config)) if with_images else 0
    vision = ExportedWeights(VISION_KIND[exported.kind]).bytes_of(num_of_images)
    # Quantised weights are written in 16 bits first. optimum-intel's graph has experts of gpt-oss in 32 bits.
    scratch = (6 if has_exact_experts(config) else 4 if _of(config, "quantization_config") else 2) * num_weights
    return ExportSizes(exported.bytes_of(num_weights - num_of_images), vision, scratch)


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
    options = _of(config, "quantization_config")
    if (bits := _kept_bits(config)) is not None:
        return bits / 8
    if options.get("quant_method") == _MXFP4:
        return _MXFP4_BYTES
    if options:
        return 1
    return 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
