"""The processes of the ranks after the first: how they start, and what happens when one ends."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.common.launch import with_parent
from headrace.worker.ranks.messages import make_links

log = logging.getLogger("headrace.worker.ranks")

MODULE = "headrace.worker.ranks.member"
Cpus = Sequence[int]


@dataclass(frozen=True, slots=True)
class Member:
    """The process of a rank: the socket to it, and the event that wakes it."""

    rank: int
    link: socket.socket
    bell: int
    process: subprocess.Popen[bytes]


class Members:
    """Starts a process on each of `cpus`, which share the files `descriptors`. They end when this
    process ends. `on_lost` is called in a thread with the reason when one has ended before `close`."""

    def __init__(self, cpus: Sequence[Cpus], descriptors: Sequence[int], on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._is_closed = False
        self._members: list[Member] = []
        self._started = threading.Event()
        self._error: OSError | None = None
        # A process gets its death signal when the thread that has started it ends. So that is not the caller's.
        self._thread = threading.Thread(target=self._run, args=(cpus, descriptors), name="ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def ring(self) -> None:
        """Wake all of them."""
        for member in self._members:
            os.eventfd_write(member.bell, 1)

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for member in self._members:
            member.process.kill()
        self._thread.join()
        for member in self._members:
            member.process.wait()
            member.link.close()
            os.close(member.bell)

    def _run(self, cpus: Sequence[Cpus], descriptors: Sequence[int]) -> None:
        try:
            for rank, mask in enumerate(cpus, 1):
                self._members.append(self._start(rank, mask, descriptors))
        except OSError as error:
            self._error = error
        finally:
            self._started.set()
        self._watch()

    def _start(self, rank: int, cpus: Cpus, descriptors: Sequence[int]) -> Member:
        ours, theirs = make_links()
        bell = os.eventfd(0)
        with theirs:
            inherited = [theirs.fileno(), *descriptors, bell]
            command = [sys.executable, "-m", MODULE, *map(str, inherited)]
            process = subprocess.Popen(with_parent(command, ",".join(map(str, cpus))), pass_fds=inherited)
        return Member(rank, ours, bell, process)

    def _watch(self) -> None:
        """Wait for the end of a process."""
        poll = select.poll()
        members = {}
        for member in self._members:
            descriptor = os.pidfd_open(member.process.pid)
            poll.register(descriptor, select.POLLIN)
            members[descriptor] = member
        for descriptor, _ in poll.poll() if members else ():
            member = members[descriptor]
            if not self._is_closed:
                self._on_lost(
                    f"rank {member.rank} of the divided model has ended (process {member.process.pid}, status "
                    f"{member.process.wait()})"
                )
        for descriptor in members:
            os.close(descriptor)
