"""Files of models as their makers publish them, as far as their images depend on them; some smaller, to be quick."""

from __future__ import annotations

import json
from typing import Any

CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 0.00392156862745098,
    "resample": 3,
}
HALF: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}

# Name -> config.json, preprocessor_config.json, processor_config.json.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {
            "model_type": "llava",
            "image_token_index": 32000,
            "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
            "vision_feature_select_strategy": "default",
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            **CLIP,
        },
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava-siglip": (
        {
            "model_type": "llava",
            "image_token_index": 151646,
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
            "vision_feature_select_strategy": "full",
        },
        {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 384, "width": 384},
            "resample": 3,
            "do_convert_rgb": True,
            **HALF,
        },
        {"patch_size": 14, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
    ),
    "llava-next": (
        {
            "model_type": "llava_next",
            "image_token_index": 32000,
            "image_grid_pinpoints": PINPOINTS,
            "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
            "vision_feature_select_strategy": "default",
        },
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": PINPOINTS,
            **CLIP,
        },
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "image_token_index": 262144,
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "mm_tokens_per_image": 256,
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
        },
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 896, "width": 896},
            "resample": 2,
            "do_pan_and_scan": None,
            **HALF,
        },
        {"image_seq_length": 256},
    ),
    "gemma4": (
        {
            "model_type": "gemma4",
            "image_token_id": 258880,
            "boi_token_id": 255999,
            "eoi_token_id": 258882,
            "text_config": {"sliding_window": 1024, "use_bidirectional_attention": "vision", "pad_token_id": 0},
            "vision_config": {"model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3},
        },
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "do_normalize": False,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": 280,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "resample": 3,
            "rescale_factor": 1 / 255,
        },
        {"image_seq_length": 280},
    ),
    "qwen2-vl": (
        {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}, **QWEN_IDS},
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **CLIP,
        },
        {},
    ),
    "qwen3-vl": (
        {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}, **QWEN_IDS},
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **HALF,
        },
        {},
    ),
    "smolvlm": (
        {
            "model_type": "smolvlm",
            "image_token_id": 49190,
            "scale_factor": 4,
            "vision_config": {"image_size": 512, "patch_size": 16},
        },
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "resample": 1,
            "do_image_splitting": True,
            **HALF,
        },
        {"image_seq_len": 64},
    ),
    "idefics3-small": (
        {
            "model_type": "idefics3",
            "image_token_id": 128257,
            "scale_factor": 2,
            "vision_config": {"image_size": 56, "patch_size": 14},
        },
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 224},
            "max_image_size": {"longest_edge": 56},
            "resample": 1,
            "do_image_splitting": True,
            **HALF,
        },
        {"image_seq_len": 4},
    ),
    "mistral3": (
        {
            "model_type": "mistral3",
            "image_token_index": 10,
            "spatial_merge_size": 2,
            "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
        },
        {
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 1540},
            "patch_size": {"height": 14, "width": 14},
            **CLIP,
        },
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "pixtral": (
        {
            "model_type": "llava",
            "image_token_index": 10,
            "vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16},
        },
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 1024},
            "patch_size": {"height": 16, "width": 16},
            **CLIP,
        },
        {"patch_size": 16},
    ),
}


def files_of(name: str) -> dict[str, bytes]:
    """The files of a model, as bytes by name."""
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    return {file: json.dumps(content).encode() for file, content in zip(names, MODELS[name], strict=True)}
