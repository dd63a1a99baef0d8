"""The flags of datasets, their lengths and their files: what is sent."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from headrace.bench.datasets import ManyTurns
from headrace.bench.lengths import SHAPES, Lengths
from headrace.bench.options import vllm
from headrace.bench.options.parsing import Section
from headrace.bench.options.values import OneOf, RangeRatio
from headrace.bench.workload import NAMES, OF_FILES, Workload
from headrace.common.commands import CommandError
from headrace.common.flags import FiniteRange

_NUM_PROMPTS = 1000
# What needs no file and is like it.
_GENERATED = {
    "sharegpt": ", or generate requests of similar lengths: --dataset-name random --input-len 128 --input-dist "
    "lognormal --output-dist exponential",
}
_TRACE_FIELDS = {
    "timestamp": "time of a request",
    "input_length": "length of its prompt",
    "output_length": "length of its answer",
    "hash_ids": "ids of its blocks",
}

FLAGS = Section(
    "What is asked",
    click.option(
        "--dataset-name",
        type=OneOf(NAMES, vllm.DATASETS),
        default="random",
        help="Generated: random words; prefix_repetition: random words after one of several prefixes, as of shared "
        "documents; multi_turn: conversations of users who think. From the file --dataset-path: sharegpt: first "
        "questions of ShareGPT's conversations, with answers as long as there; custom: your prompts; timed_trace: a "
        "trace of arrivals and lengths, at its own times; burstgpt: lengths of BurstGPT; spec_bench: questions of "
        "Spec-Bench; sonnet: lines of a poem.",
    ),
    click.option(
        "--dataset-path",
        type=click.Path(path_type=Path),
        help="File of sharegpt (JSON), custom (JSONL with `prompt`), timed_trace (Mooncake's JSONL), burstgpt (CSV), "
        "spec_bench (JSONL) or sonnet (text).",
    ),
    click.option(
        "--num-prompts",
        type=click.IntRange(-1),
        help="Number of requests; each turn of a conversation is one. 0 or -1: all of a file. Default: 1000.",
    ),
    click.option(
        "--no-oversample",
        is_flag=True,
        help="Send each prompt of a file at most once, even if it has fewer than --num-prompts.",
    ),
    click.option("--seed", type=int, default=0, help="Seed of prompts, lengths and arrivals."),
    click.option(
        "--tokenizer",
        help="Name of a cached model, or a directory, whose tokenizer counts tokens. Default: the server's /tokenize, "
        "if it has one.",
    ),
    click.option(
        "--input-len",
        type=click.IntRange(1),
        help="Tokens of a prompt, for random, sonnet and multi_turn. Default: that of the dataset's own flag below; "
        "128 for multi_turn.",
    ),
    click.option(
        "--output-len",
        type=click.IntRange(1),
        help="Tokens of an answer, for every dataset except timed_trace. Default: that of the dataset's own flag "
        "below; 128 for multi_turn; those of the file for sharegpt and burstgpt.",
    ),
    click.option(
        "--input-dist",
        type=click.Choice(SHAPES),
        help="Distribution of prompt lengths, for random, prefix_repetition (its suffixes) and multi_turn. The given "
        "length is the median of lognormal and the mean of exponential. Default: uniform with --random-range-ratio, "
        "else fixed; lognormal for multi_turn.",
    ),
    click.option(
        "--output-dist",
        type=click.Choice(SHAPES),
        help="Distribution of answer lengths, for the same datasets and custom. Default: as for prompts; exponential "
        "for multi_turn.",
    ),
    click.option("--lognormal-sigma", type=FiniteRange(0), default=1.0, help="Sigma of lognormal lengths."),
    click.option(
        "--max-total-len",
        type=click.IntRange(2),
        default=32768,
        help="Maximum tokens of prompt and answer together. Longer requests of a trace are left out, drawn lengths are "
        "at most half of it, and conversations end before it.",
    ),
    click.option("--random-input-len", type=click.IntRange(1), default=1024, help="random: tokens of a prompt."),
    click.option("--random-output-len", type=click.IntRange(1), default=128, help="random: tokens of an answer."),
    click.option(
        "--random-range-ratio",
        type=RangeRatio(),
        default="0.0",
        help="random: lengths are uniform within this share around the given ones; also as JSON, such as "
        '{"input": 0.3, "output": 0.5}.',
    ),
    click.option(
        "--random-prefix-len",
        type=click.IntRange(0),
        default=0,
        help="random: length of the prefix that all prompts share, in tokens.",
    ),
    click.option(
        "--sharegpt-output-len", type=click.IntRange(1), help="sharegpt: tokens of answers. Default: as in the file."
    ),
    click.option(
        "--custom-output-len",
        type=click.IntRange(-1),
        help="custom: tokens of an answer. -1: the `output_tokens` of each line. Default: `output_tokens` if a line "
        "has it, else 256.",
    ),
    click.option(
        "--spec-bench-output-len", type=click.IntRange(1), default=256, help="spec_bench: tokens of an answer."
    ),
    click.option("--spec-bench-category", help="spec_bench: category of questions to send. Default: all."),
    click.option("--sonnet-input-len", type=click.IntRange(1), default=550, help="sonnet: maximum tokens of a prompt."),
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
        help="prefix_repetition: tokens after the prefix.",
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
        help="timed_trace: seconds in one unit of the timestamps. Mooncake's are milliseconds; 0.0005 replays twice as "
        "fast.",
    ),
    click.option(
        "--timed-trace-chunk-hash-size",
        type=click.IntRange(1),
        help="timed_trace: tokens of a block in hash_ids. Default: derived from the lengths; 512 for Mooncake's.",
    ),
    *(
        click.option(
            f"--timed-trace-label-{name.replace('_', '-')}", default=name, help=f"timed_trace: field with the {what}."
        )
        for name, what in _TRACE_FIELDS.items()
    ),
    click.option(
        "--self-timed/--no-self-timed",
        default=None,
        help="timed_trace: send requests at the trace's times. Default: yes.",
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
        help="multi_turn: number of users, each with one conversation after the other. With --request-rate, so many "
        "conversations begin a second instead.",
    ),
    click.option(
        "--multi-turn-system-len", type=click.IntRange(0), default=512, help="multi_turn: tokens of the system prompt."
    ),
    click.option(
        "--multi-turn-num-systems", type=click.IntRange(1), default=1, help="multi_turn: number of system prompts."
    ),
    click.option("--disable-shuffle", is_flag=True, help="Use the entries of a file in their order."),
)


_READERS: Mapping[str, Collection[str]] = {
    "input_len": ("random", "sonnet", "multi_turn"),
    "input_dist": ("random", "prefix_repetition", "multi_turn"),
    "output_len": [name for name in NAMES if name != "timed_trace"],
    "output_dist": [name for name in NAMES if name not in ("timed_trace", "sharegpt", "burstgpt")],
    "disable_shuffle": sorted(OF_FILES - {"timed_trace", "sonnet"}),
}
"""The datasets that read a flag, of flags that do not begin with the name of one."""


def without_effect(name: str, given: Collection[str]) -> list[str]:
    """A sentence for each of the `given` flags that this dataset does not read."""
    found = []
    for flag in sorted(given):
        readers = _READERS.get(flag) or [each for each in NAMES if flag.startswith(f"{each}_")]
        if readers and name not in readers:
            found.append(
                f"--{flag.replace('_', '-')} has no effect on --dataset-name {name}: it is for {', '.join(readers)}"
            )
    return found


def count(flags: Mapping[str, Any]) -> int:
    """The number of requests. For a file, all requests in it if the flags say so."""
    asked = flags["num_prompts"]
    return _NUM_PROMPTS if asked is None else asked if asked > 0 else sys.maxsize


def workload(flags: Mapping[str, Any]) -> Workload:
    """The dataset with its numbers. Raises CommandError."""
    name = flags["dataset_name"]
    if name in OF_FILES and flags["dataset_path"] is None:
        instead = _GENERATED.get(name, "")
        raise CommandError(f"--dataset-name {name} reads a file; name it with --dataset-path{instead}")
    if name not in OF_FILES and flags["dataset_path"] is not None:
        names = ", ".join(sorted(OF_FILES))
        raise CommandError(f"--dataset-name {name} reads no file; name one of {names} for --dataset-path")
    if flags["dataset_path"] is not None and not flags["dataset_path"].is_file():
        raise CommandError(f"cannot read --dataset-path {flags['dataset_path']}: there is no such file")
    if name not in OF_FILES and flags["num_prompts"] is not None and flags["num_prompts"] < 1:
        raise CommandError(
            f"--num-prompts {flags['num_prompts']} sends all prompts of a file, and {name} reads none; give a "
            "number of requests"
        )
    sigma = flags["lognormal_sigma"]
    input_ratio, output_ratio = flags["random_range_ratio"] if name == "random" else (0.0, 0.0)
    custom_len = flags["custom_output_len"]
    if custom_len == 0:
        raise CommandError("--custom-output-len 0: give a length, or -1 for those of the file")
    most = flags["max_total_len"] // 2
    is_many = name == "multi_turn"

    def lengths(dist: str | None, usual: str, middle: int, ratio: float = 0.0) -> Lengths:
        shape = dist or ("uniform" if ratio else usual)
        return Lengths(shape, middle, sigma if shape == "lognormal" else ratio, most)  # type: ignore[arg-type]

    output_len = flags["output_len"]
    outputs = {
        "random": flags["random_output_len"],
        "custom": custom_len if custom_len is not None and custom_len > 0 else 256,
        "spec_bench": flags["spec_bench_output_len"],
        "sonnet": flags["sonnet_output_len"],
        "prefix_repetition": flags["prefix_repetition_output_len"],
    }
    output = lengths(
        flags["output_dist"],
        "exponential" if is_many else "fixed",
        output_len or outputs.get(name, 128),
        output_ratio,
    )
    inputs = lengths(
        flags["input_dist"],
        "lognormal" if is_many else "fixed",
        flags["input_len"] or (128 if is_many else flags["random_input_len"]),
        input_ratio,
    )
    return Workload(
        name=name,
        path=flags["dataset_path"],
        inputs=inputs,
        outputs=output,
        output_len=output_len or flags["sharegpt_output_len"] or (custom_len if custom_len != -1 else None),
        needs_own_lengths=custom_len == -1 and output_len is None,
        is_shuffled=not flags["disable_shuffle"],
        repeats=not flags["no_oversample"] and count(flags) != sys.maxsize,
        category=flags["spec_bench_category"],
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
        trace_names={name: flags[f"timed_trace_label_{name}"] for name in _TRACE_FIELDS},
        most_tokens=flags["max_total_len"],
    )
