"""What exported weights are like, and what an export takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INT4, INT8, BF16 = "int4", "int8", "bf16"
EXPORTED = (INT4, INT8, BF16)
"""Kinds of weights that a checkpoint in safetensors form can be exported with."""
DEFAULT = INT8
DEFAULT_GROUP_SIZE = 128
GROUP_SIZES = (32, 64, 128)
_DEQUANTISED = "mxfp4"
_MXFP4_BYTES = 0.53
# Of a group: a scale in float16 and a zero point of 4 bits.
_GROUP_BYTES = 2.5


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The kind of weights. With int4, `group_size` weights share a scale, and `ratio` of the layers' weights have 4
    bits, the others 8. Embeddings and vocabulary have 8 bits with int4."""

    kind: str = DEFAULT
    group_size: int = DEFAULT_GROUP_SIZE
    ratio: float = 1.0

    @property
    def mode(self) -> str:
        """How the exporter calls it: nncf's name of the mode, or bf16."""
        return {INT4: "int4_asym", INT8: "int8_asym", BF16: BF16}[self.kind]

    @property
    def record(self) -> dict[str, str]:
        """For the manifest."""
        fields = {"weights": self.kind}
        if self.kind == INT4:
            fields |= {"group_size": str(self.group_size), "ratio": f"{self.ratio:g}"}
        return fields

    def bytes_of(self, num_weights: int) -> int:
        """About the size of so many weights."""
        in_four = self.ratio * (0.5 + _GROUP_BYTES / self.group_size) + (1 - self.ratio)
        return int(num_weights * {INT4: in_four, INT8: 1.0, BF16: 2.0}[self.kind])


def weights_named(quantisation: str | None) -> ExportedWeights:
    """The weights of OWNER/NAME:QUANTISATION; the default ones if it names none."""
    kind = (quantisation or "").lower()
    return ExportedWeights(kind) if kind in EXPORTED else ExportedWeights()


def quantised_by(config: Mapping[str, object]) -> str:
    """The method by which a checkpoint is quantised, of its config.json; empty if it is not, or if transformers turns
    the weights into bfloat16 as it reads them."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return ""
    method = str(found.get("quant_method") or "an unknown method")
    return "" if method == _DEQUANTISED else method


def bytes_per_weight(config: Mapping[str, object]) -> float:
    """Bytes of a weight in the checkpoint that a config.json describes."""
    if config.get("quantization_config"):
        return _MXFP4_BYTES
    return 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
