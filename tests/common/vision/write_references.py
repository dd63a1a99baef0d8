"""Writes references.json: what transformers' own processors make of pictures. Run once for each version, by itself:

    python -m venv /tmp/references
    /tmp/references/bin/pip install transformers==5.24.0 tokenizers pillow==13.0.0 numpy
    /tmp/references/bin/python -m tests.common.vision.write_references

and in the same way with transformers 4.57.6. The file has a part for each version. 4.57.6 is asked only where it is
right: it takes images of height 1 or 3 for images in another order of axes, does not read `size` of Qwen's models,
and has other tiles for a SmolVLM image of 1 x 1 than for a larger one.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image, ImageOps

from tests.common.vision.image_files import files
from tests.common.vision.models import MODELS
from tests.common.vision.pictures import LAYOUT_SIZES, PROMPT, SIZES, picture

PATH = Path(__file__).parent / "references.json"
OLD = transformers.__version__.startswith("4.")
# Models that 4.57.6 does not have.
NEWER = ("gemma4",)


def main() -> None:
    """Write the part of the installed version."""
    transformers.logging.set_verbosity_error()
    content = json.loads(PATH.read_text()) if PATH.exists() else {}
    part: dict[str, Any] = {"pixels": {}, "layouts": {}}
    part["files"] = {name: hashed(as_loaded(data)) for name, data in files().items()}
    if not OLD:
        part["files on white"] = {name: hashed(as_converted(data)) for name, data in files().items()}
    for name in MODELS:
        if OLD and name in NEWER:
            continue
        processor = image_processor(name)
        part["pixels"][name] = dict(pixels(name, processor))
        part["layouts"][name] = dict(layouts(name, processor))
    content[transformers.__version__] = part
    PATH.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def as_loaded(data: bytes) -> Any:
    """The pixels of a file as transformers reads it, [height, width, 3]."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return np.asarray(transformers.image_utils.load_image(file.name))


def as_converted(data: bytes) -> Any:
    """The pixels of a file that Pillow opens and turns, as a processor of version 5 converts it."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return transformers.image_transforms.convert_to_rgb(image, return_numpy=True)


def image_processor(name: str) -> Any:
    """The image processor of a model."""
    settings = dict(MODELS[name][1])
    kind = settings.pop("image_processor_type").removesuffix("Fast") + ("" if OLD else "Pil")
    if name == "mistral3":  # its processor gives the image processor the side of merged patches
        settings["patch_size"] = 28
    return getattr(transformers, kind)(**settings)


def is_right(name: str, width: int, height: int) -> bool:
    """Whether this version computes images of this size as it means to."""
    return not (OLD and (height in (1, 3) or name == "qwen3-vl"))


def low(name: str, width: int, height: int) -> dict[str, Any] | None:
    """Arguments of an image processor for what is called low detail here; None if there is none."""
    ratio = max(width, height) / min(width, height)
    return {
        "gemma4": {"max_soft_tokens": 70},
        "smolvlm": {"do_image_splitting": False},
        "idefics3-small": {"do_image_splitting": False},
        "qwen2-vl": {"size": {"shortest_edge": 3136, "longest_edge": 256 * 28 * 28}},
        "qwen3-vl": {"size": {"shortest_edge": 65536, "longest_edge": 256 * 32 * 32}},
        "mistral3": {"size": {"longest_edge": min(1540, math.isqrt(int(256 * 28 * 28 * ratio)))}},
        "pixtral": {"size": {"longest_edge": min(1024, math.isqrt(int(256 * 16 * 16 * ratio)))}},
    }.get(name)


def pixels(name: str, processor: Any) -> Iterator[tuple[str, str]]:
    """Hashes of what a tower reads, by size."""
    for width, height in SIZES:
        if not is_right(name, width, height):
            continue
        image = Image.fromarray(picture(width, height))
        if name != "smolvlm" or max(width, height) > 1000:  # large, so once is enough
            yield f"{width}x{height}", hashed(values(processor(image, return_tensors="np")))
        arguments = low(name, width, height)
        if arguments is not None:
            yield f"{width}x{height} low", hashed(values(processor(image, return_tensors="np", **arguments)))
    # 5.24.0 lays all pictures on white that it is given, but not those that it reads from files itself. Idefics3's of
    # 4.57.6 lays each tile on white, after scaling transparent pixels too.
    if (
        name in ("idefics3-small", "mistral3", "pixtral")
        if not OLD
        else not name.startswith(("idefics3", "smol", "qwen3"))
    ):
        image = Image.fromarray(picture(70, 50, 4))
        yield "alpha", hashed(values(processor(image, return_tensors="np")))


def values(found: Mapping[str, Any]) -> Any:
    """What a processor gives the tower for one image."""
    array = np.asarray(found["pixel_values"], np.float32)
    if "num_soft_tokens_per_image" in found:  # without the patches that are filled up
        array = array[:, (np.asarray(found["image_position_ids"])[0] >= 0).all(-1)]
    # Idefics3's have images of images, CLIP's have images.
    return array[0] if array.ndim == 5 else array


def hashed(array: Any) -> str:
    """The shape, and the first 16 bytes of SHA-256 of the bytes."""
    return f"{'x'.join(map(str, array.shape))} {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"


def layouts(name: str, processor: Any) -> Iterator[tuple[str, str]]:
    """For each size, the number of image tokens and the hash of all tokens of a prompt with an image."""
    if not OLD and name in ("mistral3", "pixtral"):  # their processor wants torch
        return
    if name == "smolvlm":  # Idefics3's takes its own class only, which does the same
        settings = {key: value for key, value in MODELS[name][1].items() if key != "image_processor_type"}
        processor = getattr(transformers, "Idefics3ImageProcessor" + ("" if OLD else "Pil"))(**settings)
    expand = expander(name, processor)
    for width, height in LAYOUT_SIZES[:: 3 if name == "smolvlm" else 1]:
        if is_right(name, width, height):
            tokens = expand(Image.fromarray(picture(width, height)))
            count = tokens.count(IMAGE_TOKENS[name])
            yield f"{width}x{height}", f"{count} {hashlib.sha256(chr(10).join(tokens).encode()).hexdigest()[:32]}"


IMAGE_TOKENS = dict.fromkeys(MODELS, "<image>") | {
    "gemma3": "<image_soft_token>",
    "gemma4": "<|image|>",
    "qwen2-vl": "<|image_pad|>",
    "qwen3-vl": "<|image_pad|>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
}


def tokenizer() -> Any:
    """A tokenizer whose tokens are words, runs of line ends, and the special tokens of all models."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<start_of_image>"]
    marks += ["<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_pad|>"]
    marks += ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|image>", "<|image|>", "<image|>"]
    marks += [f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)]
    words = ["<unk>", "user", "what", *("\n" * count for count in range(1, 6))]
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    special = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>")
    wrapped.add_special_tokens({"additional_special_tokens": marks} if OLD else {"extra_special_tokens": marks})
    for key, value in special.items():
        setattr(wrapped, key, value)
        setattr(wrapped, f"{key}_id", wrapped.convert_tokens_to_ids(value))
    return wrapped


def expander(name: str, processor: Any) -> Any:
    """A function from an image to the tokens of the prompt around it, by the model's processor."""
    words = tokenizer()
    settings = MODELS[name][2]
    if not name.startswith("gemma3"):
        for key in ("image_token", "image_token_id"):
            delattr(words, key)

    def of_text(text: str) -> list[str]:
        found: list[str] = words.convert_ids_to_tokens(words.encode(text, add_special_tokens=False))
        return found

    def of_processor(wrapped: Any) -> Any:
        def expand(image: Image.Image) -> list[str]:
            text = PROMPT.format(IMAGE_TOKENS[name] if name != "gemma3" else "<start_of_image>")
            ids = wrapped(images=[image], text=[text], return_tensors="np")["input_ids"][0]
            found: list[str] = words.convert_ids_to_tokens(ids.tolist())
            return found

        return expand

    if name == "gemma4":
        # The processor wants torchvision for videos. This is what it does to a text.
        def expand_between(image: Image.Image) -> list[str]:
            count = int(processor(image, return_tensors="np")["num_soft_tokens_per_image"][0])
            return of_text(PROMPT.format(f"<|image>{'<|image|>' * count}<image|>"))

        return expand_between
    if name.startswith("qwen"):
        # The processor wants a package for videos. This is what it does to a text.
        def expand(image: Image.Image) -> list[str]:
            grid = processor(image, return_tensors="np")["image_grid_thw"][0]
            return of_text(PROMPT.format("<|image_pad|>" * int(grid.prod() // processor.merge_size**2)))

        return expand
    kinds = {"gemma3": ("gemma3", "Gemma3Processor"), "llava-next": ("llava_next", "LlavaNextProcessor")}
    kinds |= dict.fromkeys(("mistral3", "pixtral"), ("pixtral", "PixtralProcessor"))
    # SmolVLM's wants packages for videos, and does the same.
    kinds |= dict.fromkeys(("smolvlm", "idefics3-small"), ("idefics3", "Idefics3Processor"))
    module, kind = kinds.get(name, ("llava", "LlavaProcessor"))
    found = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    return of_processor(getattr(found, kind)(processor, words, **settings))


if __name__ == "__main__":
    main()
