"""`headrace bench serve`: from the flags to a load on a server, and to what is told of it."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import click
import uvloop

from headrace.bench.arrivals import Arrivals
from headrace.bench.benchmark import Benchmark, BenchmarkError, Plan, first_model, waited, writer_of
from headrace.bench.connection import Client
from headrace.bench.datasets import Conversation
from headrace.bench.options import dataset, load, reporting, requests, server, vllm
from headrace.bench.options.parsing import Command
from headrace.bench.results import Result
from headrace.bench.sender import HttpSender
from headrace.bench.sweep import sweep, table
from headrace.bench.telling import Outputs
from headrace.bench.workload import Workload
from headrace.common.commands import CommandError, CommandFailed, duration
from headrace.common.flags import given_in

_SWEEP_PROBES = 3
_SWEEP_FIRST_SHARE = 0.5
_SWEEP_LEAST_PROMPTS = 20
_MAX_SWEEP_PROMPTS = 5000


_SECTIONS = (server.FLAGS, dataset.FLAGS, load.FLAGS, requests.FLAGS, reporting.FLAGS, vllm.FLAGS)


@click.command(
    cls=Command,
    sections={section.title: section.flags for section in _SECTIONS},
    short_help="Put load on the server at URL, and print its latencies.",
    context_settings={"show_default": True},
)
@server.FLAGS
@dataset.FLAGS
@load.FLAGS
@requests.FLAGS
@reporting.FLAGS
@vllm.FLAGS
@click.pass_context
def serve(context: click.Context, /, **flags: Any) -> None:
    """Put load on the server at URL, print its latencies and throughput, and check its answers.

    The options, the text and the JSON are those of `vllm bench serve`. The server may have any OpenAI-compatible API,
    or that of Ollama, TGI or KServe (--backend). If OPENAI_API_KEY is set, it is sent as a bearer token.

    If answers are wrong, or all requests fail, the exit status is 1. Ctrl-C ends the load: the finished requests are
    reported and saved, marked as partial, and the exit status is 130.

    \b
    Examples:
      # 4 requests a second, with objectives and a report
      headrace bench http://127.0.0.1:8000 --num-prompts 200 --request-rate 4 --goodput ttft:2s tpot:100ms --html r.html
      # 8 clients that wait for their answers
      headrace bench http://127.0.0.1:8000 --num-prompts 50 --max-concurrency 8
      # the highest rate at which nine of ten requests meet both objectives
      headrace bench http://127.0.0.1:8000 --sweep --goodput ttft:2s tpot:100ms
      # 8 users in conversations, who think 20 s between questions
      headrace bench http://127.0.0.1:8000 --dataset-name multi_turn --multi-turn-think-time 20 --num-prompts 100
      # the first 200 requests of a trace, at its own times
      headrace bench http://127.0.0.1:8000 --dataset-name timed_trace --dataset-path trace.jsonl --num-prompts 200
      # another server, saved to be compared by `headrace bench report`
      headrace bench http://127.0.0.1:11434 --backend ollama --num-prompts 50 --save-detailed --label theirs
    """
    for sentence in dataset.without_effect(flags["dataset_name"], given_in(context)):
        click.echo(sentence, err=True)
    context.exit(uvloop.run(_serve(flags)))


async def _serve(flags: Mapping[str, Any]) -> int:
    """Run it all; the exit status."""
    api = server.api(flags)
    plan = plan_of(flags)
    outputs = reporting.outputs(flags)
    options = requests.request_options(flags, api, flags["served_model_name"] or flags["model"] or "")
    client = Client(server.target(flags), flags["request_timeout"])
    try:
        if not options.model:
            options = options._replace(model=await waited(lambda: first_model(client, api), plan.ready_timeout_s))
        model = options.model
        writer = await waited(lambda: writer_of(client, model, flags["tokenizer"]), plan.ready_timeout_s)
        if not writer.counter.is_exact:
            click.echo("no tokenizer: lengths of prompts are guesses; see --tokenizer", err=True)
        chance = random.Random(f"adapters {flags['seed']}") if flags["lora_assignment"] == "random" else None
        sender = HttpSender(client, api, options, flags["lora_modules"], flags["request_id_prefix"], chance)
        bench = Benchmark(client, api, sender, options, writer)
        if flags["is_sweep"]:
            return await _swept(bench, plan, outputs, flags["sweep_seconds"], flags["sweep_refinements"])
        return await _once(bench, plan, outputs, f"{options.model} at {client.target.url}")
    except BenchmarkError as error:
        raise CommandFailed(str(error)) from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    finally:
        client.close()


def plan_of(flags: Mapping[str, Any]) -> Plan:
    """The plan of a benchmark. Raises CommandError for flags that contradict each other."""
    load.check_sweep(flags)
    return Plan(
        workload=dataset.workload(flags),
        num_prompts=dataset.count(flags),
        arrivals=load.arrivals(flags),
        is_self_timed=load.is_self_timed(flags),
        max_concurrency=flags["max_concurrency"],
        num_users=load.num_users(flags),
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
        probe_rate=flags["probe_request_rate"],
        is_profiled=flags["profile"],
        keeps_part=True,
    )


def load_text(plan: Plan, conversations: Sequence[Conversation]) -> str:
    """What will be sent and when, for who has left it to defaults."""
    turns = [turn for conversation in conversations for turn in conversation.turns]
    count = f"{len(turns)} requests"
    many = len(conversations) < len(turns)
    if many:
        count += f" in {len(conversations)} conversations"
    prompt, answer = (
        statistics.fmean(lengths)
        for lengths in ([turn.prompt_tokens for turn in turns], [turn.output_tokens for turn in turns])
    )
    lengths = f"{'questions' if many else 'prompts'} of {prompt:,.0f} tokens and answers of {answer:,.0f} on average"
    return f"{count} ({plan.workload.name}), {lengths}, {_times_text(plan, conversations, many)}"


def _times_text(plan: Plan, conversations: Sequence[Conversation], many: bool) -> str:
    rate, ramp = plan.arrivals.rate, plan.arrivals.ramp_up
    if plan.num_users is not None:
        return f"{plan.num_users} users who think for {plan.think_s:g} s on average"
    if plan.is_self_timed:
        return f"at the trace's times, during {duration(conversations[-1].at_s or 0.0)}"
    limit = "" if plan.max_concurrency is None else f", at most {plan.max_concurrency} at a time"
    if ramp is not None:
        return f"from {ramp.start:g} to {ramp.end:g} a second{limit}"
    if math.isfinite(rate):
        what = "conversations" if many else "requests"
        return f"{rate:g} {what} a second, during {duration(len(conversations) / rate)}{limit}"
    if plan.max_concurrency is not None:
        return f"{plan.max_concurrency} at a time"
    return "all at once"


async def _once(bench: Benchmark, plan: Plan, outputs: Outputs, server: str) -> int:
    drawn = await bench.draw(plan, plan.num_prompts)
    if drawn.note:
        click.echo(drawn.note, err=True)
    if plan.shows_progress:
        click.echo(f"{server}: {load_text(plan, drawn.conversations)}", err=True)
    await _warn_of_long(bench, plan.workload, drawn.conversations)
    await bench.warm_up(plan, drawn.conversations)
    result = await bench.run(plan, drawn.conversations, plan.arrivals, "load")
    return outputs.tell([result])


async def _warn_of_long(bench: Benchmark, workload: Workload, conversations: Sequence[Conversation]) -> None:
    """Say before the load if requests will be refused for their length."""
    most = await bench.most_tokens()
    if most is None:
        return
    if many := sum(conversation.total_tokens > most for conversation in conversations):
        remedy = f"--max-total-len {most} avoids them" if workload.obeys_most_tokens else "give shorter lengths"
        what = "conversations" if workload.name == "multi_turn" else "requests"
        click.echo(
            f"{many} of {len(conversations)} {what} have more tokens, with their answers, than the {most} that the "
            f"model takes, and will be refused: {remedy}",
            err=True,
        )


async def _swept(bench: Benchmark, plan: Plan, outputs: Outputs, seconds: float, refinements: int) -> int:
    probes = await bench.draw(plan, _SWEEP_PROBES)
    await _warn_of_long(bench, plan.workload, probes.conversations)
    await bench.warm_up(plan, probes.conversations)
    alone = dataclasses.replace(plan, max_concurrency=1, num_users=None)
    first = await bench.run(alone, probes.conversations, Arrivals(), "one after the other")
    if not first.totals.completed or first.run.is_partial:
        return outputs.tell([first])
    latency_s = statistics.median(record.latency_s for record in first.run.records if record.succeeded)
    results: list[Result] = []

    async def run(rate: float) -> Result:
        count = min(max(math.ceil(rate * seconds), _SWEEP_LEAST_PROMPTS), _MAX_SWEEP_PROMPTS)
        drawn = await bench.draw(dataclasses.replace(plan, seed=plan.seed + 1 + len(results)), count)
        arrivals = dataclasses.replace(plan.arrivals, rate=rate)
        results.append(await bench.run(plan, drawn.conversations, arrivals, f"{rate:.2f} req/s"))
        return results[-1]

    found = await sweep(_SWEEP_FIRST_SHARE / max(latency_s, 1e-3), refinements, run)
    return outputs.tell(results, table(found)) or int(found.knee is None)
