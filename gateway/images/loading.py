"""Loads images: decodes base64, fetches URLs if the operator allows it, and bounds them by their length and header.

Nothing keeps the event loop for long. Base64 is decoded in slices, between which others have their turn; hashes and
files are read in threads.
"""

from __future__ import annotations

import asyncio
import binascii
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeVar

from headrace.common.vision.bounds import check_size
from headrace.common.vision.header import ImageError, ImageHeader, read_header
from headrace.gateway.images.given import GivenImage
from headrace.gateway.images.local import LocalImages
from headrace.gateway.images.refusal import ImageRefusal, Why, too_large
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ImageLimits

if TYPE_CHECKING:
    from headrace.gateway.images.remote import RemoteImages

MAX_FETCHES_OF_REQUEST = 8
"""At a time. The time limit of an image does not begin before its turn."""
MAX_FETCHED_BYTES = 1024 * 1024 * 1024
"""Of all requests. The bodies of requests have a bound of their own (`edge.bodies`), but a short body may name large
files."""
MAX_INLINE_BYTES = 32 * 1024
"""What is done with so many bytes takes less time than handing it to a thread."""
# About half a millisecond.
_SLICE_CHARS = 128 * 1024
# White space that browsers skip in base64, and the two characters that its alphabet for URLs has in place of others.
_WHITE_SPACE = b" \t\n\f\r"
_OF_URLS = bytes.maketrans(b"-_", b"+/")
# Part of a text that white space may be before the text counts as too long: a little more than that of short lines.
_WHITE_SHARE = 0.05
_T = TypeVar("_T")


class ImageLoader:
    """Loads images for all requests. Made and used on one event loop."""

    def __init__(
        self, executor: Executor, remote: RemoteImages | None = None, local: LocalImages | None = None
    ) -> None:
        """Without `remote` or `local`, such URLs are refused."""
        self._executor = executor
        self._remote = remote
        self._local = local
        self._num_fetched_bytes = 0

    async def load(
        self, images: Sequence[tuple[str, GivenImage]], limits: ImageLimits, max_bytes: int
    ) -> Sequence[tuple[bytes, ImageHeader]]:
        """The files of a request's images, each given with the name of its field, and their headers. All of them have
        at most `max_bytes`. Raises `StatusError`."""
        check_number(images, limits)
        for name, image in images:
            _check_length(name, image, limits.max_bytes)
        _check_total(images, map(_least_bytes, (image for _, image in images)), max_bytes)
        turns = asyncio.Semaphore(MAX_FETCHES_OF_REQUEST)
        try:
            async with asyncio.TaskGroup() as loading:
                for name, image in images:
                    loading.create_task(self._load(name, image, limits.max_bytes, turns))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        files = [image.data or b"" for _, image in images]
        _check_total(images, map(len, files), max_bytes)
        names = [name for name, _ in images]
        return [
            (data, await self.run(lambda name=name, data=data: _header(name, data, limits), len(data)))  # type: ignore[misc]
            for name, data in zip(names, files, strict=True)
        ]

    async def run(self, work: Callable[[], _T], num_bytes: int) -> _T:
        """The result of work on so many bytes, in a thread if they are many."""
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _load(self, name: str, image: GivenImage, max_bytes: int, turns: asyncio.Semaphore) -> None:
        if image.data is None and image.base64 is not None:
            image.data = await _decoded(name, image.base64)
            image.base64 = None
        elif image.data is None:
            async with turns:
                image.data = await self._fetched(name, image.url or "", max_bytes)
            self._hold(image, len(image.data))
        if len(image.data) > max_bytes:
            raise too_large(name, max_bytes)

    async def _fetched(self, name: str, url: str, max_bytes: int) -> bytes:
        if url[:5].lower() != "file:":
            if self._remote is None:
                raise _no_source(name, "fetches no images", "--allowed-media-domains")
            return await self._remote.fetch(name, url, max_bytes)
        local = self._local
        if local is None:
            raise _no_source(name, "reads no images from files", "--allowed-local-media-path")
        return await self.run(lambda: local.read(name, url, max_bytes), max_bytes)

    def _hold(self, image: GivenImage, num_bytes: int) -> None:
        """Count the bytes of a fetched image until it is freed. Raises StatusError (QUEUE_FULL)."""
        if self._num_fetched_bytes + num_bytes > MAX_FETCHED_BYTES:
            image.data = None
            problem = f"the requests at the gateway have {MAX_FETCHED_BYTES} bytes of images, the maximum"
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0)
        self._num_fetched_bytes += num_bytes
        weakref.finalize(image, self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._num_fetched_bytes -= num_bytes


def check_number(images: Sequence[tuple[str, GivenImage]], limits: ImageLimits) -> None:
    """Raise `ImageRefusal` for more images than a request may have."""
    if len(images) > limits.max_images:
        name, _ = images[limits.max_images]
        problem = (
            f"{name}: the request has {len(images)} images, and the model takes at most {limits.max_images}: leave out "
            "images of earlier turns, or have --max-images of the worker raised"
        )
        raise ImageRefusal(Why.NUMBER, name, problem)


def _least_bytes(image: GivenImage) -> int:
    """A lower bound of the image's size in bytes, as far as it is known before the image is loaded. Base64 with more
    white space than lines need counts as longer."""
    if image.data is not None:
        return len(image.data)
    return 0 if image.base64 is None else int(len(image.base64) * (1 - _WHITE_SHARE)) // 4 * 3


def _check_length(name: str, image: GivenImage, max_bytes: int) -> None:
    if _least_bytes(image) > max_bytes:
        raise too_large(name, max_bytes)


def _check_total(images: Sequence[tuple[str, GivenImage]], sizes: Iterable[int], max_bytes: int) -> None:
    totals = itertools.accumulate(sizes)
    for (name, _), total in zip(images, totals, strict=True):
        if total > max_bytes:
            problem = f"{name}: the images up to this one have more than {max_bytes} bytes, the maximum of a request"
            remedy = "leave out images of earlier turns, or send smaller files, such as JPEG in place of PNG"
            raise ImageRefusal(Why.BYTES, name, f"{problem}: {remedy}")


async def _decoded(name: str, text: str) -> bytes:
    """The bytes that base64 stands for. As in browsers, white space is skipped and padding may be missing; the alphabet
    may be that for URLs. Raises `ImageRefusal`."""
    if not text.isascii():
        raise _not_base64(name)
    found = bytearray()
    rest = b""
    for start in range(0, len(text), _SLICE_CHARS):
        if start:
            await asyncio.sleep(0)
        part = rest + text[start : start + _SLICE_CHARS].encode().translate(_OF_URLS, _WHITE_SPACE)
        num_whole = (len(part) - 1) // 4 * 4
        whole, rest = part[:num_whole], part[num_whole:]
        if b"=" in whole:  # more follows the padding
            raise _not_base64(name)
        found += _strictly(name, whole)
    return bytes(found + _strictly(name, rest if b"=" in rest else rest + b"=" * (-len(rest) % 4)))


def _strictly(name: str, part: bytes) -> bytes:
    try:
        return binascii.a2b_base64(part, strict_mode=True)
    except binascii.Error:
        raise _not_base64(name) from None


def _not_base64(name: str) -> ImageRefusal:
    problem = f"{name} is not valid base64, which has letters, digits, + and /, and up to two = at its end"
    return ImageRefusal(Why.FORMAT, name, f"{problem}. Send the whole file as base64")


def _header(name: str, data: bytes, limits: ImageLimits) -> ImageHeader:
    try:
        header = read_header(data)
    except ImageError as error:
        raise ImageRefusal(Why.FORMAT, name, f"{name}: {error}") from None
    try:
        check_size(header, limits.max_pixels)
    except ImageError as error:
        raise ImageRefusal(Why.PIXELS, name, f"{name}: {error}") from None
    return header


def _no_source(name: str, what: str, flag: str) -> ImageRefusal:
    problem = f"{name}: the server {what}; send the image as a data: URL with base64, or have it allowed with {flag}"
    return ImageRefusal(Why.URL, name, problem)
