"""The flags of workers that `headrace serve` also takes and passes on, each declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from headrace.common.flags import FiniteRange

SPECULATION_KINDS = ("auto", "off", "ngram", "draft", "eagle3", "medusa")
_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class WorkerFlag:
    """A flag of the worker and of `headrace serve`.

    Without `default`, the worker chooses by itself. `headrace serve` has no defaults: it passes on what it is given.
    """

    flag: str
    type: click.ParamType[Any]
    of_worker: str
    """The help of `python -m headrace.worker`."""
    of_serve: str
    """The help of `headrace serve`."""
    default: Any = None
    serve_flag: str = ""
    """The flag of `headrace serve`, if it has another name."""

    @property
    def option(self) -> str:
        """The option of `headrace serve` in Python."""
        return (self.serve_flag or self.flag).removeprefix("--").replace("-", "_")

    @property
    def least(self) -> int:
        """The least value of a flag that counts."""
        assert isinstance(self.type, click.IntRange)
        assert self.type.min is not None
        return int(self.type.min)

    def worker_option(self, default: Any = None) -> Callable[[_Command], _Command]:
        """The decorator of the worker's command, with `default` if the table has none."""
        given = self.default if default is None else default
        return click.option(
            self.flag, type=self.type, help=self.of_worker, **({} if given is None else {"default": given})
        )

    def serve_option(self) -> Callable[[_Command], _Command]:
        """The decorator of `headrace serve`."""
        return click.option(self.serve_flag or self.flag, type=self.type, help=self.of_serve)

    def arguments(self, value: Any) -> list[str]:
        """The worker's arguments for a value; none for None, its default."""
        return [] if value is None else [self.flag, str(value)]


KV_CACHE_GB = WorkerFlag(
    "--kv-cache-gb",
    FiniteRange(0, min_open=True),
    of_worker="Size of the KV cache in GiB.",
    of_serve="KV cache of each worker, in GiB.",
)
MAX_NUM_SEQS = WorkerFlag(
    "--max-num-seqs",
    click.IntRange(1),
    of_worker="Maximum number of requests in a batch. Default: 128, or fewer if steps are smaller.",
    of_serve="Largest batch of each worker, in sequences.",
)
MAX_NUM_BATCHED_TOKENS = WorkerFlag(
    "--max-num-batched-tokens",
    click.IntRange(1),
    of_worker="Maximum number of tokens in a step. Default: 1024, or as many as this CPU computes exactly.",
    of_serve="Maximum number of tokens in a step.",
)
MAX_NUM_MIXED_TOKENS = WorkerFlag(
    "--max-num-mixed-tokens",
    click.IntRange(1),
    of_worker="Maximum number of tokens in a step with both prompts and running streams. Default: "
    "--max-num-batched-tokens.",
    of_serve="Maximum number of tokens in a step with running streams.",
)
EXECUTION_MODE = WorkerFlag(
    "--execution-mode",
    click.Choice(["performance", "accuracy"]),
    of_worker="Compute in the fastest precision of this CPU, or in that of the model.",
    of_serve="Compute in the fastest precision, or in that of the model.  [default: performance]",
    default="performance",
)
DECODE_GRAPH = WorkerFlag(
    "--decode-graph",
    click.Choice(["auto", "on", "off"]),
    of_worker="Keep a second copy of the weights that makes decode steps with few sequences faster. auto: on CPUs "
    "with AMX, if the copy takes at most a tenth of the memory.",
    of_serve="Keep a second copy of the weights, which speeds up small batches on CPUs with AMX.  [default: auto]",
    default="auto",
)
SPECULATION = WorkerFlag(
    "--speculation",
    click.Choice(SPECULATION_KINDS),
    of_worker="Speculative decoding: verify several proposed tokens in a step. Answers stay the same. ngram: always "
    "propose the tokens that followed the same text earlier in prompt or answer. auto: as ngram, but only as many "
    "tokens as make this worker faster. draft: as auto, and also tokens of --draft-model. eagle3, medusa: the same "
    "with heads in these formats. All propose a request's prediction, and the tokens that its grammar requires.  "
    "[default: the kind of --draft-model, else auto; off on CPUs with AMX, unless --execution-mode is accuracy]",
    of_serve="Verify several proposed tokens in a step: when it makes answers faster, never, always, or with "
    "--draft-model.  [default: what --draft-model names, else auto; off on CPUs with AMX]",
)
WINDOW_CACHE = WorkerFlag(
    "--window-cache",
    click.Choice(["whole", "trim"]),
    of_worker="Tokens that layers with a sliding window keep of a request (Gemma 2 and 3, gpt-oss, Mistral 7B v0.1 "
    "and others). trim: only those that queries can still reach, so that the KV cache holds several times as many "
    "tokens. The KV cache is then not kept after a crash. whole: all tokens.",
    of_serve="Let layers with a sliding window keep all tokens, or only their windows (trim). With trim the KV cache "
    "holds several times as many tokens, but is not kept after a crash.  [default: whole]",
    default="whole",
)
KV_PRECISION = WorkerFlag(
    "--kv-precision",
    click.Choice(["u8", "u4", "bf16", "f32"]),
    of_worker="Precision of the KV cache. A lower precision holds more tokens.",
    of_serve="Precision of the KV cache. A lower precision holds more tokens.  [default: u8]",
    default="u8",
)
MAX_CONTEXT_TOKENS = WorkerFlag(
    "--max-context-tokens",
    click.IntRange(2),
    of_worker="Maximum length of prompt and answer together. Default: the model's.",
    of_serve="Maximum length of prompt and answer together, in tokens.  [default: the model's]",
)
MAX_TTFT_S = WorkerFlag(
    "--max-ttft-s",
    FiniteRange(0, min_open=True),
    of_worker="Refuse requests that would wait longer than this for other requests. The time for their own prompt "
    "does not count.",
    of_serve="Maximum time that a request waits for others, in seconds.",
    default=60.0,
    serve_flag="--max-ttft",
)
STUCK_AFTER_S = WorkerFlag(
    "--stuck-after-s",
    FiniteRange(0, min_open=True),
    of_worker="Stop serving while there is work and no step has finished for this long. If steps are expected to be "
    "long, the limit is higher.",
    of_serve="Seconds without a step after which a worker that has work counts as failed.  [default: 60]",
)
KV_DISK_GB = WorkerFlag(
    "--kv-disk-gb",
    FiniteRange(0, min_open=True),
    of_worker="Size of the files in --kv-disk, in GiB, for each model. It is reserved at the start.  [default: 16]",
    of_serve="Size of each model's files in --kv-disk, in GiB.  [default: 16]",
)
MAX_ADAPTERS = WorkerFlag(
    "--max-adapters",
    click.IntRange(0, 1024),
    of_worker="Number of adapters in memory at a time; 0 for none. Adapters take a second copy of the model's "
    "weights. Default: as many as --adapter names, at most 16.",
    of_serve="Maximum adapters in a worker's memory; 0 for none.  [default: the number of --adapter, at most 16]",
)

OF_ALL_MODELS = (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, EXECUTION_MODE, MAX_TTFT_S, STUCK_AFTER_S)
"""What `headrace serve` passes on to every worker."""
OF_GENERATION = (MAX_NUM_MIXED_TOKENS, DECODE_GRAPH, SPECULATION, WINDOW_CACHE, KV_PRECISION, KV_DISK_GB)
"""What it passes on to workers that generate text; those that encode texts refuse it."""
