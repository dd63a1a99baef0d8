"""The messages between rank 0 and another rank, most of them before the first step: packets of MessagePack over a
socket."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headrace.worker.ranks.memory import LogitsShape
from headrace.worker.ranks.shared_cache import Place

_MAX_BYTES = 1 << 16
_Message = TypeVar("_Message")


class LinkClosedError(OSError):
    """The other rank has ended."""


class Setup(msgspec.Struct, frozen=True):
    """Which rank of which model a process is, and how it computes; see `OpenVINOModelRunner`. If it `is_stage`, that is
    of a stage of a pipeline, whose `StageLayers` come as soon as they are known. For `computes_all_states` see
    `StateReader`."""

    rank: int
    num_ranks: int
    model_dir: str
    threads: int
    kv_precision: str
    execution_mode: str
    max_context_tokens: int
    speculates: bool
    has_parts: bool
    max_adapters: int
    is_stage: bool
    computes_all_states: bool


class StageLayers(msgspec.Struct, frozen=True):
    """The layers of the stage; see `Layers`."""

    first: int
    end: int | None
    bfloat16_states: bool


class Compiled(msgspec.Struct, frozen=True):
    """Reports that the rank's graph is compiled, or the `problem` why the model cannot be divided. `shapes` describe
    the rank's part of a KV block: heads, tokens and bytes of a token in each of its caches. `in_slots` says which of
    these are in slots. `state_bytes` is the size of its part of a slot for the states of recurrent layers."""

    exact_rows: int = 0
    shapes: Sequence[tuple[int, int, int]] = ()
    in_slots: Sequence[bool] = ()
    state_bytes: int = 0
    problem: str = ""


class Allocate(msgspec.Struct, frozen=True):
    """Make the KV cache in the file that comes with this, and be ready for steps. `place` is that of the caches in the
    file, `logits` the shape of the shared logits; None if there are none. `num_state_slots` are for the states of
    recurrent layers."""

    num_blocks: int
    num_slots: int
    num_state_slots: int
    huge_pages: bool
    place: Place
    logits: LogitsShape | None


class Allocated(msgspec.Struct, frozen=True):
    """Reports that the KV cache is allocated, or the problem why it is not."""

    problem: str = ""


class MovedAdapters(msgspec.Struct, frozen=True):
    """The rank's part of all adapters is in the file that comes with this, with room for LoRA ranks up to `lora_rank`.
    Sent before the first step that reads it (see `Step`)."""

    lora_rank: int


def make_links() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that preserve the boundaries of packets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: msgspec.Struct, files: Sequence[int] = ()) -> None:
    """Send a message, with descriptors of files. OSError if the other end is closed."""
    socket.send_fds(link, [msgspec.msgpack.encode(message)], files)


def receive(link: socket.socket, kind: type[_Message]) -> _Message:
    """Wait for a message. LinkClosedError if the other end is closed."""
    return receive_with_files(link, kind, 0)[0]


def receive_with_files(link: socket.socket, kind: type[_Message], count: int) -> tuple[_Message, list[int]]:
    """Wait for a message and the descriptors of `count` files, which are the caller's. LinkClosedError if the other end
    is closed."""
    packet, files, _, _ = socket.recv_fds(link, _MAX_BYTES, count)
    if not packet:
        raise LinkClosedError("the other rank has ended")
    return msgspec.msgpack.decode(packet, type=kind), files
