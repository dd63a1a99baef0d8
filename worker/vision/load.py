"""Makes a model's images ready to serve: its family, the process that encodes them, and the store of states."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.common.host_memory import GIB, available_bytes
from headrace.common.vision.bounds import DEFAULT_MAX_IMAGE_PIXELS, MAX_PIXELS
from headrace.common.vision.families.known import family_in
from headrace.common.vision.family import FamilyError, ImageFamily
from headrace.protos.worker_pb2 import ImageLimits
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.multimodal.image_inputs import ImageInputs
from headrace.worker.vision.encoder import Setting, UnsupportedModelError
from headrace.worker.vision.process import EncoderProcess
from headrace.worker.vision.states import StateStore

log = logging.getLogger("headrace.worker")

# Files of images are sent in messages of at most 16 MiB, beside a prompt.
MAX_IMAGE_BYTES = 12 << 20
# What decoding and encoding an image may allocate beside the tower.
MEMORY_BYTES = 4 * GIB
# What the states of all images of one request may take, if --image-cache-gb is not more. Only a request none of whose
# images is in a cache takes it, and only one at a time takes more than --image-cache-gb.
_REQUEST_BYTES = 4 * GIB


class Vision(NamedTuple):
    """A model's images: the family, the bounds for requests, what encodes them, and the states that are kept. The
    images of a request have at most `max_tokens` tokens together."""

    family: ImageFamily
    limits: ImageLimits
    max_tokens: int
    encoder: EncoderProcess
    store: StateStore


def vision_for(
    config: WorkerConfig, inputs: ImageInputs | None, threads: int, on_ended: Callable[[], None]
) -> Vision | None:
    """The images of a model whose graph has these inputs for them; None if it serves text only, which the log then
    explains. `on_ended` is called by any thread when images have ended. ConfigurationError if the process that encodes
    images does not start, or if the flags ask for more memory than there is."""
    family = _family(config, inputs)
    if family is None or inputs is None:
        return None
    cache_bytes = int(config.image_cache_gb * GIB)
    if cache_bytes > available_bytes():
        raise ConfigurationError(
            f"--image-cache-gb asks for {config.image_cache_gb:.1f} GiB, but only {available_bytes() / GIB:.1f} GiB of "
            "memory are available to this process; choose a smaller size"
        )
    view_pixels = config.max_image_pixels or DEFAULT_MAX_IMAGE_PIXELS
    setting = Setting(
        str(Path(config.model_dir).absolute()),
        view_pixels,
        config.image_threads or threads,
        config.execution_mode,
        MEMORY_BYTES,
        inputs.hidden_size,
        inputs.num_layers,
    )
    try:
        encoder = EncoderProcess(setting, on_ended, stuck_after_s=config.stuck_after_s)
    except UnsupportedModelError as error:
        log.warning("the model is served for its text only: %s", error)
        return None
    limits = ImageLimits(
        max_images=config.max_images, max_pixels=MAX_PIXELS, max_bytes=MAX_IMAGE_BYTES, max_view_pixels=view_pixels
    )
    max_tokens = max(cache_bytes, _REQUEST_BYTES) // encoder.bytes_per_token
    log.info(
        "up to %d images with %d tokens in a request; their states are kept in %.2f GiB",
        config.max_images,
        max_tokens,
        config.image_cache_gb,
    )
    return Vision(family, limits, max_tokens, encoder, StateStore(cache_bytes))


def _family(config: WorkerConfig, inputs: ImageInputs | None) -> ImageFamily | None:
    """The image family of a model; None if its images are not served."""
    if not config.max_images:
        return None
    try:
        family = family_in(config.model_dir, config.max_image_pixels or DEFAULT_MAX_IMAGE_PIXELS)
    except FamilyError as error:
        log.warning("the model is served for its text only: %s", error)
        return None
    if family is not None and inputs is None:
        log.warning(
            "the model is served for its text only: its directory lacks networks for images; pull the model again"
        )
        return None
    return family
