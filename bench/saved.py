"""Reads saved results, of this client or of `vllm bench serve`, for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

_NUM_QUANTILES = 200


@dataclass(frozen=True, slots=True)
class Request:
    """One request: times in seconds after the first one's."""

    sent_s: float
    first_s: float
    ended_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A result. `quantiles_ms` has quantiles of metrics at even steps from 0 to 100 %, of those that were saved."""

    name: str
    numbers: Mapping[str, Any]
    quantiles_ms: Mapping[str, Sequence[float]]
    requests: Sequence[Request] = ()
    in_flight: Sequence[float] = ()
    output_tokens: Sequence[float] = ()
    findings: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_checked(self) -> bool:
        """Whether its answers were checked. Those of other clients are not."""
        return "answers_are_right" in self.numbers

    @property
    def num_wrong(self) -> int:
        """Answers that are wrong in the same way: the largest number of them."""
        return max((int(each["count"]) for each in self.findings), default=0)

    def number(self, key: str) -> float | None:
        """A figure; None if it is not there."""
        value = self.numbers.get(key)
        return float(value) if isinstance(value, int | float) else None

    def quantile_ms(self, metric: str, percent: float) -> float | None:
        """A quantile of a metric, from the saved ones or from the summary."""
        found = self.quantiles_ms.get(metric)
        if found:
            return float(np.interp(percent, np.linspace(0, 100, len(found)), found))
        return self.number(f"median_{metric}_ms" if percent == 50 else f"p{percent:g}_{metric}_ms")


def read(path: Path) -> Iterator[SavedRun]:
    """The results in a file: one JSON object, or one on each line. Raises ValueError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    lines = [line for line in raw.splitlines() if line.strip()]
    try:
        try:
            found = [msgspec.json.decode(raw, type=dict[str, Any])]
        except msgspec.DecodeError:
            found = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a result in JSON: {error}") from None
    for number, result in enumerate(found):
        if "duration" not in result or "completed" not in result:
            raise ValueError(f"{path} is not a result of a benchmark: it has no duration; save one with --save-result")
        name = str(result.get("label") or path.stem)
        if len(found) > 1:
            rate = result.get("request_rate")
            name = f"{name} {rate:.2f}/s" if isinstance(rate, float) else f"{name} {number + 1}"
        yield of(name, result)


def of(name: str, result: Mapping[str, Any]) -> SavedRun:
    """A result under a name."""
    own = result.get("headrace")
    own = own if isinstance(own, dict) else {}
    timeline = own.get("timeline", {})
    return SavedRun(
        name,
        {key: value for key, value in {**result, **own}.items() if not isinstance(value, list | dict)},
        {metric: values for metric, values in _quantiles(result, own).items() if values},
        _requests(result),
        timeline.get("in_flight", ()),
        timeline.get("output_tokens", ()),
        own.get("findings", ()),
        own.get("errors_by_kind", {}),
    )


def _quantiles(result: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, list[float]]:
    saved = own.get("quantiles_ms")
    if isinstance(saved, dict):
        return saved
    errors = result.get("errors") or []
    failed = {i for i, error in enumerate(errors) if error}
    ttfts = [t for i, t in enumerate(result.get("ttfts") or []) if i not in failed and t]
    gaps = [gap for i, gaps in enumerate(result.get("itls") or []) if i not in failed for gap in gaps]
    shares = np.linspace(0, 100, _NUM_QUANTILES + 1)
    return {
        name: [float(v) * 1000 for v in np.percentile(values, shares)] if values else []
        for name, values in (("ttft", ttfts), ("itl", gaps))
    }


def _requests(result: Mapping[str, Any]) -> list[Request]:
    starts, ttfts, itls = (result.get(key) or [] for key in ("start_times", "ttfts", "itls"))
    errors = result.get("errors") or [""] * len(starts)
    if not starts or not len(starts) == len(ttfts) == len(itls) == len(errors):
        return []
    latencies = result.get("latencies") or [ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)]
    first = min(starts)
    return [
        Request(start - first, start - first + ttft, start - first + latency, bool(error))
        for start, ttft, latency, error in zip(starts, ttfts, latencies, errors, strict=True)
    ]
