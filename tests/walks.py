"""The path of one request through the files of a process, from a trace, and its diagram in docs/architecture.md.

`make docs-walk` updates the diagrams.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function within one request. `name` is the module of a wing, or the function of a file."""

    caller: str
    station: str
    name: str


@dataclass
class Walk:
    """Records the calls of a request, in order of the first call of each function. `station_of` gives the station of a
    function and its name there, or None for one that is not traced. The request enters at the station `entry`, called
    from `outside`; calls that do not come from there are timers, reports and the like."""

    station_of: Callable[[CodeType], tuple[str, str] | None]
    entry: str
    outside: str
    calls: list[Call] = field(default_factory=list)
    _seen: set[CodeType] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """For sys.setprofile."""
        if event != "call" or frame.f_code in self._seen:
            return
        place = self.station_of(frame.f_code)
        if place is None:
            return
        callers, back = [], frame.f_back
        while back is not None:
            found = self.station_of(back.f_code)
            callers += [] if found is None else [found[0]]
            back = back.f_back
        if self.entry in (place[0], *callers):
            self._seen.add(frame.f_code)
            self.calls.append(Call(callers[0] if callers else self.outside, *place))

    def arrows(self) -> dict[tuple[str, str], list[str]]:
        """What is called, by caller and station, in the order of the calls."""
        found: dict[tuple[str, str], list[str]] = {}
        for call in self.calls:
            if call.caller == call.station or call.name.startswith(("__", "<")):
                continue
            names = found.setdefault((call.caller, call.station), [])
            if call.name not in names:
                names.append(call.name)
        return found

    def visits(self) -> Counter[str]:
        """How often a reader who follows the request comes to each station. Each run of calls there is a visit."""
        return Counter(name for name, _ in groupby(self.calls, key=lambda call: call.station))


def assert_drawn(picture: str, begin: str, end: str) -> None:
    """The page has this picture between two lines; with HEADRACE_DRAW_WALK it gets it."""
    before, _, rest = PAGE.read_text().partition(begin)
    drawn, _, after = rest.partition(end)
    made = f"\n```mermaid\n{picture}\n```\n\n"
    if os.environ.get("HEADRACE_DRAW_WALK"):
        PAGE.write_text(before + begin + made + end + after)
    else:
        assert drawn == made, "docs/architecture.md is out of date: make docs-walk"
