"""Gemma 2's cap of the scores of attention, which no graph that is served has: OpenVINO's paged attention cannot cap
them (docs/decisions/models.md#gguf). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.common.model_files.config import text_part

SCORE_CAP = "attn_logit_softcapping"
"""Its name in config.json, and without the architecture in GGUF files."""
WITHOUT_SCORE_CAP = (
    "its scores of attention are capped, which OpenVINO's paged attention cannot, and Gemma 2 27B writes no sense "
    "without; use Gemma 2 9B, or Gemma 3"
)
"""Why a model that needs the cap is refused, with a remedy."""
_DEFAULT = 50.0
_LAYERS_OF_LARGEST = 46


def needs_score_cap(config: Mapping[str, Any]) -> bool:
    """Whether the model with this config.json needs the cap to produce meaningful text. Only the largest one does."""
    text = text_part(config)
    is_largest = text.get("model_type") == "gemma2" and text.get("num_hidden_layers") == _LAYERS_OF_LARGEST
    return is_largest and bool(text.get(SCORE_CAP, _DEFAULT))
