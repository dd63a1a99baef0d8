"""Huge pages for a KV cache in an in-memory file.

Most kernels back such files with small pages (/sys/kernel/mm/transparent_hugepage/shmem_enabled is `never`), but
collapse them into huge pages on request (MADV_COLLAPSE, since Linux 6.1). A thread makes these requests for blocks that
are about to come into use, which happens in order of their numbers. Blocks work before their pages are collapsed, too.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.host_memory import HUGE_PAGE_BYTES, advise

log = logging.getLogger(__name__)

_MADV_COLLAPSE = 25
# The minimum number of blocks to prepare in advance: a step of prompts takes at most this many.
_LEAST_AHEAD = 64


class HugePages:
    """Collapses the pages of `caches` into huge ones. Each cache is an array of bytes that stores its blocks one after
    another. The first `begun` blocks are skipped, because they are huge already."""

    def __init__(self, caches: Sequence[npt.NDArray[np.uint8]], num_blocks: int, begun: int = 0) -> None:
        self._caches = caches
        self._num_blocks = num_blocks
        widest = max(cache.nbytes // num_blocks for cache in caches)
        self._ahead = max(_LEAST_AHEAD, HUGE_PAGE_BYTES // widest)
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "huge-pages")
        self._asked = begun
        self._done: set[int] = set()

    def reach(self, block: int) -> int:
        """Prepare for the use of `block`, the highest so far. Returns the block at which to call again."""
        executor = self._executor  # the thread may set it to None
        if executor is None:
            return self._num_blocks
        first, self._asked = self._asked, min(block + 2 * self._ahead, self._num_blocks)
        executor.submit(self._collapse, first, self._asked)
        return self._asked - self._ahead if self._asked < self._num_blocks else self._num_blocks

    def wait(self) -> None:
        """Wait until all pages that `reach` has asked for are collapsed. For tests."""
        if self._executor is not None:
            self._executor.submit(int).result()

    def _collapse(self, first: int, end: int) -> None:
        for cache in self._caches:
            each = cache.nbytes // self._num_blocks
            address = cache.ctypes.data
            begin, stop = address + first * each, address + end * each
            # A page that is only partly in this cache is collapsed, too: its other part belongs to another cache.
            for page in range(begin - begin % HUGE_PAGE_BYTES, stop, HUGE_PAGE_BYTES):
                if page not in self._done and not self._make_huge(page, cache, max(page - address, 0)):
                    return

    def _make_huge(self, page: int, cache: npt.NDArray[np.uint8], offset: int) -> bool:
        """Collapse one page. Returns False if the kernel does not support it."""
        self._done.add(page)
        # The kernel collapses only pages that are present, so read one.
        int(cache[offset])
        try:
            advise(page, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                log.info("this kernel has no huge pages for a KV cache that outlives the worker; Linux 6.1 has them")
                self._executor = None
                return False
        return True
