"""Runs a function in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_PAGE_BYTES = 4096
_T = TypeVar("_T")
# The stack size of new threads is one setting of the process.
_starting = threading.Lock()


def in_thread(name: str, function: Callable[[], _T], *, stack_bytes: int = 0) -> Future[_T]:
    """The result of a function that runs in a daemon thread, which no end of the process waits for. It has begun, so
    it cannot be cancelled. With `stack_bytes`, the stack has at least so many; only what is touched takes memory, until
    the end of the function."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _starting:
        before = threading.stack_size(-(-stack_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result
