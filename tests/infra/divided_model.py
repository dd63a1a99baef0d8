"""A model of text, divided as exports of multimodal models are: embeddings of tokens, and a language model that takes
embeddings."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

# Declared absent before OpenVINO is imported, see docs/decisions/dependencies.md#no-reports.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
from openvino import opset13  # noqa: E402


def write_divided(source: Path, target: Path) -> None:
    """Copy a model directory with its network divided. config.json describes the text in a part of its own, and beside
    the two networks is one that is none, as for images."""
    core = ov.Core()
    target.mkdir()
    for file in source.iterdir():
        if not file.name.startswith(("openvino_model.", "headrace.")):
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({"model_type": "divided", "text_config": config}))
    first = core.read_model(source / "openvino_model.xml")
    embeddings = ov.Model([_embedding(first)], [_tokens(first)], "embeddings")
    embeddings.outputs[0].get_tensor().set_names({"inputs_embeds"})
    ov.save_model(embeddings, target / "openvino_text_embeddings_model.xml", compress_to_fp16=False)
    language = core.read_model(source / "openvino_model.xml")
    _take_embeddings(language)
    ov.save_model(language, target / "openvino_language_model.xml", compress_to_fp16=False)
    for suffix in ("xml", "bin"):
        (target / f"openvino_vision_embeddings_model.{suffix}").write_text("no network")


def _tokens(model: ov.Model) -> ov.Node:
    node: ov.Node = model.input("input_ids").get_node()
    return node


def _embedding(model: ov.Model) -> ov.Output:
    """What is looked up by tokens."""
    waiting = [_tokens(model)]
    while waiting:
        node = waiting.pop()
        if node.get_type_name() == "Gather" and len(node.get_output_partial_shape(0)) == 3:
            found: ov.Output = node.output(0)
            return found
        if node.get_type_name() in {"Parameter", "Convert"}:
            waiting += [port.get_node() for port in node.output(0).get_target_inputs()]
    raise AssertionError("the model looks nothing up by tokens")


def _take_embeddings(model: ov.Model) -> None:
    tokens, looked_up = _tokens(model), _embedding(model)
    embeds = opset13.parameter([-1, -1, looked_up.get_partial_shape()[2].get_length()], np.float32, "inputs_embeds")
    embeds.output(0).get_tensor().set_names({"inputs_embeds"})
    for port in looked_up.get_target_inputs():
        port.replace_source_output(embeds.output(0))
    for port in tokens.output(0).get_target_inputs():
        if port.get_node().get_type_name() == "ShapeOf":
            port.replace_source_output(embeds.output(0))
    model.add_parameters([embeds])
    model.remove_parameter(tokens)
    model.validate_nodes_and_infer_types()
