"""Datasets: conversations of one turn or several, generated or read from files. A generated prompt has exactly the
requested number of tokens, if there is a tokenizer to count them (`texts`)."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.lengths import Lengths
from headrace.bench.texts import Writer

_SHAREGPT_MIN = 4
_SHAREGPT_MAX_PROMPT = 1024
_SHAREGPT_MAX_TOTAL = 2048
_SHAREGPT_AT_ONCE = 64
_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"
_MAX_TRIES = 100


@dataclass(frozen=True, slots=True)
class Turn:
    """A question. `parts` are joined by spaces; long ones are shared among turns. Lengths are in tokens, and
    `think_s` is how long its user thinks after the previous answer."""

    parts: tuple[str, ...]
    prompt_tokens: int
    """Length of all parts, without what was said before."""
    output_tokens: int
    think_s: float = 0.0

    @property
    def text(self) -> str:
        """The question."""
        return " ".join(self.parts)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, one after the answer to the other. `system` is a prompt that stands before all, and `at_s` when it begins
    if the dataset says so, in seconds."""

    turns: tuple[Turn, ...]
    system: str = ""
    system_tokens: int = 0
    at_s: float | None = None

    @property
    def total_tokens(self) -> int:
        """Of its last prompt and answer, if answers are as long as asked for."""
        return self.system_tokens + sum(turn.prompt_tokens + turn.output_tokens for turn in self.turns)


class DatasetError(ValueError):
    """A dataset that cannot be used; the message says what to change."""


async def random_prompts(
    writer: Writer, rng: random.Random, count: int, inputs: Lengths, outputs: Lengths, prefix_tokens: int
) -> list[Conversation]:
    """Random words after a shared prefix."""
    prefix = writer.prompt(rng, prefix_tokens) if prefix_tokens else ""
    lengths = [prefix_tokens + inputs.draw(rng) for _ in range(count)]
    texts = [
        f"{prefix} {writer.words_of(rng, n - prefix_tokens)}" if prefix else writer.prompt(rng, n) for n in lengths
    ]
    texts = await writer.fitted(texts, lengths, rng)
    return [_single(text, n, outputs.draw(rng)) for text, n in zip(texts, lengths, strict=True)]


async def prefix_repetition(
    writer: Writer,
    rng: random.Random,
    count: int,
    num_prefixes: int,
    prefix_tokens: int,
    suffix: Lengths,
    outputs: Lengths,
) -> list[Conversation]:
    """`num_prefixes` prefixes, each with equally many random suffixes, in random order. Raises DatasetError."""
    if count < num_prefixes:
        raise DatasetError(f"--num-prompts {count} is less than --prefix-repetition-num-prefixes {num_prefixes}")
    prefixes = [writer.prompt(rng, prefix_tokens) for _ in range(num_prefixes)]
    lengths = [suffix.draw(rng) for _ in range(count)]
    texts = [f"{prefixes[i % num_prefixes]} {writer.words_of(rng, n)}" for i, n in enumerate(lengths)]
    totals = [prefix_tokens + n for n in lengths]
    texts = await writer.fitted(texts, totals, rng)
    found = [_single(text, n, outputs.draw(rng)) for text, n in zip(texts, totals, strict=True)]
    rng.shuffle(found)
    return found


@dataclass(frozen=True, slots=True)
class ManyTurns:
    """Conversations of users. The number of turns is geometric with mean `turns`, thinking exponential with mean
    `think_s`; `inputs` is the length of a question. A conversation ends before it exceeds `most_tokens`."""

    turns: float
    think_s: float
    system_tokens: int
    num_systems: int
    inputs: Lengths
    outputs: Lengths
    most_tokens: int

    async def draw(self, writer: Writer, rng: random.Random, count: int) -> list[Conversation]:
        """Conversations with `count` turns in all."""
        systems = (
            [writer.prompt(rng, self.system_tokens) for _ in range(self.num_systems)] if self.system_tokens else []
        )
        found: list[Conversation] = []
        while count > 0:
            total = self.system_tokens
            turns: list[Turn] = []
            while len(turns) < count and (not turns or rng.random() >= 1 / self.turns):
                length, output = self.inputs.draw(rng), self.outputs.draw(rng)
                total += length + output
                if turns and total > self.most_tokens:
                    break
                think_s = rng.expovariate(1 / self.think_s) if self.think_s and turns else 0.0
                turns.append(Turn((writer.text(rng, length),), length, output, think_s))
            count -= len(turns)
            system = rng.choice(systems) if systems else ""
            found.append(Conversation(tuple(turns), system, self.system_tokens if systems else 0))
        return found


async def sharegpt(
    writer: Writer, rng: random.Random, path: Path, count: int, output_tokens: int | None, is_shuffled: bool
) -> list[Conversation]:
    """The first question and the length of the first answer of ShareGPT's conversations that have two turns or more,
    at least 4 tokens in both, at most 1,024 in the question and 2,048 in both. Raises DatasetError."""
    entries = [entry for entry in _json_list(path) if len(_turns_of(entry)) >= 2]
    if is_shuffled:
        rng.shuffle(entries)
    found: list[Conversation] = []
    for start in range(0, len(entries), _SHAREGPT_AT_ONCE):
        pairs = [_turns_of(entry)[:2] for entry in entries[start : start + _SHAREGPT_AT_ONCE]]
        questions = await writer.counter.count([question for question, _ in pairs])
        if output_tokens is None:
            answers = await writer.counter.count([answer for _, answer in pairs])
        else:
            answers = [output_tokens] * len(pairs)
        for (question, _), prompt, answer in zip(pairs, questions, answers, strict=True):
            if is_sharegpt_pair(prompt, answer, output_tokens is not None):
                found.append(_single(question, prompt, answer))
        if len(found) >= count:
            return found[:count]
    return found


def is_sharegpt_pair(prompt_tokens: int, answer_tokens: int, has_own_length: bool = False) -> bool:
    """Whether a question and an answer of these lengths are taken. A given length of answers may be short."""
    return (
        prompt_tokens >= _SHAREGPT_MIN
        and (has_own_length or answer_tokens >= _SHAREGPT_MIN)
        and prompt_tokens <= _SHAREGPT_MAX_PROMPT
        and prompt_tokens + answer_tokens <= _SHAREGPT_MAX_TOTAL
    )


@dataclass(frozen=True, slots=True)
class Custom:
    """Prompts of a file with one JSON object with `prompt` a line. `output_tokens` of a line is the length of its
    answer, unless `is_fixed`: then all have `outputs`. `needs_own`: a line without a length is refused."""

    path: Path
    outputs: Lengths
    is_fixed: bool
    needs_own: bool

    async def read(self, writer: Writer, rng: random.Random, count: int, is_shuffled: bool) -> list[Conversation]:
        """At most `count` of them. Raises DatasetError."""
        rows = list(_json_lines(self.path))
        for number, row in enumerate(rows, 1):
            place = f"{self.path}, line {number}"
            if not isinstance(row.get("prompt"), str) or not row["prompt"]:
                raise DatasetError(f'{place}: there is no text "prompt"')
            if self.needs_own and "output_tokens" not in row:
                raise DatasetError(
                    f'{place}: there is no "output_tokens"; give --custom-output-len another value than -1'
                )
            if not isinstance(row.get("output_tokens", 1), int) or row.get("output_tokens", 1) < 1:
                raise DatasetError(f'{place}: "output_tokens" is not a positive integer')
        if is_shuffled:
            rng.shuffle(rows)
        return await _prompts(
            writer,
            [(row["prompt"], None if self.is_fixed else row.get("output_tokens")) for row in rows[:count]],
            self.outputs,
            rng,
        )


async def spec_bench(
    writer: Writer,
    rng: random.Random,
    path: Path,
    count: int,
    category: str | None,
    outputs: Lengths,
    is_shuffled: bool,
) -> list[Conversation]:
    """The first turns of Spec-Bench's questions, of one category or of all. Raises DatasetError."""
    found: list[tuple[str, int | None]] = []
    categories = set()
    for number, row in enumerate(_json_lines(path), 1):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise DatasetError(f'{path}, line {number}: there are no texts "turns"')
        categories.add(str(row.get("category")))
        if category is None or row.get("category") == category:
            found.append((turns[0], None))
    if not found and categories:
        names = ", ".join(sorted(categories))
        raise DatasetError(f"--spec-bench-category {category}: {path} has only {names}")
    if is_shuffled:
        rng.shuffle(found)
    return await _prompts(writer, found[:count], outputs, rng)


async def burstgpt(writer: Writer, rng: random.Random, path: Path, count: int, is_shuffled: bool) -> list[Conversation]:
    """Random words with the lengths of BurstGPT's requests to GPT-4 that were answered. Raises DatasetError."""
    try:
        lengths = [
            (int(row["Request tokens"]), int(row["Response tokens"]))
            for row in csv.DictReader(_text(path).splitlines())
            if row["Model"] == "GPT-4" and int(row["Response tokens"]) > 0
        ]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        columns = '"Model", "Request tokens" and "Response tokens"'
        raise DatasetError(f"{path} is not BurstGPT's CSV with the columns {columns}: {error!r}") from None
    if is_shuffled:
        rng.shuffle(lengths)
    taken = lengths[:count]
    targets = [max(prompt, 1) for prompt, _ in taken]
    texts = await writer.fitted([writer.prompt(rng, n) for n in targets], targets, rng)
    return [_single(text, n, answer) for text, n, (_, answer) in zip(texts, targets, taken, strict=True)]


async def sonnet(
    writer: Writer, rng: random.Random, path: Path, count: int, input_tokens: int, prefix_tokens: int, outputs: Lengths
) -> list[Conversation]:
    """Random lines of a poem after its first lines, which all prompts share. Prompts have at most `input_tokens`.
    Raises DatasetError."""
    lines = [f"{line}\n" for line in _text(path).splitlines() if line.strip()]
    if not lines:
        raise DatasetError(f"{path} has no lines")
    mean = sum(await writer.counter.count(lines)) / len(lines)
    (task,) = await writer.counter.count([_SONNET_TASK])
    if input_tokens <= task:
        raise DatasetError(f"--sonnet-input-len {input_tokens} is not more than the {task} tokens of the task")
    num_prefix = max(round((prefix_tokens - task) / mean), 0)
    num_more = max(round((input_tokens - task) / mean) - num_prefix, 0)
    prefix = "".join(lines[:num_prefix])
    found: list[Conversation] = []
    for _ in range(_MAX_TRIES):
        texts = [_SONNET_TASK + prefix + "".join(rng.choices(lines, k=num_more)) for _ in range(count - len(found))]
        counts = await writer.counter.count(texts)
        found += [
            _single(text, n, outputs.draw(rng)) for text, n in zip(texts, counts, strict=True) if n <= input_tokens
        ]
        if len(found) >= count:
            return found
    raise DatasetError(f"lines of {path} are too long for --sonnet-input-len {input_tokens}; give more")


class _TraceRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_TRACE_FIELDS = _TraceRow.__struct_fields__


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace of arrivals with the blocks of their prompts, as Mooncake published one. `seconds` is the length of a
    unit of its timestamps, and `block_tokens` the length of a block; None: as its lengths say."""

    path: Path
    seconds: float
    block_tokens: int | None
    most_tokens: int
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the fields in the file, for those that have another one than Mooncake's."""

    def read(self, writer: Writer, count: int, seed: int) -> tuple[list[Conversation], int]:
        """The first `count` requests that fit into `most_tokens`, and how many did not. Equal blocks have equal words.
        Raises DatasetError."""
        rows: list[_TraceRow] = []
        num_dropped = 0
        for number, raw in enumerate(_lines(self.path), 1):
            try:
                fields = msgspec.json.decode(raw, type=dict[str, Any])
                named = {name: self.names.get(name, name) for name in _TRACE_FIELDS}
                row = msgspec.convert({name: fields[own] for name, own in named.items() if own in fields}, _TraceRow)
            except msgspec.DecodeError as error:
                raise DatasetError(f"{self.path}, line {number}: {error}") from None
            if row.input_length < 1 or row.output_length < 1 or not math.isfinite(row.timestamp):
                raise DatasetError(f"{self.path}, line {number}: lengths are at least 1, and timestamps are finite")
            if row.input_length + row.output_length > self.most_tokens:
                num_dropped += 1
                continue
            rows.append(row)
            if len(rows) == count:
                break
        if not rows:
            raise DatasetError(f"no request of {self.path} has at most {self.most_tokens} tokens; see --max-total-len")
        block = self.block_tokens or _block_tokens(rows)
        texts: dict[int, str] = {}
        first_s = rows[0].timestamp
        found = []
        for number, row in enumerate(rows):
            parts = []
            left = row.input_length - writer.around
            for place in range(math.ceil(row.input_length / block)):
                # A prompt without ids for all its blocks has words of its own there.
                key = row.hash_ids[place] if place < len(row.hash_ids) else -1 - number
                if key not in texts:
                    texts[key] = writer.text(random.Random(f"{seed} {key}"), block)
                words = texts[key]
                if left < block:
                    words = " ".join(words.split(" ", max(left, 1))[: max(left, 1)])
                parts.append(words)
                left -= block
                if left <= 0:
                    break
            at_s = (row.timestamp - first_s) * self.seconds
            found.append(Conversation((Turn(tuple(parts), row.input_length, row.output_length),), at_s=at_s))
        return sorted(found, key=lambda conversation: conversation.at_s or 0.0), num_dropped


def _block_tokens(rows: Sequence[_TraceRow]) -> int:
    """The size of blocks that most prompts have: the power of two next to their length by number of blocks."""
    tally = Tally(
        1 << math.ceil(math.log2(row.input_length / len(row.hash_ids))) for row in rows if len(row.hash_ids) > 1
    )
    return tally.most_common(1)[0][0] if tally else 512


def _single(text: str, prompt_tokens: int, output_tokens: int) -> Conversation:
    return Conversation((Turn((text,), prompt_tokens, output_tokens),))


async def _prompts(
    writer: Writer, rows: Sequence[tuple[str, int | None]], outputs: Lengths, rng: random.Random
) -> list[Conversation]:
    """Prompts with the lengths of their answers; None: drawn from `outputs`."""
    counts = await writer.counter.count([prompt for prompt, _ in rows])
    return [_single(prompt, n, length or outputs.draw(rng)) for (prompt, length), n in zip(rows, counts, strict=True)]


def repeated(found: list[Conversation], count: int, rng: random.Random) -> list[Conversation]:
    """Exactly `count` conversations: the given ones, some of them repeated if there are too few."""
    return found + [rng.choice(found) for _ in range(count - len(found))]


def _turns_of(entry: Any) -> list[str]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        return []
    return [turn["value"] for turn in turns if isinstance(turn, dict) and isinstance(turn.get("value"), str)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read --dataset-path {path}: {error}") from None


def _json_list(path: Path) -> list[Any]:
    try:
        entries = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise DatasetError(f"{path} is not a list of conversations, as ShareGPT's file is")
    return entries


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise DatasetError(f"cannot read --dataset-path {path}: {error.strerror}") from None


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, raw in enumerate(_lines(path), 1):
        try:
            yield msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}, line {number}: not a JSON object: {error}") from None
