"""Memory of a process and of the files that it has mapped (Linux: proc_pid_smaps(5), madvise(2))."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MADV_DONTNEED = 4
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")


class Mapping(NamedTuple):
    """A mapping of this process: its address, its size and its resident part in bytes, and its permissions, such as
    "r--p"."""

    address: int
    size: int
    resident: int
    permissions: str


def mappings_of(path: Path) -> Iterator[Mapping]:
    """The mappings of a file in this process; none on systems without /proc."""
    wanted, header = os.path.realpath(path), None
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if found := _HEADER.match(line):
            header = found if found[4] == wanted else None
        elif header is not None and line.startswith("Rss:"):
            start, end = int(header[1], 16), int(header[2], 16)
            yield Mapping(start, end - start, int(line.split()[1]) * 1024, header[3])


def give_back(path: Path) -> int:
    """Return the memory of a mapped file to the kernel, which reads pages again when they are used. Returns the number
    of bytes. Writable mappings stay, because their pages may differ from the file's."""
    libc, given_back = ctypes.CDLL(None, use_errno=True), 0
    for mapping in list(mappings_of(path)):
        address, size = ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.size)
        if "w" not in mapping.permissions and libc.madvise(address, size, _MADV_DONTNEED) == 0:
            given_back += mapping.resident
    return given_back


def private_bytes() -> int:
    """Memory that is this process's own and backed by no file, in bytes; 0 on systems without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
