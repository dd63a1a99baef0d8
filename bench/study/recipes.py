"""The experiments, as data: which servers, which settings, which loads. Pure.

    1      throughput by rate of requests and size of the batch
    2      preemptions by size of the batch, with little KV memory
    3      servers side by side by rate, each answer as long as asked for
    4      throughput by KV memory
    5      throughput by size of the model
    rates  the table of rates 0.2, 1, 2 and inf: throughput and latencies

All experiments use one kind of load: the first turns of conversations. Rates of 1 and 3 are shares
of what headrace does when all requests come at once, so that they mean the same on every host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.datasets import ManyTurns
from headrace.bench.lengths import Lengths
from headrace.bench.workload import Workload

OURS = "headrace"
GENAI = "openvino-genai"
LLAMA_CPP = "llama.cpp"
VLLM = "vllm"
PEERS = (GENAI, LLAMA_CPP, VLLM)
DEMO_MODEL = "smollm2-135m"

MAX_PROMPT_TOKENS = 1024
MAX_OUTPUT_TOKENS = 1024
MAX_TOKENS = MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS
_PROMPT_MEDIAN, _PROMPT_SIGMA = 128, 0.8
_OUTPUT_MEAN = 128
_BATCH = 64
_KV_TOKENS = 32_768
_SMALL_KV_TOKENS = 8192
_LEAST_PROMPTS = 12


def workload(sharegpt: Path | None) -> Workload:
    """The conversations of a file of ShareGPT, of those the first turns; or else log-normal prompts and exponential
    answers. Prompt and answer together fit into MAX_TOKENS."""
    inputs = Lengths("lognormal", _PROMPT_MEDIAN, _PROMPT_SIGMA, MAX_PROMPT_TOKENS)
    outputs = Lengths("exponential", _OUTPUT_MEAN, most=MAX_OUTPUT_TOKENS)
    return Workload(
        name="random" if sharegpt is None else "sharegpt",
        path=sharegpt,
        inputs=inputs,
        outputs=outputs,
        output_len=None,
        is_shuffled=True,
        random_prefix_len=0,
        num_prefixes=1,
        prefix_len=1,
        suffix_len=inputs,
        sonnet_input_len=1,
        sonnet_prefix_len=0,
        many_turns=ManyTurns(1, 0, 0, 1, inputs, outputs, MAX_TOKENS),
        trace_seconds=0.001,
        trace_block=None,
        most_tokens=MAX_TOKENS,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server that was started for it. `rate_name` is the rate in requests per second as tables call it,
    `inf` for all at once; `kv_tokens` is the size of the KV cache."""

    experiment: str
    server: str
    model: str
    rate_name: str
    num_prompts: int
    batch: int
    kv_tokens: int
    repetition: int

    @property
    def rate(self) -> float:
        """The rate in requests per second; infinite for all at once."""
        return float(self.rate_name)

    @property
    def key(self) -> str:
        """The name of the run and of its file."""
        parts = (self.experiment, self.model, self.server, f"rate-{self.rate_name}", f"batch-{self.batch}")
        return "_".join((*parts, f"kv-{self.kv_tokens}", f"r{self.repetition}")).replace("/", "-").replace(" ", "")


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is varied and how it is shown. `across` is the field of a run on the horizontal axis, `series` the one that
    gives a line each."""

    name: str
    title: str
    explanation: str
    across: str
    series: str
    servers: Sequence[str]
    figures: Sequence[str]


THROUGHPUT, PREEMPTIONS = "output_throughput", "preemptions"
TTFT, TTFT_P99, TPOT = "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms"

EXPERIMENTS = (
    Experiment(
        "1",
        "Throughput by rate and batch",
        "A larger batch gives more tokens per second once requests come faster than a small one can take them.",
        "rate_name",
        "batch",
        (OURS,),
        (THROUGHPUT, TTFT, TPOT),
    ),
    Experiment(
        "2",
        "Preemptions by batch",
        f"All requests come at once, and the KV cache holds only {_SMALL_KV_TOKENS:,} tokens. A batch that does not "
        "fit into it makes requests lose their blocks, which are then computed again.",
        "batch",
        "server",
        (OURS,),
        (PREEMPTIONS, THROUGHPUT, TPOT),
    ),
    Experiment(
        "3",
        "Servers side by side",
        "Every server gets the same requests and must give answers of exactly the lengths asked for, so all do the "
        "same work.",
        "rate_name",
        "server",
        (OURS, *PEERS),
        (THROUGHPUT, TTFT, TTFT_P99, TPOT),
    ),
    Experiment(
        "4",
        "Throughput by KV memory",
        "All requests come at once. With less KV memory fewer requests are computed together.",
        "kv_tokens",
        "server",
        (OURS, GENAI),
        (THROUGHPUT, TTFT_P99, TPOT),
    ),
    Experiment(
        "5",
        "Throughput by model size",
        "All requests come at once.",
        "model",
        "server",
        (OURS, GENAI),
        (THROUGHPUT, TTFT, TPOT),
    ),
    Experiment(
        "rates",
        "The table of rates",
        "Requests per second as in the white paper of OpenVINO Model Server: 0.2, 1, 2, and all at once.",
        "rate_name",
        "server",
        (OURS, GENAI),
        (THROUGHPUT, TTFT, TTFT_P99, TPOT),
    ),
)
NAMES = tuple(experiment.name for experiment in EXPERIMENTS)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `repetitions` are those of experiment 3; `seconds` is for how long requests come. `shares`
    are rates as shares of the capacity of the host, and `fixed_rates` those of the table, all in addition to all at
    once."""

    name: str
    repetitions: int
    repetitions_of_others: int
    seconds: float
    capacity_prompts: int
    batches: Sequence[int]
    batches_in_little_memory: Sequence[int]
    shares_of_batches: Sequence[float]
    shares_of_servers: Sequence[float]
    kv_tokens: Sequence[int]
    fixed_rates: Sequence[float]


FULL = Scale(
    name="full",
    repetitions=3,
    repetitions_of_others=2,
    seconds=25.0,
    capacity_prompts=96,
    batches=(8, 32, 128),
    batches_in_little_memory=(8, 16, 32, 64, 128),
    shares_of_batches=(0.5, 1.0),
    shares_of_servers=(0.3, 0.6, 0.9),
    kv_tokens=(4096, 8192, 16_384, 32_768),
    fixed_rates=(0.2, 1.0, 2.0),
)
QUICK = Scale(
    name="quick",
    repetitions=1,
    repetitions_of_others=1,
    seconds=4.0,
    capacity_prompts=16,
    batches=(8, 64),
    batches_in_little_memory=(8, 128),
    shares_of_batches=(0.5,),
    shares_of_servers=(0.6,),
    kv_tokens=(4096, 32_768),
    fixed_rates=(2.0,),
)


def capacity_run(model: str, scale: Scale) -> Run:
    """The run that measures the capacity of the host, from which the rates of the other runs follow."""
    return Run("0", OURS, model, "inf", scale.capacity_prompts, _BATCH, _KV_TOKENS, 1)


def runs(
    experiment: Experiment, scale: Scale, models: Sequence[str], servers: Sequence[str], capacity: Mapping[str, float]
) -> list[Run]:
    """The runs of an experiment in their order: repetitions outermost, and in each the servers in turn at each point,
    so that a host that slows down does so for all of them. `capacity` is that of each model in requests per second.
    """
    found = []
    taking_part = [server for server in experiment.servers if server in servers]
    repetitions = scale.repetitions if experiment.name == "3" else scale.repetitions_of_others
    for repetition in range(1, repetitions + 1):
        # Who is first alternates.
        order = taking_part if repetition % 2 else taking_part[::-1]
        for model, rate, batch, kv_tokens in _points(experiment.name, scale, models, capacity):
            per_s = min(rate, capacity[model])
            count = max(_LEAST_PROMPTS, math.ceil(per_s * scale.seconds))
            found += [
                Run(experiment.name, server, model, f"{rate:g}", count, batch, kv_tokens, repetition)
                for server in order
            ]
    return found


def _points(
    name: str, scale: Scale, models: Sequence[str], capacity: Mapping[str, float]
) -> Iterator[tuple[str, float, int, int]]:
    """Model, rate, batch and KV tokens of each point of an experiment."""
    first = models[0]
    match name:
        case "1":
            for rate in (*_shares(scale.shares_of_batches, capacity[first]), math.inf):
                for batch in scale.batches:
                    yield first, rate, batch, _KV_TOKENS
        case "2":
            for batch in scale.batches_in_little_memory:
                yield first, math.inf, batch, _SMALL_KV_TOKENS
        case "3":
            for rate in (*_shares(scale.shares_of_servers, capacity[first]), math.inf):
                yield first, rate, _BATCH, _KV_TOKENS
        case "4":
            for kv_tokens in scale.kv_tokens:
                yield first, math.inf, _BATCH, kv_tokens
        case "5":
            for model in models:
                yield model, math.inf, _BATCH, _KV_TOKENS
        case "rates":
            for rate in (*scale.fixed_rates, math.inf):
                yield first, rate, _BATCH, _KV_TOKENS


def _shares(shares: Sequence[float], capacity: float) -> list[float]:
    """The rates, rounded to two digits."""
    return [float(f"{share * capacity:.2g}") for share in shares]
