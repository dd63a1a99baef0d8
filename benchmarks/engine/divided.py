"""A model on one core, divided between two processes with a core each, and whole on both cores: the processes of such
a comparison, and its figures."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.model.runner import OpenVINOModelRunner

NUM_BLOCKS = 2100
# Tokens before the one that a step of decode computes.
CONTEXT = 256
# Of a step in one go, the first of which is not counted.
REPEATS = 6

Make = Callable[[Path, list[int]], OpenVINOModelRunner]
Compute = Callable[[Make, Path, list[int], Connection], None]
"""What a process does: it loads a model on CPUs, sends its pid, and answers each name of a step with its figures."""


def arguments(description: str | None, steps: Iterable[str]) -> argparse.Namespace:
    """What the command is given: the model's directory, the number of rounds, and which of the steps to compare."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--step", action="append", choices=list(steps), metavar="NAME", help="only this one, or these")
    args = parser.parse_args()
    args.step = args.step or list(steps)
    return args


def whole(model_dir: Path, cpus: list[int]) -> OpenVINOModelRunner:
    """The undivided model on these CPUs."""
    os.sched_setaffinity(0, cpus)
    return OpenVINOModelRunner(model_dir, threads=len(cpus), kv_precision="u8", execution_mode="performance")


class Sides:
    """A process for each side: one core, the divided model, two threads. An idle one takes no CPU time."""

    def __init__(self, model_dir: Path, name: str, make: Make, compute: Compute) -> None:
        """Load the model in all of them. `make` makes the divided one, which is called by `name`."""
        first, second = sorted(os.sched_getaffinity(0))[:2]
        sides = {
            "one core": (whole, [first]),
            name: (make, [first, second]),
            "two threads": (whole, [first, second]),
        }
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._links: dict[str, Connection] = {}
        self.pids: dict[str, int] = {}
        """The process of each side."""
        for side, (make_one, cpus) in sides.items():
            self._links[side], theirs = context.Pipe()
            context.Process(target=compute, args=(make_one, model_dir, cpus, theirs)).start()
            self.pids[side] = self._links[side].recv()

    def measure(self, step: str, rounds: int) -> list[list[Any]]:
        """Compute a step on all sides in turns, and give the figures of each round in the order of the sides."""
        names = list(self._links)
        found = []
        for number in range(rounds + 1):
            of_round = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                self._links[name].send(step)
                of_round[name] = self._links[name].recv()
            if number:  # in the first round kernels are built
                found.append([of_round[name] for name in names])
        return found

    def describe(self, step: str, times: npt.NDArray[np.float64]) -> str:
        """The medians of milliseconds `[rounds, sides]`, and the ratios of the divided model to the other sides with
        their quartiles."""
        one, two, threads = np.median(times, axis=0)
        against = [
            f"{name} {np.median(ratios):.3f} ({np.percentile(ratios, 25):.3f} to {np.percentile(ratios, 75):.3f})"
            for name, ratios in (("one core", times[:, 1] / times[:, 0]), ("two threads", times[:, 1] / times[:, 2]))
        ]
        return (
            f"{step}: {one:.1f} ms on one core, {two:.1f} on {self._name}, {threads:.1f} on two threads; "
            f"{self._name} to {', to '.join(against)}"
        )

    def end(self) -> None:
        """Let the processes end."""
        for link in self._links.values():
            link.send(None)


@contextmanager
def running(model_dir: Path, name: str, make: Make, compute: Compute) -> Iterator[Sides]:
    """Context manager: the sides, ended with the block."""
    sides = Sides(model_dir, name, make, compute)
    try:
        yield sides
    finally:
        sides.end()
