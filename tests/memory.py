"""Gives memory back between tests, and keeps the search for it short.

Models that tests compile are often in circles of references, which Python frees at a time of its own choosing: by then
one process could hold several gigabytes, and be what the kernel kills when another program needs memory.

A search for such circles looks at every object. Most of them are modules and collected tests, which stay to the end.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Generator
from pathlib import Path

import pytest

# More than this since the last time, and what nothing refers to any more is looked for.
_GROWTH_BYTES = 256 << 20
_PAGE_BYTES = 4096
_kept_bytes = 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for nothing while tests are collected, because what is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave all that there is by now out of later searches. Gateways, of which tests close hundreds, each begin one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """After a test and the fixtures that ended with it, free what it left if that is much."""
    global _kept_bytes
    if resident_bytes() - _kept_bytes > _GROWTH_BYTES:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _kept_bytes = resident_bytes()


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process, by default of this one."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES
