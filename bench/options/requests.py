"""How it is asked: the flags of the fields that every request has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from headrace.bench.apis import Api, Chat, Completions, Options
from headrace.bench.options.parsing import UsageError, options
from headrace.bench.options.values import JsonObject
from headrace.common.flags import FiniteRange

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_ENDLESS = ("random", "timed_trace")
"""Datasets whose answers would end anywhere."""

FLAGS = options(
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Answers do not end before their length. Default: for random and timed_trace, where the API can.",
    ),
    click.option(
        "--extra-body", type=JsonObject(), default="{}", help="JSON object of further fields of each request."
    ),
    click.option("--logprobs", type=click.IntRange(0), help="Ask for so many log-probabilities of each token."),
    click.option(
        "--lora-modules",
        multiple=True,
        help="Adapter to ask for instead of the model; may be repeated. Conversations ask them in turn.",
    ),
    click.option("--request-id-prefix", default="", help="Send x-request-id with this and a number."),
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            type=int if name == "top_k" else FiniteRange(),
            help="Of sampling; sent if given.",
        )
        for name in _SAMPLING
    ),
)


def request_options(flags: Mapping[str, Any], api: Api, model: str) -> Options:
    """What every request has. Raises UsageError for what the API does not have."""
    sampling = {name: flags[name] for name in _SAMPLING if flags[name] is not None} | _logprobs(flags, api)
    return Options(model, _ignores_eos(flags, api), sampling, flags["extra_body"])


def _ignores_eos(flags: Mapping[str, Any], api: Api) -> bool:
    if flags["ignore_eos"] and not api.ignores_eos:
        raise UsageError(f"--ignore-eos: the API {flags['backend']} cannot continue after the end of an answer")
    if flags["ignore_eos"] is None:
        return api.ignores_eos and flags["dataset_name"] in _ENDLESS
    return bool(flags["ignore_eos"])


def _logprobs(flags: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """The fields that ask for log-probabilities. Raises UsageError for an API that has none."""
    count = flags["logprobs"]
    if count is None:
        return {}
    match api:
        case Chat():
            return {"logprobs": True, "top_logprobs": count}
        case Completions():
            return {"logprobs": count}
    raise UsageError(f"--logprobs: the API {flags['backend']} is not asked for log-probabilities; leave it out")
