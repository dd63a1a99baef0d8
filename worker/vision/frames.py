"""Messages between the worker and its process that encodes images: frames of bytes over a socket.

    | size of the head, 4 bytes | head, MessagePack | payloads, as long as the head says |

Nothing is unpickled, and the worker checks all sizes against what it asked for, because the other process reads what
strangers send.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SIZE = struct.Struct(">I")
# No head is longer: a few numbers and a sentence for each image of a batch.
_MAX_HEAD_BYTES = 1 << 20
# The socket takes this much at a time.
_SLICE_BYTES = 1 << 20

_Head = TypeVar("_Head")


class BrokenFrameError(OSError):
    """The other process has ended, or has sent something that is not a frame."""


class Opened(msgspec.Struct, frozen=True):
    """Reports that the process is ready, or the problem why the model's images cannot be encoded."""

    problem: str = ""


class Wanted(msgspec.Struct, frozen=True):
    """An image to be encoded: how closely, and the bytes of its file, which are a payload."""

    detail: str
    num_bytes: int


class Encode(msgspec.Struct, frozen=True):
    """Images to be encoded. Their files follow."""

    images: Sequence[Wanted]


class Result(msgspec.Struct, frozen=True):
    """The result for one image: its number of tokens, whose states are a payload; or the problem, in our own words."""

    num_tokens: int = 0
    problem: str = ""
    is_invalid: bool = False
    """Whether the file is at fault."""


class Encoded(msgspec.Struct, frozen=True):
    """A result for each image, and the seconds that all of them took."""

    results: Sequence[Result]
    seconds: float


def send(link: socket.socket, head: msgspec.Struct, payloads: Sequence[Buffer] = ()) -> None:
    """Send a frame. Payloads are contiguous. OSError if the other end is closed."""
    raw = msgspec.msgpack.encode(head)
    link.sendall(_SIZE.pack(len(raw)) + raw)
    for payload in payloads:
        view = memoryview(payload).cast("B")
        for start in range(0, len(view), _SLICE_BYTES):
            link.sendall(view[start : start + _SLICE_BYTES])


def receive(link: socket.socket, kind: type[_Head]) -> _Head:
    """The head of the next frame. BrokenFrameError, or TimeoutError after the socket's timeout."""
    (size,) = _SIZE.unpack(receive_bytes(link, _SIZE.size))
    if size > _MAX_HEAD_BYTES:
        raise BrokenFrameError("the head of a frame is too long")
    try:
        return msgspec.msgpack.decode(receive_bytes(link, size), type=kind)
    except msgspec.DecodeError:
        raise BrokenFrameError("the head of a frame is unknown") from None


def receive_bytes(link: socket.socket, size: int) -> bytes:
    """The next bytes of a frame."""
    raw = bytearray(size)
    _receive_into(link, memoryview(raw))
    return bytes(raw)


def receive_floats(link: socket.socket, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The next payload, an array of this shape."""
    values = np.empty(shape, np.float32)
    if values.size:
        _receive_into(link, memoryview(cast("Buffer", values)).cast("B"))
    return values


def _receive_into(link: socket.socket, view: memoryview) -> None:
    while view:
        count = link.recv_into(view)
        if not count:
            raise BrokenFrameError("the other process has ended")
        view = view[count:]
