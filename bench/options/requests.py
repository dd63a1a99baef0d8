"""The flags of the fields that every request has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from headrace.bench.apis import SAMPLING, Api, Chat, Completions, Options
from headrace.bench.options.parsing import Section
from headrace.bench.options.values import JsonObject
from headrace.common.commands import CommandError
from headrace.common.flags import FiniteRange

_ENDLESS = ("random", "timed_trace")
"""Datasets whose answers would end anywhere."""

FLAGS = Section(
    "How it is asked",
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Answers have the requested length, even if the model would end them. Default: for random and "
        "timed_trace, if the API can.",
    ),
    click.option(
        "--extra-body", type=JsonObject(), default="{}", help="JSON object with further fields of each request."
    ),
    click.option("--logprobs", type=click.IntRange(0), help="Request this many log-probabilities for each token."),
    click.option(
        "--lora-modules",
        multiple=True,
        help="LoRA adapter to request instead of the model; may be repeated.",
    ),
    click.option(
        "--lora-assignment",
        type=click.Choice(("random", "round-robin")),
        default="random",
        help="How conversations are assigned to --lora-modules.",
    ),
    click.option("--request-id-prefix", default="", help="Send the header x-request-id: this prefix and a number."),
    *(
        click.option(
            f"--{name.replace('_', '-')}",
            type=int if name == "top_k" else FiniteRange(),
            help="Sampling parameter, as the API has it. Sent only if given.",
        )
        for name in SAMPLING
    ),
    click.option(
        "--chat-template-kwargs",
        type=JsonObject(),
        default="{}",
        help='JSON object with variables of the chat template, such as {"enable_thinking": false}; for openai-chat.',
    ),
    click.option(
        "--profile",
        is_flag=True,
        help="Start the server's profiler before the load and stop it afterwards, as in vLLM (POST /start_profile).",
    ),
)


def request_options(flags: Mapping[str, Any], api: Api, model: str) -> Options:
    """The fields that every request has. Raises CommandError for fields that the API does not have."""
    fields = _sampling(flags, api) | _logprobs(flags, api)
    return Options(model, _ignores_eos(flags, api), fields, _template(flags, api) | flags["extra_body"])


def _sampling(flags: Mapping[str, Any], api: Api) -> dict[str, Any]:
    given = {name: flags[name] for name in SAMPLING if flags[name] is not None}
    for name in given:
        if name not in api.sampling:
            flag = "--" + name.replace("_", "-")
            raise CommandError(f"{flag}: the API {flags['backend']} has no such parameter; leave it out")
    return {api.sampling[name]: value for name, value in given.items()}


def _template(flags: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """The field with the variables of the chat template. Raises CommandError for an API without one."""
    if not flags["chat_template_kwargs"]:
        return {}
    if not isinstance(api, Chat):
        raise CommandError(
            f"--chat-template-kwargs: the API {flags['backend']} has no field for them, and the server applies "
            "templates; add --backend openai-chat"
        )
    return {"chat_template_kwargs": flags["chat_template_kwargs"]}


def _ignores_eos(flags: Mapping[str, Any], api: Api) -> bool:
    if flags["ignore_eos"] and not api.ignores_eos:
        raise CommandError(f"--ignore-eos: the API {flags['backend']} cannot continue after the end of an answer")
    if flags["ignore_eos"] is None:
        return api.ignores_eos and flags["dataset_name"] in _ENDLESS
    return bool(flags["ignore_eos"])


def _logprobs(flags: Mapping[str, Any], api: Api) -> dict[str, Any]:
    """The fields that ask for log-probabilities. Raises CommandError for an API that has none."""
    count = flags["logprobs"]
    if count is None:
        return {}
    match api:
        case Chat():
            return {"logprobs": True, "top_logprobs": count}
        case Completions():
            return {"logprobs": count}
    raise CommandError(f"--logprobs: the API {flags['backend']} is not asked for log-probabilities; leave it out")
