"""Names of APIs and datasets, and flags, that `vllm bench serve` has and `headrace bench` has not.

A flag that changes nothing in what is measured is accepted. One that would change it is refused, with what to do
instead. vLLM has a second client, in Rust, with flags of its own. tests/bench/test_vllm_flags.py holds these tables and
the flags of the other files to the flags of vLLM.
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
    "speed-bench": _TO_JSONL,
    "txt-slices": 'write its slices to a file, as lines {"prompt": TEXT}, and use --dataset-name custom',
    "prefix-repetition": Alias("prefix_repetition"),
    "timed-trace": Alias("timed_trace"),
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
    "no-steady-state": (True, "there are no figures of a steady state"),
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


_TURNS = "use --dataset-name multi_turn with --multi-turn-turns, --multi-turn-users and --multi-turn-think-time"
_SHARED = "use --random-prefix-len, or --dataset-name prefix_repetition"
_SWEEP = "use --sweep, or run the command for each value and name the results to `headrace bench report`"
_STEADY = "the figures are those of the whole run; --html shows each second of it"
_PROFILER = "use --profile, for the whole load"

REFUSED_OF_RUST: Mapping[str, tuple[bool, str]] = {
    "multi-turn": (True, _TURNS),
    **dict.fromkeys(
        (
            *("multi-turn-num-turns", "multi-turn-min-turns", "multi-turn-max-turns", "multi-turn-concurrency"),
            *("multi-turn-delay-ms", "per-turn-input-len"),
        ),
        (False, _TURNS),
    ),
    **dict.fromkeys(
        (
            *("random-cache-hit-fraction", "random-cache-ratio"),
            *("multi-turn-prefix-global-ratio", "multi-turn-prefix-conversation-ratio"),
        ),
        (False, _SHARED),
    ),
    **dict.fromkeys(("sweep-max-concurrency", "sweep-num-prompts-factor", "sweep-request-rate"), (False, _SWEEP)),
    "sweep-summary-percentiles": (False, "use --metric-percentiles"),
    "num-runs": (False, "run the command so many times, and name the results to `headrace bench report`"),
    "compare": (False, "use `headrace bench report FILE FILE`"),
    **dict.fromkeys(("steady-state-threshold", "steady-state-min-window"), (False, _STEADY)),
    **dict.fromkeys(("profile-batch-threshold", "profile-duration"), (False, _PROFILER)),
    **dict.fromkeys(("speed-bench-config", "speed-bench-max-input-len", "hf-text-column"), (False, _TO_JSONL)),
    "max-model-len": (False, "use --max-total-len"),
    "prompt-token-ids": (True, "prompts are texts whose words are one token each, so their lengths are exact too"),
    "reset-prefix-cache": (True, "restart the server, or give each run its own --seed"),
    "dry-run": (True, "try the flags with --num-prompts 1"),
}
"""Flags that only vLLM's client in Rust has."""

_REMEDIES = {**REFUSED, **REFUSED_OF_RUST}


def _refuse(context: click.Context, param: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        name = param.opts[0].removeprefix("--")
        raise click.BadParameter(f"it has no counterpart here: {_REMEDIES[name][1]}", context, param)


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
    *(_refusal(name, is_switch) for name, (is_switch, _) in _REMEDIES.items()),
    click.option("--random-batch-size", type=int, default=1, expose_value=False, hidden=True, callback=_one),
)
