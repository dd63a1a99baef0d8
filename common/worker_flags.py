"""The flags of workers that `headrace serve` also takes and passes on, each declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from headrace.common.flags import FiniteRange

DEFAULT_KV_DISK_GB = 16
DEFAULT_MAX_ADAPTERS = 16
SPECULATION_KINDS = ("auto", "off", "ngram", "draft", "eagle3", "medusa", "mtp")
AUTO_RANKS = "auto"
DEFAULT_AWAIT_STAGES = "0.0.0.0:50070"
_NUM_RANKS = click.IntRange(1, 64)
_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Text(click.ParamType[str]):
    """A text. `name` is the placeholder for its value in help texts."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Eviction(click.ParamType[str]):
    """The value of --cache-eviction, checked."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value. Raises BadParameter if it is wrong."""
        # Imported late: this takes a while.
        from headrace.protos.cache_eviction import parse_eviction

        try:
            parse_eviction(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


class _Ranks(click.ParamType[int | str]):
    """A number of ranks, or "auto"."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The value. Raises BadParameter if it is neither."""
        return AUTO_RANKS if value == AUTO_RANKS else _NUM_RANKS.convert(value, param, ctx)


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
    """The help of `headrace serve`, which adds the default."""
    default: Any = None
    serve_flag: str = ""
    """The flag of `headrace serve`, if it has another name."""
    serve_type: click.ParamType[Any] | None = None
    """The type of `headrace serve`'s flag, if it has another one."""
    variable: str | None = None
    """The environment variable that `headrace serve` reads too, instead of one of its own."""
    is_repeated: bool = False
    of_encoders: bool = False
    """Whether `headrace serve` passes it on to workers that encode texts, which refuse flags of generation."""

    @property
    def option(self) -> str:
        """The option of `headrace serve` in Python."""
        name = (self.serve_flag or self.flag).removeprefix("--").replace("-", "_")
        return f"{name}s" if self.is_repeated else name

    @property
    def least(self) -> int:
        """The least value of a flag that is a number."""
        assert isinstance(self.type, click.IntRange)
        assert self.type.min is not None
        return int(self.type.min)

    def worker_option(self) -> Callable[[_Command], _Command]:
        """The decorator that adds the flag to the worker's command."""
        default = {} if self.default is None else {"default": self.default}
        names = [self.flag, self.option] if self.is_repeated else [self.flag]
        return click.option(*names, type=self.type, multiple=self.is_repeated, help=self.of_worker, **default)

    def serve_option(self) -> Callable[[_Command], _Command]:
        """The decorator that adds the flag to `headrace serve`."""
        kind = self.serve_type or self.type
        flag = self.serve_flag or self.flag
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        help_text = self.of_serve if shown is None else f"{self.of_serve}  [default: {shown}]"
        return click.option(
            flag, self.option, type=kind, multiple=self.is_repeated, envvar=self.variable, help=help_text
        )

    def arguments(self, value: Any) -> Iterator[str]:
        """The worker's arguments for a value; none for None, its default. Paths become absolute."""
        values = value if self.is_repeated and value is not None else [value]
        for one in values:
            if one is not None:
                yield from (self.flag, str(one.absolute() if isinstance(one, Path) else one))


MAX_CONTEXT_TOKENS = WorkerFlag(
    "--max-context-tokens",
    click.IntRange(2),
    of_worker="Maximum length of prompt and answer together, in tokens. Default: the model's.",
    of_serve="Maximum length of prompt and answer together, in tokens.  [default: the model's]",
)
MAX_TTFT = WorkerFlag(
    "--max-ttft-s",
    FiniteRange(0, min_open=True),
    of_worker="Refuse requests that would wait longer than this for other requests, in seconds, even if the router "
    "would let them wait. The time for their own prompt does not count.",
    of_serve="Refuse requests that would wait longer than this for others, in seconds.",
    default=60.0,
    serve_flag="--max-ttft",
    of_encoders=True,
)
MAX_IMAGES = WorkerFlag(
    "--max-images",
    click.IntRange(0, 1024),
    of_worker="Maximum number of images of a request, with those of earlier turns; 0: the model serves text only.",
    of_serve="Maximum number of images of a request, with those of earlier turns; 0 serves text only.",
    default=128,
)
IMAGE_CACHE_GB = WorkerFlag(
    "--image-cache-gb",
    FiniteRange(0),
    of_worker="Memory for encoded images, in GiB, so that the same image is not encoded again.",
    of_serve="Memory of each worker for encoded images, in GiB.",
    default=1.0,
)
MAX_ADAPTERS = WorkerFlag(
    "--max-adapters",
    click.IntRange(0, 1024),
    of_worker="Maximum number of adapters in memory; 0 for none. Adapters take a second copy of the model's weights. "
    f"Default: as many as --adapter names, at most {DEFAULT_MAX_ADAPTERS}.",
    of_serve="Maximum number of adapters in a worker's memory; 0 for none.  [default: the number of --adapter, at most "
    f"{DEFAULT_MAX_ADAPTERS}]",
)
TENSOR_PARALLEL = WorkerFlag(
    "--tensor-parallel",
    _NUM_RANKS,
    of_worker="Divide the model, or the layers of a stage, among this many processes, each on a NUMA node of its own "
    "among those of the CPUs on which the worker is started. All of them compute each step together.",
    of_serve="Number of NUMA nodes among which each worker or stage divides the model, for faster single answers or a "
    "model that is larger than a node. auto: the fewest nodes that hold the model and reach --target-tpot-ms.",
    default=1,
    serve_type=_Ranks(),
)
PIPELINE = WorkerFlag(
    "--pipeline",
    _NUM_RANKS,
    of_worker="Divide the layers of the model among this many stages: this worker, and processes that join at "
    "--await-stages or that --stage names. Each has the weights and the KV cache of its layers only.",
    of_serve="Divide the layers of the model among this many stages: a worker here, and others on hosts that join with "
    "headrace serve --join, or that --stage names.",
    default=1,
)
AWAIT_STAGES = WorkerFlag(
    "--await-stages",
    _Text("address"),
    of_worker="host:port or unix:/path at which the other stages of --pipeline join (--join), in the order of their "
    f"names. Default: {DEFAULT_AWAIT_STAGES}, unless --stage names them.",
    of_serve="host:port at which other hosts join the --pipeline (headrace serve --join).  [default: "
    f"{DEFAULT_AWAIT_STAGES}, unless --stage names the stages]",
)
STAGE = WorkerFlag(
    "--stage",
    _Text("address"),
    of_worker="Address of a later stage of --pipeline: a process that was started with --serve-stage and the same "
    "model. Repeat it for each stage, in order.",
    of_serve="host:port of a later stage of --pipeline, started by headrace worker --serve-stage. Repeat it for each "
    "stage, in order.",
    is_repeated=True,
)
WORKER_FLAGS = (
    TENSOR_PARALLEL,
    PIPELINE,
    AWAIT_STAGES,
    STAGE,
    WorkerFlag(
        "--kv-cache-gb",
        FiniteRange(0, min_open=True),
        of_worker="Size of the KV cache in GiB. Default: --kv-cache-share of the available memory.",
        of_serve="Size of each worker's KV cache, in GiB.  [default: 40 % of the available memory, divided among the "
        "workers]",
    ),
    WorkerFlag(
        "--max-num-seqs",
        click.IntRange(1),
        of_worker="Maximum number of requests in a batch. Default: 128, or fewer if steps are smaller.",
        of_serve="Maximum number of sequences in a batch of a worker.  [default: 128, or fewer if steps are smaller]",
        of_encoders=True,
    ),
    WorkerFlag(
        "--max-num-batched-tokens",
        click.IntRange(1),
        of_worker="Maximum number of tokens in a step. Default: 1024, or as many as this CPU computes exactly.",
        of_serve="Maximum number of tokens in a step.  [default: 1024, or as many as this CPU computes exactly]",
        of_encoders=True,
    ),
    WorkerFlag(
        "--max-num-mixed-tokens",
        click.IntRange(1),
        of_worker="Maximum number of tokens in a step with both prompts and running streams. Default: "
        "--max-num-batched-tokens.",
        of_serve="Maximum number of tokens in a step with running streams.  [default: --max-num-batched-tokens]",
    ),
    WorkerFlag(
        "--target-tpot-ms",
        FiniteRange(0, min_open=True),
        of_worker="Target time between two tokens of a running stream, while prompts are computed or images wait to be "
        "encoded. Default: 200 ms, or 1.9 times the time of a step without prompts, whichever is longer.",
        of_serve="Target time between two tokens of a running stream while prompts are computed, in milliseconds.  "
        "[default: 200, or 1.9 times the time of a step without prompts]",
    ),
    WorkerFlag(
        "--execution-mode",
        click.Choice(["performance", "accuracy"]),
        of_worker="Compute in the fastest precision of this CPU (performance), or in that of the model (accuracy).",
        of_serve="Compute in the fastest precision of this CPU (performance), or in that of the model (accuracy).",
        default="performance",
        of_encoders=True,
    ),
    WorkerFlag(
        "--decode-graph",
        click.Choice(["auto", "on", "off"]),
        of_worker="Keep a second copy of the weights that makes decode steps with few sequences faster. auto: on CPUs "
        "with AMX, if the copy takes at most a tenth of the memory.",
        of_serve="Keep a second copy of the weights that speeds up small batches on CPUs with AMX. auto: if it takes "
        "at most a tenth of the memory.",
        default="auto",
    ),
    WorkerFlag(
        "--speculation",
        click.Choice(SPECULATION_KINDS),
        of_worker="Speculative decoding: verify several proposed tokens in a step. Answers stay the same. ngram: "
        "always propose the tokens that followed the same text earlier in prompt or answer. auto: as ngram, but only "
        "as many tokens as make this worker faster. draft: as auto, and also propose tokens of --draft-model, a "
        "smaller model. eagle3, medusa: the same with heads in these formats. mtp: the same with a checkpoint's layer "
        "that predicts further tokens. All except off also propose a request's prediction, and the tokens that its "
        "grammar requires.  [default: the kind of --draft-model, else auto; off on CPUs with AMX, unless "
        "--execution-mode is accuracy]",
        of_serve="Speculative decoding: verify several proposed tokens in a step. Answers stay the same. auto: tokens "
        "from earlier text, if that is faster; ngram: always; off: never; draft, eagle3, medusa, mtp: also tokens of "
        "--draft-model, which must be of this kind.  [default: the kind of --draft-model, else auto; off on CPUs with "
        "AMX]",
    ),
    WorkerFlag(
        "--draft-model",
        click.Path(path_type=Path),
        of_worker="Directory with what proposes tokens: a smaller model with the same tokenizer, EAGLE-3 or Medusa "
        "heads for this model, or its checkpoint with a layer that predicts further tokens (MTP).",
        of_serve="What proposes tokens: a smaller model with the same tokenizer, EAGLE-3 or Medusa heads for this "
        "model, or its checkpoint with a layer that predicts further tokens (MTP). A name in the cache, a directory, "
        "or OWNER/NAME on a hub.  [default: none]",
        serve_type=_Text("name_or_dir"),
    ),
    WorkerFlag(
        "--draft-tree-tokens",
        click.IntRange(2, 64),
        of_worker="Let EAGLE-3 heads propose trees of up to this many tokens, with several candidates for a position; "
        "a step verifies as many as make this worker faster. Default: no trees, one candidate for each position.",
        of_serve="Let EAGLE-3 heads propose trees of up to this many tokens, with several candidates for a position.  "
        "[default: no trees]",
    ),
    WorkerFlag(
        "--draft-tree-depth",
        click.IntRange(1, 11),
        of_worker="Depth of these trees: the tokens on the longest path. Default: 5.",
        of_serve="Depth of these trees: the tokens on the longest path.  [default: 5]",
    ),
    WorkerFlag(
        "--draft-tree-top-k",
        click.IntRange(2, 16),
        of_worker="How many tokens of each depth are continued, and with how many candidates each. Default: 4.",
        of_serve="How many tokens of each depth are continued, and with how many candidates each.  [default: 4]",
    ),
    WorkerFlag(
        "--cache-eviction",
        _Eviction(),
        of_worker="Let long requests evict the KV blocks that they attend to least, so that answers may be longer than "
        "the KV cache. Answers then change. on-request: requests that ask for it. "
        "max_cache_size=TOKENS[,start_size=TOKENS][,recent_size=TOKENS][,aggregation_mode=sum|norm_sum]: all requests "
        "that do not set cache_eviction to false; this many tokens stay.",
        of_serve="Let long requests evict the tokens that they attend to least, so that answers may be longer than the "
        "KV cache. Their answers change. on-request: requests that ask for it. "
        "max_cache_size=TOKENS[,start_size=TOKENS][,recent_size=TOKENS][,aggregation_mode=sum|norm_sum]: all requests "
        "that do not set cache_eviction to false.",
        default="off",
    ),
    WorkerFlag(
        "--window-cache",
        click.Choice(["whole", "trim"]),
        of_worker="Tokens that layers with a sliding window keep of a request (Gemma 2 and 3, gpt-oss, Mistral 7B v0.1 "
        "and others). trim: only those that queries can still reach, so that the KV cache holds several times as many "
        "tokens. whole: all tokens.",
        of_serve="Let layers with a sliding window keep all tokens, or only their windows (trim). With trim the KV "
        "cache holds several times as many tokens.",
        default="whole",
    ),
    WorkerFlag(
        "--kv-precision",
        click.Choice(["u8", "u4", "bf16", "f32"]),
        of_worker="Precision of the KV cache. A lower precision holds more tokens.",
        of_serve="Precision of the KV cache. A lower precision holds more tokens.",
        default="u8",
    ),
    MAX_CONTEXT_TOKENS,
    MAX_TTFT,
    WorkerFlag(
        "--stuck-after-s",
        FiniteRange(0, min_open=True),
        of_worker="Stop serving while there is work and no step has finished for this many seconds. If steps are "
        "expected to be long, the limit is higher. While a divided model loads, also the time after which a rank or "
        "stage that does nothing is lost.",
        of_serve="Seconds without a step after which a worker that has work counts as failed.",
        default=60.0,
        of_encoders=True,
    ),
    WorkerFlag(
        "--kv-disk",
        click.Path(path_type=Path, file_okay=False),
        of_worker="Directory on a fast disk for cached prefixes that leave the KV cache. Workers of one host share it.",
        of_serve="Directory on a fast disk for cached prefixes evicted from the KV caches.  [default: none]",
    ),
    WorkerFlag(
        "--kv-disk-gb",
        FiniteRange(0, min_open=True),
        of_worker="Size of the files in --kv-disk, in GiB, for each model. It is reserved at the start.  [default: "
        f"{DEFAULT_KV_DISK_GB}]",
        of_serve=f"Size of each model's files in --kv-disk, in GiB.  [default: {DEFAULT_KV_DISK_GB}]",
    ),
    WorkerFlag(
        "--kv-disk-key",
        click.Path(path_type=Path, dir_okay=False),
        of_worker="File with a key of 64 hexadecimal digits that encrypts the files in --kv-disk. Default: no "
        "encryption.",
        of_serve="Encrypt the files in --kv-disk with the key in this file, 64 hexadecimal digits.  [default: no "
        "encryption]",
        variable="HEADRACE_WORKER_KV_DISK_KEY",
    ),
    WorkerFlag(
        "--adapter",
        _Text("name=path"),
        of_worker="LoRA adapter: a directory in PEFT's format, or a GGUF file. Requests select it by NAME as their "
        "model. May be repeated.",
        of_serve="LoRA adapter: a directory in PEFT's format, or a GGUF file. Requests select it by NAME as their "
        "model. May be repeated.",
        is_repeated=True,
    ),
    MAX_ADAPTERS,
    MAX_IMAGES,
    WorkerFlag(
        "--max-image-pixels",
        click.IntRange(4096),
        of_worker="Maximum number of pixels of an image, for models that take images of any size (Qwen's, Pixtral's). "
        "Larger images are scaled down. The time to encode an image grows faster than its pixels. Default: 1003520.",
        of_serve="Maximum number of pixels of an image, for models that take images of any size. Larger images are "
        "scaled down.  [default: 1003520]",
    ),
    WorkerFlag(
        "--image-threads",
        click.IntRange(1),
        of_worker="Number of threads that encode images, in a process of lower priority beside the engine. Default: as "
        "many as --threads.",
        of_serve="Threads of each worker that encode images, at a lower priority.  [default: as many as --threads]",
    ),
    IMAGE_CACHE_GB,
)
"""In the order of help texts."""


def worker_options(command: _Command) -> _Command:
    """Decorator: add all flags of workers to the worker's command."""
    for flag in reversed(WORKER_FLAGS):
        command = flag.worker_option()(command)
    return command


def serve_options(command: _Command) -> _Command:
    """Decorator: add all flags of workers to `headrace serve`."""
    for flag in reversed(WORKER_FLAGS):
        command = flag.serve_option()(command)
    return command


def arguments(of_all: Mapping[str, Any], own: Mapping[str, Any], *, is_encoder: bool) -> list[str]:
    """The arguments of a model's workers, from the options of `headrace serve` (`of_all`) and from the model's own
    options (`own`), which take precedence. None means that an option is not given. A worker that encodes texts gets its
    own options and those for encoders."""
    assert {*of_all, *own} <= {flag.option for flag in WORKER_FLAGS}
    argv: list[str] = []
    for flag in WORKER_FLAGS:
        value = own.get(flag.option)
        if value is None and (flag.of_encoders or not is_encoder):
            value = of_all.get(flag.option)
        argv += flag.arguments(value)
    return argv
