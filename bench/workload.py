"""Which dataset is asked, with its numbers: from the flags to conversations."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.bench import datasets
from headrace.bench.datasets import Conversation, Custom, DatasetError, ManyTurns, Trace
from headrace.bench.lengths import Lengths
from headrace.bench.texts import Writer

NAMES = (
    *("random", "prefix_repetition", "multi_turn", "sharegpt", "custom", "timed_trace", "burstgpt", "spec_bench"),
    "sonnet",
)
OF_FILES = frozenset({"sharegpt", "custom", "timed_trace", "burstgpt", "spec_bench", "sonnet"})


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
    trace_names: Mapping[str, str] = field(default_factory=dict)
    """Names of a trace's fields, for those that have another one than Mooncake's."""
    needs_own_lengths: bool = False
    """Whether each prompt of a file must say how long its answer is."""
    repeats: bool = True
    """Whether prompts of a file are asked again if there are too few."""
    category: str | None = None
    """Of Spec-Bench's questions; None: all."""

    @property
    def obeys_most_tokens(self) -> bool:
        """Whether longer requests are left out. Other datasets have the lengths that were given, or those of a file."""
        return self.name in ("timed_trace", "multi_turn")

    async def draw(self, writer: Writer, count: int, seed: int) -> Drawn:
        """Conversations with `count` requests in all, or fewer if a file has fewer and they are not repeated; the same
        for the same seed. Raises DatasetError."""
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
        if self.name == "timed_trace":
            trace = Trace(path, self.trace_seconds, self.trace_block, self.most_tokens, self.trace_names)
            found, num_dropped = trace.read(writer, count, seed)
            note = f"left out {num_dropped} requests of more than {self.most_tokens} tokens" if num_dropped else ""
            return Drawn(found, note)
        found = await self._read(writer, rng, path, count)
        if not found:
            raise DatasetError(f"{path} has nothing that can be asked")
        if len(found) < count and self.repeats:
            return Drawn(datasets.repeated(found, count, rng), f"{path} has {len(found)} prompts; some are asked again")
        return Drawn(found)

    async def _read(self, writer: Writer, rng: random.Random, path: Path, count: int) -> list[Conversation]:
        match self.name:
            case "sharegpt":
                return await datasets.sharegpt(writer, rng, path, count, self.output_len, self.is_shuffled)
            case "custom":
                custom = Custom(path, self.outputs, self.output_len is not None, self.needs_own_lengths)
                return await custom.read(writer, rng, count, self.is_shuffled)
            case "spec_bench":
                return await datasets.spec_bench(
                    writer, rng, path, count, self.category, self.outputs, self.is_shuffled
                )
            case "burstgpt":
                return await datasets.burstgpt(writer, rng, path, count, self.is_shuffled)
        lengths = (self.sonnet_input_len, self.sonnet_prefix_len, self.outputs)
        return await datasets.sonnet(writer, rng, path, count, *lengths)
