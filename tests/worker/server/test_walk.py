"""The path of one request through the worker, from its arrival to the engine's mailbox and back, and its diagram in
docs/architecture.md. The engine's thread is not traced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import headrace.worker
from headrace.protos.inference_pb2 import SamplingParams
from tests.walks import Walk, assert_drawn
from tests.worker.server.running import running_worker, small_engine

BEGIN, END = "<!-- the worker's walk, drawn by make docs-walk -->\n", "<!-- end of the worker's walk -->\n"
WORKER = str(Path(headrace.worker.__file__).parent.resolve())
ROUTER = "router"
# The wing whose files are one station each. The others are one station.
SERVER = "server"
# It only watches.
ASIDE = frozenset({"observer"})


def station_of(code: CodeType) -> tuple[str, str] | None:
    """See `Walk`."""
    path = Path(code.co_filename)
    if not str(path).startswith(WORKER):
        return None
    wing = path.relative_to(WORKER).parts[0]
    if wing != SERVER:
        return wing, path.stem
    return None if path.stem in ASIDE else (path.stem, code.co_name)


async def walk_of() -> Walk:
    """The walk of one request. The worker has answered one before."""
    sampling = SamplingParams(max_tokens=1, seed=1)
    walk = Walk(station_of, "service", ROUTER)
    async with running_worker(small_engine()) as worker:
        await worker.generate(token_ids=[1, 2, 3], sampling=sampling)
        sys.setprofile(walk)
        try:
            responses = await worker.generate(token_ids=[4, 5, 6, 7], sampling=sampling)
        finally:
            sys.setprofile(None)
    assert sum(len(response.token_ids) for response in responses) == 1
    return walk


def picture(walk: Walk) -> str:
    """The walk as a Mermaid sequence diagram."""
    found = walk.arrows()
    stations = list(dict.fromkeys(station for pair in found for station in pair))
    lines = ["sequenceDiagram", *(f"    participant {station}" for station in stations)]
    lines += [f"    {caller}->>{station}: {', '.join(names)}" for (caller, station), names in found.items()]
    return "\n".join([*lines, f"    responses-->>{ROUTER}: GenerateResponse, several times"])


async def test_the_picture_is_that_of_the_code() -> None:
    assert_drawn(picture(await walk_of()), BEGIN, END)


async def test_a_reader_comes_to_admission_twice() -> None:
    """To decode the request, and to check it."""
    walk = await walk_of()
    assert walk.visits()["admission"] == 2, [(call.station, call.name) for call in walk.calls]
