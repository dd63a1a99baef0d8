"""The head of a model's graph and the graphs after it, compared with numpy, on a graph that has only a head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.model.batch import Sums
from headrace.worker.model.lm_head import HeadRequest, replace_head
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import FloatArray, reduce_with_numpy
from headrace.worker.sampling.row_sums import RowSums

HIDDEN = 32
CORE = ov.Core()
PRECISIONS = ["f32", *(["bf16"] if "BF16" in CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES") else [])]


def hidden_states(num_tokens: int) -> FloatArray:
    return np.random.default_rng(1).normal(size=(num_tokens, 1, HIDDEN)).astype(np.float32)


def head_request(
    vocab_size: int, precision: str, *, scaled: str = "", run: int | None = None
) -> tuple[HeadRequest, ov.InferRequest]:
    """A model whose input is its last hidden states; `scaled` multiplies its logits once more, the scale standing
    "behind" or "before" them, or "before" them and converted. `run` is the length of runs."""
    states = opset13.parameter([-1, 1, HIDDEN], np.float32, "hidden_states")
    states.output(0).get_tensor().set_names({"hidden_states"})
    weights = (np.random.default_rng(0).normal(size=(vocab_size, HIDDEN))).astype(np.float32)
    logits = opset13.matmul(states, opset13.constant(weights), False, True)
    if scaled == "behind":
        logits = opset13.multiply(logits, opset13.constant(np.float32(0.5)))
    elif scaled == "before":
        logits = opset13.multiply(opset13.constant(np.float32(0.5)), logits)
    elif scaled == "converted":
        scale = opset13.convert(opset13.constant(np.float16(0.5)), "f32")
        logits = opset13.convert(opset13.multiply(scale, logits), "f32")
    model = ov.Model([opset13.result(logits)], [states], "head")
    has_runs = replace_head(model, is_bfloat16=precision == "bf16", run=run)
    compiled = CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1})
    request = compiled.create_infer_request()
    request.set_tensor("hidden_states", ov.Tensor(hidden_states(40)))
    row_sums = RowSums(vocab_size, compiled.output("logits").element_type, 1, run=run) if has_runs else None
    return HeadRequest(request, row_sums, vocab_size), request


def computed(head: HeadRequest, rows: npt.NDArray[np.int64], temperatures: FloatArray, sums: Sums) -> Logits:
    head.bind(rows, temperatures, sums)
    head.run()
    return head.logits()


@pytest.mark.parametrize("run", [32, 0])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_part_of_a_vocabulary_has_the_runs_of_the_whole(num_rows: int, run: int) -> None:
    # A vocabulary of this size alone would have runs of 256.
    head, _ = head_request(40_960, "f32", run=run)
    inverse_temperatures = np.linspace(0.5, 3, num_rows).astype(np.float32)
    logits = computed(head, np.arange(num_rows), inverse_temperatures, Sums.DRAWN_AND_MODEL)
    if not run:
        assert logits.reduction is None
        return
    assert logits.reduction is not None
    assert logits.model_sums is not None
    in_runs = logits.whole(np.arange(num_rows)).reshape(num_rows, -1, run)
    np.testing.assert_array_equal(logits.reduction.maxima, in_runs.max(axis=2))
    for sums, each in (
        (logits.reduction.sums, inverse_temperatures),
        (logits.model_sums, np.ones_like(inverse_temperatures)),
    ):
        weights = np.exp((in_runs - in_runs.max(axis=2, keepdims=True)) * each[:, None, None])
        np.testing.assert_allclose(sums, weights.sum(axis=2), rtol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 40])
@pytest.mark.parametrize("vocab_size", [1024, 40_960])  # weighed in one part, and in four
def test_every_kind_of_step_gives_the_same_logits_and_what_numpy_reads_of_them(
    precision: str, num_rows: int, vocab_size: int
) -> None:
    head, _ = head_request(vocab_size, precision)
    rows = np.random.default_rng(2).permutation(40)[:num_rows]
    inverse_temperatures = np.linspace(0.5, 3, num_rows).astype(np.float32)
    every = np.arange(num_rows)
    bits = set()
    for sums in (*Sums, *reversed(Sums)):
        logits = computed(head, rows, inverse_temperatures, sums)
        values = logits.whole(every)
        bits.add(values.tobytes())
        assert logits.reduction is not None
        wanted = reduce_with_numpy(values, inverse_temperatures)
        assert np.array_equal(logits.reduction.maxima, wanted.maxima)
        if sums is Sums.NONE:
            assert logits.reduction.sums.shape == (num_rows, 0)
        else:
            np.testing.assert_allclose(logits.reduction.sums, wanted.sums, rtol=2e-6)
        assert (logits.model_sums is not None) == (sums is Sums.DRAWN_AND_MODEL)
        if logits.model_sums is not None:
            ones = np.ones(num_rows, np.float32)
            np.testing.assert_allclose(logits.model_sums, reduce_with_numpy(values, ones).sums, rtol=2e-6)
    assert len(bits) == 1
    states = hidden_states(40)[rows, 0]
    np.testing.assert_allclose(values, states @ model_weights(vocab_size).T, atol=0.3 if precision == "bf16" else 1e-4)


def model_weights(vocab_size: int) -> FloatArray:
    return np.random.default_rng(0).normal(size=(vocab_size, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("sums", Sums)
def test_a_row_has_the_same_bits_whatever_is_beside_it(sums: Sums) -> None:
    head, _ = head_request(1024, PRECISIONS[-1])
    temperatures = np.full(40, 1.25, np.float32)
    together = computed(head, np.arange(40), temperatures, sums)
    kept = [together.whole(np.arange(40)), *(np.array(part) for part in together.reduction or ())]
    for rows in (np.array([3, 4]), np.arange(20, 33)):
        some = computed(head, rows, temperatures[rows], sums)
        assert some.reduction is not None
        got = [some.whole(np.arange(len(rows))), *some.reduction]
        assert [one.tobytes() for one in got] == [one[rows].tobytes() for one in kept]


@pytest.mark.parametrize(
    ("vocab_size", "scaled"), [(1000, ""), (1024, "behind"), (1024, "before"), (1024, "converted"), (1000, "before")]
)
def test_a_model_that_has_no_runs_or_does_more_to_its_logits_gives_only_them(vocab_size: int, scaled: str) -> None:
    head, _ = head_request(vocab_size, "f32", scaled=scaled)
    rows = np.array([5, 0, 39])
    logits = computed(head, rows, np.ones(3, np.float32), Sums.DRAWN_AND_MODEL)
    assert logits.reduction is None
    wanted = hidden_states(40)[rows, 0] @ model_weights(vocab_size).T
    np.testing.assert_allclose(logits.values, 0.5 * wanted if scaled else wanted, atol=1e-4)


def test_a_row_of_no_numbers_shows_in_the_maxima_or_the_best_run() -> None:
    head, request = head_request(1024, PRECISIONS[-1])
    states = hidden_states(40)
    states[2] = np.nan
    request.set_tensor("hidden_states", ov.Tensor(states))
    for sums in Sums:
        logits = computed(head, np.array([1, 2, 3]), np.ones(3, np.float32), sums)
        assert np.isnan(logits.at(np.array([1]), np.array([7])))
        assert logits.reduction is not None
        if sums is not Sums.NONE:
            assert np.isfinite(logits.reduction.sums.sum(axis=1)).tolist() == [True, False, True]


@pytest.mark.parametrize("sums", list(Sums))
@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_the_graph_computes_as_many_rows_as_are_sampled_however_they_are_drawn(sums: Sums, num_rows: int) -> None:
    head, request = head_request(151_936, "f32")
    computed(head, np.arange(num_rows), np.full(num_rows, 1.25, np.float32), sums)
    assert request.get_tensor("logits").shape[0] == num_rows


@pytest.mark.parametrize("num_rows", [2, 13])
def test_a_row_has_the_same_sums_alone_and_among_others(num_rows: int) -> None:
    """Alone it is weighed by numpy, among others in parts by a graph."""
    head, _ = head_request(151_936, "f32")
    temperatures = np.linspace(0.5, 3, num_rows).astype(np.float32)
    together = computed(head, np.arange(num_rows), temperatures, Sums.DRAWN_AND_MODEL)
    for row in range(num_rows):
        alone = computed(head, np.array([row]), temperatures[row : row + 1], Sums.DRAWN_AND_MODEL)
        assert alone.reduction is not None
        assert together.reduction is not None
        np.testing.assert_allclose(alone.reduction.sums[0], together.reduction.sums[row], rtol=2e-6)
        np.testing.assert_allclose(alone.model_sums[0], together.model_sums[row], rtol=2e-6)  # type: ignore[index]


def test_an_end_without_a_product_with_weights_is_refused_by_name() -> None:
    states = opset13.parameter([-1, 1, HIDDEN], np.float32, "hidden_states")
    model = ov.Model([opset13.result(opset13.relu(states, name="the_end"))], [states], "no_head")
    with pytest.raises(ConfigurationError, match="Parameter '.*' does not depend on a product"):
        replace_head(model, is_bfloat16=False)
    weights = opset13.constant(model_weights(1024))
    turned = opset13.transpose(states, opset13.constant(np.array([1, 2, 0])))
    model = ov.Model([opset13.result(opset13.matmul(weights, turned, False, False))], [states], "turned")
    with pytest.raises(ConfigurationError, match="multiplies the weights with the hidden states"):
        replace_head(model, is_bfloat16=False)
