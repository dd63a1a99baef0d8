"""What images cost: the sizing guide and the simulator have what the families and their towers' layers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.images.cost import MODELS, rows
from headrace.common.vision.family import Detail
from headrace.sim.images import FAMILIES

SIZING = Path(__file__).parents[3] / "docs/how-to/sizing.md"
NAMES = {
    "llava": "LLaVA 1.5",
    "llava-next": "LLaVA-NeXT",
    "gemma3": "Gemma 3",
    "qwen2-vl": "Qwen2-VL",
    "qwen2.5-vl": "Qwen2.5-VL",
    "qwen3-vl": "Qwen3-VL",
    "smolvlm": "SmolVLM 256M, 500M",
    "mistral3": "Mistral 3",
    "pixtral": "Pixtral",
}


def test_the_sizing_guide_has_the_table() -> None:
    assert "\n".join(rows(4000, 3000)) in SIZING.read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_simulator_has_the_same_numbers(name: str) -> None:
    kind, _, detail = name.partition(":")
    (model,) = (model for model in MODELS if model.name == NAMES[kind])
    layout = model.family().layout(4000, 3000, Detail.LOW if detail else Detail.AUTO)
    sizes = next(iter(model.towers.values()))
    assert FAMILIES[name].num_tokens == layout.num_image_tokens
    assert FAMILIES[name].core_s == round(sizes.core_s(layout.num_pixels))
