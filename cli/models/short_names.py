"""Short names of models on a hub, and their requirements. Data only.

The weights of these models were not tested. `checked` says what is tested of their architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.cli.models.reference import HubReference
from headrace.cli.models.shape import ModelShape

# How tests check an architecture.
EXPORTS = "architecture beside transformers"
GGUF_FILES = "reader beside a reference"
_LLAMA_3_1 = "Llama 3.1 Community"
_LLAMA_3_2 = "Llama 3.2 Community"


@dataclass(frozen=True, slots=True)
class ShortName:
    """A model on a hub. `weight_gb` is about 10^9 bytes of weights; `pull` says the exact size before it fetches them.
    `shape` has the context that a worker serves by default. `tools` is the format of its tool calls, as the gateway
    detects it from the chat template; empty if it has none. `checked` says what tests cover."""

    reference: HubReference
    license: str
    weight_gb: float
    shape: ModelShape
    tools: str
    checked: str


def _openvino(
    repository: str, license_name: str, weight_gb: float, shape: tuple[int, int, int, int], tools: str
) -> ShortName:
    return ShortName(
        HubReference(f"OpenVINO/{repository}-int4-ov"), license_name, weight_gb, ModelShape(*shape), tools, EXPORTS
    )


def _gguf(
    repository: str, license_name: str, weight_gb: float, shape: tuple[int, int, int, int], tools: str
) -> ShortName:
    reference = HubReference(f"bartowski/{repository}-GGUF", "Q4_K_M")
    return ShortName(reference, license_name, weight_gb, ModelShape(*shape), tools, GGUF_FILES)


# Shapes are layers, KV heads, head size and context.
SHORT_NAMES: Mapping[str, ShortName] = {
    "qwen3-0.6b": _openvino("Qwen3-0.6B", "Apache-2.0", 0.4, (28, 8, 128, 40_960), "hermes"),
    "qwen3-1.7b": _openvino("Qwen3-1.7B", "Apache-2.0", 1.1, (28, 8, 128, 40_960), "hermes"),
    "qwen3-4b": _openvino("Qwen3-4B", "Apache-2.0", 2.3, (36, 8, 128, 40_960), "hermes"),
    "qwen3-8b": _openvino("Qwen3-8B", "Apache-2.0", 5.0, (36, 8, 128, 40_960), "hermes"),
    "qwen3-14b": _openvino("Qwen3-14B", "Apache-2.0", 8.6, (40, 8, 128, 40_960), "hermes"),
    "qwen3-30b-a3b": _openvino("Qwen3-30B-A3B", "Apache-2.0", 16.5, (48, 4, 128, 40_960), "hermes"),
    # LongRoPE: the first set of factors is for 4,096 tokens.
    "phi-3.5-mini": _openvino("Phi-3.5-mini-instruct", "MIT", 2.2, (32, 32, 96, 4096), ""),
    "phi-4-mini": _openvino("Phi-4-mini-instruct", "MIT", 2.3, (32, 8, 128, 4096), "phi4"),
    "mistral-7b": _openvino("Mistral-7B-Instruct-v0.3", "Apache-2.0", 4.0, (32, 8, 128, 32_768), "mistral"),
    "gpt-oss-20b": _openvino("gpt-oss-20b", "Apache-2.0", 12.6, (24, 8, 64, 131_072), "gpt-oss"),
    "llama-3.2-3b": _gguf("Llama-3.2-3B-Instruct", _LLAMA_3_2, 2.0, (28, 8, 128, 131_072), "llama3"),
    "llama-3.1-8b": _gguf("Meta-Llama-3.1-8B-Instruct", _LLAMA_3_1, 4.9, (32, 8, 128, 131_072), "llama3"),
}
