"""Quantised checkpoints keep their numbers: what the exported graph multiplies with is, to the bit, what the checkpoint
stands for, and OpenVINO's kernels take integers as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest

from headrace.worker.model.fused_projections import is_constant
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import FAMILIES
from tests.architectures.test_architectures import NAMES

INTEGERS = {ov.Type.u4, ov.Type.i4, ov.Type.u8, ov.Type.i8}
# The products of gpt-oss's experts, by the ends of their names.
EXPERTS = {"bmm/MatMul": ".gate_up_proj", "bmm/MatMul_1": ".down_proj"}
PLAIN = ("f32", "f16", "bf16", "int8_asym", "int8_sym", "int4_asym", "int4_sym")
QUANTISED = [name for name in NAMES if FAMILIES[name].weights not in PLAIN]
Floats = npt.NDArray[np.float32]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def products_of(graph: ov.Model) -> dict[str, ov.Output]:
    """The constant weights of products, by their names in the checkpoint."""
    found = {}
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and is_constant(node.input_value(1)):
            module, _, product = node.get_friendly_name().removeprefix("__module.").partition("/")
            found[module + (EXPERTS[product.rpartition("::")[2]] if module.endswith(".experts") else ".weight")] = (
                node.input_value(1)
            )
    return found


def value_of(output: ov.Output) -> Floats:
    """What a graph of constants gives, computed in float32."""
    node = output.get_node()
    kind, parts = node.get_type_name(), [value_of(value) for value in node.input_values()[:2]]
    if kind == "Constant":
        return np.asarray(node.get_data(dtype=np.float32))
    if kind == "Convert":
        return parts[0]
    if kind == "Reshape":
        return parts[0].reshape(list(output.get_shape()))
    assert kind in ("Subtract", "Multiply"), kind
    return parts[0] - parts[1] if kind == "Subtract" else parts[0] * parts[1]


def stored_type(output: ov.Output) -> ov.Type:
    """The type of the numbers that stand first in a graph of constants."""
    node = output.get_node()
    return stored_type(node.input_value(0)) if node.input_values() else node.get_output_element_type(0)


@pytest.mark.parametrize("name", QUANTISED)
def test_weights_are_what_the_checkpoint_stands_for_to_the_bit(name: str) -> None:
    directory = exported(QUANTISED)[name]
    found = products_of(ov.Core().read_model(directory / "openvino_model.xml"))
    keeps_integers = "fp8" not in FAMILIES[name].weights
    with np.load(directory / "weights.npz") as expected:
        assert len(expected) >= 4
        for weight, values in expected.items():
            output = found[weight]
            assert (stored_type(output) in INTEGERS) == keeps_integers, stored_type(output)
            assert keeps_integers or stored_type(output) == ov.Type.bf16
            is_expert = values.ndim == 3
            np.testing.assert_array_equal(value_of(output), values.transpose(0, 2, 1) if is_expert else values, weight)


@pytest.mark.parametrize("name", [name for name in QUANTISED if "fp8" not in FAMILIES[name].weights])
def test_openvino_multiplies_with_the_integers(name: str) -> None:
    """The plugin would otherwise decompress the weights in every step."""
    assert num_decompressions(exported(QUANTISED)[name]) == 0


def num_decompressions(directory: Path) -> int:
    """How many nodes of the compiled graph convert integers of weights to floats."""
    compiled = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": 1})
    nodes = compiled.get_runtime_model().get_ordered_ops()
    converts = [node for node in nodes if node.get_rt_info()["layerType"].value == "Convert"]
    return sum(map(is_weight, converts))


def is_weight(convert: ov.Node) -> bool:
    """Whether a node of a compiled graph converts a constant of integers with two dimensions or more."""
    source = convert.input_value(0)
    kind = source.get_node().get_rt_info()["layerType"].value
    return kind == "Const" and source.get_element_type() in INTEGERS and len(source.get_partial_shape()) > 1
