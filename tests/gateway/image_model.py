"""A tiny model that reads images: the files of its bundle, its card, and pictures to send."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

from headrace.protos.worker_pb2 import ImageLimits

IMAGE = "<image>"
MORE_SPECIAL = [IMAGE, "<pad>"]
NUM_TOKENS = 4
"""Image tokens of each image."""
MAX_IMAGES = 3
MAX_BYTES = 64 * 1024
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# As LLaVA's templates, whose tools see texts only.
USERS_ONLY = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% elif message.role == 'user' %}<image>{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def files(first_id: int) -> dict[str, bytes]:
    """The files that describe the images of a LLaVA with patches of 14 on 28 x 28 pixels. `first_id` is the token of
    `IMAGE`."""
    config = {
        "model_type": "llava",
        "image_token_index": first_id,
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "image_seq_length": NUM_TOKENS,
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    }
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    }
    more = {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": IMAGE}
    more |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    contents = {"config.json": config, "preprocessor_config.json": processor, "processor_config.json": more}
    return {name: json.dumps(content).encode() for name, content in contents.items()}


def limits() -> ImageLimits:
    """What a worker of the model takes."""
    return ImageLimits(max_images=MAX_IMAGES, max_pixels=1_000_000, max_bytes=MAX_BYTES, max_view_pixels=1_003_520)


def png(width: int = 8, height: int = 8, colour: tuple[int, int, int] = (220, 30, 30)) -> bytes:
    """A picture of one colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = (b"\0" + bytes(colour) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


RED, GREEN, BLUE = (png(colour=colour) for colour in ((220, 30, 30), (30, 160, 60), (40, 70, 220)))


def b64(data: bytes) -> str:
    """A file as base64."""
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{media_type};base64,{b64(data)}"


def image_part(data: bytes, **fields: Any) -> dict[str, Any]:
    """The part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}
