"""Encoders with random weights. Runs in the environment of `export.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoConfig


def random_encoder(kind: Any, model_type: str, **arguments: Any) -> Any:
    """A model of this class and type in float32, with weights drawn so that layers, positions and tokens all show in
    its results. `arguments` are of its configuration."""
    config = AutoConfig.for_model(model_type, **arguments)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:
                weights.add_(torch.randn(weights.shape, generator=generator) * 0.05)
            else:
                deviation = 0.3 if "embed" in name else 1.2 / math.sqrt(weights.shape[-1])
                weights.copy_(torch.randn(weights.shape, generator=generator) * deviation)
    return model
