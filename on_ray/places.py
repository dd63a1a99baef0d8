"""Assigns NUMA nodes of a host to workers. Ray counts the nodes' resources, but does not name them.

A place is a NUMA node, or a part of one if a host offers more resources than it has nodes. A file lock says that a
place is taken: it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from headrace.cli.fleet.run_state import runtime_directory
from headrace.cli.serving.placement import WorkerPlace


@dataclass(slots=True)
class Claim:
    """Places that are taken. `numbers` are theirs on the host."""

    numbers: tuple[int, ...]
    places: tuple[WorkerPlace, ...]
    descriptors: list[int]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs of all places."""
        return tuple(sorted({cpu for place in self.places for cpu in place.cpus}))

    @property
    def num_threads(self) -> int:
        """The threads of all places."""
        return sum(place.num_threads for place in self.places)

    @property
    def memory_node(self) -> int | None:
        """The NUMA node of the memory; None if the places are on several."""
        nodes = {place.node for place in self.places}
        return nodes.pop() if len(nodes) == 1 else None

    def release(self) -> None:
        """Let others take the places."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def claim_places(places: Sequence[WorkerPlace], count: int, directory: Path) -> Claim | None:
    """Take `count` free places, or none of them: None if fewer are free. `directory` has the locks of the host."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    taken = Claim((), (), [])
    for number, place in enumerate(places):
        if len(taken.numbers) == count:
            break
        descriptor = os.open(directory / f"place-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        taken.numbers += (number,)
        taken.places += (place,)
        taken.descriptors.append(descriptor)
    if len(taken.numbers) == count:
        return taken
    taken.release()
    return None


def lock_directory(node_name: str) -> Path:
    """Where the locks of a Ray node are. A node that is started again has the same name, so that its workers wait for
    those which outlive the old one. Raises CommandError as `runtime_directory` does."""
    directory = runtime_directory() / "ray" / quote(node_name, safe="")
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    return directory
