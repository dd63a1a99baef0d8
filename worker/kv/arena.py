"""The memory of the KV cache: one anonymous mapping. Its pages are first touched when blocks come into use, by the
threads that compute with them, so they come from these threads' NUMA node."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np
import numpy.typing as npt

# The size of a huge page on x86-64, and on ARM with pages of 4 KiB.
_HUGE_PAGE_BYTES = 2 << 20
# The widest operand of a vector instruction.
_ALIGNMENT_BYTES = 64


class KVArena:
    """`size_bytes` of zeros at `address`, handed out in order by `take`. A mapping of its own in /proc/self/smaps, and
    excluded from core dumps."""

    def __init__(self, size_bytes: int, num_pieces: int, *, huge_pages: bool) -> None:
        """Reserve `num_pieces` pieces of `size_bytes` in total. OSError if that is not possible.

        With `huge_pages` the kernel is asked for transparent huge pages; it may give none.
        """
        wanted = size_bytes + num_pieces * _ALIGNMENT_BYTES
        self.size_bytes = -(-wanted // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        # Kernels before 6.7 do not align mappings: map more, and begin at the first boundary of a huge page.
        mapping = mmap.mmap(-1, self.size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._offset = -start % _HUGE_PAGE_BYTES
        self._end = self._offset + self.size_bytes
        self.address = start + self._offset
        mapping.madvise(mmap.MADV_DONTDUMP, self._offset, self.size_bytes)
        if huge_pages:
            # EINVAL if the kernel is built without huge pages.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE, self._offset, self.size_bytes)
        self._mapping = mapping

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The next `num_bytes`, aligned for vector instructions. The array keeps the mapping alive."""
        assert self._offset + num_bytes <= self._end, "more was taken than was asked for"
        piece = np.frombuffer(self._mapping, np.uint8, num_bytes, self._offset)
        self._offset += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return piece
