"""Which dataset is asked, with its numbers: from the flags to conversations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.bench import datasets
from headrace.bench.datasets import Conversation, DatasetError, ManyTurns, Trace
from headrace.bench.lengths import Lengths
from headrace.bench.texts import Writer

NAMES = ("random", "sharegpt", "prefix_repetition", "custom", "timed_trace", "sonnet", "multi_turn")
OF_FILES = frozenset({"sharegpt", "custom", "timed_trace", "sonnet"})


class Drawn(NamedTuple):
    """Conversations, and a sentence on what was left out, if anything was."""

    conversations: list[Conversation]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset and its numbers. Lengths are in tokens; see `datasets` for what each means."""

    name: str
    path: Path | None
    inputs: Lengths
    outputs: Lengths
    output_len: int | None
    """A length of answers that was given on the command line; None: the dataset's own."""
    is_shuffled: bool
    random_prefix_len: int
    num_prefixes: int
    prefix_len: int
    suffix_len: Lengths
    sonnet_input_len: int
    sonnet_prefix_len: int
    many_turns: ManyTurns
    trace_seconds: float
    trace_block: int | None
    most_tokens: int

    async def draw(self, writer: Writer, count: int, seed: int) -> Drawn:
        """Conversations with `count` requests in all, the same for the same seed. Raises DatasetError."""
        rng = random.Random(f"{self.name} {seed}")
        match self.name:
            case "random":
                prefix = self.random_prefix_len
                return Drawn(await datasets.random_prompts(writer, rng, count, self.inputs, self.outputs, prefix))
            case "prefix_repetition":
                numbers = (self.num_prefixes, self.prefix_len, self.suffix_len, self.outputs)
                return Drawn(await datasets.prefix_repetition(writer, rng, count, *numbers))
            case "multi_turn":
                return Drawn(await self.many_turns.draw(writer, rng, count))
        path = self.path
        if path is None:
            raise DatasetError(f"--dataset-name {self.name} reads a file; name it with --dataset-path")
        match self.name:
            case "sharegpt":
                return Drawn(await datasets.sharegpt(writer, rng, path, count, self.output_len, self.is_shuffled))
            case "custom":
                return Drawn(await datasets.custom(writer, rng, path, count, self.outputs, self.is_shuffled))
            case "sonnet":
                lengths = (self.sonnet_input_len, self.sonnet_prefix_len, self.outputs)
                return Drawn(await datasets.sonnet(writer, rng, path, count, *lengths))
        trace = Trace(path, self.trace_seconds, self.trace_block, self.most_tokens)
        found, num_dropped = trace.read(writer, count, seed)
        note = f"left out {num_dropped} requests of more than {self.most_tokens} tokens" if num_dropped else ""
        return Drawn(found, note)
