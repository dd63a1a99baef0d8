"""A tower with trained weights sees as well when its products are computed in 8-bit integers: the model of shapes
answers as the reference does. CPUs without these instructions compute the same graph in another precision."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.multimodal.towers import integer_products
from headrace.worker.vision.encoder import BadImageError, ImageFile, Setting
from headrace.worker.vision.tower_encoder import TowerEncoder
from tests.e2e.shapes import MODEL, questions, swapped

TOWER = "openvino_vision_embeddings_model.xml"
SENTENCE = "what is in the picture first second ? a and colour shape"
THINGS = "red green blue yellow black purple circle square triangle"
WORDS = ("<pad>", "<s>", "</s>", "<image>", *SENTENCE.split(" "), *THINGS.split(" "))
HIDDEN = 96
MOST_TOKENS = 8


def compress(path: Path, to: Path) -> int:
    """Give the products of a network weights of 8 bits with a scale and a zero for each output, as exporters do.
    Returns how many."""
    model = ov.Core().read_model(path)
    count = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        if source.get_type_name() == "Convert":
            source = source.input_value(0).get_node()
        if source.get_type_name() != "Constant" or len(source.get_output_shape(0)) != 2:
            continue
        weights = source.data.astype(np.float32)
        least = weights.min(1, keepdims=True)
        scales = np.maximum((weights.max(1, keepdims=True) - least) / 255, 1e-8).astype(np.float16)
        zeros = np.clip(np.round(-least / scales.astype(np.float32)), 0, 255)
        stored = np.clip(np.round(weights / scales.astype(np.float32)) + zeros, 0, 255)
        parts = [opset13.convert(opset13.constant(values.astype(np.uint8)), np.float16) for values in (stored, zeros)]
        found = opset13.convert(opset13.multiply(opset13.subtract(*parts), opset13.constant(scales)), np.float32)
        node.input(1).replace_source_output(found.output(0))
        count += 1
    ov.save_model(model, to, compress_to_fp16=False)
    return count


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of shapes with a tower of 8 bits."""
    directory = tmp_path_factory.mktemp("compressed")
    for file in MODEL.iterdir():
        if not file.name.startswith(TOWER.removesuffix(".xml")):
            shutil.copy(file, directory)
    assert compress(MODEL / TOWER, directory / TOWER) == 20
    return directory


class Seeing:
    """The model of shapes with this encoder of its pictures."""

    def __init__(self, encoder: TowerEncoder) -> None:
        self._encoder = encoder
        core = ov.Core()
        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        self._embed = core.compile_model(MODEL / "openvino_text_embeddings_model.xml", "CPU", exact)
        self._language = core.compile_model(MODEL / "openvino_language_model.xml", "CPU", exact).create_infer_request()

    def states(self, picture: bytes) -> npt.NDArray[np.float32]:
        (found,) = self._encoder.encode([ImageFile(picture, "auto")])
        assert not isinstance(found, BadImageError)
        return found.states

    def answer(self, pictures: Sequence[bytes], text: str) -> str:
        """The words of a greedy answer."""
        parts = [self._embedded(["<s>"]), *map(self.states, pictures), self._embedded(text.split(" "))]
        new = np.concatenate(parts)
        said: list[str] = []
        self._language.reset_state()
        num_seen = 0
        while len(said) < MOST_TOKENS:
            length = len(new)
            places = np.arange(num_seen, num_seen + length)
            num_seen += length
            inputs = {
                "inputs_embeds": new[None],
                "attention_mask": np.ones((1, num_seen), np.int64),
                "position_ids": places[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            logits = next(iter(self._language.infer(inputs).values()))
            word = WORDS[int(logits[0, -1].argmax())]
            if word == "</s>":
                break
            said.append(word)
            new = self._embedded([word])
        return " ".join(said)

    def _embedded(self, words: Sequence[str]) -> npt.NDArray[np.float32]:
        ids = np.array([[WORDS.index(word) for word in words]], np.int64)
        found: npt.NDArray[np.float32] = next(iter(self._embed(ids).values()))[0]
        return found


def seeing(directory: Path, execution_mode: str) -> Seeing:
    return Seeing(TowerEncoder(Setting(str(directory), 1 << 20, 1, execution_mode, 1 << 30, HIDDEN, 0)))


def test_a_trained_tower_in_integers_answers_as_in_float32(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*questions(), *swapped()]
    exact = seeing(compressed, "accuracy")
    # Its weights are few, and a group has to be as small as the inputs of most of its products.
    monkeypatch.setattr(integer_products, "_LEAST_WEIGHTS", 1)
    monkeypatch.setitem(integer_products._PROPERTIES, "DYNAMIC_QUANTIZATION_GROUP_SIZE", str(HIDDEN))
    in_integers = seeing(compressed, "performance")
    wanted, found = (each.states(asked[0].pictures[0]) for each in (exact, in_integers))
    difference = np.abs(found - wanted).mean() / np.abs(wanted).mean()
    core = ov.Core()
    if integer_products.integer_products(core, core.read_model(compressed / TOWER), "performance"):
        assert difference > 0.0145, "only attention was in another precision: 0.0129"
    assert difference < 0.03
    answers = [in_integers.answer(question.pictures, question.text) for question in asked]
    # All of them on a Zen 4; another rounding may turn one that is nearly a tie.
    assert sum(answer == one.reference for answer, one in zip(answers, asked, strict=True)) >= len(asked) - 3
