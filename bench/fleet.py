"""A running headrace, as GET /console/fleet shows it: its workers, what they have learned, and its recent load."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import msgspec

from headrace.bench.calibration import Model
from headrace.bench.connection import Client, ExchangeError
from headrace.sim.step_logs import LearnedCost

_PATH = "/console/fleet"


class _Load(msgspec.Struct):
    num_blocks: int
    num_window_slots: int
    max_num_seqs: int
    transfer_bytes_per_s: float = 0.0
    step_costs: dict[str, LearnedCost] = {}
    counters: dict[str, int] = {}


class _Worker(msgspec.Struct):
    worker_id: str
    host: str
    state: str
    model: str
    load: _Load | None = None


class _Model(msgspec.Struct):
    id: str
    fingerprint: str
    max_context_tokens: int
    block_size: int
    kv_block_bytes: int
    kv_part_bytes: int
    window_tokens: int
    kv_precision: str
    vocab_size: int


class _Interval(msgspec.Struct):
    number: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    answered: int
    refused: int
    failed: int


class _Recent(msgspec.Struct):
    interval_s: float
    next: int
    num_intervals: int
    ttft_ms: dict[str, float | None]
    intervals: list[_Interval]


class _Fleet(msgspec.Struct):
    workers: list[_Worker]
    models: list[_Model]
    recent: _Recent


class RecentLoad(NamedTuple):
    """What the gateway served in its last minutes: requests a second, means per request in tokens, and percentiles of
    the time to the first token, None if it has none. Requests that were refused are not among them."""

    seconds: float
    per_s: float
    prompt: float
    cached: float
    answer: float
    num_refused: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None


class Fleet(NamedTuple):
    """A fleet of one model. `kv_tokens`, `max_num_seqs` and `window_slots` are those of its smallest worker; the costs
    are those of the worker that has learned from the most steps, None while none has. `peer_bytes_per_s` is the median
    of the speeds at which workers have fetched cached prefixes from each other, 0 if none has."""

    model: Model
    vocabulary: int
    num_workers: int
    num_hosts: int
    kv_tokens: int
    max_num_seqs: int
    window_slots: int
    peer_bytes_per_s: float
    prompts: LearnedCost | None
    decode: LearnedCost | None
    load: RecentLoad | None


async def fleet_of(client: Client, model: str | None = None) -> Fleet:
    """Ask the gateway for its fleet. Raises ExchangeError if it does not answer, if it is not a headrace of this
    version, or if it has no worker."""
    try:
        status, raw = await client.call("GET", f"{_PATH}?since=0")
    except ExchangeError as error:
        if error.kind == "connect":  # it names the server
            raise
        raise ExchangeError(error.kind, f"{client.target.url} does not tell of its fleet: {error}") from None
    if status in (401, 403):
        raise ExchangeError(f"HTTP {status}", "the server wants an API key; set OPENAI_API_KEY")
    if status != 200:
        raise ExchangeError(
            f"HTTP {status}", f"{client.target.url} has no {_PATH}: it is no headrace, or runs with --no-console"
        )
    try:
        return fleet_in(msgspec.json.decode(raw), model)
    except msgspec.DecodeError as error:
        raise ExchangeError(
            "malformed", f"{client.target.url} is a headrace of another version ({error}); use the same version here"
        ) from None


def fleet_in(body: Any, model: str | None) -> Fleet:
    """The fleet in the gateway's answer. Raises msgspec.ValidationError, or ExchangeError if there is no such model or
    no worker."""
    found = msgspec.convert(body, _Fleet)
    names = [one.id for one in found.models]
    generating = [one for one in found.models if one.block_size]
    wanted = [one for one in generating if model in (None, one.id)]
    if not wanted:
        raise ExchangeError(
            "model", f"the server has no model {model!r} that generates text; it has {', '.join(names)}"
        )
    if len(wanted) > 1:
        raise ExchangeError("model", f"the server has several models; name one of {', '.join(names)} with --model")
    (card,) = wanted
    workers = [(w, w.load) for w in found.workers if w.model == card.id and w.state == "ready" and w.load is not None]
    if not workers:
        raise ExchangeError("workers", f"no worker of {card.id} is ready")
    loads = [load for _, load in workers]
    both = [load.step_costs for load in loads if {"prompt", "decode"} <= load.step_costs.keys()]
    speeds = [load.transfer_bytes_per_s for load in loads if load.transfer_bytes_per_s]
    best = max(both, key=lambda costs: costs["decode"].num_steps, default=None)
    return Fleet(
        model=Model(
            name=card.id,
            fingerprint=card.fingerprint,
            max_context_tokens=card.max_context_tokens,
            block_tokens=card.block_size,
            kv_token_bytes=card.kv_block_bytes / card.block_size,
            kv_precision=card.kv_precision,
            window_tokens=card.window_tokens,
            window_token_bytes=card.kv_part_bytes / card.block_size if card.window_tokens else 0.0,
        ),
        vocabulary=card.vocab_size,
        num_workers=len(workers),
        num_hosts=len({worker.host for worker, _ in workers}),
        kv_tokens=min(load.num_blocks for load in loads) * card.block_size,
        max_num_seqs=min(load.max_num_seqs for load in loads),
        window_slots=min(load.num_window_slots for load in loads),
        peer_bytes_per_s=statistics.median(speeds) if speeds else 0.0,
        prompts=None if best is None else best["prompt"],
        decode=None if best is None else best["decode"],
        load=_load_of(found.recent),
    )


def _load_of(recent: _Recent) -> RecentLoad | None:
    """The load of the last minutes; None if nothing was answered."""
    intervals = recent.intervals
    answered = sum(one.answered for one in intervals)
    if not answered:
        return None
    # The first and the last interval with answers bound the time.
    numbers = [one.number for one in intervals if one.answered or one.tokens]
    seconds = (max(numbers) - min(numbers) + 1) * recent.interval_s
    return RecentLoad(
        seconds=seconds,
        per_s=answered / seconds,
        prompt=sum(one.prompt_tokens for one in intervals) / answered,
        cached=sum(one.cached_tokens for one in intervals) / answered,
        answer=sum(one.tokens for one in intervals) / answered,
        num_refused=sum(one.refused for one in intervals),
        ttft_p50_ms=recent.ttft_ms.get("p50"),
        ttft_p95_ms=recent.ttft_ms.get("p95"),
    )
