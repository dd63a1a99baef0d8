"""The path of one streaming chat through the gateway's wings, and its diagram in docs/architecture.md.

`make docs-walk` updates the diagram.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import pytest_asyncio

import headrace.gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- the walk, drawn by make docs-walk -->\n", "<!-- end of the walk -->\n"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
GATEWAY = str(Path(headrace.gateway.__file__).parent.resolve())
TRANSPORT = str(Path(GATEWAY).parent / "common" / "transport")
PLANNING = "gateway/chat/planning.py"
# Copies a planned request to a model on trial; the request does not pass through it.
WATCHING = "gateway/chat/shadowing.py"
CLIENT, ROUTER = "client", "router"
# They only watch, or hold a value that all wings read; a request does not pass through them.
ASIDE = frozenset({"telemetry", "cache_eviction", "checks", "field_names", "fields", "hints"})
# A value, no station.
VALUES = frozenset({("access", "caller")})
# A protocol reads its request from the exchange that the edge hands to it.
HANDED_OVER = ("openai", "edge")


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function of one wing from another, within one request."""

    caller: str
    wing: str
    module: str


@dataclass
class Walk:
    """The calls of a request, in order of the first call of each function."""

    outward: list[Call] = field(default_factory=list)
    """Until the request has left for the router."""
    back: list[Call] = field(default_factory=list)
    """From the first message of the answer on."""
    num_calls: Counter[str] = field(default_factory=Counter)
    """Calls of plain functions, by qualified name."""
    from_planning: list[str] = field(default_factory=list)
    """The file of each call from the file that plans chats."""


class Tracer:
    """Records a walk from the interpreter's call events."""

    def __init__(self) -> None:
        self.walk = Walk()
        self._seen: set[CodeType] = set()
        self._has_left = False
        self._places: dict[str, tuple[str, str] | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """For sys.setprofile."""
        if event != "call":
            return
        code = frame.f_code
        place = self._place(code)
        if place is None:
            return
        if place[0] == ROUTER:
            self._has_left = self._has_left or code.co_qualname == "ClientCall.push"
            if code.co_qualname != "SessionClient.generate":
                return
        self.walk.num_calls[code.co_qualname] += 1
        if self._is_from_planning(frame) and place[0] not in ASIDE:
            self.walk.from_planning.append(Path(code.co_filename).resolve().relative_to(GATEWAY).as_posix())
        if code in self._seen or place[0] in ASIDE or place in VALUES:
            return
        self._seen.add(code)
        caller = self._caller(frame)
        if caller != place[0]:
            (self.walk.back if self._has_left else self.walk.outward).append(Call(caller, *place))

    def _is_from_planning(self, frame: FrameType) -> bool:
        """Whether a function of another file is called from there, for a plan."""
        back, own = frame.f_back, frame.f_code.co_filename
        if back is None or own.endswith(WATCHING) or own == back.f_code.co_filename:
            return False
        return back.f_code.co_filename.endswith(PLANNING) and back.f_code.co_qualname.startswith("Chats.")

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        """Wing and module of a function; None for a function that is not the gateway's."""
        name = code.co_filename
        if name not in self._places:
            path = Path(name).resolve()
            place = None
            if str(path).startswith(GATEWAY):
                wing, *rest = path.relative_to(GATEWAY).with_suffix("").parts
                place = (wing, rest[0] if rest else wing)
            elif str(path).startswith(TRANSPORT):
                place = (ROUTER, path.stem)
            self._places[name] = place
        return self._places[name]

    def _caller(self, frame: FrameType) -> str:
        """The wing of the caller, or the client if the call comes from outside the gateway."""
        back = frame.f_back
        while back is not None:
            place = self._place(back.f_code)
            if place is not None and place[0] not in ASIDE:
                return place[0]
            back = back.f_back
        return CLIENT


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def walk(gateway: Any, router: Any) -> AsyncIterator[Walk]:
    """The walk of one streaming chat. The gateway has answered one before, and so has loaded model and imports."""
    await gateway.http.post("/v1/chat/completions", json=BODY)
    tracer = Tracer()
    sys.setprofile(tracer)
    threading.setprofile(tracer)
    try:
        answer = await gateway.http.post("/v1/chat/completions", json=BODY)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert "[DONE]" in answer.text
    yield tracer.walk


def arrows(calls: Sequence[Call]) -> dict[tuple[str, str], list[str]]:
    """Modules that are called, by caller and wing, in the order of the calls."""
    found: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        modules = found.setdefault((call.caller, call.wing), [])
        if call.module not in modules:
            modules.append(call.module)
    return found


def picture(walk: Walk) -> str:
    """The walk as a Mermaid sequence diagram."""
    outward, back = arrows(walk.outward), arrows(walk.back)
    wings = list(dict.fromkeys(wing for pair in (*outward, *back) for wing in pair if wing not in (CLIENT, ROUTER)))
    lines = ["sequenceDiagram", f"    participant {CLIENT}"]
    lines += [f"    participant {wing}" for wing in wings]
    lines += [f"    participant {ROUTER}"]
    lines += [f"    {caller}->>{wing}: {', '.join(modules)}" for (caller, wing), modules in outward.items()]
    lines += [f"    {ROUTER}-->>upstream: tokens", "    upstream-->>chat: tokens"]
    lines += [f"    {caller}-->>{wing}: {', '.join(modules)}" for (caller, wing), modules in back.items()]
    lines += [f"    edge-->>{CLIENT}: server-sent events"]
    return "\n".join(lines)


async def test_the_picture_is_that_of_the_code(walk: Walk) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    drawn, _, after = rest.partition(END)
    made = f"\n```mermaid\n{picture(walk)}\n```\n\n"
    if os.environ.get("HEADRACE_DRAW_WALK"):
        PAGE.write_text(before + BEGIN + made + END + after)
    else:
        assert drawn == made, "docs/architecture.md is out of date: make docs-walk"


async def test_each_wing_is_entered_from_one_other_in_each_direction(walk: Walk) -> None:
    for calls in (walk.outward, walk.back):
        entered = Counter(wing for caller, wing in arrows(calls) if (caller, wing) != HANDED_OVER)
        twice = {wing: [caller for caller, other in arrows(calls) if other == wing] for wing in entered}
        assert set(entered.values()) == {1}, twice


async def test_each_value_is_checked_once(walk: Walk) -> None:
    checks = {
        name: count for name, count in walk.num_calls.items() if name.startswith("check_") or name == "structure_of"
    }
    assert set(checks) >= {"check_chat_body", "check_chat", "check_sampling", "structure_of"}
    assert set(checks.values()) == {1}, checks


async def test_planning_enters_at_most_eight_files_and_none_twice(walk: Walk) -> None:
    """Each run of calls of one file is a visit of a reader who follows the request."""
    visits = [file for file, _ in groupby(walk.from_planning)]
    assert 5 <= len(visits) <= 8, visits
    assert len(set(visits)) == len(visits), visits
