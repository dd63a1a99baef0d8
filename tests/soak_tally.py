"""The rounds of a soak, over several runs: HEADRACE_SOAK_TALLY names a file with a line of JSON for each.

A run continues behind the last round in the file. A round depends only on its number and the seed, so a round that has
failed comes again, with the same choices. HEADRACE_SOAK_MINUTES ends a run early, between two rounds.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SEED = int(os.environ.get("HEADRACE_SEED", "1"))


class Tally:
    """The rounds of the soak `name` with a seed. Without a file, none are remembered."""

    def __init__(self, name: str, seed: int = SEED, file: Path | None = None) -> None:
        self.counts = Counter[str]()
        """How often each kind of event has happened, in all runs."""
        self._name, self._seed, self._file = name, seed, file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        for line in lines:
            found = json.loads(line)
            if (found["soak"], found["seed"]) == (name, seed):
                self.counts[found["event"]] += 1

    @staticmethod
    def of_environment(name: str) -> Tally:
        """The tally in the file that the environment names."""
        file = os.environ.get("HEADRACE_SOAK_TALLY")
        return Tally(name, file=None if file is None else Path(file))

    @property
    def num_rounds(self) -> int:
        """How many rounds there were."""
        return sum(self.counts.values())

    def rounds(self, count: int, most_s: float = float("inf")) -> Iterator[tuple[int, random.Random]]:
        """The numbers of the rounds that are missing to `count`, each with its source of random choices. Begins none
        after `most_s` seconds."""
        end_s = time.monotonic() + most_s
        for number in range(self.num_rounds, count):
            if time.monotonic() > end_s:
                return
            yield number, random.Random(f"{self._seed} {number}")

    def note(self, event: str, seconds: float) -> None:
        """Remember that a round with this event has passed."""
        self.counts[event] += 1
        if self._file is not None:
            line = {"soak": self._name, "seed": self._seed, "event": event, "seconds": round(seconds, 1)}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def __str__(self) -> str:
        counts = ", ".join(f"{event} {count}" for event, count in sorted(self.counts.items()))
        return f"{self._name}, seed {self._seed}: {self.num_rounds} rounds so far ({counts})"


def most_seconds() -> float:
    """How long a run goes on."""
    return 60 * float(os.environ.get("HEADRACE_SOAK_MINUTES", "inf"))
