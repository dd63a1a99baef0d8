"""Runs a function in its own thread."""

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
    """Run a function in a daemon thread. Returns the future of its result. The function cannot be cancelled, and the
    process does not wait for it when it ends. With `stack_bytes`, the thread's stack has at least that size; only the
    part that is used takes memory, until the function returns."""
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
