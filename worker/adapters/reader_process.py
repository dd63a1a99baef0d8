"""Reads adapters in a separate process at the lowest priority, so that running streams do not wait for it.

    worker                                            reader
    layers, memory (its files)      ------------->    maps the memory
    read PATH                       ------------->    reads, checks, hashes
    write SLOT                      ------------->    converts into the slot

A thread would hold the interpreter's lock hundreds of times while a step waits for it. The process ends with its
worker, because that closes the socket between them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.worker.adapters.files import AdapterError
from headrace.worker.adapters.reader import AdapterReader, Found, Layers
from headrace.worker.model.adapter_memory import AdapterMemory

log = logging.getLogger(__name__)

# A reader that competes with the worker for a core gets a seventieth of it. It works while cores are idle; most of them
# are idle between two steps.
_NICE = 19
_STOP_S = 2.0


class ReaderProcess:
    """A Reader that works in another process. Restarts the process if it has ended unexpectedly."""

    def __init__(self, layers: Layers, memory: AdapterMemory) -> None:
        self._layers = layers
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The id of the process that reads adapters."""
        assert self._process is not None
        return self._process.pid

    def read(self, path: Path) -> Found:
        """See Reader."""
        return Found(*self._ask("read", path))

    def write(self, slot: int, path: Path, sha256: str) -> None:
        """See Reader."""
        self._ask("write", slot, path, sha256)

    def move(self, memory: AdapterMemory, slots: Sequence[int]) -> None:
        """See Reader."""
        self._ask("move", memory.rank, list(slots), memory=memory)
        self._memory = memory

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._socket = self._connection = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        memory = self._memory
        shape = memory.num_slots, memory.rank
        self._send((self._layers, memory.groups, *shape, memory.is_bfloat16, memory.parts), memory)

    def _ask(self, method: str, *arguments: Any, memory: AdapterMemory | None = None) -> Any:
        """Call a method of AdapterReader in the other process, and return its result. Re-raises its exception."""
        for is_last in (False, True):
            try:
                if self._process is None:
                    self._start()
                self._send((method, arguments), memory)
                assert self._connection is not None
                result = self._connection.recv()
                break
            except (EOFError, OSError) as error:
                assert self._process is not None
                pid = self._process.pid
                self.close()
                if is_last:
                    raise AdapterError(
                        "the process that reads adapters ended twice; is there too little memory for this adapter?"
                    ) from error
                log.warning("the process %d that reads adapters has ended unexpectedly; it is started again", pid)
        if isinstance(result, Exception):
            raise result
        return result

    def _send(self, message: tuple[Any, ...], memory: AdapterMemory | None) -> None:
        assert self._socket is not None
        assert self._connection is not None
        self._connection.send(message)
        if memory is not None:
            socket.send_fds(self._socket, [b"m"], memory.fds)


def main() -> None:
    """The other process: answer requests from the socket until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group; the worker may still need it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    link = socket.socket(fileno=int(sys.argv[1]))
    connection = Connection(os.dup(link.fileno()))
    with contextlib.suppress(EOFError, OSError):
        layers, groups, num_slots, rank, is_bfloat16, parts = connection.recv()
        fds = _files(link, len(parts))
        memory = AdapterMemory(groups, num_slots, rank, is_bfloat16=is_bfloat16, parts=parts, fds=fds)
        reader = AdapterReader(layers, memory)
        while True:
            method, arguments = connection.recv()
            if method == "move":
                rank, slots = arguments
                memory = memory.in_files(rank, _files(link, len(parts)))
                arguments = memory, slots
            try:
                connection.send(getattr(reader, method)(*arguments))
            except (AdapterError, MemoryError) as error:
                connection.send(error)
            except Exception as error:
                connection.send(AdapterError(f"its files are damaged or unknown ({type(error).__name__}: {error})"))


def _files(link: socket.socket, count: int) -> list[int]:
    """The descriptors of so many files, which the worker sends."""
    _, fds, _, _ = socket.recv_fds(link, 1, count)
    if len(fds) != count:
        raise EOFError
    return fds


if __name__ == "__main__":
    main()
