"""Huge pages for a KV cache in a file in memory.

Most kernels give such files small pages on a fault (/sys/kernel/mm/transparent_hugepage/shmem_enabled is `never`), and
huge ones on request (MADV_COLLAPSE, Linux 6.1). So a thread requests them for blocks that are about to come into use.
Blocks come into use in order, and a page that is not huge in time works too.
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
# Prompts take this many blocks in a step, or fewer.
_LEAST_AHEAD = 64


class HugePages:
    """Makes the pages of `caches` huge, arrays of bytes in which block follows block. `begun` blocks are done."""

    def __init__(self, caches: Sequence[npt.NDArray[np.uint8]], num_blocks: int, begun: int = 0) -> None:
        self._caches = caches
        self._num_blocks = num_blocks
        widest = max(cache.nbytes // num_blocks for cache in caches)
        self._ahead = max(_LEAST_AHEAD, HUGE_PAGE_BYTES // widest)
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "huge-pages")
        self._asked = begun
        self._done: set[int] = set()

    def reach(self, block: int) -> int:
        """This block comes into use, the highest so far. Returns from which block on to call again."""
        if self._executor is None:
            return self._num_blocks
        first, self._asked = self._asked, min(block + 2 * self._ahead, self._num_blocks)
        self._executor.submit(self._collapse, first, self._asked)
        return self._asked - self._ahead if self._asked < self._num_blocks else self._num_blocks

    def wait(self) -> None:
        """Wait until all that was asked for is done."""
        if self._executor is not None:
            self._executor.submit(int).result()

    def _collapse(self, first: int, end: int) -> None:
        for cache in self._caches:
            each = cache.nbytes // self._num_blocks
            address = cache.ctypes.data
            begin, stop = address + first * each, address + end * each
            # A page that is only partly in this cache is as good for its neighbour.
            for page in range(begin - begin % HUGE_PAGE_BYTES, stop, HUGE_PAGE_BYTES):
                if page not in self._done and not self._make_huge(page, cache, max(page - address, 0)):
                    return

    def _make_huge(self, page: int, cache: npt.NDArray[np.uint8], offset: int) -> bool:
        """Returns whether to go on."""
        self._done.add(page)
        # The kernel collapses only where a page is present; reading takes one.
        int(cache[offset])
        try:
            advise(page, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                log.info("this kernel has no huge pages for a KV cache that outlives the worker (Linux 6.1 has)")
                self._executor = None
                return False
        return True
