"""The memory of the KV cache: one mapping. Its pages are first touched when blocks come into use, by the threads that
compute with them, so they come from these threads' NUMA node."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.host_memory import HUGE_PAGE_BYTES, advise

# The widest operand of a vector instruction.
_ALIGNMENT_BYTES = 64


def arena_bytes(size_bytes: int, num_pieces: int) -> int:
    """The size of an arena for `num_pieces` pieces of `size_bytes` in total."""
    wanted = size_bytes + num_pieces * _ALIGNMENT_BYTES
    return -(-wanted // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


class KVArena:
    """`size_bytes` at `address`, handed out in order by `take`; zeros if the memory is new. A mapping of its own in
    /proc/self/smaps, and excluded from core dumps."""

    def __init__(
        self,
        size_bytes: int,
        num_pieces: int,
        *,
        huge_pages: bool,
        memory: npt.NDArray[np.uint8] | None = None,
        offset: int = 0,
    ) -> None:
        """Reserve `num_pieces` pieces of `size_bytes` in total. OSError if that is not possible. They lie in `memory`
        at `offset`, both aligned to huge pages, or in a private mapping.

        With `huge_pages` the kernel is asked for transparent huge pages; it may give none.
        """
        self.size_bytes = arena_bytes(size_bytes, num_pieces)
        if memory is None:
            # Kernels before 6.7 do not align mappings: map more, and begin at the first boundary of a huge page.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = np.frombuffer(mmap.mmap(-1, self.size_bytes + HUGE_PAGE_BYTES, flags=flags), np.uint8)
            offset = -memory.ctypes.data % HUGE_PAGE_BYTES
        assert len(memory) >= offset + self.size_bytes, "the memory is too small"
        self._memory, self._offset = memory, offset
        self._end = self._offset + self.size_bytes
        self.address = memory.ctypes.data + offset
        advise(self.address, self.size_bytes, mmap.MADV_DONTDUMP)
        if huge_pages:
            # EINVAL if the kernel is built without huge pages, and of hugetlbfs.
            with contextlib.suppress(OSError):
                advise(self.address, self.size_bytes, mmap.MADV_HUGEPAGE)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next `num_bytes`, aligned for vector instructions. The array keeps the mapping alive."""
        assert self._offset + num_bytes <= self._end, "more was taken than was asked for"
        piece = self._memory[self._offset : self._offset + num_bytes]
        self._offset += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return piece
