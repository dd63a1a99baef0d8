"""The process that decodes and encodes images: `python -m headrace.worker.vision.child FD`.

    worker                                 this process
    where the model is       ----------->  reads and compiles its tower
                             <-----------  opened
                                           encodes an image of its own
    files of images          ----------->  decodes, resizes, encodes
                             <-----------  states, or what is wrong

It runs beside the engine, at a lower priority, and with a bound on its memory. What crashes here ends one image. It
ends with its worker, even in the middle of an image, because that closes the socket between them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.worker.request.images import ImageStates
from headrace.worker.vision.encoder import (
    NOT_ENCODED,
    BadImageError,
    ImageEncoder,
    ImageFile,
    Setting,
    UnsupportedModelError,
)
from headrace.worker.vision.frames import (
    Encode,
    Encoded,
    Opened,
    Result,
    receive,
    receive_bytes,
    send,
)

log = logging.getLogger("headrace.worker.vision")

# Where the engine competes for a core, this process gets a quarter of it.
_NICE = 5
# The kernel ends this process before others if the host's memory is used up.
_OOM_SCORE = "1000"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

TOO_LARGE = "the image needs more memory than the worker has for one; make it smaller, or ask for a lower detail"
NOT_A_NUMBER = "the image has states that are not numbers; the worker's log has more"


def serve(link: socket.socket, open_encoder: Callable[[Setting], ImageEncoder]) -> None:
    """Answer the worker until it closes the socket."""
    setting = receive(link, Setting)
    try:
        encoder = open_encoder(setting)
    except UnsupportedModelError as error:
        send(link, Opened(str(error)))
        return
    _bound_memory(setting.memory_bytes)
    send(link, Opened())
    if setting.warms_up:
        _warm_up(encoder)
    while True:
        wanted = receive(link, Encode).images
        files = [ImageFile(receive_bytes(link, image.num_bytes), image.detail) for image in wanted]
        start = time.perf_counter()
        found = _encode(encoder, files)
        seconds = time.perf_counter() - start
        results: list[Result] = []
        payloads: list[Any] = []
        for entry in found:
            if isinstance(entry, ImageStates):
                results.append(Result(len(entry.states)))
                payloads += [np.ascontiguousarray(array, np.float32) for array in entry if array is not None]
            else:
                results.append(entry)
        send(link, Encoded(results, seconds), payloads)


def _warm_up(encoder: ImageEncoder) -> None:
    """Encode one small image to prepare the kernels, within the bound on memory. The worker is ready meanwhile."""
    start = time.perf_counter()
    try:
        encoder.warm_up()
    except Exception:
        log.exception("no image could be encoded at the start")
    else:
        log.info("the first image was encoded in %.1f s", time.perf_counter() - start)


def _encode(encoder: ImageEncoder, files: Sequence[ImageFile]) -> list[ImageStates | Result]:
    """The result for each file: states, or a problem. If encoding all files together fails, each is tried alone."""
    try:
        return [_checked(entry) for entry in encoder.encode(files)]
    except MemoryError:
        if len(files) == 1:
            return [Result(problem=TOO_LARGE, is_invalid=True)]
    except Exception:
        log.exception("%d images could not be encoded", len(files))
        if len(files) == 1:
            return [Result(problem=NOT_ENCODED)]
    return [_encode(encoder, [file])[0] for file in files]


def _checked(entry: ImageStates | BadImageError) -> ImageStates | Result:
    if isinstance(entry, BadImageError):
        return Result(problem=str(entry), is_invalid=True)
    if not all(np.isfinite(array).all() for array in entry if array is not None):
        log.error("the tower made states that are not numbers")
        return Result(problem=NOT_A_NUMBER)
    return entry


def _bound_memory(num_bytes: int) -> None:
    """Limit the process's memory to `num_bytes` more than it has now."""
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, held + num_bytes))


def _end_with_the_worker(link: socket.socket) -> None:
    """End the process when the worker closes the socket, whatever else it does then."""
    poller = select.poll()
    poller.register(link, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


def run(open_encoder: Callable[[Setting], ImageEncoder]) -> None:
    """The process: serve on the descriptor that the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group; the worker may still need it
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format=_LOG_FORMAT, level=logging.INFO)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    link = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_the_worker, args=(link,), daemon=True).start()
    with contextlib.suppress(OSError):
        serve(link, open_encoder)


def open_tower(setting: Setting) -> ImageEncoder:
    """Make the encoder that runs a model's vision tower."""
    # Imported late: this loads OpenVINO.
    from headrace.worker.vision.tower_encoder import TowerEncoder

    return TowerEncoder(setting)


if __name__ == "__main__":
    run(open_tower)
