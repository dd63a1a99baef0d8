"""What an image costs in each family: its tokens, the pixels that are read of it, and the core-seconds of its encoder.

    python -m benchmarks.images.cost [--size 4000x3000]
    python -m benchmarks.images.cost --measure DIRECTORY... [--size 4000x3000] [--threads 2] [--execution-mode accuracy]

The first prints the table of docs/how-to/sizing.md. Tokens and pixels are those of the families' own processors.
Core-seconds are computed: the multiplications and additions of the published tower's layers, at the rate that two
layers of Qwen2.5-VL's tower reached in float32.

The second has the models in directories (`benchmarks.images.vision_model` makes some) encode a JPEG of this size, after
a first image, and prints the CPU seconds of the process beside what is computed for the same model.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.images.throughput import picture
from benchmarks.machine import describe
from headrace.common.vision.bounds import DEFAULT_MAX_IMAGE_PIXELS, MAX_PIXELS
from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import Detail, ImageFamily
from headrace.common.vision.files import FILES
from headrace.worker.vision.encoder import BadImageError, ImageFile, Setting
from headrace.worker.vision.tower_encoder import TowerEncoder
from tests.common.vision.models import files_of

OPERATIONS_PER_S = 70e9
"""Multiplications and additions of a core in a second."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The layers of a tower: how many are computed, their width and that of their middle, of which a gated one has
    three products, and the pixels of a patch's side. A patch attends to `tile` patches, or to all of the image if that
    is 0. In models with windows, `whole` layers do, and in the others a patch sees `window` patches."""

    layers: int
    width: int
    middle: int
    patch: int
    is_gated: bool = False
    tile: int = 0
    whole: int | None = None
    window: int = 0

    def core_s(self, num_pixels: int) -> float:
        """Core-seconds for an image of which so many pixels are read."""
        patches = num_pixels // self.patch**2
        whole = self.layers if self.whole is None else self.whole
        seen = whole * (self.tile or patches) + (self.layers - whole) * self.window
        products = 4 * self.width**2 + (3 if self.is_gated else 2) * self.width * self.middle
        return 2 * patches * (self.layers * products + 2 * self.width * seen) / OPERATIONS_PER_S


_CLIP = Sizes(23, 1024, 4096, 14, tile=577)  # the last of 24 layers is not used
_QWEN3_LARGE = Sizes(27, 1152, 4304, 16)


@dataclass(frozen=True, slots=True)
class Model:
    """A published model: its name in the table, the files of its processor, and its tower. Several sizes of a model may
    have several towers, with their names."""

    name: str
    files: Mapping[str, bytes]
    towers: Mapping[str, Sizes]

    def family(self, max_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> ImageFamily:
        """Its images, with a bound on the pixels that its tower reads."""
        found = family_of(self.files, max_pixels)
        assert found is not None
        return found


def _with(name: str, model_type: str = "", edits: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, bytes]:
    """The files of a model of the tests, of another type and with other settings."""
    contents = {file: json.loads(content) for file, content in files_of(name).items()}
    for content, edit in zip(contents.values(), edits, strict=False):
        content.update(edit)
    if model_type:
        contents["config.json"]["model_type"] = model_type
    return {file: json.dumps(content).encode() for file, content in contents.items()}


_IDEFICS3 = (
    {"vision_config": {"image_size": 364, "patch_size": 14}},
    {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}},
    {"image_seq_len": 169},
)

MODELS = (
    Model("LLaVA 1.5", files_of("llava"), {"": _CLIP}),
    Model("LLaVA-NeXT", files_of("llava-next"), {"": _CLIP}),
    Model("Gemma 3", files_of("gemma3"), {"": Sizes(27, 1152, 4304, 14)}),
    Model("Gemma 4", files_of("gemma4"), {"E2B, E4B": Sizes(16, 768, 3072, 16, is_gated=True)}),
    Model("Qwen2-VL", files_of("qwen2-vl"), {"": Sizes(32, 1280, 5120, 14)}),
    Model(
        "Qwen2.5-VL",
        _with("qwen2-vl", "qwen2_5_vl"),
        {"": Sizes(32, 1280, 3420, 14, is_gated=True, whole=4, window=64)},
    ),
    Model("Qwen3-VL", files_of("qwen3-vl"), {"2B, 4B": Sizes(24, 1024, 4096, 16), "8B": _QWEN3_LARGE}),
    Model("Qwen3.5", _with("qwen3-vl", "qwen3_5"), {"27 layers": _QWEN3_LARGE}),
    Model("SmolVLM 256M, 500M", files_of("smolvlm"), {"": Sizes(12, 768, 3072, 16, tile=1024)}),
    Model("Idefics 3", _with("idefics3-small", edits=_IDEFICS3), {"": Sizes(27, 1152, 4304, 14, tile=676)}),
    Model("Mistral 3", files_of("mistral3"), {"": Sizes(24, 1024, 4096, 14, is_gated=True)}),
    Model("Pixtral", files_of("pixtral"), {"": Sizes(24, 1024, 4096, 16, is_gated=True)}),
)


def rows(width: int, height: int) -> Iterator[str]:
    """The lines of the table for an image of this size."""
    yield "| Family | Tokens of the image | Pixels read | Core-seconds | at `detail: low` |"
    yield "|---|---|---|---|---|"
    for model in MODELS:
        family = model.family()
        layout, low = (family.layout(width, height, detail) for detail in (Detail.AUTO, Detail.LOW))
        most = model.family(MAX_PIXELS).layout(width, height, Detail.AUTO).num_image_tokens
        more = f" ({most:,} without a bound)" if most > layout.num_image_tokens else ""
        named = ", ".join(
            f"{sizes.core_s(layout.num_pixels):.0f}" + (f" ({name})" if name else "")
            for name, sizes in model.towers.items()
        )
        cheap = ", ".join(f"{sizes.core_s(low.num_pixels):.0f}" for sizes in model.towers.values())
        less = f"{low.num_image_tokens:,}; {_millions(low.num_pixels)}; {cheap}" if low != layout else "the same"
        pixels = _millions(layout.num_pixels)
        yield f"| {model.name} | {layout.num_image_tokens:,}{more} | {pixels} | {named} | {less} |"


def _millions(pixels: int) -> str:
    return f"{pixels / 1e6:.2f} million"


def sizes_in(directory: Path) -> Sizes:
    """The tower of a model of one of the kinds that `vision_model` makes."""
    config = json.loads((directory / "config.json").read_bytes())
    vision, kind = config["vision_config"], config["model_type"]
    if kind == "qwen2_vl":
        width = vision["embed_dim"]
        return Sizes(vision["depth"], width, vision["mlp_ratio"] * width, vision["patch_size"])
    unused = 1 if kind == "llava" else 0
    tile = (vision["image_size"] // vision["patch_size"]) ** 2 + unused
    layers = vision["num_hidden_layers"] - unused
    return Sizes(layers, vision["hidden_size"], vision["intermediate_size"], vision["patch_size"], tile=tile)


def measure(directory: Path, size: tuple[int, int], threads: int, mode: str) -> str:
    """A line of the table of measured models."""
    family = family_of({name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()})
    assert family is not None
    config = json.loads((directory / "config.json").read_bytes())
    hidden_size = config.get("text_config", config)["hidden_size"]
    encoder = TowerEncoder(Setting(str(directory), DEFAULT_MAX_IMAGE_PIXELS, threads, mode, 1 << 40, hidden_size, 0))
    encoder.warm_up()
    out = io.BytesIO()
    Image.fromarray(picture(np.random.default_rng(0), *size)).save(out, "JPEG", quality=92)
    cells = []
    for detail in (Detail.AUTO, Detail.LOW):
        layout, start_s = family.layout(*size, detail), time.process_time()
        (found,) = encoder.encode([ImageFile(out.getvalue(), detail.value)])
        cpu_s = time.process_time() - start_s
        if isinstance(found, BadImageError):
            raise found
        cells.append(f"{layout.num_image_tokens:,} | {cpu_s:.1f} | {sizes_in(directory).core_s(layout.num_pixels):.1f}")
    return f"| {directory.name} | {' | '.join(cells)} |"


def main() -> None:
    """Parse, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4000x3000", help="of the image (default 4000x3000)")
    parser.add_argument("--measure", type=Path, nargs="+", default=[], metavar="DIRECTORY")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--execution-mode", choices=("accuracy", "performance"), default="accuracy")
    args = parser.parse_args()
    width, height = (int(part) for part in args.size.split("x"))
    if not args.measure:
        print("\n".join(rows(width, height)))
        return
    print(describe())
    print("| Model | Tokens | CPU seconds | computed | Tokens, low | CPU seconds | computed |")
    print("|---|---|---|---|---|---|---|")
    for directory in args.measure:
        print(measure(directory, (width, height), args.threads, args.execution_mode), flush=True)


if __name__ == "__main__":
    main()
