"""What rank 0 and another rank tell each other before the first step: packets of MessagePack over a socket."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headrace.worker.ranks.memory import LogitsShape

_MAX_BYTES = 1 << 16
_Message = TypeVar("_Message")


class LinkClosedError(OSError):
    """The other rank has ended."""


class Setup(msgspec.Struct, frozen=True):
    """Which rank of which model a process is, and how it computes; see `OpenVINOModelRunner`."""

    rank: int
    num_ranks: int
    model_dir: str
    threads: int
    kv_precision: str
    execution_mode: str
    max_context_tokens: int
    speculates: bool
    has_parts: bool


class Compiled(msgspec.Struct, frozen=True):
    """The rank's graph is compiled; or the model cannot be divided so, because of this problem. `shapes` are those of
    its part of a KV block: heads, tokens and bytes of a token in each of its caches, of which some are `in_slots`."""

    exact_rows: int = 0
    shapes: Sequence[tuple[int, int, int]] = ()
    in_slots: Sequence[bool] = ()
    problem: str = ""


class Allocate(msgspec.Struct, frozen=True):
    """Make the KV cache, and be ready for steps. `logits` is the shape of the shared logits."""

    num_blocks: int
    num_slots: int
    huge_pages: bool
    logits: LogitsShape


class Allocated(msgspec.Struct, frozen=True):
    """The KV cache is there, unless there is a problem."""

    problem: str = ""


def make_links() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep packets apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. OSError if the other end is closed."""
    link.sendall(msgspec.msgpack.encode(message))


def receive(link: socket.socket, kind: type[_Message]) -> _Message:
    """Wait for a message. LinkClosedError if the other end is closed."""
    packet = link.recv(_MAX_BYTES)
    if not packet:
        raise LinkClosedError("the other rank has ended")
    return msgspec.msgpack.decode(packet, type=kind)
