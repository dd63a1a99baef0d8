"""Models made of GGUF files compute what their files say, in every quantisation, paged as a worker has them."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, ReaderTensor
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from headrace.cli.gguf.weights import Weights, matrix_of, read_weights, rows_of, with_rows
from headrace.cli.models.convert import ConversionError, _write_model, convert, pieces_of
from headrace.common.model_files.gguf_files import metadata_of
from headrace.worker.model.adapted_linears import find_linears
from headrace.worker.model.directory import read_model_dir
from headrace.worker.model.fused_projections import is_constant
from headrace.worker.model.lm_head import replace_head
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from tests.cli.gguf_reference import log_probabilities
from tests.gguf_models import TinyModel, write_gguf

KINDS = (
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q8_0,
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
    Type.Q2_K,
    Type.Q3_K,
    Type.IQ4_NL,
    Type.IQ4_XS,
    Type.MXFP4,
    Type.IQ3_S,
)
# Kinds that are a scale times an integer. Those with minima are added up in another order, and others are rounded.
SCALED = (
    *(Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.Q6_K, Type.Q3_K),
    *(Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
)
ROUNDED = (Type.IQ3_S,)


def random_blocks(kind: Type, rows: int = 6, columns: int = 512) -> np.ndarray:
    """Random bytes of a matrix with realistic scales and minima."""
    random = np.random.default_rng(3)
    weights_in_block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // weights_in_block, block_bytes), dtype=np.uint8)
    if kind == Type.MXFP4:
        blocks[:, 0] = random.integers(110, 125, len(blocks))  # powers of two
        return blocks.reshape(rows, -1)
    scales = {Type.Q6_K: [208], Type.Q3_K: [108], Type.Q2_K: [80, 82]}.get(
        kind, [0, 2] if kind.name[-1] in "1K" else [0]
    )
    for at in scales:
        halves = random.uniform(0.001, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def computed(output: ov.Output, *inputs: ov.Node, values: tuple[np.ndarray, ...] = ()) -> np.ndarray:
    core = ov.Core()
    core.set_property("CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    found: np.ndarray = core.compile_model(ov.Model([output], list(inputs)), "CPU")(values)[0]
    return found


def product_with_unit_matrix(weights: Weights) -> np.ndarray:
    """The matrix, by a product with it, as a worker computes one."""
    states = ov.opset13.parameter([-1, weights.shape[1]], np.float32)
    product = ov.opset13.matmul(states, matrix_of(weights), False, True)
    return computed(product.output(0), states, values=(np.eye(weights.shape[1], dtype=np.float32),)).T


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_are_those_of_the_file(kind: Type) -> None:
    data = random_blocks(kind)
    expected = dequantize(data, kind)
    weights = read_weights(kind, data)
    tolerance = np.abs(expected).max() * (0.005 if kind in ROUNDED else 1e-6)
    np.testing.assert_allclose(product_with_unit_matrix(weights), expected, rtol=0, atol=tolerance)
    indices = ov.opset13.parameter([-1, -1], np.int64)
    rows = computed(rows_of(weights, indices.output(0)), indices, values=(np.array([[4, 0]]),))
    np.testing.assert_allclose(rows[0], expected[[4, 0]], rtol=0, atol=tolerance)
    order = np.array([5, 3, 1, 0, 2, 4])
    np.testing.assert_allclose(product_with_unit_matrix(with_rows(weights, order)), expected[order], atol=tolerance)


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)
def test_integers_and_scales_give_llama_cpps_values_to_the_bit(kind: Type) -> None:
    data = random_blocks(kind)
    groups = read_weights(kind, data).groups
    assert groups is not None
    assert groups.minima is None
    values = groups.integers.astype(np.float32) * groups.scales.astype(np.float32)
    np.testing.assert_array_equal(values.reshape(len(data), -1), dequantize(data, kind))


def test_the_smallest_powers_of_two_are_kept() -> None:
    """Those of MXFP4 go beyond the normal numbers of float32."""
    blocks = np.tile(np.arange(17, dtype=np.uint8) * 13, (250, 1))
    blocks[:, 0] = np.arange(250)
    groups = read_weights(Type.MXFP4, blocks).groups
    assert groups is not None
    values = groups.integers.astype(np.float32) * groups.scales
    np.testing.assert_array_equal(values.reshape(250, -1), dequantize(blocks, Type.MXFP4))


def test_groups_of_one_number_keep_it() -> None:
    blocks = random_blocks(Type.Q4_1, 2, 64).reshape(-1, 20)
    blocks[0, :2] = 0  # the scale
    expected = dequantize(blocks.reshape(2, -1), Type.Q4_1)
    found = product_with_unit_matrix(read_weights(Type.Q4_1, blocks.reshape(2, -1)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


MODELS = {
    **{kind.name: TinyModel(default=kind) for kind in (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)},
    **{kind.name: TinyModel(default=kind) for kind in (Type.F16, Type.BF16, Type.F32)},
    "qwen2": TinyModel("qwen2", Type.Q8_0),
    "qwen3": TinyModel("qwen3", Type.Q4_1, {"token_embd": Type.F16}, tied=True),
    "llama-3.1": TinyModel(default=Type.Q8_0, rope_factors=True),
    "mixed": TinyModel(default=Type.Q4_0, types={"attn_v": Type.Q8_0, "output.weight": Type.F16}),
    "pieces": TinyModel(default=Type.Q8_0, pieces=3),
    "mxfp4": TinyModel(default=Type.MXFP4),
    **{
        f"qwen3moe-{kind.name}": TinyModel("qwen3moe", kind, {"gate_inp": Type.F32}, experts=4, used_experts=2)
        for kind in (Type.Q8_0, Type.Q4_1, Type.MXFP4)
    },
    "mixtral": TinyModel(default=Type.Q4_0, types={"gate_inp": Type.F32}, experts=3, used_experts=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_what_its_file_says(name: str, tmp_path: Path) -> None:
    """Log-probabilities in accuracy mode, within 0.001 of the book's."""
    model = MODELS[name]
    readers = [GGUFReader(path) for path in pieces_of(write_gguf(model, tmp_path / "m.gguf"))]
    assert len(readers) == model.pieces
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    _write_model(metadata_of(readers[0]), tensors, tmp_path / "openvino_model.xml")
    weights = {key: dequantize(tensor.data, tensor.tensor_type) for key, tensor in tensors.items()}
    tokens = np.random.default_rng(1).integers(0, 250, 40).tolist()
    expected = log_probabilities(model, weights, tokens)
    core = ov.Core()
    core.set_property("CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    compiled = core.compile_model(tmp_path / "openvino_model.xml", "CPU", {"KV_CACHE_PRECISION": "f32"})
    request = compiled.create_infer_request()
    found = []
    for begin, end in ((0, 25), (25, 40)):
        shape = (1, end - begin)
        inputs = {
            "input_ids": np.array([tokens[begin:end]]),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end).reshape(shape),
            "beam_idx": np.zeros(1, np.int32),
        }
        found.append(request.infer(inputs)["logits"][0].astype(np.float64))
    logits = np.concatenate(found)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


def written(model: TinyModel, directory: Path) -> list[ReaderTensor]:
    """The converted model, in the directory; the tensors of its file."""
    reader = GGUFReader(write_gguf(model, directory / "m.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _write_model(metadata_of(reader), tensors, directory / "openvino_model.xml")
    return list(reader.tensors)


def test_a_worker_pages_a_converted_model(tmp_path: Path) -> None:
    """All attention layers, query, key and value as one product, and weights that stay compressed."""
    tensors = written(replace(MODELS["qwen3"], types={}), tmp_path)
    runner = OpenVINOModelRunner(tmp_path, threads=1, kv_precision="u8", execution_mode="performance")
    assert runner.vocab_size == 263
    assert (tmp_path / "openvino_model.bin").stat().st_size < 1.45 * sum(tensor.n_bytes for tensor in tensors)


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q4_0, Type.Q5_1], ids=lambda kind: kind.name)
def test_products_have_integers_and_scales_only(kind: Type, tmp_path: Path) -> None:
    """With a float32 zero point, OpenVINO does not quantise the states and takes up to 4.6 times as long."""
    written(TinyModel(default=kind, types={"output.weight": Type.F16}), tmp_path)
    model = read_paged(ov.Core(), tmp_path).graph
    assert not [node for node in model.get_ops() if node.get_type_name() == "Subtract" and is_constant(node.output(0))]
    assert len(find_linears(model)) == 2 * 7


def test_the_last_layer_is_computed_for_sampled_rows_with_minima_too(tmp_path: Path) -> None:
    written(TinyModel(default=Type.Q4_1, types={"output.weight": Type.F16}), tmp_path)
    model = read_paged(ov.Core(), tmp_path).graph
    replace_head(model, is_bfloat16=False)
    nodes = model.get_ordered_ops()
    names = [node.get_friendly_name() for node in nodes]
    rows = next(node for node in nodes if "rows" in node.output(0).get_names())
    first = max(names.index(port.get_node().get_friendly_name()) for port in rows.output(0).get_target_inputs())
    parts = ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    of_layer = {name for name in names[first:] if name.startswith("__module.model.layers.1.")}
    assert of_layer == {f"__module.model.layers.1.{part}_proj/aten::linear/MatMul" for part in parts}


def test_a_directory_has_all_templates_that_requests_may_need(tmp_path: Path) -> None:
    templates = {"tool_use": "with tools", "rag": "with documents", "other": "for nothing"}
    convert(write_gguf(TinyModel(default=Type.Q5_0, templates=templates), tmp_path / "m.gguf"), tmp_path)
    model = read_model_dir(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(model.tokenizer_bundle)) as bundle:
        found = {name: bundle.extractfile(name) for name in bundle.getnames() if name.endswith(".jinja")}
        texts = {name: file.read().decode() for name, file in found.items() if file is not None}
    assert "<|im_start|>" in texts.pop("chat_template.jinja")
    assert texts == {
        "additional_chat_templates/tool_use.jinja": "with tools",
        "additional_chat_templates/rag.jinja": "with documents",
    }


@pytest.mark.parametrize(("written", "used"), [(5, 1), (3, 4)])
def test_experts_that_the_metadata_do_not_have_are_refused(written: int, used: int, tmp_path: Path) -> None:
    model = TinyModel(default=Type.Q4_0, types={"gate_inp": Type.F32}, experts=3, used_experts=used)
    path = write_gguf(model, tmp_path / "m.gguf")
    reader = GGUFReader(path)
    metadata = {**metadata_of(reader), "llama.expert_count": written}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with pytest.raises(ConversionError, match=f"uses {used} of {written} experts, .* layer 0 has 3, 3, 3 of"):
        _write_model(metadata, tensors, tmp_path / "openvino_model.xml")
