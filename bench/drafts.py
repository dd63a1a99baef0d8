"""What speculative decoding of a server did during a load, as `vllm bench serve` tells it: from the counters among the
Prometheus metrics that vLLM has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.bench.connection import Client, ExchangeError

_COUNTER = re.compile(r"vllm:spec_decode_(\w+)_total(?:\{(.*)\})? (\S+)")
_POSITION = re.compile(r'position="(\d+)"')


class Drafted(NamedTuple):
    """Counters since the server's start: drafts, their tokens, accepted tokens, and those by their position."""

    num_drafts: float
    num_tokens: float
    num_accepted: float
    by_position: Mapping[int, float]


async def drafted(client: Client) -> Drafted | None:
    """The counters of the server; None if it has none."""
    try:
        status, raw = await client.call("GET", "/metrics")
    except ExchangeError:
        return None
    return drafted_in(raw.decode(errors="replace")) if status == 200 else None


def drafted_in(metrics: str) -> Drafted | None:
    """The counters among metrics in Prometheus's text format; None if there are none."""
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for line in metrics.splitlines():
        match = _COUNTER.match(line)
        if match is None:
            continue
        name, labels, value = match[1], match[2] or "", float(match[3])
        position = _POSITION.search(labels)
        if name == "num_accepted_tokens_per_pos" and position is not None:
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
    if not totals:
        return None
    return Drafted(
        totals.get("num_drafts", 0.0),
        totals.get("num_draft_tokens", 0.0),
        totals.get("num_accepted_tokens", 0.0),
        by_position,
    )


def figures(before: Drafted | None, after: Drafted | None) -> dict[str, Any]:
    """What was drafted between two looks at the counters, by the keys in the JSON of `vllm bench serve`; empty if
    nothing was."""
    if before is None or after is None or after.num_tokens <= before.num_tokens:
        return {}
    drafts = after.num_drafts - before.num_drafts
    tokens, accepted = after.num_tokens - before.num_tokens, after.num_accepted - before.num_accepted
    positions = sorted(after.by_position) if drafts else []
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else 0.0,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            (after.by_position[position] - before.by_position.get(position, 0.0)) / drafts for position in positions
        ],
    }
