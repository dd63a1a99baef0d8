"""Make a vision-language model with random weights in the shape of a real one, for the benchmarks beside this file.

    .make/architectures/bin/python -m benchmarks.images.vision_model SHAPE DIRECTORY [--layers 8]

Its answers are noise, but its cost is that of the real model with so many layers in its language model. The vision
tower is whole. Weights have 8 bits, as optimum-intel compresses vision-language models by default. Layers share their
weights until they are compressed, so that the export needs little memory.

    llava-1.5    CLIP ViT-L/14 of 336 pixels, 576 tokens an image; Llama 2 7B
    qwen2-vl     Qwen2-VL's vision tower; Qwen2 1.5B
    smolvlm      SmolVLM-500M: SigLIP of 512 pixels, 64 tokens a tile; SmolLM2-360M
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
import transformers
from openvino import opset13
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import export_from_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from benchmarks.images.words import WORDS

# As in the tokenizers of Llama 2.
_SPACE = "\u2581"
_NETWORKS = ("language_model", "text_embeddings_model", "vision_embeddings_model", "vision_embeddings_merger_model")
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SCALED = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True}
_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A real model: its type, the sizes of its language model, its vision tower, what is around both, and the settings
    of its processor. `tokens` are special ones at the end of the vocabulary; the chat template writes `placeholder` for
    an image."""

    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tokens: tuple[str, ...]
    placeholder: str
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)
    around: Mapping[str, Any] = field(default_factory=dict)


SHAPES = {
    "llava-1.5": Shape(
        "llava",
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32_064,
            "max_position_embeddings": 4096,
        },
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
        ("<image>",),
        "<image>\n",
        {
            **_SCALED,
            **_CLIP_COLOURS,
            "do_resize": True,
            "size": {"shortest_edge": 336},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": 336, "width": 336},
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
        },
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "processor_class": "LlavaProcessor",
        },
        {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "image_seq_length": 576},
    ),
    "qwen2-vl": Shape(
        "qwen2_vl",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "tie_word_embeddings": True,
        },
        {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14},
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            **_SCALED,
            **_CLIP_COLOURS,
            "do_resize": True,
            "min_pixels": 3136,
            "max_pixels": 12_845_056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        },
    ),
    "smolvlm": Shape(
        "smolvlm",
        {
            "model_type": "llama",
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "vocab_size": 49_280,
            "max_position_embeddings": 8192,
        },
        {
            "model_type": "smolvlm_vision",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        (
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<end_of_utterance>",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        "<image>",
        {
            **_SCALED,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "do_resize": True,
            "size": {"longest_edge": 2048},
            "resample": 1,
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": 512},
            "do_pad": True,
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
        },
        {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        {"scale_factor": 4},
    ),
}


def main() -> None:
    """Write the model to the directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8, help="layers of the language model (default 8)")
    args = parser.parse_args()
    shape, directory = SHAPES[args.shape], args.directory
    tokenizer = _tokenizer(shape)
    model = _model(shape, args.layers)
    export_from_model(model, output=directory, task="image-text-to-text", stateful=True, patch_16bit_model=True)
    config = model.config
    del model
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(_TEMPLATE.replace("PLACEHOLDER", shape.placeholder))
    (directory / "preprocessor_config.json").write_text(json.dumps(shape.preprocessor))
    if shape.processor:
        (directory / "processor_config.json").write_text(json.dumps(shape.processor))
    for name, made in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        ov.save_model(made, directory / f"openvino_{name}.xml")
    for name in _NETWORKS:
        path = directory / f"openvino_{name}.xml"
        if path.exists():
            _compress(path)


def _model(shape: Shape, layers: int) -> Any:
    image_token_id = shape.text["vocab_size"] - len(shape.tokens)
    text = {**shape.text, "num_hidden_layers": layers}
    if shape.model_type == "qwen2_vl":
        ids = {"image_token_id": image_token_id, "video_token_id": image_token_id + 1}
        ids |= {"vision_start_token_id": image_token_id + 2, "vision_end_token_id": image_token_id + 3}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=dict(shape.vision), **ids, **shape.around)
    else:
        name = "image_token_index" if shape.model_type == "llava" else "image_token_id"
        given = {"text_config": text, "vision_config": dict(shape.vision), name: image_token_id, **shape.around}
        config = transformers.AutoConfig.for_model(shape.model_type, **given)
    torch.manual_seed(0)
    depth = "depth" if "depth" in shape.vision else "num_hidden_layers"
    config.text_config.num_hidden_layers = 1
    setattr(config.vision_config, depth, 1)
    # As published weights: 16 bits, which also halves the memory of the export.
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float16).eval()
    decoder = model.get_decoder()
    text_layers = getattr(decoder, "text_model", decoder).layers  # of SmolVLM it is the whole model
    for module in list(model.modules()):
        if isinstance(module, torch.nn.ModuleList):
            _repeat(module, layers if module is text_layers else shape.vision[depth])
    config = model.config
    config.text_config.num_hidden_layers = layers
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:1] * layers
    setattr(config.vision_config, depth, shape.vision[depth])
    return model


def _repeat(layers: torch.nn.ModuleList, number: int) -> None:
    """So many layers with the weights of the only one."""
    weights = {id(parameter): parameter for parameter in layers[0].parameters()}
    for index in range(1, number):
        layer = copy.deepcopy(layers[0], dict(weights))
        attention = getattr(layer, "self_attn", None)
        if hasattr(attention, "layer_idx"):
            attention.layer_idx = index
        layers.append(layer)


def _tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Pieces for characters and for the words of the benchmark, and made-up ones up to the size of the vocabulary.

    A word is a token, as most words are for real tokenizers, except where no space is before it.
    """
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    starts = {f"{_SPACE}{word[:end]}": None for word in WORDS for end in range(1, len(word) + 1)}
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE, *map(chr, range(33, 127)), *starts]
    pieces += [f"w{number}" for number in range(shape.text["vocab_size"] - len(pieces) - len(shape.tokens))]
    merges = [(piece[:-1], piece[-1]) for piece in starts]
    ids = {piece: index for index, piece in enumerate(pieces)}
    bpe = models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>")
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([*special, *shape.tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def _compress(path: Path) -> None:
    """Give a network weights of 8 bits."""
    graph = nncf.compress_weights(ov.Core().read_model(path), mode=nncf.CompressWeightsMode.INT8_ASYM)
    _tell_apart(graph)
    whole = path.with_name(f"compressed_{path.name}")
    ov.save_model(graph, whole, compress_to_fp16=False)
    del graph
    for made in (whole, whole.with_suffix(".bin")):
        made.replace(path.with_suffix(made.suffix))


def _tell_apart(graph: ov.Model) -> None:
    """Give products that share weights weights of their own: the same rows in another order."""
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        sharing = [port for port in node.input_value(1).get_target_inputs() if port.get_index() == 1]
        for number, port in enumerate(sharing[1:], 1):
            port.replace_source_output(_in_other_order(port.get_source_output(), number))


def _in_other_order(weights: ov.Output, shift: int) -> ov.Output:
    """Decompressed weights `[outputs, inputs]` with their rows shifted."""
    node = weights.get_node()
    parts = [_in_other_order(value, shift) for value in node.input_values()]
    match node.get_type_name():
        case "Constant":
            return opset13.constant(np.roll(node.data, shift, axis=0)).output(0)
        case "Convert":
            return opset13.convert(parts[0], weights.get_element_type().to_string()).output(0)
        case "Subtract":
            return opset13.subtract(*parts).output(0)
        case "Multiply":
            return opset13.multiply(*parts).output(0)
    raise ValueError(f"weights in an unknown form: {node}")


if __name__ == "__main__":
    main()
