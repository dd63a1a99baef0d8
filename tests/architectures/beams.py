"""Write what beam searches of transformers find with the models of `export.py`: `beams.py OUTDIR NAME...`.

OUTDIR/DIRECTORY/beams.json has a list of searches:

    prompt          the tokens of the prompt
    stops           the tokens that end an answer
    width, max_tokens, length_penalty, early_stopping, min_tokens
    answers         the tokens behind the prompt, best first, up to the token that ends them
    scores          their scores
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.architectures.export import model_of
from tests.architectures.families import FAMILIES, VOCABULARY, directory_name

MAX_TOKENS = 16


def searches(model: PreTrainedModel, prompt: list[int]) -> list[dict[str, Any]]:
    """Searches of several widths that end in all ways."""
    common = {"length_penalty": 1.0, "early_stopping": False, "min_tokens": 0}
    (best, *_), _ = answers_of(model, prompt, {**common, "width": 4, "max_tokens": MAX_TOKENS, "stops": []})
    cases = []
    for stops, width in itertools.product(([], [best[2], best[7], *range(20)]), (2, 4, 8)):
        for penalty, stopping in itertools.product((0.0, 1.0, -1.0), (False, True, "never")):
            options = {**common, "length_penalty": penalty, "early_stopping": stopping}
            cases.append({**options, "width": width, "max_tokens": MAX_TOKENS, "stops": stops})
        cases.append({**common, "width": width, "max_tokens": MAX_TOKENS, "stops": stops, "min_tokens": 9})
    for case in cases:
        case["prompt"] = prompt
        case["answers"], case["scores"] = answers_of(model, prompt, case)
    return cases


def answers_of(model: PreTrainedModel, prompt: list[int], case: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """The answers of a search and their scores."""
    stops = case["stops"]
    config = GenerationConfig(
        num_beams=case["width"],
        num_return_sequences=case["width"],
        max_new_tokens=case["max_tokens"],
        min_new_tokens=case["min_tokens"] or None,
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=stops or None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    model.generation_config = GenerationConfig()
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    answers = []
    for row in made.sequences[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
        answers.append(row[: end + 1])
    return answers, made.sequences_scores.tolist()


def main() -> None:
    root, *names = sys.argv[1:]
    for name in names:
        prompt = np.random.default_rng(7).integers(20, VOCABULARY, 45).tolist()
        found = json.dumps(searches(model_of(FAMILIES[name]), prompt))
        part = Path(root) / f"{directory_name(name)}.part"
        part.mkdir(exist_ok=True)
        (part / "beams.json").write_text(found)
        part.rename(Path(root) / directory_name(name))


if __name__ == "__main__":
    main()
