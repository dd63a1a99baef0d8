"""Write what transformers answers to the questions of shapes.py: `shapes_reference.py CHECKPOINT > answers.json`.

Runs in the environment that exports models. CHECKPOINT is that of the model in shapes_vlm/, in safetensors form.
"""

from __future__ import annotations

import io
import json
import sys

import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, LlavaForConditionalGeneration

from tests.e2e.shapes import TOKENS_PER_PICTURE, Question, drawn, drawn_swapped

_MOST_WORDS = 6


def main() -> None:
    """Write the answers as JSON to standard output."""
    checkpoint = sys.argv[1]
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    processor = CLIPImageProcessor.from_pretrained(checkpoint)

    def answer(question: Question) -> str:
        images = [Image.open(io.BytesIO(picture)) for picture in question.pictures]
        text = "<s>" + "<image>" * TOKENS_PER_PICTURE * len(images) + f" {question.text}"
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            ids = model.generate(**inputs, pixel_values=pixels, max_new_tokens=_MOST_WORDS, do_sample=False)
        found: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return found

    answers = {
        "answers": [answer(question) for question in drawn()],
        "swapped": [answer(question) for question in drawn_swapped()],
    }
    json.dump(answers, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
