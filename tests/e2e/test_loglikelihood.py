"""Log-likelihoods as evaluation harnesses read them from completions, beside those of the bare model.

A harness sends a context and a continuation as one prompt of tokens, with `echo` and one token to generate. It drops
the last entry of the lists, for the generated token, and sums up the entries behind the context. The generated token
may be the end of sequence, which is no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openvino as ov
import pytest

from headrace.cli.models.model_cache import model_directory
from tests.e2e.serving import BOUND_S, MODEL, Serve, serving
from tests.patience import patience

pytestmark = pytest.mark.e2e

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ITEMS = (
    (CHAT.format("What is the capital of France?"), "The capital of France is Paris."),
    (CHAT.format("What is the capital of France?"), "The capital of France is Lyon."),
    ("Question: Which of these is a fruit?\nAnswer:", " an apple"),
    ("Question: Which of these is a fruit?\nAnswer:", " a stone"),
    ("Is water wet", "?"),
)
# Nats of a whole continuation. Both sides compute in f32, in different kernels.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Item:
    """The tokens of a context and of the continuation to score."""

    context: list[int]
    continuation: list[int]


@pytest.fixture(scope="module")
def accurate() -> Iterator[Serve]:
    """The demo model, computed in its own precision."""
    with serving("--execution-mode", "accuracy") as serve:
        yield serve


@pytest.fixture(scope="module")
def items(accurate: Serve) -> list[Item]:
    """The items, tokenized apart, as harnesses do."""
    return [Item(tokens_of(accurate, context), tokens_of(accurate, rest)) for context, rest in ITEMS]


def tokens_of(system: Serve, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    tokens: list[int] = httpx.post(f"{system.base_url}/tokenize", json=body, timeout=patience(BOUND_S)).json()["tokens"]
    return tokens


def scored(system: Serve, items: Sequence[Item], **fields: Any) -> list[dict[str, Any]]:
    """The choices of one request for all items."""
    body = {
        "prompt": [item.context + item.continuation for item in items],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
        **fields,
    }
    response = httpx.post(f"{system.base_url}/v1/completions", json=body, timeout=patience(BOUND_S))
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


@pytest.fixture(scope="module")
def reference(items: list[Item]) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation, and whether each of its tokens is the most probable, by the bare model."""
    core = ov.Core()
    options = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    request = core.compile_model(model_directory(MODEL) / "openvino_model.xml", "CPU", options).create_infer_request()
    found = []
    for item in items:
        request.reset_state()
        tokens = np.array([item.context + item.continuation])
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "position_ids": np.arange(tokens.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        logits = next(iter(request.infer(inputs).values()))[0].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= logits.max(-1, keepdims=True)
        rows = logprobs[len(item.context) - 1 : -1]
        chosen = rows[np.arange(len(item.continuation)), item.continuation]
        found.append((float(chosen.sum()), bool((rows.argmax(-1) == item.continuation).all())))
    return found


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_continuations_score_as_by_the_bare_model(
    accurate: Serve, items: list[Item], reference: list[tuple[float, bool]], num_top: int
) -> None:
    choices = scored(accurate, items, logprobs=num_top)
    # The case that loses a token where the end is not listed.
    assert "stop" in {choice["finish_reason"] for choice in choices}
    for choice, item, (likelihood, is_greedy) in zip(choices, items, reference, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(item.context) + len(item.continuation) + 1
        chosen = logprobs["token_logprobs"][len(item.context) : -1]
        top = logprobs["top_logprobs"][len(item.context) : -1]
        assert len(chosen) == len(item.continuation)
        assert sum(chosen) == pytest.approx(likelihood, abs=TOLERANCE)
        if num_top:
            assert all(one == max(best.values()) for one, best in zip(chosen, top, strict=True)) == is_greedy


def test_the_prompt_alone_scores_the_same(accurate: Serve, items: list[Item]) -> None:
    for one, none in zip(scored(accurate, items), scored(accurate, items, max_tokens=0), strict=True):
        for name in ("tokens", "text_offset"):
            assert none["logprobs"][name] == one["logprobs"][name][:-1]
        assert none["logprobs"]["token_logprobs"][1:] == pytest.approx(
            one["logprobs"]["token_logprobs"][1:-1], abs=1e-4
        )
