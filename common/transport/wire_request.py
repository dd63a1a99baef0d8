"""The wire format of a GenerateRequest, in parts that several requests may share.

The n choices of a chat differ only in id and seed; prompt and grammar are the same. Protobuf reads two concatenated
messages as one merged message, so such requests are written as

    request i  =  shared parts (prompt, grammar)  +  own bytes (id, seed)

A shared part is one object in a process. It is encoded, sent, parsed and hashed only once for all its requests. Where
the parts cannot be kept apart, `WireRequest.joined` is the whole request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from headrace.protos.inference_pb2 import GenerateRequest

_T = TypeVar("_T")


def without_images(request: GenerateRequest) -> GenerateRequest:
    """The request without its images, which are taken out of the given one. It is another message if there are any,
    because a message keeps the memory of fields that are cleared."""
    if not request.images:
        return request
    request.ClearField("images")
    freed = GenerateRequest()
    freed.CopyFrom(request)
    return freed


class SharedPart:
    """Bytes with which several requests begin, and values derived from them. Parts are compared by identity."""

    __slots__ = ("__weakref__", "_kept", "raw")

    def __init__(self, raw: bytes) -> None:
        """`raw` is a GenerateRequest with the fields that are shared."""
        self.raw = raw
        self._kept: dict[Any, Any] = {}

    def kept(self, make: Callable[[bytes], _T]) -> _T:
        """The value that `make` computes from the raw bytes. The first caller computes it, and the others that share
        the part reuse it."""
        if make not in self._kept:
            self._kept[make] = make(self.raw)
        return cast("_T", self._kept[make])


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request: the parts that it shares with others, followed by its own bytes."""

    own: bytes
    shared: tuple[SharedPart, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the whole request."""
        return len(self.own) + sum(len(part.raw) for part in self.shared)

    def joined(self) -> bytes:
        """The encoded request with its shared parts, as the method Generate takes it."""
        return b"".join((*(part.raw for part in self.shared), self.own)) if self.shared else self.own


class HeldBytes:
    """The bytes of the requests that are held. A part that several share counts once, until the last one is
    released."""

    def __init__(self) -> None:
        self.total = 0
        self._num_holders: Counter[SharedPart] = Counter()

    def added_by(self, request: WireRequest) -> int:
        """How many bytes this request would add."""
        if not request.shared:
            return len(request.own)
        fresh = (part for part in set(request.shared) if part not in self._num_holders)
        return len(request.own) + sum(len(part.raw) for part in fresh)

    def hold(self, request: WireRequest) -> None:
        """Count a request until it is released."""
        self.total += self.added_by(request)
        if request.shared:
            self._num_holders.update(set(request.shared))

    def release(self, request: WireRequest) -> None:
        """Stop counting a request that was held. Must be called exactly once for each."""
        self.total -= len(request.own)
        for part in set(request.shared):
            self._num_holders[part] -= 1
            if not self._num_holders[part]:
                del self._num_holders[part]
                self.total -= len(part.raw)
