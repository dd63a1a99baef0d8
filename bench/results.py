"""The result of a run: as the text block and the JSON of `vllm bench serve`, with what this client adds.

What is added stands under "headrace" in the JSON, and in sections of its own after the metrics in the text, so that
scripts made for the other find what they look for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.bench import measures
from headrace.bench.arrivals import Arrivals
from headrace.bench.checks import Checked
from headrace.bench.load import Run
from headrace.bench.measures import METRICS, ClientHealth, Distribution, Timeline, Totals

_WIDTH = 50
_NUM_QUANTILES = 200
_PROBES = {
    "Probe requests completed:": "probe_completed",
    "Probe requests failed:": "probe_failed",
    "Median probe E2EL (ms):": "probe_median_e2el_ms",
    "P99 probe E2EL (ms):": "probe_p99_e2el_ms",
    "Max probe E2EL (ms):": "probe_max_e2el_ms",
}
_DRAFTS = {
    "Acceptance rate (%):": "acceptance_rate",
    "Acceptance length:": "acceptance_length",
    "Drafts:": "num_drafts",
    "Draft tokens:": "draft_tokens",
    "Accepted tokens:": "accepted_tokens",
}
_LATE_SHARE = 0.05
"""Of requests: from here on, late ones are warned of."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a run: server, load and settings."""

    url: str
    backend: str
    label: str | None
    model: str
    tokenizer: str | None
    dataset: str
    num_prompts: int
    arrivals: Arrivals
    max_concurrency: int | None
    num_users: int | None
    objectives_ms: Mapping[str, float]
    metrics: Sequence[str]
    percentiles: Sequence[float]
    prompts_counted_by: str
    answers_counted_by: str
    date: str
    metadata: Mapping[str, str]
    seed: int
    rate_changes: Sequence[Mapping[str, Any]] = ()
    """Of a ramp: each whole rate with the time at which it was reached, in ISO 8601."""


@dataclass(frozen=True, slots=True)
class Result:
    """A run and its figures. `distributions` has those of all metrics that there are."""

    setup: Setup
    run: Run
    totals: Totals
    distributions: Mapping[str, Distribution]
    health: ClientHealth
    checked: Checked
    timeline: Timeline
    probes: Mapping[str, Any]
    """Figures of small requests beside the load, by their keys; empty if there were none."""
    drafts: Mapping[str, Any]
    """Figures of the server's speculative decoding, by their keys; empty if it told none."""

    @classmethod
    def of(
        cls,
        setup: Setup,
        run: Run,
        checked: Checked,
        cpu_s: float,
        probes: Mapping[str, Any],
        drafts: Mapping[str, Any] | None = None,
    ) -> Result:
        """Compute all figures."""
        names = [name for name in METRICS if name in setup.metrics]
        return cls(
            setup,
            run,
            measures.totals(run, setup.objectives_ms),
            {n: measures.distribution(measures.values_s(run.records, n), setup.percentiles) for n in names},
            measures.health(run, cpu_s),
            checked,
            measures.timeline(run),
            probes,
            drafts or {},
        )


def percentile_name(percentile: float) -> str:
    """99 for 99.0, but 99.9."""
    return f"{percentile:g}"


def text_block(result: Result) -> str:
    """The figures as lines."""
    setup, totals = result.setup, result.totals
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]

    def say(name: str, value: float | str) -> None:
        lines.append(f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}")

    def title(words: str) -> None:
        lines.append(words.center(_WIDTH, "-"))

    say("Successful requests:", totals.completed)
    say("Failed requests:", totals.failed)
    if setup.max_concurrency is not None:
        say("Maximum request concurrency:", setup.max_concurrency)
    if math.isfinite(setup.arrivals.rate):
        say("Request rate configured (RPS):", setup.arrivals.rate)
    say("Benchmark duration (s):", totals.duration_s)
    say("Total input tokens:", totals.input_tokens)
    say("Total generated tokens:", totals.output_tokens)
    say("Request throughput (req/s):", totals.per_s(totals.completed))
    if setup.objectives_ms:
        say("Request goodput (req/s):", totals.per_s(totals.good))
    say("Output token throughput (tok/s):", totals.per_s(totals.output_tokens))
    say("Peak output token throughput (tok/s):", totals.peak_output_tokens_per_s)
    say("Peak concurrent requests:", float(totals.peak_concurrency))
    say("Total token throughput (tok/s):", totals.per_s(totals.input_tokens + totals.output_tokens))
    if result.probes:
        title("Probe Requests")
        for line, key in _PROBES.items():
            say(line, result.probes[key])
    for name, found in result.distributions.items():
        short, long = METRICS[name]
        title(long)
        say(f"Mean {short} (ms):", found.mean)
        say(f"Median {short} (ms):", found.median)
        for percentile, value in found.percentiles.items():
            say(f"P{percentile_name(percentile)} {short} (ms):", value)
    _say_drafts(result.drafts, say, title)
    _say_answers(result, say, title)
    _say_client(result, say, title)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _say_drafts(drafts: Mapping[str, Any], say: Any, title: Any) -> None:
    if not drafts:
        return
    title("Speculative Decoding")
    for line, key in _DRAFTS.items():
        say(line, drafts[f"spec_decode_{key}"])
    rates = drafts["spec_decode_per_position_acceptance_rates"]
    if rates:
        say("Per-position acceptance (%):", "")
    for position, rate in enumerate(rates):
        say(f"  Position {position}:", 100 * rate)


def _say_answers(result: Result, say: Any, title: Any) -> None:
    checked = result.checked
    title("Answers")
    if result.run.is_partial:
        say("STOPPED before the end, unfinished:", result.run.num_open)
    for reason, count in checked.finish_reasons.items():
        say(f"Finished ({reason}):", count)
    for kind, count in checked.errors.items():
        say(f"Failed ({kind}):", count)
    for finding in checked.findings:
        say(f"WRONG ({finding.kind}):", finding.count)
    if not checked.findings:
        say("Wrong answers found:", 0)
    if result.setup.objectives_ms:
        say("Requests that meet every --goodput:", f"{result.totals.good} of {len(result.run.records)}")
    if result.totals.cached_share is not None:
        say("Prompt tokens from the cache (%):", 100 * result.totals.cached_share)
    say("Prompt tokens counted by:", result.setup.prompts_counted_by)
    say("Output tokens counted by:", result.setup.answers_counted_by)


def _say_client(result: Result, say: Any, title: Any) -> None:
    health = result.health
    title("Client")
    if health.timed_requests:
        say("Late sends (> 10 ms):", f"{health.late_requests} of {health.timed_requests}")
        say("Mean send delay (ms):", health.mean_lateness_ms)
        say("Maximum send delay (ms):", health.max_lateness_ms)
    say("P99 timer lag (ms):", health.p99_lag_ms)
    say("CPU of one core (%):", 100 * health.cpu_share)


def warnings(result: Result) -> list[str]:
    """The warnings that a reader of the figures must see first; empty if all is well."""
    run = result.run
    found = []
    if run.is_partial:
        found.append(
            f"PARTIAL: stopped after {len(run.records)} of {result.setup.num_prompts} requests; {run.num_open} that "
            "were under way are in no figure."
        )
    found += [f"WRONG ANSWERS: {each.count} of {each.of} {each.sentence}." for each in result.checked.findings]
    for kind, count in result.checked.errors.items():
        example = result.checked.error_examples[kind]
        found.append(f"FAILED: {count} of {len(run.records)} requests ({kind}): {example}")
    health = result.health
    if health.timed_requests and health.late_requests > _LATE_SHARE * health.timed_requests:
        found.append(
            f"LATE: the client sent {health.late_requests} of {health.timed_requests} requests more than 10 ms late "
            f"(at most {health.max_lateness_ms:.0f} ms): the load was less than asked for. Give the client a core of "
            "its own, or run it on another host."
        )
    return found


def as_json(result: Result, *, is_detailed: bool) -> dict[str, Any]:
    """The result as it is saved. Times of single requests are in seconds, those of the summary in milliseconds."""
    setup, totals, arrivals = result.setup, result.totals, result.setup.arrivals
    head: dict[str, Any] = {
        "date": setup.date,
        "endpoint_type": setup.backend,
        "backend": setup.backend,
        "label": setup.label,
        "model_id": setup.model,
        "tokenizer_id": setup.tokenizer,
        "num_prompts": setup.num_prompts,
        **setup.metadata,
        "request_rate": arrivals.rate if math.isfinite(arrivals.rate) else "inf",
        "burstiness": arrivals.burstiness if math.isfinite(arrivals.burstiness) else "inf",
        "max_concurrency": setup.max_concurrency,
    }
    if arrivals.ramp_up is not None:
        ramp = arrivals.ramp_up
        head |= {"ramp_up_strategy": ramp.strategy, "ramp_up_start_rps": ramp.start, "ramp_up_end_rps": ramp.end}
    body: dict[str, Any] = {
        "duration": totals.duration_s,
        "completed": totals.completed,
        "failed": totals.failed,
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "request_throughput": totals.per_s(totals.completed),
        "request_goodput": totals.per_s(totals.good) if setup.objectives_ms else None,
        "output_throughput": totals.per_s(totals.output_tokens),
        "total_token_throughput": totals.per_s(totals.input_tokens + totals.output_tokens),
        "max_output_tokens_per_s": totals.peak_output_tokens_per_s,
        "max_concurrent_requests": totals.peak_concurrency,
        "rtfx": 0.0,
        # As vllm bench serve has them, which leaves out only the longer lists.
        "latencies": [record.latency_s for record in result.run.records],
        "queue_times": [record.queued_s for record in result.run.records],
        **result.probes,
        **({"rps_change_events": setup.rate_changes} if setup.rate_changes else {}),
        **result.drafts,
    }
    if is_detailed:
        body |= _details(result.run)
    for name, found in result.distributions.items():
        body |= {f"mean_{name}_ms": found.mean, f"median_{name}_ms": found.median, f"std_{name}_ms": found.std}
        body |= {f"p{percentile_name(p)}_{name}_ms": value for p, value in found.percentiles.items()}
    return {**head, **body, "headrace": _additions(result)}


def _details(run: Run) -> dict[str, Any]:
    records = run.records
    return {
        "input_lens": [r.input_tokens for r in records],
        "output_lens": [r.output_tokens if r.succeeded else 0 for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.gaps_s for r in records],
        "start_times": [r.sent_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error if r.error_kind else "" for r in records],
    }


def _additions(result: Result) -> dict[str, Any]:
    setup, checked = result.setup, result.checked
    quantiles = {}
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = measures.values_s(result.run.records, name)
        shares = np.linspace(0, 100, _NUM_QUANTILES + 1)
        quantiles[name] = [round(float(v), 3) for v in np.percentile(values, shares) * 1000] if len(values) else []
    return {
        "url": setup.url,
        "partial": result.run.is_partial,
        "unfinished": result.run.num_open,
        "dataset": setup.dataset,
        "seed": setup.seed,
        "users": setup.num_users,
        "goodput_objectives_ms": dict(setup.objectives_ms),
        "prompts_counted_by": setup.prompts_counted_by,
        "answers_counted_by": setup.answers_counted_by,
        "cached_share": result.totals.cached_share,
        "answers_are_right": not checked.is_wrong,
        "findings": [dataclasses.asdict(finding) for finding in checked.findings],
        "finish_reasons": checked.finish_reasons,
        "errors_by_kind": checked.errors,
        "error_examples": checked.error_examples,
        "client": dataclasses.asdict(result.health),
        "quantiles_ms": quantiles,
        "timeline": {
            "in_flight": result.timeline.in_flight,
            "output_tokens": [round(n, 1) for n in result.timeline.output_tokens],
        },
    }


def encoded(results: Mapping[str, Any]) -> bytes:
    """A result as JSON."""
    return msgspec.json.encode(results)


def file_name(setup: Setup) -> str:
    """The name under which a result is saved if none is given."""
    base, arrivals = setup.model.split("/")[-1], setup.arrivals
    at_most = f"-concurrency{setup.max_concurrency}" if setup.max_concurrency is not None else ""
    label = setup.label or setup.backend
    if arrivals.ramp_up is not None:
        ramp = arrivals.ramp_up
        rate = f"ramp-up-{ramp.strategy}-{ramp.start:g}qps-{ramp.end:g}qps"
    else:
        rate = f"{arrivals.rate}qps"
    return f"{label}-{rate}{at_most}-{base}-{setup.date}.json"
