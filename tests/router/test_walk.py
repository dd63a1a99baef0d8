"""The path of one streaming request through the router's files, and its diagram in docs/architecture.md."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import pytest

import headrace.router
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import answer
from tests.walks import Walk, assert_drawn

BEGIN, END = "<!-- the router's walk, drawn by make docs-walk -->\n", "<!-- end of the router's walk -->\n"
ROUTER = str(Path(headrace.router.__file__).parent.resolve())
SHARED = str(Path(ROUTER).parent / "common")
GATEWAY, WORKER = "gateway", "worker"
# The wings that are one station each. In the others, each file is one.
WINGS = frozenset({"fleet", "placement"})
# They only watch.
ASIDE = frozenset({"metrics"})
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15]


def station_of(code: CodeType) -> tuple[str, str] | None:
    """See `Walk`."""
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
    walk = Walk(station_of, "service", GATEWAY)
    sys.setprofile(walk)
    try:
        tokens, _ = await router.generate(PROMPT[:-1], 5)
    finally:
        sys.setprofile(None)
    assert tokens == answer(PROMPT[:-1], 5)
    return walk


def picture(walk: Walk) -> str:
    """The walk as a Mermaid sequence diagram."""
    found = walk.arrows()
    stations = list(dict.fromkeys(station for pair in found for station in pair))
    lines = ["sequenceDiagram", *(f"    participant {station}" for station in [*stations, WORKER])]
    for (caller, station), names in found.items():
        if (caller, station) == ("attempt", "fleet"):
            lines.append(f"    attempt->>{WORKER}: GenerateRequest")
            lines.append(f"    {WORKER}-->>attempt: GenerateResponse, several times")
        lines.append(f"    {caller}->>{station}: {', '.join(names)}")
    return "\n".join([*lines, f"    generation-->>{GATEWAY}: GenerateResponse, several times"])


async def test_the_picture_is_that_of_the_code(start_router: StartRouter, start_worker: StartWorker) -> None:
    assert_drawn(picture(await walk_of(start_router, start_worker)), BEGIN, END)


@pytest.mark.parametrize(("station", "most"), [("service", 2), ("forwarding", 2)])
async def test_a_reader_comes_back_to_a_file_at_most_once(
    start_router: StartRouter, start_worker: StartWorker, station: str, most: int
) -> None:
    walk = await walk_of(start_router, start_worker)
    assert 1 <= walk.visits()[station] <= most, [(call.station, call.name) for call in walk.calls]
