"""Processes of ranks that end or stand still while they load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.worker.host.progress import Progress
from headrace.worker.ranks import members as members_module
from headrace.worker.ranks.counters import RankLostError
from headrace.worker.ranks.members import Member, Members
from headrace.worker.ranks.memory import GroupMemory
from headrace.worker.ranks.messages import Compiled, MovedAdapters
from tests.patience import until

# Of ranks that stand still, and of those that do not.
HANGS_AFTER_S, NEVER_S = 0.8, 3600.0


@contextmanager
def started(
    does: str, directory: Path, monkeypatch: pytest.MonkeyPatch, hangs_after_s: float = HANGS_AFTER_S
) -> Iterator[tuple[Members, list[str]]]:
    """A rank whose process does this instead, and what is said of lost ones."""
    (directory / "rank_of_a_test.py").write_text(f"import os, signal, socket, sys, time\n{does}")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setattr(members_module, "MODULE", "rank_of_a_test")
    lost: list[str] = []
    members = Members([[min(os.sched_getaffinity(0))]], [], lost.append, hangs_after_s=hangs_after_s)
    try:
        yield members, lost
    finally:
        members.close()


def only(members: Members) -> Member:
    (member,) = members
    return member


def test_a_rank_that_ends_while_it_loads_is_lost_and_not_misconfigured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration error would end the worker with status 2, and it would not be started again."""
    with started("os.kill(os.getpid(), signal.SIGKILL)", tmp_path, monkeypatch, NEVER_S) as (members, lost):
        member = only(members)
        why = f"rank 1 of the divided model has ended (process {member.process.pid}, status -9)"
        with pytest.raises(RankLostError) as raised:
            members.hear(member, Compiled)
        assert str(raised.value) == f"{why} while it loaded; is there enough memory on its NUMA node?"
        with pytest.raises(RankLostError, match="has ended .* while it loaded"):
            members.tell(member, MovedAdapters(8))
        until(lambda: why in lost, "the one who watches has told it too")


def test_a_rank_that_stands_still_while_it_loads_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started("time.sleep(3600)", tmp_path, monkeypatch) as (members, lost):
        member = only(members)
        with pytest.raises(RankLostError):
            members.hear(member, Compiled)
        assert lost == [
            f"rank 1 of the divided model hangs while it loads (process {member.process.pid}): it has neither computed "
            f"nor read or written files for {HANGS_AFTER_S:g} s"
        ]


class GetsOn(Progress):
    """Of a process that gets on, which is told so at the third look."""

    def __init__(self, pid: int, tell: Path) -> None:
        super().__init__(pid, HANGS_AFTER_S / 10)
        self._tell, self.num_looks = tell, 0

    def is_lost(self) -> bool:
        """It is not."""
        self.num_looks += 1
        if self.num_looks == 3:
            self._tell.touch()
        return False


def test_one_that_takes_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packet = msgspec.msgpack.encode(Compiled(exact_rows=7))
    told = tmp_path / "told"
    does = f"""
while not os.path.exists({str(told)!r}):
    time.sleep(0.01)
socket.socket(fileno=int(sys.argv[1])).send({packet!r})
time.sleep(3600)
"""
    with started(does, tmp_path, monkeypatch) as (members, lost):
        member = only(members)
        progress = GetsOn(member.process.pid, told)
        assert members.hear(replace(member, progress=progress), Compiled).exact_rows == 7
        assert progress.num_looks >= 3
        assert not lost


def test_a_rank_that_stands_still_in_the_warm_up_is_lost_and_later_left_to_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started("time.sleep(3600)", tmp_path, monkeypatch) as (members, lost):
        memory = GroupMemory(GroupMemory.make(2), 0, 2, members.get_on)
        members.ring()
        with pytest.raises(RankLostError):
            memory.steps.wait((1,), 1)
        assert "rank 1 of the divided model hangs while it loads" in lost[0]
        members.loaded()
        assert members.get_on()
