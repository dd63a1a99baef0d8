"""Print for which tokens the routers of small models hardly prefer an expert to another one, in transformers.

    python -m tests.architectures.router_gaps NAME...

Runs in the environment that exports models, in the root of the repository. The gap of a token is the probability of
the last expert that it uses less that of the next one. Where it is nearly 0, a program that rounds elsewhere takes the
other expert, and log-probabilities differ by much (docs/decisions/models.md#gguf).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.architectures.export import LONG, SHORT, model_of
from tests.architectures.families import VOCABULARY
from tests.architectures.gguf_families import GGUF_FAMILIES

_ROUTERS = ("block_sparse_moe.gate", "router.layer", "mlp.gate")
_SHOWN = 3


def report(name: str) -> None:
    """Print the smallest gaps of each layer's router, with the places of their tokens."""
    model = model_of(GGUF_FAMILIES[name].family)
    used = model.config.num_experts_per_tok
    for part, module in model.named_modules():
        if part.endswith(_ROUTERS):
            module.register_forward_hook(partial(_print_gaps, f"{name} {part}", used))
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, LONG)[:SHORT]
    with torch.no_grad():
        model(torch.tensor(tokens)[None])


def _print_gaps(title: str, used: int, _module: Any, _inputs: Any, scores: Any) -> None:
    shares = np.sort(scores.reshape(SHORT, -1).softmax(-1).numpy(), -1)[:, ::-1]
    gaps = shares[:, used - 1] - shares[:, used]
    smallest = ", ".join(f"{gaps[place]:.1e} at token {place}" for place in np.argsort(gaps)[:_SHOWN])
    print(f"{title}: median {np.median(gaps):.3f}, smallest {smallest}", flush=True)


if __name__ == "__main__":
    for family in sys.argv[1:]:
        report(family)
