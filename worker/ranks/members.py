"""The processes of all ranks but the first: starts them, and detects when one ends."""

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
from typing import NoReturn, TypeVar

import msgspec

from headrace.common.launch import with_parent
from headrace.worker.host.progress import Progress
from headrace.worker.ranks.counters import RankLostError
from headrace.worker.ranks.messages import LinkClosedError, make_links, receive, send

log = logging.getLogger("headrace.worker.ranks")

MODULE = "headrace.worker.ranks.member"
Cpus = Sequence[int]
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class Member:
    """The process of a rank: the socket to it, the event that wakes it, and its progress while it loads."""

    rank: int
    link: socket.socket
    bell: int
    process: subprocess.Popen[bytes]
    progress: Progress

    def ending(self) -> str:
        """Wait until the process has ended. Returns a description of how it ended, for an error message."""
        of_process = f"process {self.process.pid}, status {self.process.wait()}"
        return f"rank {self.rank} of the divided model has ended ({of_process})"


class Members:
    """Starts a process on each of `cpus`. The processes share the files `descriptors`, and end when this process ends.
    If one ends before `close`, `on_lost` is called with the reason, in a thread.

    Until `loaded` is called, a process also counts as lost if it makes no progress for `hangs_after_s` seconds while
    this process waits for it. Later, a watchdog checks the steps.
    """

    def __init__(
        self,
        cpus: Sequence[Cpus],
        descriptors: Sequence[int],
        on_lost: Callable[[str], None],
        *,
        hangs_after_s: float,
    ) -> None:
        self._on_lost = on_lost
        self._hangs_after_s = hangs_after_s
        self._is_loaded = False
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
        """Wake all processes, because there is a new step."""
        for member in self._members:
            if not self._is_loaded:
                member.progress.begin()
            os.eventfd_write(member.bell, 1)

    def tell(self, member: Member, message: msgspec.Struct, files: Sequence[int] = ()) -> None:
        """Send a rank a message while it loads, with descriptors of files. RankLostError, after `on_lost`, if it has
        ended."""
        try:
            send(member.link, message, files)
        except OSError:
            self._lose(f"{member.ending()} while it loaded")

    def hear(self, member: Member, kind: type[_Message]) -> _Message:
        """Wait for a rank's message of this `kind` while it loads. RankLostError, after `on_lost`, if the rank ends or
        makes no progress."""
        poll = select.poll()
        poll.register(member.link, select.POLLIN)
        member.progress.begin()
        while not poll.poll(1000 * member.progress.every_s):
            self._refuse_hanging(member)
        try:
            return receive(member.link, kind)
        except LinkClosedError:
            self._lose(f"{member.ending()} while it loaded; is there enough memory on its NUMA node?")

    def get_on(self) -> bool:
        """Return True: the rank that waits may go on waiting. RankLostError, after `on_lost`, if a rank makes no
        progress while it loads."""
        if not self._is_loaded:
            for member in self._members:
                self._refuse_hanging(member)
        return True

    def loaded(self) -> None:
        """Stop checking the progress of the processes."""
        self._is_loaded = True

    def _refuse_hanging(self, member: Member) -> None:
        if member.progress.is_lost():
            self._lose(
                f"rank {member.rank} of the divided model hangs while it loads (process {member.process.pid}): "
                f"{member.progress}"
            )

    def _lose(self, why: str) -> NoReturn:
        self._on_lost(why)
        raise RankLostError(why)

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
        return Member(rank, ours, bell, process, Progress(process.pid, self._hangs_after_s))

    def _watch(self) -> None:
        """Wait until a process ends."""
        poll = select.poll()
        members = {}
        for member in self._members:
            descriptor = os.pidfd_open(member.process.pid)
            poll.register(descriptor, select.POLLIN)
            members[descriptor] = member
        for descriptor, _ in poll.poll() if members else ():
            member = members[descriptor]
            if not self._is_closed:
                self._on_lost(member.ending())
        for descriptor in members:
            os.close(descriptor)
