"""A process that encodes images without a tower: `python -m tests.worker.vision.fake_child FD`. What a file says
happens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from headrace.worker.request.images import ImageStates
from headrace.worker.vision import child
from headrace.worker.vision.child import run
from headrace.worker.vision.encoder import BadImageError, ImageEncoder, ImageFile, Setting, UnsupportedModelError

HIDDEN_SIZE, NUM_LAYERS = 3, 2


class ObedientEncoder:
    """Files are a verb, a number of tokens, and what the verb needs. Each warm-up is a line of the file `warm` in the
    model's directory, if that exists."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    def warm_up(self) -> None:
        if self._model_dir.is_dir():
            with (self._model_dir / "warm").open("a") as file:
                file.write("warm\n")
            raise MemoryError("once is enough")

    def encode(self, images: Sequence[ImageFile]) -> Sequence[ImageStates | BadImageError]:
        return [self._encode(*image.data.decode().split(" ", 2)) for image in images]

    def _encode(self, verb: str, count: str, more: str = "") -> ImageStates | BadImageError:
        num_tokens = int(count)
        match verb:
            case "refuse":
                return BadImageError(more)
            case "die":
                os._exit(3)
            case "die_once" if not Path(more).exists():
                Path(more).touch()
                os._exit(3)
            case "hang":
                time.sleep(1e6)
            case "grow":
                np.ones(1 << 34, np.uint8)
            case "raise":
                raise ZeroDivisionError("a secret at 0x7f0000000000")
            case "wait":
                while not Path(more).exists():
                    time.sleep(0.005)
            case "invent":
                num_tokens += 1
            case "rewind":
                child.time = SimpleNamespace(perf_counter=lambda: -1e12)  # type: ignore[assignment]
        states = np.full((num_tokens, HIDDEN_SIZE), num_tokens, np.float32)
        if verb == "nan":
            states[-1, -1] = np.nan
        return ImageStates(states, np.full((NUM_LAYERS, num_tokens, HIDDEN_SIZE), 7, np.float32))


def open_encoder(setting: Setting) -> ImageEncoder:
    """ImageEncoder, unless the directory of the model says otherwise."""
    if setting.model_dir == "no tower" or (Path(setting.model_dir) / "lost").exists():
        raise FileNotFoundError("there is no tower")
    if setting.model_dir == "strange tower":
        raise UnsupportedModelError("its tower is of an unknown form")
    return ObedientEncoder(Path(setting.model_dir))


if __name__ == "__main__":
    run(open_encoder)
