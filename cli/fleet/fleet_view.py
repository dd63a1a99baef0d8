"""The workers and models of a whole fleet as rows and tables, with the rates between two looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.cli.fleet.gateway_access import FleetPicture
from headrace.cli.fleet.tables import console_for
from headrace.cli.fleet.worker_columns import LOST_STATES, WORKER_STATES, slowest_rank, slowest_stage, worker_columns
from headrace.protos.load_report import kv_use
from headrace.protos.router_pb2 import WorkerInfo
from headrace.protos.worker_pb2 import Counters

if TYPE_CHECKING:
    from rich.table import Table

STATE_COLOURS = {"ready": "green", "draining": "yellow"}
Row = Mapping[str, Any]


@dataclass(slots=True)
class Rates:
    """The rates of each worker between the last two updates. A new or restarted worker has none."""

    _seen: dict[tuple[str, str], tuple[float, Counters]] = field(default_factory=dict)

    def of(self, workers: Sequence[WorkerInfo], now_s: float) -> dict[tuple[str, str], dict[str, float | None]]:
        """The figures of these workers, by name and address, and `now_s` for the next look."""
        seen, found = {}, {}
        for worker in workers:
            key = (worker.worker_id, worker.address)
            if not worker.HasField("load"):
                continue
            counters = worker.load.counters
            seen[key] = (now_s, counters)
            if key in self._seen:
                found[key] = _between(*self._seen[key], now_s, counters)
        self._seen = seen
        return found


def _between(before_s: float, before: Counters, now_s: float, now: Counters) -> dict[str, float | None]:
    elapsed_s = now_s - before_s
    if elapsed_s <= 0 or now.steps < before.steps or now.tokens_generated < before.tokens_generated:
        return {}

    def more(name: str) -> int:
        return max(0, int(getattr(now, name)) - int(getattr(before, name)))

    computed, cached, steps = more("prompt_tokens_computed"), more("prompt_tokens_cached"), more("steps")
    return {
        "tokens_per_s": more("tokens_generated") / elapsed_s,
        "prompt_tokens_per_s": computed / elapsed_s,
        "hit_ratio": cached / (cached + computed) if cached + computed else None,
        "step_ms": (more("infer_us") + more("overhead_us")) / steps / 1000 if steps else None,
    }


def worker_rows(picture: FleetPicture, rates: Mapping[tuple[str, str], Row] | None = None) -> list[dict[str, Any]]:
    """One row for each worker, by name.

    A row has name, address, state, detail, silent_s while it does not answer, in_flight, report_age_ms, the columns of
    `worker_columns`, max_num_seqs, decode_step_ms, preemptions, kv_used (a ratio), tokens_per_s, prompt_tokens_per_s,
    hit_ratio and step_ms. What is unknown is None. hit_ratio and step_ms are since the worker's start without `rates`;
    the rates are unknown then.
    """
    return [_worker_row(worker, (rates or {}).get((worker.worker_id, worker.address))) for worker in picture.workers]


def _worker_row(worker: WorkerInfo, rates: Row | None) -> dict[str, Any]:
    load, counters = worker.load, worker.load.counters
    is_known = worker.HasField("load")
    state = WORKER_STATES.get(worker.state) or LOST_STATES.get(worker.state, "unknown")
    prompts = counters.prompt_tokens_cached + counters.prompt_tokens_computed
    since_start = {
        "tokens_per_s": None,
        "prompt_tokens_per_s": None,
        "hit_ratio": counters.prompt_tokens_cached / prompts if prompts else None,
        "step_ms": (counters.infer_us + counters.overhead_us) / counters.steps / 1000 if counters.steps else None,
    }
    return {
        "name": worker.worker_id,
        "address": worker.address,
        "state": state,
        "detail": worker.detail or None,
        "in_flight": worker.num_in_flight,
        "report_age_ms": worker.report_age_ms,
        **worker_columns(worker),
        "silent_s": round(worker.report_age_ms / 1000, 1) if state == "not answering" else None,
        "max_num_seqs": load.max_num_seqs if is_known else None,
        "decode_step_ms": load.decode_step_ms or None,
        "preemptions": counters.preemptions if is_known else None,
        "kv_used": kv_use(load.num_blocks, load.num_free_blocks) if load.num_blocks else None,
        **since_start,
        **(rates or {}),
    }


def model_rows(picture: FleetPicture, workers: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each model or alias that callers may name: its state, and the sums of its workers."""
    rows = []
    for model in picture.models:
        served = model["alias_of"] or model["id"]
        own = [worker for worker in workers if worker["model"] == served]
        blocks = sum(worker["kv_blocks"] or 0 for worker in own)
        free = sum(worker["kv_blocks_free"] or 0 for worker in own)
        rows.append(
            {
                "name": model["id"],
                "alias_of": model["alias_of"] or None,
                "state": model["state"],
                "problem": model["problem"] or None,
                "max_context_tokens": model["max_context_tokens"],
                "workers": len(own),
                "workers_ready": sum(worker["state"] == "ready" for worker in own),
                "in_flight": sum(worker["in_flight"] for worker in own),
                "requests_running": _sum(own, "requests_running"),
                "requests_waiting": _sum(own, "requests_waiting"),
                "kv_used": kv_use(blocks, free) if blocks else None,
                "tokens_per_s": _sum(own, "tokens_per_s"),
                "prompt_tokens_per_s": _sum(own, "prompt_tokens_per_s"),
            }
        )
    return rows


def _sum(rows: Sequence[Row], name: str) -> Any:
    """The sum of what is known; None if nothing is."""
    known = [row[name] for row in rows if row[name] is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, its text, and the value to sort by."""

    title: str
    text: Callable[[Row], str]
    key: Callable[[Row], Any]
    is_number: bool = False


def _number(title: str, name: str, pattern: str = "{}") -> Column:
    def text(row: Row) -> str:
        return "" if row[name] is None else pattern.format(row[name])

    return Column(title, text, lambda row: -1 if row[name] is None else row[name], is_number=True)


def _word(title: str, name: str) -> Column:
    return Column(title, lambda row: row[name] or "", lambda row: row[name] or "")


def _state_of(row: Row) -> str:
    since = f" for {row['silent_s']:.0f} s" if row["silent_s"] is not None else ""
    return f"{row['state']}{since}"


def _name_of(row: Row) -> str:
    return row["name"] if row["serves"] in (None, "both") else f"{row['name']} ({row['serves']})"


def _ranks_of(row: Row) -> str:
    stages = [stage["ranks"] for stage in row["stages"]]
    if not any(stages):
        return _count_of(row["ranks"])
    # A stage without ranks is one process.
    return " + ".join(_count_of(ranks) or "1" for ranks in stages)


def _count_of(ranks: Sequence[Mapping[str, Any]]) -> str:
    if not ranks:
        return ""
    slowest = slowest_rank(ranks)
    return f"{len(ranks)}" if slowest is None else f"{len(ranks)}, rank {slowest} is slowest"


def _stages_of(row: Row) -> str:
    if not row["stages"]:
        return ""
    slowest = slowest_stage(row["stages"])
    return f"{len(row['stages'])}" if slowest is None else f"{len(row['stages'])}, stage {slowest} is slowest"


WORKER_COLUMNS = (
    Column("worker", _name_of, lambda row: row["name"]),
    _word("model", "model"),
    Column("state", _state_of, lambda row: row["state"]),
    _number("in flight", "in_flight"),
    _number("running", "requests_running"),
    _number("waiting", "requests_waiting"),
    _number("KV used", "kv_used", "{:.0%}"),
    _number("hits", "hit_ratio", "{:.0%}"),
    _number("tok/s", "tokens_per_s", "{:.1f}"),
    _number("prompt tok/s", "prompt_tokens_per_s", "{:.0f}"),
    _number("step ms", "step_ms", "{:.1f}"),
    _number("node", "numa_node"),
    Column("ranks", _ranks_of, lambda row: len(row["ranks"])),
    Column("stages", _stages_of, lambda row: len(row["stages"])),
    _word("address", "address"),
)
MODEL_COLUMNS = (
    _word("model", "name"),
    Column("state", lambda row: row["state"], lambda row: row["state"]),
    Column("workers", lambda row: f"{row['workers_ready']} of {row['workers']}", lambda row: row["workers_ready"]),
    _number("in flight", "in_flight"),
    _number("running", "requests_running"),
    _number("waiting", "requests_waiting"),
    _number("KV used", "kv_used", "{:.0%}"),
    _number("tok/s", "tokens_per_s", "{:.1f}"),
    _number("prompt tok/s", "prompt_tokens_per_s", "{:.0f}"),
    _number("context", "max_context_tokens"),
    _word("alias of", "alias_of"),
    _word("problem", "problem"),
)


def table_of(columns: Sequence[Column], rows: Sequence[Row], sorted_by: str = "") -> Table:
    """A table. Columns in which no row has anything are left out; the title of the one that is sorted by is marked."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    shown = [column for column in columns if not rows or any(column.text(row) for row in rows)]
    for column in shown:
        title = f"{column.title} *" if column.title == sorted_by else column.title
        table.add_column(Text(title), justify="right" if column.is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(column, row) for column in shown))
    return table


def _cell(column: Column, row: Row) -> Any:
    from rich.text import Text

    state_colour = STATE_COLOURS.get(row["state"], "green" if row["state"] == "loaded" else "red")
    return Text(column.text(row), style=state_colour if column.title == "state" else "")


def print_fleet(picture: FleetPicture, rows: Sequence[Row]) -> None:
    """Print the gateway, its routers and the workers."""
    console = console_for(table := table_of(WORKER_COLUMNS, rows))
    console.print(headline(picture, rows), soft_wrap=True)
    if rows:
        console.print(table)
    for row in rows:
        if row["detail"] and row["state"] != "ready":
            console.print(f"{row['name']}: {row['detail']}", soft_wrap=True)
    if picture.problem:
        print(f"error: {picture.problem}", file=sys.stderr)


def headline(picture: FleetPicture, rows: Sequence[Row]) -> str:
    """The fleet in a line."""
    routers = [router["address"] for router in picture.routers if router["connected"]]
    lost = [router["address"] for router in picture.routers if not router["connected"]]
    ready = sum(row["state"] == "ready" for row in rows)
    parts = [
        f"gateway {picture.gateway['host']} {picture.gateway['version']}",
        f"routers: {', '.join(routers) or 'none'}" + (f"; not connected: {', '.join(lost)}" if lost else ""),
        f"{ready} of {len(rows)} workers ready",
    ]
    return ", ".join(parts)
