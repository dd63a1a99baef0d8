"""Processes that are stages, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.fleet import Process
from tests.patience import until

LISTENING = "a stage is listening"


class Stage:
    """A process that is a stage, on a socket in a directory, or where `listen` says; not started. `flags` are further
    ones, and `before` as of `Process`."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        name: str,
        *flags: str,
        listen: str | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.address = listen or f"unix:{directory / name}.sock"
        argv = ["-m", "headrace.worker", "--serve-stage", "--model", str(model), "--listen", self.address]
        self.process = Process(name, [*argv, "--threads", "1", *flags], before=before)

    @property
    def num_starts(self) -> int:
        """How often it has begun to listen."""
        return sum(LISTENING in line for line in self.process.logs)

    def until_listening(self, times: int = 1) -> None:
        """Wait until it has begun to listen so often."""
        until(lambda: self.num_starts >= times, "the stage listens")


@contextmanager
def stages(model: Path, directory: Path, count: int, *flags: str) -> Iterator[list[Stage]]:
    """So many of them. Prints the end of their logs, which pytest shows if a test has failed."""
    made = [Stage(model, directory, f"stage-{number}", *flags) for number in range(1, count + 1)]
    try:
        for stage in made:
            stage.process.start()
        for stage in made:
            stage.until_listening()
        yield made
    finally:
        for stage in made:
            stage.process.end()
            print(stage.process.tail())
