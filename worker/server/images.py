"""Validates the images of a request: checks them against the worker's bounds, and the prompt's pseudo tokens against
the images. No image is decoded here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.common.vision.bounds import check_size
from headrace.common.vision.family import Detail, ImageFamily, ImageLayout
from headrace.common.vision.header import ImageError, read_header
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN, digest, pseudo_tokens
from headrace.protos import inference_pb2
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ImageLimits
from headrace.worker.request.images import Grid, LongArray, PlacedImage
from headrace.worker.server.admission import SentImage

_DETAILS: dict[int, Detail] = {
    inference_pb2.IMAGE_DETAIL_UNSPECIFIED: Detail.AUTO,
    inference_pb2.IMAGE_DETAIL_LOW: Detail.LOW,
    inference_pb2.IMAGE_DETAIL_HIGH: Detail.HIGH,
}


class Images(NamedTuple):
    """Which images a model takes, and within what bounds. The images of a request have at most `max_tokens` tokens
    together, which bounds the memory of their states."""

    family: ImageFamily
    limits: ImageLimits
    max_tokens: int


class ImageDesk:
    """Reads the images of requests. `images` is None for a model of text. `on_refusal` is called with one word for the
    reason of each refusal. Any thread may call it."""

    def __init__(
        self, model: str, images: Images | None, on_refusal: Callable[[str], None] = lambda label: None
    ) -> None:
        self._model = model
        self._images = images
        self._on_refusal = on_refusal

    def check_bound(self, view_pixels: int) -> None:
        """StatusError (MODEL_CHANGED) if the tokens of a prompt's images were computed for workers that see images
        within another bound of pixels; 0 if that is not known."""
        images = self._images
        if images is not None and view_pixels not in (0, images.limits.max_view_pixels):
            problem = (
                f"the tokens of the images are those within a bound of {view_pixels} pixels, and this worker's "
                f"--max-image-pixels is {images.limits.max_view_pixels}; start again"
            )
            raise self._refused("tokens", "image_view_pixels", problem, Reason.MODEL_CHANGED)

    def place(self, sent: Sequence[SentImage], token_ids: Sequence[int]) -> list[PlacedImage]:
        """The images of a prompt with these tokens. StatusError names the first that is wrong. Takes some milliseconds
        for each megabyte."""
        images = self._images
        if images is None:
            problem = f"the model {self._model!r} takes text only; remove the images, or choose a model that takes them"
            raise self._refused("unsupported", "images", problem, Reason.UNSUPPORTED)
        most = images.limits.max_images
        if len(sent) > most:
            raise self._refused(
                "count", "images", f"images has {len(sent)}; a request may have at most {most}: remove some"
            )
        found: list[tuple[PlacedImage, ImageLayout]] = []
        left = images.max_tokens
        for number, image in enumerate(sent):
            found.append(self._read(f"images[{number}]", image, images))
            left -= found[-1][1].num_image_tokens
            if left < 0:
                raise self._refused("states", f"images[{number}]", _too_many_tokens(number, images.max_tokens))
        self._find(found, np.asarray(token_ids, np.uint32))
        return [image for image, _ in found]

    def _read(self, field: str, sent: SentImage, images: Images) -> tuple[PlacedImage, ImageLayout]:
        """An image with its digest and its layout, without places."""
        most = images.limits.max_bytes
        if len(sent.data) > most:
            problem = f"the image has {len(sent.data):,} bytes; at most {most:,} are accepted. Make it smaller"
            raise self._refused("bytes", field, f"{field}: {problem}")
        detail = _DETAILS.get(sent.detail)
        if detail is None:
            known = ", ".join(sorted(_DETAILS.values()))
            raise self._refused("detail", f"{field}.detail", f"{field}.detail is {sent.detail}; known are {known}")
        try:
            header = read_header(sent.data)
            check_size(header, images.limits.max_pixels)
            layout = images.family.layout(header.width, header.height, detail)
        except ImageError as error:
            raise self._refused("file", field, f"{field}: {error}") from None
        grid = None if layout.grid is None else Grid(*layout.grid)
        own = digest(sent.data, images.family, detail)
        is_whole = images.family.keeps_images_whole
        return PlacedImage(own, np.zeros(0, np.int64), sent.data, detail.value, grid, is_whole), layout

    def _find(self, images: Sequence[tuple[PlacedImage, ImageLayout]], tokens: npt.NDArray[np.uint32]) -> None:
        """Give the images their places, where the prompt has their pseudo tokens."""
        places = np.flatnonzero(tokens >= FIRST_PSEUDO_TOKEN)
        counts = [layout.num_image_tokens for _, layout in images]
        if len(places) != sum(counts):
            problem = (
                f"token_ids has {len(places)} tokens of images, and the images have {sum(counts)}; expand the prompt "
                "as the files in the tokenizer bundle and the limits in the model card say"
            )
            raise self._refused("tokens", "token_ids", problem)
        first = 0
        for number, ((image, layout), count) in enumerate(zip(images, counts, strict=True)):
            own = places[first : first + count]
            first += count
            if not np.array_equal(tokens[own], pseudo_tokens(image.digest, count)):
                problem = (
                    f"token_ids has other tokens than those of images[{number}] in its place; compute them from the "
                    "image's bytes, detail and settings, in the order of the images"
                )
                raise self._refused("tokens", "token_ids", problem)
            if _runs(own) != list(layout.runs):
                problem = f"token_ids has the tokens of images[{number}] in other rows than its layout"
                raise self._refused("tokens", "token_ids", problem)
            image.places = own.astype(np.int64)

    def _refused(self, label: str, field: str, problem: str, reason: Reason = Reason.INVALID_FIELD) -> StatusError:
        self._on_refusal(label)
        return StatusError(reason, problem, field=field)


def _too_many_tokens(number: int, most: int) -> str:
    return (
        f"images[{number}]: the images up to this one have more than {most:,} tokens, for whose states the worker has "
        "memory: leave out images of earlier turns, send smaller ones or ask for a detail of low, or have "
        "--image-cache-gb of the worker raised"
    )


def _runs(places: LongArray) -> list[int]:
    """The lengths of the runs of consecutive places."""
    ends = [*(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]
