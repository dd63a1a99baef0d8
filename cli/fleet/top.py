"""`headrace top`: the workers and models of a fleet, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.fleet.completers import complete_served_models
from headrace.cli.fleet.fleet_access import ApiAccess
from headrace.cli.fleet.fleet_view import (
    MODEL_COLUMNS,
    WORKER_COLUMNS,
    Column,
    Rates,
    Row,
    headline,
    model_rows,
    table_of,
    worker_rows,
)
from headrace.cli.fleet.gateway_access import FleetClient, FleetPicture, default_url, operator_options
from headrace.cli.fleet.tables import console_for
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.flags import FiniteRange

if TYPE_CHECKING:
    from rich.console import RenderableType

_HELP = "q quit  m models/workers  s S sort  r reverse  f filter by model  p pause  arrows, space scroll"
_VIEWS: Mapping[str, Sequence[Column]] = {"workers": WORKER_COLUMNS, "models": MODEL_COLUMNS}
_SORTS = {
    name: {column.title.replace(" ", "-").lower(): column for column in columns} for name, columns in _VIEWS.items()
}
_ESCAPES = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down"}
_TICK_S = 0.1
# Lines around the rows: two of the head, a blank one, the titles, and two of the foot.
_LINES_AROUND = 6


@dataclass(slots=True)
class Screen:
    """The state that the keys have selected: view, order, filter and position."""

    view: str = "workers"
    sort: str = "worker"
    is_reversed: bool = False
    model: str | None = None
    is_paused: bool = False
    first: int = 0
    """Of the rows, the first that is shown."""
    is_over: bool = False

    def press(self, key: str, models: Sequence[str], page: int) -> None:
        """Handle a key. `models` are the models to filter by, and `page` is the number of visible rows."""
        titles = [*_SORTS[self.view]]
        match key:
            case "q" | "Q" | "\x1b" | "\x03":
                self.is_over = True
            case "m" | "\t":
                self.view = "models" if self.view == "workers" else "workers"
                self.sort, self.first = next(iter(_SORTS[self.view])), 0
            case "s" | "S":
                step = 1 if key == "s" else -1
                self.sort = titles[(titles.index(self.sort) + step) % len(titles)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "f":
                choices = [None, *models]
                at = choices.index(self.model) if self.model in choices else 0
                self.model, self.first = choices[(at + 1) % len(choices)], 0
            case "p":
                self.is_paused = not self.is_paused
            case "up":
                self.first -= 1
            case "down":
                self.first += 1
            case "page up":
                self.first -= page
            case "page down":
                self.first += page

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in their order. Numbers come largest first."""
        column = _SORTS[self.view][self.sort]
        own = [row for row in rows if self.model in (None, row.get("model"), row["name"])]
        by_name = sorted(own, key=lambda row: row["name"])
        return sorted(by_name, key=column.key, reverse=column.is_number != self.is_reversed)

    def window(self, rows: Sequence[Row], height: int) -> list[Row]:
        """The visible rows."""
        self.first = max(0, min(self.first, len(rows) - height))
        return [*rows[self.first : self.first + height]]


class Fleet:
    """The newest picture of a fleet, with rates since the one before."""

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self._rates = Rates()
        self.picture: FleetPicture | None = None
        self.workers: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = []
        self.problem = ""

    def look(self) -> None:
        """Ask the gateway. If it does not answer, `problem` says why and the last picture stays."""
        try:
            picture = self._client.picture()
        except CommandFailed as error:
            self.problem = error.message
            return
        self.problem = picture.problem
        self.workers = worker_rows(picture, self._rates.of(picture.workers, time.monotonic()))
        self.models = model_rows(picture, self.workers)
        self.picture = picture

    @property
    def names(self) -> list[str]:
        """The models that have workers."""
        return sorted({worker["model"] for worker in self.workers if worker["model"]})

    def lines(self) -> list[str]:
        """The head of the screen: gateway, routers and sums."""
        if self.picture is None:
            return [self.problem or "no picture yet", ""]
        return [headline(self.picture, self.workers), sums_of(self.workers)]


def sums_of(workers: Sequence[Row]) -> str:
    """The load of all workers in a line."""

    def total(name: str) -> float:
        return sum(worker[name] or 0 for worker in workers)

    blocks = total("kv_blocks")
    used = f"{1 - total('kv_blocks_free') / blocks:.0%}" if blocks else "unknown"
    return (
        f"running {total('requests_running'):.0f}, waiting {total('requests_waiting'):.0f}, "
        f"{total('tokens_per_s'):.1f} tokens/s, {total('prompt_tokens_per_s'):.0f} prompt tokens/s, KV used {used}"
    )


def screen_of(fleet: Fleet, screen: Screen, height: int) -> RenderableType:
    """The whole picture in `height` lines."""
    from rich.console import Group
    from rich.text import Text

    rows = screen.rows(fleet.workers if screen.view == "workers" else fleet.models)
    shown = screen.window(rows, max(1, height - _LINES_AROUND))
    column = _SORTS[screen.view][screen.sort]
    head = [Text(line, no_wrap=True, overflow="ellipsis") for line in fleet.lines()]
    notes = [
        f"{screen.first + 1}-{screen.first + len(shown)} of {len(rows)}" if len(shown) < len(rows) else "",
        f"model {screen.model}" if screen.model else "",
        "paused" if screen.is_paused else "",
        fleet.problem,
    ]
    foot = Text("  ".join(filter(None, notes)), style="red" if fleet.problem else "bold", no_wrap=True)
    table = table_of(_VIEWS[screen.view], shown, column.title)
    return Group(*head, Text(""), table, foot, Text(_HELP, style="dim", no_wrap=True, overflow="ellipsis"))


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Context manager: standard input gives each key at once, without echo. Ctrl-C still interrupts."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield number
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def pressed(text: str) -> list[str]:
    """The keys in what a terminal has sent."""
    keys = []
    while text:
        known = next((escape for escape in _ESCAPES if text.startswith(escape)), None)
        if known is None:
            known = text[0]
        keys.append(_ESCAPES.get(known, known))
        text = text[len(known) :]
    return keys


def _live(fleet: Fleet, screen: Screen, interval_s: float) -> None:
    """Show the fleet until a key ends it. Requests run in a thread, so that keys work while a gateway is silent."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with (
        _keys() as number,
        ThreadPoolExecutor(1, "fleet") as thread,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        looking: Future[None] | None = None
        due_s = 0.0
        while not screen.is_over:
            now_s = time.monotonic()
            is_new = looking is not None and looking.done()
            if looking is not None and looking.done():
                looking.result()
                looking = None
            if looking is None and now_s >= due_s and not screen.is_paused:
                due_s = now_s + interval_s
                looking = thread.submit(fleet.look)
            ready, _, _ = select.select([number], [], [], _TICK_S)
            for key in pressed(os.read(number, 1024).decode(errors="replace")) if ready else ():
                screen.press(key, fleet.names, max(1, console.height - _LINES_AROUND))
            if is_new or ready or console.is_dumb_terminal:
                live.update(screen_of(fleet, screen, console.height), refresh=True)


def _printed(fleet: Fleet, screen: Screen, interval_s: float, iterations: int | None) -> None:
    """Print the fleet again and again: for pipes and logs."""
    number = 0
    while iterations is None or number < iterations:
        if number:
            time.sleep(interval_s)
        fleet.look()
        if fleet.picture is None:
            raise CommandFailed(fleet.problem)
        rows = screen.rows(fleet.workers if screen.view == "workers" else fleet.models)
        table = table_of(_VIEWS[screen.view], rows, _SORTS[screen.view][screen.sort].title)
        console = console_for(table)
        for line in (*fleet.lines(), fleet.problem):
            if line:
                console.print(line, soft_wrap=True)
        console.print(table)
        sys.stdout.flush()
        number += 1


@click.command()
@click.option("--url", help="Gateway of the fleet.  [default: the one on this host]")
@click.option("--models", "by_model", is_flag=True, help="Begin with the models instead of the workers.")
@click.option("--model", help="Only the workers of this model.", shell_complete=complete_served_models)
@click.option("--sort", help="Column to sort by, such as waiting, kv-used or tok/s.  [default: the name]")
@click.option("--reverse", is_flag=True, help="Sort the other way round.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--iterations", "-n", type=click.IntRange(1), help="Print this many times and end, without keys.")
@operator_options
def top(
    url: str | None,
    by_model: bool,
    model: str | None,
    sort: str | None,
    reverse: bool,
    interval_s: float,
    iterations: int | None,
    access: ApiAccess,
) -> None:
    """Watch the workers of a fleet: load, KV cache, cache hits, tokens per second, time of a step.

    "hits" and "step ms" cover the time since the last update; in the first picture, the time since the worker's start.
    Keys: q quits, m shows models or workers, s and S choose the column to sort by, r reverses, f filters by model, p
    pauses, arrows and space scroll. If the output is not a terminal, each update is printed after the last.
    """
    view = "models" if by_model else "workers"
    if sort is not None and sort.lower() not in _SORTS[view]:
        raise CommandError(f"--sort {sort[:40]!r} is no column; there are {', '.join(_SORTS[view])}")
    screen = Screen(view, (sort or next(iter(_SORTS[view]))).lower(), reverse, model)
    with FleetClient(url or default_url(), access) as client:
        fleet = Fleet(client)
        if iterations is not None or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _printed(fleet, screen, interval_s, iterations)
            return
        with contextlib.suppress(KeyboardInterrupt):
            _live(fleet, screen, interval_s)
