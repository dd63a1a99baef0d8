"""How many workers a model needs: the demand of its requests, measured in workers, and its forecast. Pure.

    need     = the largest of three shares, at the utilisation that workers are planned for:
                 seats     requests that are there, those that were refused included, by places in a batch
                 prompts   tokens to be computed, by the learned rate of prompts: those that arrive in a second, and
                           those that wait, which are to be computed within `BACKLOG_S`
                 blocks    KV blocks that requests use or wait for, by the blocks of a worker
    forecast = the need after `HORIZON_S`, by its mean and its trend; not below its mean over some minutes

A new worker needs time to load its model, and takes its cached prefixes along when it goes. So the forecast rises with
the trend, and falls slowly.
"""

from __future__ import annotations

import math

import msgspec

from headrace.router.placement.candidates import Candidates, Columns, Values
from headrace.router.placement.rates import Priors, believed_rates

UTILISATION = 0.8
"""The part of a worker's places, blocks and time for prompts that is planned to be in use."""
BACKLOG_S = 10.0
"""The time in which the prompts that wait are to be computed."""
HORIZON_S = 30.0
"""How far ahead the forecast looks: the time in which a worker starts."""
WINDOW_S = 180.0
"""The time over which the need is averaged before fewer workers are wanted."""
_TREND_S = 20.0
# The number of workers changes only if the need passes the border between two numbers by this much.
_MARGIN = 0.1


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """What one worker of a model has, on average: places in its batch, KV blocks (0 if it has reported none), and the
    learned rate of prompts."""

    seats: float = 16.0
    blocks: float = 0.0
    prefill_tokens_per_s: float = 1000.0

    @classmethod
    def of(cls, candidates: Candidates, priors: Priors) -> Capacity | None:
        """The mean of these workers. None if none has reported its load yet."""
        columns = candidates.columns
        if not len(candidates) or not columns.max_num_seqs.any():
            return None
        prefill = believed_rates(columns, priors)[0]
        return cls(float(columns.max_num_seqs.mean()), float(columns.blocks.mean()), float(prefill.mean()))


class Work(msgspec.Struct, frozen=True, gc=False):
    """The work on a model at one moment. `num_at_workers` requests run or wait at workers, or are on the way there;
    `num_waiting` wait at routers, with `waiting_tokens` prompt tokens; `num_refused` were refused and would otherwise
    be there. At workers, `uncached_tokens` prompt tokens remain to be computed, and `tokens_per_s` more arrive. The
    requests at workers use `used_blocks` blocks."""

    num_at_workers: float = 0.0
    num_waiting: float = 0.0
    num_refused: float = 0.0
    uncached_tokens: float = 0.0
    waiting_tokens: float = 0.0
    tokens_per_s: float = 0.0
    used_blocks: float = 0.0


def used_blocks(columns: Columns[Values]) -> float:
    """The KV blocks that requests at these workers use, without those that hold only reusable content."""
    return float((columns.blocks - columns.free_blocks).clip(0.0).sum())


def kv_pressure(columns: Columns[Values]) -> float:
    """The part of the KV blocks of these workers that requests use, from 0 to 1."""
    blocks = float(columns.blocks.sum())
    return min(used_blocks(columns) / blocks, 1.0) if blocks else 0.0


def backlog_s(work: Work, num_workers: int, capacity: Capacity) -> float:
    """Seconds in which `num_workers` workers, at least one, compute the prompts that wait."""
    return (work.uncached_tokens + work.waiting_tokens) / (max(num_workers, 1) * capacity.prefill_tokens_per_s)


def need_of(work: Work, capacity: Capacity) -> float:
    """How many workers the work needs; see the module. Requests that wait are assumed to need as many blocks as those
    that run."""
    seats = (work.num_at_workers + work.num_waiting + work.num_refused) / capacity.seats
    tokens_per_s = work.tokens_per_s + (work.uncached_tokens + work.waiting_tokens) / BACKLOG_S
    prompts = tokens_per_s / capacity.prefill_tokens_per_s
    blocks = 0.0
    if capacity.blocks and work.num_at_workers:
        blocks = work.used_blocks * (1 + work.num_waiting / work.num_at_workers) / capacity.blocks
    return max(seats, prompts, blocks) / UTILISATION


class Mean:
    """An exponentially weighted mean of values that are observed at irregular times. Each value is weighted by the time
    since the previous one."""

    __slots__ = ("_at_s", "_span_s", "value")

    def __init__(self, span_s: float) -> None:
        self.value = 0.0
        self._span_s = span_s
        self._at_s: float | None = None

    def observe(self, value: float, now_s: float) -> float:
        """Add a value. Returns the mean."""
        if self._at_s is None:
            self.value = value
        else:
            self.value += (value - self.value) * -math.expm1((self._at_s - now_s) / self._span_s)
        self._at_s = now_s
        return self.value


class Forecast:
    """The need of one model, observed again and again."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._mean = Mean(_TREND_S)
        self._mean_of_mean = Mean(_TREND_S)
        self._slow = Mean(window_s)
        self._num_wanted = 0

    def observe(self, need: float, now_s: float) -> int:
        """Add the current need. Returns the number of wanted workers: at least one if there ever was a need."""
        mean = self._mean.observe(need, now_s)
        behind = self._mean_of_mean.observe(mean, now_s)
        slow = self._slow.observe(need, now_s)
        # Two means, of which one follows the other, give the level and the slope of a line (Brown).
        ahead = 2 * mean - behind + (mean - behind) * HORIZON_S / _TREND_S
        wanted = max(ahead, slow, 0.0)
        at_least = math.ceil(wanted - _MARGIN)
        at_most = math.ceil(wanted + _MARGIN)
        self._num_wanted = min(max(self._num_wanted, at_least), at_most)
        return self._num_wanted
