"""Write the files beside the networks of a vision-language model, and what transformers computes of its prompts with
images.

Runs in the environment that exports models, as a part of export.py. `image_references.py` describes the files.

Processors of transformers are told that pixels come last: they guess it from the sizes else, wrongly for images of one
or three pixels. Two families need a repair of transformers 4.57, which 5.0 has.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
import transformers
from PIL import Image, ImageOps
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.idefics3.processing_idefics3 import get_image_prompt_string

from tests.architectures.image_files import PROMPTS, content_of, image_files, names_in
from tests.architectures.image_processing import Processing

_GREEDY, _CLEAR = 8, 2e-3
_PIXELS_LAST = "channels_last"
# Families whose reference puts white, not black, under transparent pixels.
_ON_WHITE = ("PixtralImageProcessor", "Idefics3ImageProcessor", "SmolVLMImageProcessor")
# Inputs of a model that have a number for each token, and what a generated token has there.
_OF_TOKENS = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}


def write_files(model: PreTrainedModel, processing: Processing, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write what optimum-intel writes if it finds a processor: the configurations, tokenizer and chat template."""
    if not (out / "config.json").is_file():  # that of an export has more than the model's
        model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "chat_template.jinja").write_text(processing.template)
    (out / "preprocessor_config.json").write_text(json.dumps(processing.preprocessor, indent=1))
    if processing.processor:
        (out / "processor_config.json").write_text(json.dumps(processing.processor, indent=1))


def write_image_references(model: PreTrainedModel, processing: Processing, directory: Path) -> None:
    """Compute all prompts, from the files that `write_files` wrote."""
    repair(model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    files, arrays, described = image_files(), {}, []
    (directory / "images").mkdir()
    for name, content in files.items():
        (directory / "images" / name).write_bytes(content)
    for number, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": content_of(prompt)}]
        text = _rendered(processing, messages)
        inputs = _inputs(processing, tokenizer, text, [files[name] for name in names_in(prompt)])
        rows = _logprobs(model, inputs)
        greedy, values = _continuation(model, inputs, rows[-1], processing)
        arrays[f"logprobs-{number}"] = rows
        arrays[f"greedy_logprobs-{number}"] = np.array(values, np.float32)
        token_ids = inputs["input_ids"][0].tolist()
        described.append({"messages": messages, "images": names_in(prompt), "token_ids": token_ids, "greedy": greedy})
    config = model.config
    image_token_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    whole = {"image_token_id": image_token_id, "prompts": described}
    (directory / "images.json").write_text(json.dumps(whole))
    np.savez(directory / "images.npz", **arrays)


def repair(model: PreTrainedModel) -> None:
    """Give Idefics 3 and SmolVLM the positions of patches that they were trained with. transformers 4.55 to 4.57 round
    the fractions down to the place before (corrected in 5.0); all tiles are whole here."""
    for name, module in model.named_modules():
        if name.endswith("vision_model.embeddings") and hasattr(module, "num_patches_per_side"):
            module.forward = _all_patches(module)


def _all_patches(module: Any) -> Callable[..., torch.Tensor]:
    def forward(pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> torch.Tensor:
        assert patch_attention_mask.all()
        patches = module.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        return patches + module.position_embedding(torch.arange(patches.shape[1]))

    return forward


def _rendered(processing: Processing, messages: Sequence[Mapping[str, Any]]) -> str:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(processing.template)
    return template.render(bos_token="<s>", messages=messages, add_generation_prompt=True)


def _decoded(data: bytes, *, is_on_white: bool) -> Image.Image:
    """The first frame, turned as it is to be shown, in RGB."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if is_on_white and image.mode != "RGB":
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, (255, 255, 255)), over)
    return image.convert("RGB")


def _inputs(
    processing: Processing, tokenizer: PreTrainedTokenizerFast, text: str, files: Sequence[bytes]
) -> dict[str, torch.Tensor]:
    """The inputs of the model for a prompt, as its processor makes them."""
    kind = str(processing.preprocessor["image_processor_type"]).removesuffix("Fast")
    images = [_decoded(data, is_on_white=kind in _ON_WHITE) for data in files]
    settings = {key: value for key, value in processing.preprocessor.items() if not key.endswith(("_type", "_class"))}
    if kind == "Qwen2VLImageProcessor" and "size" in settings:
        # The class ignores it.
        size = settings.pop("size")
        settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    # From 5.4 on, that of the usual name computes with torchvision.
    pixels_of = (getattr(transformers, f"{kind}Pil", None) or getattr(transformers, kind))(**settings)
    name = str(processing.preprocessor["processor_class"])
    if name in _BY_HAND:
        made = _BY_HAND[name](processing, pixels_of, text, images)
    else:
        options = {key: value for key, value in processing.processor.items() if key != "processor_class"}
        processor = getattr(transformers, name)(image_processor=pixels_of, tokenizer=tokenizer, **options)
        return dict(processor(images=images, text=text, return_tensors="pt", input_data_format=_PIXELS_LAST))
    expanded, tensors = made
    ids = tokenizer(expanded, return_tensors="pt", return_token_type_ids=False)
    if name == "Gemma4Processor":
        tensors["mm_token_type_ids"] = (ids["input_ids"] == tokenizer.image_token_id).long()
    return {**ids, **tensors}


def _qwen(
    _processing: Processing, pixels_of: Any, text: str, images: Sequence[Image.Image]
) -> tuple[str, dict[str, torch.Tensor]]:
    """The processor's expansion: it needs torchvision for videos."""
    tensors = [pixels_of(image, return_tensors="pt", input_data_format=_PIXELS_LAST) for image in images]
    pieces = text.split("<|image_pad|>")
    expanded = pieces[0]
    for found, piece in zip(tensors, pieces[1:], strict=True):
        num_tokens = int(found["image_grid_thw"].prod()) // pixels_of.merge_size**2
        expanded += "<|image_pad|>" * num_tokens + piece
    return expanded, {key: torch.cat([found[key] for found in tensors]) for key in tensors[0]}


def _smolvlm(
    processing: Processing, pixels_of: Any, text: str, images: Sequence[Image.Image]
) -> tuple[str, dict[str, torch.Tensor]]:
    """The expansion of Idefics 3, the same: the processor needs num2words for videos."""
    found = pixels_of([list(images)], return_tensors="pt", return_row_col_info=True, input_data_format=_PIXELS_LAST)
    rows, columns = found.pop("rows")[0], found.pop("cols")[0]
    pieces = text.split("<image>")
    expanded = pieces[0]
    for across, along, piece in zip(rows, columns, pieces[1:], strict=True):
        expanded += get_image_prompt_string(
            across,
            along,
            processing.processor["image_seq_len"],
            image_token="<image>",
            fake_token_around_image="<fake_token_around_image>",
            global_img_token="<global-img>",
        )
        expanded += piece
    return expanded, dict(found)


def _gemma4(
    _processing: Processing, pixels_of: Any, text: str, images: Sequence[Image.Image]
) -> tuple[str, dict[str, torch.Tensor]]:
    """The expansion: the processor needs torchvision for videos."""
    found = pixels_of(images, return_tensors="pt", input_data_format=_PIXELS_LAST)
    pieces = text.split("<|image|>")
    expanded = pieces[0]
    for count, piece in zip(found.pop("num_soft_tokens_per_image"), pieces[1:], strict=True):
        expanded += "<|image>" + "<|image|>" * int(count) + "<image|>" + piece
    return expanded, dict(found)


_BY_HAND = {
    "Gemma4Processor": _gemma4,
    "Qwen2VLProcessor": _qwen,
    "Qwen2_5_VLProcessor": _qwen,
    "Qwen3VLProcessor": _qwen,
    "SmolVLMProcessor": _smolvlm,
}


def needs_cache(model: PreTrainedModel) -> bool:
    """Whether transformers computes another model without a cache: layers that take keys and values of others find them
    in it (Gemma 4)."""
    return bool(getattr(model.config.get_text_config(), "num_kv_shared_layers", 0))


def _logprobs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> np.ndarray:
    with torch.no_grad():
        logits = model(**inputs, use_cache=needs_cache(model)).logits[0].double()
    return torch.log_softmax(logits, -1).float().numpy()


def _continuation(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], last: np.ndarray, processing: Processing
) -> tuple[list[int], list[float]]:
    """The most probable tokens, up to one that another comes near, or a special one, for which transformers would look
    for an image; and their log-probabilities."""
    inputs, chosen, values = dict(inputs), [], []
    while len(chosen) < _GREEDY:
        second, best = (int(token) for token in np.argsort(last)[-2:])
        if last[best] - last[second] < _CLEAR or processing.is_special(best):
            break
        chosen.append(best)
        values.append(float(last[best]))
        for name, value in {"input_ids": best, **_OF_TOKENS}.items():
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.tensor([[value]])], 1)
        last = _logprobs(model, inputs)[-1]
    return chosen, values
