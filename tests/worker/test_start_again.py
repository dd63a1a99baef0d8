"""A stage whose worker has ended starts again."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from headrace.worker import __main__ as command


@pytest.mark.parametrize("is_bound", [True, False])
def test_the_new_process_has_the_cpus_and_the_memory_policy_that_the_old_one_had_at_first(
    monkeypatch: pytest.MonkeyPatch, is_bound: bool
) -> None:
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "end_children", lambda: done.append(("end children",)))
    monkeypatch.setattr(command, "unbind_memory", lambda: done.append(("unbind memory",)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *asked: done.append(asked))
    monkeypatch.setattr(os, "execv", lambda *asked: done.append(asked))
    command.start_again({4, 5}, is_bound=is_bound)
    unbound = [("unbind memory",)] if is_bound else []
    assert done == [
        ("end children",),
        *unbound,
        (0, {4, 5}),
        (sys.executable, [sys.executable, *sys.orig_argv[1:]]),
    ]
