"""Runs a function with a stack as deep as its input may need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_PAGE_BYTES = 4096
_T = TypeVar("_T")
# The stack size of new threads is one setting of the process.
_starting = threading.Lock()


def with_stack(num_bytes: int, function: Callable[[], _T]) -> _T:
    """The result of a function that runs in a thread of its own with a stack of `num_bytes`. Only what it touches takes
    memory, until it ends. Raises what the function raises."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _starting:
        before = threading.stack_size(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result.result()
