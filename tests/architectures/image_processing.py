"""What is around the networks of vision-language models: tokens, chat template, and the settings of their processors.

Data only, in the words of the files that real models have. Sizes are small, so that images have few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.architectures.families import VOCABULARY


@dataclass(frozen=True, slots=True)
class Processing:
    """The files beside the networks of a family. `tokens` are special ones, with ids from VOCABULARY on. The chat
    template writes `placeholder` for each image. `preprocessor` is preprocessor_config.json, `processor` is
    processor_config.json; empty if the family has none."""

    tokens: tuple[str, ...]
    placeholder: str
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)
    extra_tokens: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer that name some of the tokens."""

    @property
    def template(self) -> str:
        """The chat template."""
        return _TEMPLATE.replace("PLACEHOLDER", self.placeholder)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is one of `tokens`."""
        return VOCABULARY <= token_id < VOCABULARY + len(self.tokens)


_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
_SCALED = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True}
_CLIP = {
    **_SCALED,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {**_SCALED, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_BICUBIC, _BILINEAR, _LANCZOS = 3, 2, 1
_CROPPED = {
    "do_resize": True,
    "size": {"shortest_edge": 56},
    "resample": _BICUBIC,
    "do_center_crop": True,
    "crop_size": {"height": 56, "width": 56},
}
_LLAVA = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
}
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_PIXTRAL = {
    **_CLIP,
    "do_resize": True,
    "resample": _BICUBIC,
    "image_processor_type": "PixtralImageProcessor",
    "processor_class": "PixtralProcessor",
}
_PIXTRAL_PROCESSOR = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "processor_class": "PixtralProcessor",
}
_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN2 = {
    **_CLIP,
    "do_resize": True,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 40,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}
_QWEN3 = {
    **_HALF,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
}
_TILED = {
    **_HALF,
    "do_resize": True,
    "size": {"longest_edge": 4 * 56},
    "resample": _LANCZOS,
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 56},
    "do_pad": True,
}
_TILE_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
_GEMMA4 = Processing(
    ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"),
    "\n\n<|image|>\n\n",
    {
        "do_convert_rgb": True,
        "do_normalize": False,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "image_processor_type": "Gemma4ImageProcessor",
        "image_seq_length": 70,
        "max_soft_tokens": 70,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "resample": _BICUBIC,
        "rescale_factor": 1 / 255,
        "processor_class": "Gemma4Processor",
    },
    {"image_seq_length": 70, "processor_class": "Gemma4Processor"},
    {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
)

PROCESSING: Mapping[str, Processing] = {
    "llava": Processing(
        ("<image>",),
        "<image>\n",
        {**_CLIP, **_CROPPED, "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"},
        {**_LLAVA, "processor_class": "LlavaProcessor"},
    ),
    "llava-pixtral": Processing(
        _PIXTRAL_TOKENS,
        "[IMG]",
        {**_PIXTRAL, "size": {"longest_edge": 140}, "patch_size": {"height": 14, "width": 14}},
        {**_PIXTRAL_PROCESSOR, "patch_size": 14},
    ),
    "llava_next": Processing(
        ("<image>",),
        "<image>\n",
        {
            **_CLIP,
            **_CROPPED,
            "do_pad": True,
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor",
        },
        {**_LLAVA, "processor_class": "LlavaNextProcessor"},
    ),
    "gemma3": Processing(
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
        {
            **_HALF,
            "do_resize": True,
            "size": {"height": 112, "width": 112},
            "resample": _BILINEAR,
            "image_seq_length": 16,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
        },
        {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "gemma4": _GEMMA4,
    "gemma4-both-directions": _GEMMA4,
    "gemma4-experts": _GEMMA4,
    "qwen2_vl": Processing(_QWEN_TOKENS, _QWEN_PLACEHOLDER, {**_QWEN2, "processor_class": "Qwen2VLProcessor"}),
    "qwen2_5_vl": Processing(_QWEN_TOKENS, _QWEN_PLACEHOLDER, {**_QWEN2, "processor_class": "Qwen2_5_VLProcessor"}),
    "qwen3_vl": Processing(_QWEN_TOKENS, _QWEN_PLACEHOLDER, _QWEN3),
    "qwen3_5": Processing(_QWEN_TOKENS, _QWEN_PLACEHOLDER, _QWEN3),
    "qwen3_5_moe": Processing(_QWEN_TOKENS, _QWEN_PLACEHOLDER, _QWEN3),
    "idefics3": Processing(
        _TILE_TOKENS,
        "<image>",
        {**_TILED, "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"},
        {"image_seq_len": 4, "processor_class": "Idefics3Processor"},
    ),
    "smolvlm": Processing(
        _TILE_TOKENS,
        "<image>",
        {**_TILED, "image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"},
        {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    ),
    "mistral3": Processing(
        _PIXTRAL_TOKENS,
        "[IMG]",
        {**_PIXTRAL, "size": {"longest_edge": 168}, "patch_size": 14},
        {**_PIXTRAL_PROCESSOR, "patch_size": 14, "spatial_merge_size": 2},
    ),
}
"""By the name of the family."""
