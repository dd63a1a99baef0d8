"""The demo model with only its first layers: the same tokenizer and the same operations, at a fraction of the work."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

# Declared absent before OpenVINO is imported, see docs/decisions/dependencies.md#no-reports.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as ov  # noqa: E402

_LAYER_OUTPUT = "model.layers.self_attn.add1.layer{}"


def write_few_layers(source: Path, target: Path, num_layers: int) -> None:
    """Copy a model directory, leaving out all layers of the model but the first `num_layers`."""
    model = ov.Core().read_model(source / "openvino_model.xml")
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    kept = nodes[_LAYER_OUTPUT.format(num_layers - 1)].output(0)
    last = max(number for number in range(len(nodes)) if _LAYER_OUTPUT.format(number) in nodes)
    for consumer in nodes[_LAYER_OUTPUT.format(last)].output(0).get_target_inputs():
        consumer.replace_source_output(kept)
    for sink in model.get_sinks():
        if _layer_of(sink.get_variable_id()) >= num_layers:
            model.remove_sink(sink)
    for variable in model.get_variables():
        if _layer_of(variable.info.variable_id) >= num_layers:
            model.remove_variable(variable)
    target.mkdir()
    for file in source.iterdir():
        # headrace.json lists the files as they were.
        if not file.name.startswith(("openvino_model.", "headrace.")):
            shutil.copy(file, target)
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)


def _layer_of(variable_id: str) -> int:
    """The number in past_key_values.7.keypresent.7.key."""
    found = re.search(r"\.(\d+)\.", variable_id)
    assert found is not None, variable_id
    return int(found[1])
