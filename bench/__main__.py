"""`python -m headrace.bench`: puts load on a server and reports what it does.

If the flags are wrong, it prints one sentence on standard error and exits with status 2; if the server cannot be
measured, or answers wrongly, with status 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from headrace.bench.apis import BACKENDS, Chat, Completions, Options, api_of
from headrace.bench.arrivals import Arrivals, RampUp
from headrace.bench.datasets import ManyTurns
from headrace.bench.flags import (
    Command,
    Group,
    JsonObject,
    MetricNames,
    Objective,
    Pair,
    Percentiles,
    PositiveOrInf,
)
from headrace.bench.lengths import SHAPES, Lengths
from headrace.bench.target import Target, target_of
from headrace.bench.workload import NAMES, OF_FILES, Workload
from headrace.common.flags import FiniteRange

_F = TypeVar("_F", bound=Callable[..., Any])
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_SWEEP_PROBES = 3
_SWEEP_FIRST_SHARE = 0.5
_SWEEP_LEAST_PROMPTS = 20
_MAX_SWEEP_PROMPTS = 5000


class UsageError(click.ClickException):
    """The flags cannot be used. The message says what to change."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the message to `file`, or to standard error."""
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class Failed(UsageError):
    """The server cannot be measured."""

    exit_code = 1


def _options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator, in their order."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_SERVER = _options(
    click.argument("url", required=False),
    click.option("--base-url", help="URL of the server, instead of URL."),
    click.option("--host", help="Host of the server, instead of URL. Default: 127.0.0.1, with --port."),
    click.option("--port", type=click.IntRange(1, 65535), help="Port of the server, with --host. Default: 8000."),
    click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        default="openai",
        help="The server's API. openai: POST /v1/completions; openai-chat: POST /v1/chat/completions; vllm: as openai.",
    ),
    click.option(
        "--endpoint", help="Path of the API, if it is not the usual one. One of chats makes the API openai-chat."
    ),
    click.option("--model", help="Model to ask for. Default: the first that the server lists."),
    click.option("--served-model-name", help="Model to ask for, if the server has another name for --model."),
    click.option("--header", "headers", type=Pair(), multiple=True, help="Header of every request; may be repeated."),
    click.option("--ca-file", type=click.Path(path_type=Path), help="Certificates of the server's authority."),
    click.option("--insecure", is_flag=True, help="Accept any certificate."),
    click.option(
        "--request-timeout",
        type=FiniteRange(0, min_open=True),
        default=600.0,
        help="Seconds until a request has failed.",
    ),
)
_DATASET = _options(
    click.option("--dataset-name", type=click.Choice(NAMES), default="random", help="What is asked."),
    click.option(
        "--dataset-path",
        type=click.Path(path_type=Path),
        help="File of sharegpt (JSON), custom (JSONL with `prompt`), timed_trace (Mooncake's JSONL) or sonnet (text).",
    ),
    click.option("--num-prompts", type=click.IntRange(1), default=1000, help="Number of requests."),
    click.option("--seed", type=int, default=0, help="Seed of prompts, lengths and arrivals."),
    click.option(
        "--tokenizer",
        help="Model of the cache, or directory, whose tokenizer counts tokens. Default: the server's /tokenize, if it "
        "has one.",
    ),
    click.option("--input-len", type=click.IntRange(1), help="Tokens of prompts of random, sonnet and multi_turn."),
    click.option("--output-len", type=click.IntRange(1), help="Tokens of answers, of every dataset but timed_trace."),
    click.option(
        "--input-dist",
        type=click.Choice(SHAPES),
        help="Distribution of prompts of random, prefix_repetition (suffixes) and multi_turn. The length is the "
        "median of lognormal and the mean of exponential. Default: uniform with --random-range-ratio, else fixed; "
        "lognormal for multi_turn.",
    ),
    click.option(
        "--output-dist",
        type=click.Choice(SHAPES),
        help="Distribution of answers of the same datasets and of custom. Default: as for prompts; exponential for "
        "multi_turn.",
    ),
    click.option("--lognormal-sigma", type=FiniteRange(0), default=1.0, help="Sigma of lognormal lengths."),
    click.option(
        "--max-total-len",
        type=click.IntRange(2),
        default=32768,
        help="Most tokens of prompt and answer. Longer requests of a trace are left out; drawn lengths are at most "
        "half of it, and conversations end before it.",
    ),
    click.option("--random-input-len", type=click.IntRange(1), default=1024, help="random: tokens of a prompt."),
    click.option("--random-output-len", type=click.IntRange(1), default=128, help="random: tokens of an answer."),
    click.option(
        "--random-range-ratio",
        type=FiniteRange(0, 1, max_open=True),
        default=0.0,
        help="random: lengths are uniform within this share around the given ones.",
    ),
    click.option(
        "--random-prefix-len",
        type=click.IntRange(0),
        default=0,
        help="random: tokens before each that all prompts share.",
    ),
    click.option(
        "--sharegpt-output-len", type=click.IntRange(1), help="sharegpt: tokens of answers. Default: as in the file."
    ),
    click.option("--custom-output-len", type=click.IntRange(1), default=256, help="custom: tokens of an answer."),
    click.option("--sonnet-input-len", type=click.IntRange(1), default=550, help="sonnet: most tokens of a prompt."),
    click.option("--sonnet-output-len", type=click.IntRange(1), default=150, help="sonnet: tokens of an answer."),
    click.option(
        "--sonnet-prefix-len", type=click.IntRange(0), default=200, help="sonnet: tokens that all prompts share."
    ),
    click.option(
        "--prefix-repetition-prefix-len",
        type=click.IntRange(1),
        default=256,
        help="prefix_repetition: tokens of a prefix.",
    ),
    click.option(
        "--prefix-repetition-suffix-len",
        type=click.IntRange(1),
        default=256,
        help="prefix_repetition: tokens behind it.",
    ),
    click.option(
        "--prefix-repetition-num-prefixes",
        type=click.IntRange(1),
        default=10,
        help="prefix_repetition: number of prefixes.",
    ),
    click.option(
        "--prefix-repetition-output-len",
        type=click.IntRange(1),
        default=128,
        help="prefix_repetition: tokens of an answer.",
    ),
    click.option(
        "--timed-trace-sec-multiplier",
        type=FiniteRange(0, min_open=True),
        default=0.001,
        help="timed_trace: seconds in a unit of the timestamps. Mooncake's are milliseconds; 0.0005 is twice as fast.",
    ),
    click.option(
        "--timed-trace-chunk-hash-size",
        type=click.IntRange(1),
        help="timed_trace: tokens of a block in hash_ids. Default: as the lengths say, 512 for Mooncake's.",
    ),
    click.option(
        "--self-timed/--no-self-timed", default=None, help="timed_trace: send at the trace's times. Default: yes."
    ),
    click.option(
        "--multi-turn-turns", type=FiniteRange(1), default=5.0, help="multi_turn: mean turns of a conversation."
    ),
    click.option(
        "--multi-turn-think-time",
        type=FiniteRange(0),
        default=10.0,
        help="multi_turn: mean seconds between an answer and the next question.",
    ),
    click.option(
        "--multi-turn-users",
        type=click.IntRange(1),
        default=8,
        help="multi_turn: users, who have one conversation after the other. With --request-rate, conversations begin "
        "at that rate instead.",
    ),
    click.option(
        "--multi-turn-system-len", type=click.IntRange(0), default=512, help="multi_turn: tokens of the system prompt."
    ),
    click.option(
        "--multi-turn-num-systems", type=click.IntRange(1), default=1, help="multi_turn: number of system prompts."
    ),
    click.option("--disable-shuffle", is_flag=True, help="Take the entries of a file in their order."),
)
_LOAD = _options(
    click.option(
        "--request-rate", type=PositiveOrInf(), default="inf", help="Requests per second. inf: all at the beginning."
    ),
    click.option(
        "--burstiness",
        type=PositiveOrInf(),
        default="1.0",
        help="1: a Poisson process; less: more bursts; more: more even arrivals; inf: even ones.",
    ),
    click.option(
        "--max-concurrency", type=click.IntRange(1), help="Most requests in flight. Others wait in the client."
    ),
    click.option(
        "--ramp-up-strategy",
        type=click.Choice(("linear", "exponential")),
        help="Raise the rate from request to request.",
    ),
    click.option("--ramp-up-start-rps", type=FiniteRange(0), help="Requests per second at the beginning of the ramp."),
    click.option("--ramp-up-end-rps", type=FiniteRange(0), help="Requests per second at its end."),
    click.option("--num-warmups", type=click.IntRange(0), default=0, help="Requests before the first that counts."),
    click.option(
        "--ready-check-timeout-sec",
        type=FiniteRange(0),
        default=0.0,
        help="Wait so long for a first answer before the load begins. 0: do not wait.",
    ),
    click.option(
        "--sweep", "is_sweep", is_flag=True, help="Try rising rates and find the highest that the server holds."
    ),
    click.option(
        "--sweep-seconds",
        type=FiniteRange(0, min_open=True),
        default=30.0,
        help="Seconds of arrivals at each rate of --sweep.",
    ),
    click.option(
        "--sweep-refinements",
        type=click.IntRange(0),
        default=2,
        help="Rates that --sweep tries between held and not held.",
    ),
)
_REQUESTS = _options(
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
_REPORT = _options(
    click.option(
        "--percentile-metrics",
        type=MetricNames(),
        default="ttft,tpot,itl",
        help="Metrics to report, with commas: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue.",
    ),
    click.option("--metric-percentiles", type=Percentiles(), default="99", help="Percentiles to report, with commas."),
    click.option(
        "--goodput",
        type=Objective(),
        multiple=True,
        help="Objective in ms, such as ttft:500; of ttft, tpot, e2el; may be repeated. A good request meets all.",
    ),
    click.option("--save-result", is_flag=True, help="Save the result as JSON."),
    click.option("--save-detailed", is_flag=True, help="Save the figures and texts of each request too."),
    click.option(
        "--append-result", is_flag=True, help="Append the result as a line to the file, instead of replacing it."
    ),
    click.option("--result-dir", type=click.Path(path_type=Path), help="Directory for results. Default: this one."),
    click.option("--result-filename", help="Name of the file. Default: made of label, rate, model and date."),
    click.option("--label", help="Begins names of files, and names the run in reports. Default: the backend."),
    click.option("--metadata", type=Pair(), multiple=True, help="NAME=VALUE to save with the result; may be repeated."),
    click.option("--html", type=click.Path(path_type=Path), help="Write a report with charts to this file."),
    click.option("--disable-tqdm", is_flag=True, help="Show no progress."),
)
# Options of `vllm bench serve` that change nothing here.
_HINTS = _options(
    *(
        click.option(f"--{name}", is_flag=True, expose_value=False, help=f"Accepted for scripts; {why}.")
        for name, why in (
            ("trust-remote-code", "no code of models is run"),
            ("skip-tokenizer-init", "no tokenizer is needed"),
            ("skip-chat-template", "the server applies templates"),
            ("no-stream", "files are read as a whole"),
        )
    ),
    click.option("--tokenizer-mode", expose_value=False, help="Accepted for scripts; tokenizers have one mode."),
)


@click.group(cls=Group, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure a server of language models: `headrace bench URL`.

    `headrace bench serve --help` lists the options. `serve` may be left out.
    """


@main.command(cls=Command, context_settings={"show_default": True})
@_SERVER
@_DATASET
@_LOAD
@_REQUESTS
@_REPORT
@_HINTS
@click.pass_context
def serve(context: click.Context, /, **flags: Any) -> None:
    """Put load on the server at URL and print latencies and throughput.

    Options, the text and the JSON are those of `vllm bench serve`. The server may be any with an OpenAI-compatible API,
    or one with Ollama's, TGI's or KServe's (--backend). OPENAI_API_KEY is sent as a bearer token if it is set.

    Answers are checked too. If some are wrong, or all requests fail, the exit status is 1.
    """
    import uvloop

    flags = _filled(flags, _given(context))
    context.exit(uvloop.run(_serve(flags)))


@main.command(context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), default="report.html", help="File to write.")
@click.option("--title", default="Benchmark", help="Title of the report.")
def report(files: tuple[Path, ...], output: Path, title: str) -> None:
    """Write one HTML report on the results in FILES, over each other.

    FILES are those of --save-result, of this client or of `vllm bench serve`. Those with --save-detailed have more to
    show. The report needs no other file and no network.
    """
    from headrace.bench import saved
    from headrace.bench.report import page

    try:
        runs = [run for file in files for run in saved.read(file)]
    except ValueError as error:
        raise UsageError(str(error)) from None
    output.write_text(page(runs, title), encoding="utf-8")
    click.echo(f"wrote {output}")


def _given(context: click.Context) -> frozenset[str]:
    """Names of the options that were given."""
    sources = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    return frozenset(name for name in context.params if context.get_parameter_source(name) in sources)


def _filled(flags: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """The flags with defaults that depend on others. Raises UsageError for flags that contradict each other."""
    found = dict(flags)
    name = found["dataset_name"]
    if name in OF_FILES and found["dataset_path"] is None:
        raise UsageError(f"--dataset-name {name} reads a file; name it with --dataset-path")
    if name not in OF_FILES and found["dataset_path"] is not None:
        names = ", ".join(sorted(OF_FILES))
        raise UsageError(f"--dataset-name {name} reads no file; name one of {names} for --dataset-path")
    if found["self_timed"] is not None and name != "timed_trace":
        raise UsageError(f"--self-timed is for --dataset-name timed_trace; {name} has no times")
    if name == "timed_trace":
        found["self_timed"] = found["self_timed"] is not False and not found["is_sweep"]
        if found["self_timed"] and given & {"request_rate", "ramp_up_strategy"}:
            raise UsageError("a trace is sent at its own times; add --no-self-timed to send it at a rate")
    api = api_of(found["backend"], found["endpoint"])
    if found["ignore_eos"] and not api.ignores_eos:
        raise UsageError(f"--ignore-eos: the API {found['backend']} cannot continue after the end of an answer")
    if found["ignore_eos"] is None:
        found["ignore_eos"] = api.ignores_eos and name in ("random", "timed_trace")
    if found["ramp_up_strategy"] is not None:
        if "request_rate" in given:
            raise UsageError("a ramp has its own rates; leave --request-rate out")
        if found["ramp_up_start_rps"] is None or not found["ramp_up_end_rps"]:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if found["ramp_up_start_rps"] > found["ramp_up_end_rps"]:
            raise UsageError("--ramp-up-start-rps is more than --ramp-up-end-rps; exchange them")
        if found["ramp_up_strategy"] == "exponential" and found["ramp_up_start_rps"] == 0:
            raise UsageError("an exponential ramp cannot begin at 0; give another --ramp-up-start-rps")
    elif given & {"ramp_up_start_rps", "ramp_up_end_rps"}:
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if found["is_sweep"]:
        wrong = given & {"request_rate", "ramp_up_strategy", "max_concurrency", "num_prompts", "self_timed"}
        if wrong:
            flag = "--" + sorted(wrong)[0].replace("_", "-")
            raise UsageError(f"--sweep chooses rates and numbers of requests itself; leave {flag} out")
    if found["url"] is not None and given & {"base_url", "host", "port"}:
        raise UsageError("the server is named twice; give either URL, or --base-url, or --host and --port")
    return found


def _target(flags: Mapping[str, Any]) -> Target:
    """The server that the flags name. Raises UsageError."""
    url = flags["url"] or flags["base_url"]
    if url is None:
        if flags["host"] is None and flags["port"] is None:
            raise UsageError("which server? Give its URL, such as http://127.0.0.1:8000")
        host = flags["host"] or "127.0.0.1"
        url = f"http://{f'[{host}]' if ':' in host else host}:{flags['port'] or 8000}"
    headers = dict(flags["headers"])
    key = os.environ.get("OPENAI_API_KEY")
    if key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    try:
        return target_of(url, headers, flags["ca_file"], flags["insecure"])
    except ValueError as error:
        raise UsageError(str(error)) from None


def _workload(flags: Mapping[str, Any]) -> Workload:
    name, sigma = flags["dataset_name"], flags["lognormal_sigma"]
    ratio = flags["random_range_ratio"] if name == "random" else 0.0
    most = flags["max_total_len"] // 2
    is_many = name == "multi_turn"

    def lengths(dist: str | None, usual: str, middle: int) -> Lengths:
        shape = dist or usual
        return Lengths(shape, middle, sigma if shape == "lognormal" else ratio, most)  # type: ignore[arg-type]

    usual = "uniform" if ratio else "fixed"
    output_len = flags["output_len"]
    outputs = {
        "random": flags["random_output_len"],
        "custom": flags["custom_output_len"],
        "sonnet": flags["sonnet_output_len"],
        "prefix_repetition": flags["prefix_repetition_output_len"],
    }
    output = lengths(flags["output_dist"], "exponential" if is_many else usual, output_len or outputs.get(name, 128))
    inputs = lengths(
        flags["input_dist"],
        "lognormal" if is_many else usual,
        flags["input_len"] or (128 if is_many else flags["random_input_len"]),
    )
    return Workload(
        name=name,
        path=flags["dataset_path"],
        inputs=inputs,
        outputs=output,
        output_len=output_len or flags["sharegpt_output_len"],
        is_shuffled=not flags["disable_shuffle"],
        random_prefix_len=flags["random_prefix_len"],
        num_prefixes=flags["prefix_repetition_num_prefixes"],
        prefix_len=flags["prefix_repetition_prefix_len"],
        suffix_len=lengths(flags["input_dist"], "fixed", flags["prefix_repetition_suffix_len"]),
        sonnet_input_len=flags["input_len"] or flags["sonnet_input_len"],
        sonnet_prefix_len=flags["sonnet_prefix_len"],
        many_turns=ManyTurns(
            flags["multi_turn_turns"],
            flags["multi_turn_think_time"],
            flags["multi_turn_system_len"],
            flags["multi_turn_num_systems"],
            inputs,
            output,
            flags["max_total_len"],
        ),
        trace_seconds=flags["timed_trace_sec_multiplier"],
        trace_block=flags["timed_trace_chunk_hash_size"],
        most_tokens=flags["max_total_len"],
    )


def _logprobs(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ask for log-probabilities. Raises UsageError for an API that has none."""
    count = flags["logprobs"]
    if count is None:
        return {}
    match api_of(flags["backend"], flags["endpoint"]):
        case Chat():
            return {"logprobs": True, "top_logprobs": count}
        case Completions():
            return {"logprobs": count}
    raise UsageError(f"--logprobs: the API {flags['backend']} is not asked for log-probabilities; leave it out")


async def _serve(flags: Mapping[str, Any]) -> int:
    """Run it all; the exit status."""
    from headrace.bench.benchmark import Benchmark, BenchmarkError, Plan, first_model, writer_of
    from headrace.bench.connection import Client
    from headrace.bench.sender import HttpSender

    target = _target(flags)
    api = api_of(flags["backend"], flags["endpoint"])
    client = Client(target, flags["request_timeout"])
    ramp = None
    if flags["ramp_up_strategy"]:
        ramp = RampUp(flags["ramp_up_strategy"], flags["ramp_up_start_rps"], flags["ramp_up_end_rps"])
    arrivals = Arrivals(flags["request_rate"], flags["burstiness"], ramp)
    is_closed = flags["dataset_name"] == "multi_turn" and not arrivals.are_timed and not flags["is_sweep"]
    try:
        model = flags["served_model_name"] or flags["model"] or await first_model(client, api)
        writer = await writer_of(client, model, flags["tokenizer"])
        if not writer.counter.is_exact:
            click.echo("no tokenizer: lengths of prompts are guesses; see --tokenizer", err=True)
        plan = Plan(
            workload=_workload(flags),
            num_prompts=flags["num_prompts"],
            arrivals=arrivals,
            is_self_timed=bool(flags["self_timed"]),
            max_concurrency=flags["max_concurrency"],
            num_users=flags["multi_turn_users"] if is_closed else None,
            think_s=flags["multi_turn_think_time"],
            num_warmups=flags["num_warmups"],
            ready_timeout_s=flags["ready_check_timeout_sec"],
            tokenizer=flags["tokenizer"],
            objectives_ms=dict(flags["goodput"]),
            metrics=flags["percentile_metrics"],
            percentiles=flags["metric_percentiles"],
            backend=flags["backend"],
            label=flags["label"],
            metadata=dict(flags["metadata"]),
            seed=flags["seed"],
            shows_progress=not flags["disable_tqdm"],
        )
        sampling = {name: flags[name] for name in _SAMPLING if flags[name] is not None} | _logprobs(flags)
        options = Options(model, flags["ignore_eos"], sampling, flags["extra_body"])
        sender = HttpSender(client, api, options, flags["lora_modules"], flags["request_id_prefix"])
        bench = Benchmark(client, api, sender, options, writer)
        return await (_swept(bench, plan, flags) if flags["is_sweep"] else _once(bench, plan, flags))
    except BenchmarkError as error:
        raise Failed(str(error)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        client.close()


async def _once(bench: Any, plan: Any, flags: Mapping[str, Any]) -> int:
    drawn = await bench.draw(plan, plan.num_prompts)
    if drawn.note:
        click.echo(drawn.note, err=True)
    await bench.warm_up(plan, drawn.conversations)
    result = await bench.run(plan, drawn.conversations, plan.arrivals, "requests")
    return _told([result], flags)


async def _swept(bench: Any, plan: Any, flags: Mapping[str, Any]) -> int:
    from headrace.bench.sweep import sweep, table

    probes = await bench.draw(plan, _SWEEP_PROBES)
    await bench.warm_up(plan, probes.conversations)
    alone = dataclasses.replace(plan, max_concurrency=1, num_users=None)
    first = await bench.run(alone, probes.conversations, Arrivals(), "one after the other")
    if not first.totals.completed:
        return _told([first], flags)
    latency_s = statistics.median(record.latency_s for record in first.run.records if record.succeeded)

    async def run(rate: float) -> Any:
        count = min(max(math.ceil(rate * flags["sweep_seconds"]), _SWEEP_LEAST_PROMPTS), _MAX_SWEEP_PROMPTS)
        drawn = await bench.draw(dataclasses.replace(plan, seed=plan.seed + 1 + len(results)), count)
        arrivals = dataclasses.replace(plan.arrivals, rate=rate)
        results.append(await bench.run(plan, drawn.conversations, arrivals, f"{rate:.2f} req/s"))
        return results[-1]

    results: list[Any] = []
    found = await sweep(_SWEEP_FIRST_SHARE / max(latency_s, 1e-3), flags["sweep_refinements"], run)
    status = _told(results, flags, table(found))
    return status or int(found.knee is None)


def _told(results: list[Any], flags: Mapping[str, Any], after: str = "") -> int:
    """Print and save results; the exit status."""
    from headrace.bench import results as writing

    status = 0
    told = []
    for result in results:
        warnings = writing.warnings(result)
        if after and warnings:
            warnings.insert(0, f"at {result.setup.arrivals.rate:.2f} requests per second:")
        _shout(warnings)
        if not after:
            click.echo(writing.text_block(result))
            _shout(warnings)
        told.append(writing.as_json(result, is_detailed=flags["save_detailed"]))
        if result.checked.is_wrong or not result.totals.completed:
            status = 1
        if flags["save_result"] or flags["save_detailed"] or flags["append_result"] or flags["result_filename"]:
            _save(writing.file_name(result.setup), told[-1], flags, is_one=len(results) == 1)
    if after:
        click.echo(after)
    if flags["html"] is not None:
        from headrace.bench import saved
        from headrace.bench.report import page

        detailed = [writing.as_json(result, is_detailed=True) for result in results]
        name = flags["label"] or flags["backend"]
        runs = [
            saved.of(name if len(detailed) == 1 else f"{name} {one['request_rate']:.2f}/s", one) for one in detailed
        ]
        flags["html"].write_text(page(runs, f"Benchmark of {results[0].setup.model}"), encoding="utf-8")
        click.echo(f"wrote {flags['html']}", err=True)
    return status


def _save(name: str, told: Mapping[str, Any], flags: Mapping[str, Any], *, is_one: bool) -> None:
    """Write a result to its file; those of a sweep become lines of one file if the file has a given name."""
    path = Path(flags["result_filename"] or name)
    if flags["result_dir"] is not None:
        flags["result_dir"].mkdir(parents=True, exist_ok=True)
        path = flags["result_dir"] / path
    appends = flags["append_result"] or (not is_one and flags["result_filename"] is not None)
    with path.open("a" if appends else "w", encoding="utf-8") as file:
        if appends and file.tell():
            file.write("\n")
        json.dump(told, file)
    click.echo(f"saved {path}", err=True)


def _shout(warnings: list[str]) -> None:
    """Print warnings so that nobody overlooks them."""
    if not warnings:
        return
    bar = "!" * 78
    lines = [bar, *(f"!!! {warning}" for warning in warnings), bar]
    for line in lines:
        click.secho(line, fg="red", bold=True, err=True)


if __name__ == "__main__":
    try:
        main(prog_name="headrace bench", auto_envvar_prefix="HEADRACE_BENCH")
    except KeyboardInterrupt:
        sys.exit(130)
