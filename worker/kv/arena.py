"""The memory of the KV cache: one mapping. The compute threads touch each page first, when its block comes into use,
so the kernel allocates it on their NUMA node."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.block_bytes import ALIGNMENT_BYTES, aligned
from headrace.worker.kv.host_memory import HUGE_PAGE_BYTES, advise


def arena_bytes(size_bytes: int, num_pieces: int) -> int:
    """The size in bytes of an arena for `num_pieces` pieces that have `size_bytes` in total."""
    wanted = size_bytes + num_pieces * ALIGNMENT_BYTES
    return -(-wanted // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


class KVArena:
    """A region of `size_bytes` at `address`, from which `take` allocates in order. New memory is zeroed. The region is
    a separate mapping in /proc/self/smaps and is excluded from core dumps."""

    def __init__(
        self,
        size_bytes: int,
        num_pieces: int,
        *,
        huge_pages: bool,
        memory: npt.NDArray[np.uint8] | None = None,
        offset: int = 0,
        descriptor: int | None = None,
    ) -> None:
        """Reserve room for `num_pieces` pieces of `size_bytes` in total, in `memory` from `offset` on, or in a private
        mapping. The address of `memory` and `offset` must be multiples of the huge page size. `descriptor` is that of
        the file which `memory` maps.

        `huge_pages` asks the kernel for transparent huge pages, which it may decline. Raises OSError if the memory
        cannot be mapped.
        """
        self.size_bytes = arena_bytes(size_bytes, num_pieces)
        if memory is None:
            # Kernels before 6.7 do not align mappings, so map more and start at the first huge page boundary.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = np.frombuffer(mmap.mmap(-1, self.size_bytes + HUGE_PAGE_BYTES, flags=flags), np.uint8)
            offset = -memory.ctypes.data % HUGE_PAGE_BYTES
        assert len(memory) >= offset + self.size_bytes, "the memory is too small for the arena"
        self.descriptor = descriptor
        """The file that other processes can map to see the arena, at `offset`; None if they cannot."""
        self.offset = offset
        self._memory = memory
        self._offset = offset
        self._end = self._offset + self.size_bytes
        self.address = memory.ctypes.data + offset
        advise(self.address, self.size_bytes, mmap.MADV_DONTDUMP)
        if huge_pages:
            # The call fails with EINVAL in a kernel without huge pages, and for a hugetlbfs file.
            with contextlib.suppress(OSError):
                advise(self.address, self.size_bytes, mmap.MADV_HUGEPAGE)

    @property
    def taken_bytes(self) -> int:
        """The number of bytes taken so far. Another arena over the same memory continues after them if it first takes
        as many."""
        return self._offset - self.offset

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the next `num_bytes`, aligned for vector instructions. The array keeps the mapping alive."""
        assert self._offset + num_bytes <= self._end, "the arena has no room left"
        piece = self._memory[self._offset : self._offset + num_bytes]
        self._offset += aligned(num_bytes)
        return piece
