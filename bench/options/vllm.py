"""Names of APIs and datasets, and flags, that `vllm bench serve` has and `headrace bench` has not.

A flag that changes nothing in what is measured is accepted. One that would change it is refused, with what to do
instead. tests/bench/test_vllm_flags.py holds this table and the flags of the other files to the flags of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from headrace.bench.options.parsing import Section
from headrace.bench.options.values import Alias

_VECTORS = "it measures answers that are streamed; use `vllm bench serve` for vectors and scores"
_TO_JSONL = (
    "write its prompts to a file and name that: "
    "`datasets.load_dataset(...).rename_column(COLUMN, 'prompt').to_json('prompts.jsonl')`, then --dataset-name custom "
    "--dataset-path prompts.jsonl"
)
_TEXTS = "prompts are texts here; use --dataset-name random or custom"

BACKENDS: Mapping[str, Alias | str] = {
    "sglang": Alias("openai"),
    "lmdeploy": Alias("openai"),
    "scalellm": Alias("openai"),
    "llama.cpp": Alias("openai"),
    "vllm-chat": Alias("openai-chat"),
    "sglang-oai": Alias("openai"),
    "sglang-oai-chat": Alias("openai-chat"),
    "tensorrt-llm": "use --backend openai with the server's OpenAI-compatible API",
    "deepspeed-mii": "use --backend openai with the server's OpenAI-compatible API",
    "openai-audio": _TEXTS,
    **dict.fromkeys(
        (
            *("openai-embeddings", "openai-embeddings-chat", "openai-embeddings-clip", "openai-embeddings-vlm2vec"),
            *("infinity-embeddings", "infinity-embeddings-clip", "vllm-pooling", "vllm-rerank"),
        ),
        _VECTORS,
    ),
}
"""Names of APIs that --backend has in vLLM, or had."""

DATASETS: Mapping[str, Alias | str] = {
    "random-mm": _TEXTS,
    "random-rerank": _VECTORS,
    "custom_audio": _TEXTS,
    "custom_image": _TEXTS,
    "custom_mm": _TEXTS,
    "hf": _TO_JSONL,
    "speed_bench": _TO_JSONL,
    "mooncake": Alias("timed_trace"),
}
"""Names that --dataset-name has in vLLM, or had."""

HINTS: Mapping[str, tuple[bool, str]] = {
    "trust-remote-code": (True, "no code of models is run"),
    "skip-tokenizer-init": (True, "no tokenizer is needed"),
    "skip-chat-template": (True, "prompts are sent as they are; the server applies templates of chats"),
    "no-stream": (True, "files are read as a whole"),
    "tokenizer-mode": (False, "tokenizers have one mode"),
    "enable-multimodal-chat": (True, "prompts of chats are messages in any case"),
    "use-beam-search": (True, "vllm bench serve ignores it too"),
}
"""Flags that change nothing here: whether it is a switch, and why."""

REFUSED: Mapping[str, tuple[bool, str]] = {
    **dict.fromkeys(
        (
            *("random-mm-base-items-per-request", "random-mm-num-mm-items-range-ratio"),
            *("random-mm-limit-mm-per-prompt", "random-mm-bucket-config"),
            *("asr-max-audio-len-sec", "asr-min-audio-len-sec"),
        ),
        (False, _TEXTS),
    ),
    "custom-ensure-client-side-data": (True, _TEXTS),
    "no-reranker": (True, _VECTORS),
    **dict.fromkeys(
        (
            *("hf-subset", "hf-split", "hf-name", "hf-output-len", "bfcl-categories"),
            *("blazedit-min-distance", "blazedit-max-distance"),
            *("speed-bench-dataset-subset", "speed-bench-output-len", "speed-bench-category"),
        ),
        (False, _TO_JSONL),
    ),
}
"""Flags that are for what is not measured here: whether it is a switch, and what to do instead."""


def _refuse(context: click.Context, param: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        name = param.opts[0].removeprefix("--")
        raise click.BadParameter(f"it is not measured here: {REFUSED[name][1]}", context, param)


def _one(context: click.Context, param: click.Parameter, value: int) -> None:
    if value != 1:
        raise click.BadParameter(f"a request has one prompt: {_VECTORS}", context, param)


def _hint(name: str, is_switch: bool, why: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", is_flag=is_switch, expose_value=False, help=f"Accepted for scripts; {why}.")


def _refusal(name: str, is_switch: bool) -> Callable[[Any], Any]:
    return click.option(f"--{name}", is_flag=is_switch, expose_value=False, hidden=True, callback=_refuse)


FLAGS = Section(
    "Accepted from vllm bench serve",
    *(_hint(name, *rest) for name, rest in HINTS.items()),
    *(_refusal(name, is_switch) for name, (is_switch, _) in REFUSED.items()),
    click.option("--random-batch-size", type=int, default=1, expose_value=False, hidden=True, callback=_one),
)
