"""What transformers computes of prompts with images: read by tests, written by image_export.py beside the networks.

    for prompt in prompts_in(exported(["llava"])["llava"]):
        prompt.messages         the chat, with parts {"type": "image"} and {"type": "text", "text": ..}
        prompt.images           the files of its images, in order: PNG, JPEG and GIF
        prompt.token_ids        the prompt as the model takes it, with `image_token_id` at each place of an image
        prompt.image_token_id   the image token
        prompt.logprobs         f32 [len(token_ids), vocabulary]: log-probabilities of the next token behind each token,
                                computed in float32, of the whole prompt at once
        prompt.greedy           the most probable tokens behind the prompt, up to one that is unclear
        prompt.greedy_logprobs  f32 [len(greedy)]: their log-probabilities

In the directory of a model, beside the files that a real one has (networks for text and for images, tokenizers, chat
template, config.json, preprocessor_config.json, processor_config.json):

images/FILE             the images that PROMPTS name
images.json             {image_token_id, prompts: [{messages, images: [FILE, ..], token_ids, greedy}, ..]}
images.npz              logprobs-N and greedy_logprobs-N of prompt N

The images have odd sizes: see `image_files.py`. A prompt has one, two or five of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images, and what transformers computes of it."""

    messages: list[dict[str, Any]]
    images: tuple[bytes, ...]
    token_ids: list[int]
    image_token_id: int
    logprobs: npt.NDArray[np.float32]
    greedy: list[int]
    greedy_logprobs: npt.NDArray[np.float32]


def prompts_in(directory: Path) -> list[ImagePrompt]:
    """The prompts of an exported model."""
    described = json.loads((directory / "images.json").read_bytes())
    with np.load(directory / "images.npz") as arrays:
        return [
            ImagePrompt(
                messages=prompt["messages"],
                images=tuple((directory / "images" / name).read_bytes() for name in prompt["images"]),
                token_ids=prompt["token_ids"],
                image_token_id=described["image_token_id"],
                logprobs=arrays[f"logprobs-{number}"],
                greedy=prompt["greedy"],
                greedy_logprobs=arrays[f"greedy_logprobs-{number}"],
            )
            for number, prompt in enumerate(described["prompts"])
        ]
