"""The path of one streaming request through the router's files, and its diagram in docs/architecture.md.

`make docs-walk` updates the diagram.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

import pytest

import headrace.router
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import answer

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- the router's walk, drawn by make docs-walk -->\n", "<!-- end of the router's walk -->\n"
ROUTER = str(Path(headrace.router.__file__).parent.resolve())
SHARED = str(Path(ROUTER).parent / "common")
GATEWAY, WORKER = "gateway", "worker"
# The wings that are one station each. In the others, each file is one.
WINGS = frozenset({"fleet", "placement"})
# They only watch.
ASIDE = frozenset({"metrics"})
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15]


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function within one request. `name` is the module of a wing, or the function of a file."""

    caller: str
    station: str
    name: str


@dataclass
class Walk:
    """Records the calls of a request, in order of the first call of each function."""

    calls: list[Call] = field(default_factory=list)
    _seen: set[CodeType] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """For sys.setprofile."""
        if event != "call" or frame.f_code in self._seen:
            return
        place = station_of(frame.f_code)
        if place is None:
            return
        callers, back = [], frame.f_back
        while back is not None:
            found = station_of(back.f_code)
            callers += [] if found is None else [found[0]]
            back = back.f_back
        # Reports of workers, timers and the like come from elsewhere.
        if "service" in (place[0], *callers):
            self._seen.add(frame.f_code)
            self.calls.append(Call(callers[0] if callers else GATEWAY, *place))


def station_of(code: CodeType) -> tuple[str, str] | None:
    """The station of a function, and its name there; None for a function that is none of the router's."""
    path = Path(code.co_filename)
    if str(path) == f"{SHARED}/ledger.py":
        return "ledger", code.co_name
    if not str(path).startswith(ROUTER):
        return None
    wing = path.relative_to(ROUTER).parts[0]
    if wing in WINGS:
        return wing, path.stem
    return None if path.stem in ASIDE else (path.stem, code.co_name)


async def walk_of(start_router: StartRouter, start_worker: StartWorker) -> Walk:
    """The walk of one request. The router has answered one before."""
    router = await start_router(await start_worker())
    await router.generate(PROMPT, 5)
    await router.until_idle()
    walk = Walk()
    sys.setprofile(walk)
    try:
        tokens, _ = await router.generate(PROMPT[:-1], 5)
    finally:
        sys.setprofile(None)
    assert tokens == answer(PROMPT[:-1], 5)
    return walk


def arrows(walk: Walk) -> dict[tuple[str, str], list[str]]:
    """What is called, by caller and station, in the order of the calls."""
    found: dict[tuple[str, str], list[str]] = {}
    for call in walk.calls:
        if call.caller == call.station or call.name.startswith("__"):
            continue
        names = found.setdefault((call.caller, call.station), [])
        if call.name not in names:
            names.append(call.name)
    return found


def picture(walk: Walk) -> str:
    """The walk as a Mermaid sequence diagram."""
    found = arrows(walk)
    stations = list(dict.fromkeys(station for pair in found for station in pair))
    lines = ["sequenceDiagram", *(f"    participant {station}" for station in [*stations, WORKER])]
    for (caller, station), names in found.items():
        if (caller, station) == ("attempt", "fleet"):
            lines.append(f"    attempt->>{WORKER}: GenerateRequest")
            lines.append(f"    {WORKER}-->>attempt: GenerateResponse, several times")
        lines.append(f"    {caller}->>{station}: {', '.join(names)}")
    return "\n".join([*lines, f"    generation-->>{GATEWAY}: GenerateResponse, several times"])


async def test_the_picture_is_that_of_the_code(start_router: StartRouter, start_worker: StartWorker) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    drawn, _, after = rest.partition(END)
    made = f"\n```mermaid\n{picture(await walk_of(start_router, start_worker))}\n```\n\n"
    if os.environ.get("HEADRACE_DRAW_WALK"):
        PAGE.write_text(before + BEGIN + made + END + after)
    else:
        assert drawn == made, "docs/architecture.md is out of date: make docs-walk"


@pytest.mark.parametrize(("station", "most"), [("service", 2), ("forwarding", 2)])
async def test_a_reader_comes_back_to_a_file_at_most_once(
    start_router: StartRouter, start_worker: StartWorker, station: str, most: int
) -> None:
    """Each run of calls in one file is a visit of a reader who follows the request."""
    walk = await walk_of(start_router, start_worker)
    visits = Counter(name for name, _ in groupby(walk.calls, key=lambda call: call.station))
    assert 1 <= visits[station] <= most, [(call.station, call.name) for call in walk.calls]
