"""Sampling against a reference in float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.draw import draw
from headrace.worker.sampling.logits import Changes, Logits, Places
from headrace.worker.sampling.penalties import PenaltyCounter
from headrace.worker.sampling.processors import Edits, LogitsProcessors
from headrace.worker.sampling.reduction import FloatArray, Reducer, reduce_with_numpy, run_length
from headrace.worker.sampling.row_sums import reducer_for
from headrace.worker.sampling.rows import DRAWS, RowParams, uniforms
from headrace.worker.sampling.runs import Runs
from headrace.worker.sampling.sampler import BatchSampler, row_logprobs
from tests.worker.sampling_params import sample

VOCAB = 3000


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 1, **fields})


def request(sampling: SamplingParams, prompt: list[int] | None = None, generated: tuple[int, ...] = ()) -> Request:
    return Request("r", prompt or [1, 2, 3], sampling, 0, resume_token_ids=generated)


def runs_of(rows: FloatArray, inverse_temperatures: FloatArray) -> Runs:
    return Runs.made_of(Logits(rows), reduce_with_numpy(rows, inverse_temperatures), inverse_temperatures)


def drawn_with(
    inverse_temperatures: npt.ArrayLike,
    quantiles: npt.NDArray[np.float64],
    *,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
    top_n_sigma: npt.ArrayLike = 0.0,
) -> RowParams:
    """The parameters of rows that are sampled with these random numbers `[n, DRAWS]`."""
    size = len(quantiles)
    return RowParams(
        np.zeros(size, np.bool_),
        np.broadcast_to(np.asarray(inverse_temperatures, np.float32), size),
        np.broadcast_to(np.asarray(top_k, np.int64), size),
        np.broadcast_to(np.asarray(top_p, np.float64), size),
        np.broadcast_to(np.asarray(min_p, np.float64), size),
        np.broadcast_to(np.asarray(top_n_sigma, np.float64), size),
        quantiles,
    )


def drawn(logits: FloatArray, sampling: SamplingParams, seed: int, num_draws: int) -> npt.NDArray[np.intp]:
    """Tokens drawn from one row at the first positions."""
    size = min(num_draws, 200)
    filters = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p", "top_n_sigma")}
    with np.errstate(divide="ignore"):
        inverse_temperatures = np.full(size, sampling.inverse_temperature, np.float32)
        runs = runs_of(np.repeat(logits[None], size, axis=0), inverse_temperatures)
        quantiles = uniforms(np.full(num_draws, seed, np.uint64), np.arange(num_draws, dtype=np.uint64))
        parts = np.split(quantiles, num_draws // size)
        return np.concatenate([draw(runs, drawn_with(inverse_temperatures, part, **filters)) for part in parts])


def logprobs_of(row: FloatArray, chosen: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row."""
    runs = runs_of(row[None], np.ones(1, np.float32))
    return row_logprobs(runs, np.array([chosen]), [num_top])[0]


def reference(logits: npt.NDArray[np.float64], sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """The distribution that a row must be drawn from, by the definition: sort, cut, renormalise."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    if sampling.top_n_sigma > 0:
        weights[logits < logits.max() - sampling.top_n_sigma * logits.std()] = 0.0
    order = np.argsort(-weights, kind="stable")
    keep = np.zeros(len(weights), bool)
    keep[order[: sampling.top_k or len(order)]] = True
    weights = np.where(keep, weights, 0.0)
    reach = np.cumsum(weights[order]) / weights.sum()
    nucleus = order[: int(np.searchsorted(reach, sampling.top_p)) + 1] if sampling.top_p < 1 else order
    keep[:] = False
    keep[nucleus] = True
    weights = np.where(keep & (weights >= sampling.min_p * weights.max()), weights, 0.0)
    return weights / weights.sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_p": 0.99, "min_p": 0.01},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 1.5, "temperature": 0.7},
    {"top_n_sigma": 2.0, "top_p": 0.8, "top_k": 50, "min_p": 0.02},
    {"top_n_sigma": -1.0},
]


@pytest.mark.parametrize("fields", FILTERS)
def test_draws_follow_the_reference_distribution(fields: dict[str, float]) -> None:
    """Chi-square over 20,000 draws, bins of at least 20 expected draws."""
    sampling = params(**fields)
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=VOCAB) * 3).astype(np.float32)
    wanted = reference(logits.astype(np.float64), sampling)
    num_draws = 20_000
    counts = np.zeros(VOCAB)
    np.add.at(counts, drawn(logits, sampling, 99, num_draws), 1)
    assert counts[wanted == 0].sum() == 0
    order = np.argsort(-wanted)
    edges = np.flatnonzero(np.diff(np.floor(np.cumsum(wanted[order]) * num_draws / 40))) + 1
    got = np.add.reduceat(counts[order], [0, *edges])
    expected = np.add.reduceat(wanted[order], [0, *edges]) * num_draws
    chi_square = float(((got - expected) ** 2 / expected).sum())
    freedom = len(got) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    spread=st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]),
)
def test_a_draw_is_always_of_the_support(seed: int, top_k: int, top_p: float, min_p: float, spread: float) -> None:
    sampling = params(top_k=top_k, top_p=top_p, min_p=min_p)
    # In steps of 1/64, so that equals are equal in float32 too.
    logits = (np.round(np.random.default_rng(seed).normal(size=700) * spread * 64) / 64).astype(np.float32)
    chosen = drawn(logits, sampling, seed, 20)
    # Where float32 and float64 disagree on the edge of a filter, the edge token may be in or out.
    looser = params(
        top_k=top_k + 1 if top_k else 0, top_p=min(1.0, top_p * 1.0001), min_p=min_p * 0.9999, temperature=1.0
    )
    assert reference(logits.astype(np.float64), looser)[chosen].min() > 0


@pytest.mark.parametrize("allowed", [(5,), (1, 2, 3), tuple(range(0, VOCAB, 2))])
def test_tokens_that_may_not_be_chosen_do_not_count_for_top_n_sigma(allowed: tuple[int, ...]) -> None:
    """As in llama.cpp, whose deviation leaves out logits of minus infinity."""
    logits = (np.random.default_rng(2).normal(size=VOCAB) * 3).astype(np.float32)
    of_allowed = logits[list(allowed)].astype(np.float64)
    least = of_allowed.max() - 0.5 * of_allowed.std()
    kept = {token for token in allowed if logits[token] >= least}
    requests = [
        request(params(seed=seed, temperature=2.0, top_n_sigma=0.5, allowed_token_ids=allowed)) for seed in range(300)
    ]
    rows = np.repeat(logits[None], len(requests), axis=0)
    taken = {sampled.token_id for sampled in sample(BatchSampler(), requests, Logits(rows))}
    assert taken <= kept
    assert len(taken) > len(kept) / 3


def test_seed_and_position_decide_whatever_else_is_in_the_batch() -> None:
    rng = np.random.default_rng(3)
    rows = (rng.normal(size=(6, VOCAB)) * 3).astype(np.float32)
    requests = [request(params(seed=i, top_p=0.9), generated=tuple(range(i))) for i in range(6)]
    together = [sampled.token_id for sampled in sample(BatchSampler(), requests, Logits(rows.copy()))]
    alone = [sample(BatchSampler(), [requests[i]], Logits(rows[i : i + 1].copy()))[0].token_id for i in range(6)]
    backwards = [sampled.token_id for sampled in sample(BatchSampler(), requests[::-1], Logits(rows[::-1].copy()))]
    assert together == alone == backwards[::-1]


def test_uniform_numbers_differ_by_seed_and_position_and_fill_the_interval() -> None:
    seeds, positions = np.repeat(np.arange(50), 50), np.tile(np.arange(50), 50)
    values = uniforms(seeds.astype(np.uint64), positions.astype(np.uint64))
    assert values.shape == (2500, DRAWS)
    assert len(np.unique(values)) == 2500 * DRAWS
    assert values.min() >= 0
    assert values.max() < 1
    assert np.histogram(values, 10, (0, 1))[0].min() > 180 * DRAWS
    again = uniforms(np.array([7], np.uint64), np.array([3], np.uint64))
    assert again.tolist() == values[[7 * 50 + 3]].tolist()


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    rows = np.zeros((2, 10), np.float32)
    rows[0, 7] = 1
    sampled = sample(BatchSampler(), [request(params(temperature=0.0))] * 2, Logits(rows))
    assert [entry.token_id for entry in sampled] == [7, 0]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0, "num_logprobs": 1}]
)
def test_a_row_without_numbers_is_reported_and_harms_no_other(fields: dict[str, Any]) -> None:
    rows = np.zeros((3, 10), np.float32)
    rows[1, 4] = np.nan
    sampled = sample(BatchSampler(), [request(params(**fields)) for _ in range(3)], Logits(rows))
    assert sampled[1].token_id == -1
    assert sampled[0].token_id >= 0
    assert sampled[2].token_id >= 0


def changed(sampling: SamplingParams, logits: FloatArray, generated: tuple[int, ...]) -> list[float]:
    requests = [request(sampling, [1, 2, 3], generated)]
    penalties = PenaltyCounter().penalties(requests, len(logits))
    processed = LogitsProcessors().process(requests, Logits(logits[None]), penalties)
    values: list[float] = processed.at(0, np.arange(len(logits))).tolist()
    return values


def test_penalties_equal_a_plain_reference() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50).astype(np.float32)
    generated = (1, 4, 4, 4, 9)
    sampling = params(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
    got = changed(sampling, logits, generated)
    for token_id, value in enumerate(logits.tolist()):
        wanted = value
        if token_id in {1, 2, 3, *generated}:
            wanted = wanted / 1.3 if wanted > 0 else wanted * 1.3
        if token_id in generated:
            wanted -= 0.5 + 0.25 * generated.count(token_id)
        assert got[token_id] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("repetition", [1e-45, 1e-40, 1e-38, 100.0])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.5}])
def test_the_smallest_and_largest_penalties_choose_a_token(repetition: float, fields: dict[str, float]) -> None:
    sampling = params(repetition_penalty=repetition, presence_penalty=-2.0, logit_bias=((1, 100.0),), **fields)
    logits = np.linspace(-20.0, 30.0, 64, dtype=np.float32)[None]
    sampled = sample(BatchSampler(), [request(sampling, [1, 2, 3, 60, 61], (62, 63))], Logits(logits.copy()))[0]
    assert sampled.token_id >= 0


def test_token_counts_keep_up_with_a_growing_answer() -> None:
    sampler = BatchSampler()
    sampling = params(temperature=0.0, frequency_penalty=1.0)
    growing = request(sampling)
    logits = np.full((1, 40), -50.0, np.float32)
    logits[0, :3] = [2.5, 2.0, 1.0]
    for _ in range(6):
        growing.token_ids.append(sample(sampler, [growing], Logits(logits.copy()))[0].token_id)
    assert list(growing.token_ids[3:]) == [0, 1, 0, 1, 2, 0]


def test_bias_allowed_tokens_bad_words_and_minimum_length_change_what_can_be_chosen() -> None:
    logits = np.arange(10, dtype=np.float32)
    assert changed(params(logit_bias=((3, 5.0), (4, -100.0))), logits, ())[3:5] == [8.0, -96.0]
    allowed = changed(params(allowed_token_ids=(2, 5)), logits, ())
    assert [i for i, value in enumerate(allowed) if value > -math.inf] == [2, 5]
    words = params(bad_words=((7,), (1, 8), (5, 6, 9)))
    banned = [i for i, value in enumerate(changed(words, logits, (5, 6))) if value == -math.inf]
    assert banned == [7, 9]
    short = params(min_tokens=2, stop_token_ids=frozenset({0}))
    assert changed(short, logits, (5,))[0] == -math.inf
    assert changed(short, logits, (5, 6))[0] == 0.0


@pytest.mark.parametrize(
    ("generated", "is_banned"), [((), False), ((6,), False), ((5, 6), True), ((4, 5, 6), True), ((6, 5), False)]
)
def test_bad_words_are_those_of_the_answer_and_do_not_begin_in_the_prompt(
    generated: tuple[int, ...], *, is_banned: bool
) -> None:
    sampling = params(bad_words=((5, 6, 9),))
    for prompt in ((1, 2, 3), (1, 5, 6), (5, 6), (5,)):
        one = Request("r", prompt, sampling, 0, resume_token_ids=generated)
        processed = LogitsProcessors().process([one], Logits(np.zeros((1, 10), np.float32)), None)
        assert (processed.at(0, np.array([9]))[0] == -math.inf) == is_banned


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_bad_words_are_found_as_by_looking_at_each(seed: int) -> None:
    rng = random.Random(seed)
    words = tuple(tuple(rng.randrange(3) for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 30)))
    sampling = params(bad_words=words, max_tokens=rng.choice([3, 100]), min_tokens=5, stop_token_ids=frozenset({7}))
    edits = Edits(sampling)
    one = request(sampling, [rng.randrange(3) for _ in range(5)])
    for _ in range(min(20, sampling.max_tokens)):
        answer = tuple(one.token_ids[one.num_prompt_tokens :])
        banned = {word[-1] for word in words if answer[len(answer) - len(word) + 1 :] == word[:-1]}
        banned |= {7} if len(answer) < 5 else set()
        assert edits.banned_ids(one).tolist() == sorted(banned)
        one.token_ids.append(rng.randrange(3))


def test_a_row_of_very_many_biases_gives_what_single_changes_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    logits = Logits((3 * rng.normal(size=(1, VOCAB))).astype(np.float32))
    bias = tuple((int(token_id), float(rng.uniform(-9, 9))) for token_id in rng.permutation(VOCAB)[: VOCAB - 20])
    for fields in ({}, {"temperature": 0.0}, {"bad_words": ((5,), (9,)), "presence_penalty": 1.0}, {"top_k": 5}):
        one = request(params(logit_bias=bias, num_logprobs=2, **fields), generated=(4, 5, 6))
        taken = []
        for most in (0, VOCAB):
            monkeypatch.setattr("headrace.worker.sampling.processors.MOST_SINGLE", most)
            taken.append(sample(BatchSampler(), [one], logits))
        assert taken[0] == taken[1]


def test_a_request_that_forbids_every_token_is_reported() -> None:
    sampling = params(allowed_token_ids=(2,), bad_words=((2,),))
    sampled = sample(BatchSampler(), [request(sampling)], Logits(np.zeros((1, 10), np.float32)))[0]
    assert sampled.token_id == -1
    assert "leave no token to choose" in sampled.error.message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("reducer", [reduce_with_numpy, reducer_for(4096, 1)])
def test_a_row_in_which_all_is_forbidden_is_found_by_every_reducer(reducer: Reducer, temperature: float) -> None:
    sampling = params(temperature=temperature, allowed_token_ids=(2,), bad_words=((2,),))
    requests = [request(params(temperature=0.5)), request(sampling)]
    sound, empty = sample(BatchSampler(reducer), requests, Logits(np.zeros((2, 4096), np.float32)))
    assert sound.token_id >= 0
    assert empty.token_id == -1
    assert "leave no token to choose" in empty.error.message


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), num_top=st.integers(0, 20), size=st.sampled_from([30, 257, 9000]))
def test_logprobs_equal_a_float64_reference(seed: int, num_top: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.normal(size=size) * 5).astype(np.float32)
    chosen = int(rng.integers(size))
    exact = row.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    entry = logprobs_of(row, chosen, num_top)
    assert entry.logprob == pytest.approx(exact[chosen], abs=1e-5)
    order = np.argsort(-exact, kind="stable")
    assert entry.rank == 1 + int((exact > exact[chosen]).sum())
    assert list(entry.top_token_ids) == order[:num_top].tolist()
    assert list(entry.top_logprobs) == pytest.approx(exact[order[:num_top]].tolist(), abs=1e-5)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.7, "presence_penalty": 1.0}])
def test_logprobs_of_drawn_tokens_are_of_the_row_as_it_came(fields: dict[str, Any]) -> None:
    logits = (np.random.default_rng(8).normal(size=(1, VOCAB)) * 3).astype(np.float32)
    sampled = sample(BatchSampler(), [request(params(num_logprobs=3, **fields))], Logits(logits.copy()))[0]
    assert sampled.logprobs == logprobs_of(logits[0], sampled.token_id, 3)


def test_reported_logprobs_are_of_the_model_not_of_what_penalties_made_of_it() -> None:
    logits = np.zeros((1, 10), np.float32)
    sampling = params(temperature=0.0, num_logprobs=1, logit_bias=((4, 50.0),))
    sampled = sample(BatchSampler(), [request(sampling)], Logits(logits))[0]
    assert sampled.token_id == 4
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.1), abs=1e-6)


def test_a_row_that_is_drawn_at_last_from_its_nucleus_is_not_taken_for_another() -> None:
    rows = np.full((2, 64), -10.0, np.float32)
    rows[0, :8] = 0.0  # the nucleus of the first row; its tail is what high quantiles give
    rows[1, 40:] = 0.0
    drawing = drawn_with([0.001, 1.0], np.full((2, DRAWS), 0.999), top_k=[0, 3], top_p=[0.5, 1.0])
    with np.errstate(divide="ignore"):
        runs = runs_of(rows, drawing.inverse_temperatures)
        first, second = draw(runs, drawing).tolist()
        alone = draw(runs.part(np.array([0])), drawing.part(np.array([0]))).tolist()
    assert second == 42  # the last of the three best
    assert first == alone[0] != second


def test_sums_that_rounding_made_too_small_do_not_stop_a_draw() -> None:
    """All other tokens come before this token. The remaining weight is a rounding error and may be negative."""
    rows = np.zeros((4, 49152), np.float32)
    rows[:, -1] = -1e-3
    runs = runs_of(rows, np.ones(4, np.float32))
    runs = replace(runs, sums=runs.sums * np.float32(1 - 1e-6))
    quantiles = np.full((4, DRAWS), 1 - 1e-9)
    quantiles[:, DRAWS - 1] = 0.5
    with np.errstate(all="ignore"):
        token_ids = draw(runs, drawn_with(1.0, quantiles, top_p=0.95))
    assert np.all(token_ids < 0.95 * 49152), "the lowest ids of equals are the nucleus"


def test_logits_that_differ_a_little_rarely_change_a_draw() -> None:
    rng = np.random.default_rng(6)
    rows = (rng.normal(size=(20, 49152)) * 2.5).astype(np.float32)
    others = (rows + rng.normal(size=rows.shape) * 2e-4).astype(np.float32)
    runs, other_runs = (runs_of(logits, np.ones(20, np.float32)) for logits in (rows, others))
    num_changed = 0
    for position in range(200):
        drawing = drawn_with(1.0, uniforms(np.arange(20, dtype=np.uint64), np.full(20, position, np.uint64)))
        num_changed += int(np.sum(draw(runs, drawing) != draw(other_runs, drawing)))
    assert num_changed <= 40, "one in a hundred"


@pytest.mark.parametrize("vocab_size", [4096, 4128, 49152])
def test_openvino_reduces_as_numpy_does(vocab_size: int) -> None:
    rows = (np.random.default_rng(4).normal(size=(37, vocab_size)) * 4).astype(np.float32)
    rows[3, 5:] = -np.inf
    inverse_temperatures = np.linspace(0.5, 4, 37).astype(np.float32)
    ours = reducer_for(vocab_size, 1)(rows, inverse_temperatures)
    wanted = reduce_with_numpy(rows, inverse_temperatures)
    assert np.array_equal(ours.maxima, wanted.maxima)
    np.testing.assert_allclose(ours.sums, wanted.sums, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("reducer", [reduce_with_numpy, reducer_for(4096, 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_every_reducer_shows_a_row_without_numbers(reducer: Reducer, value: float) -> None:
    for position in (0, 1, 255, 256, 4095):
        rows = np.zeros((3, 4096), np.float32)
        rows[1, position] = value
        with np.errstate(all="ignore"):
            totals = reducer(rows, np.ones(3, np.float32)).sums.sum(axis=1)
        assert np.isfinite(totals).tolist() == [True, False, True]


def test_vocabularies_divide_into_the_longest_runs() -> None:
    assert [run_length(size) for size in (49152, 151936, 32000, 4128, 50257)] == [256, 128, 256, 32, 0]


@pytest.mark.parametrize("vocab_size", [700, 3000, 4096])
def test_rows_of_all_kinds_in_one_batch_are_sampled_as_alone(vocab_size: int) -> None:
    rows = (np.random.default_rng(6).normal(size=(13, vocab_size)) * 3).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_p": 0.2},
        {"top_k": 9, "temperature": 1.7},
        {"min_p": 0.05, "num_logprobs": 4},
        {"temperature": 0.0, "num_logprobs": 2, "presence_penalty": 2.0},
        {"top_k": vocab_size, "top_p": 0.8},
        {"temperature": 0.0, "allowed_token_ids": (5, 6)},
        {"num_logprobs": 0, "repetition_penalty": 1.5, "top_p": 0.95},
        {"logit_bias": ((8, 100.0),)},
        {"top_p": 0.6, "min_p": 0.01, "num_logprobs": 20},
        {"top_n_sigma": 1.0, "top_p": 0.9},
    ]
    requests = [request(params(seed=row, **fields), generated=(3, 3, 9)) for row, fields in enumerate(kinds)]
    together = sample(BatchSampler(), requests, Logits(rows.copy()))
    for row, entry in enumerate(together):
        alone = sample(BatchSampler(), [requests[row]], Logits(rows[row : row + 1].copy()))[0]
        assert entry.token_id == alone.token_id >= 0
        assert entry.logprobs == alone.logprobs
        assert (entry.logprobs is None) == (requests[row].sampling.num_logprobs is None)
    assert together[8].token_id in (5, 6)
    assert together[10].token_id == 8


def bfloat16(rows: FloatArray) -> npt.NDArray[np.uint16]:
    """The upper halves."""
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"temperature": 0.0}])
@pytest.mark.parametrize("vocab_size", [700, 4096])
def test_bfloat16_logits_and_their_reduction_give_what_float32_ones_give(
    vocab_size: int, fields: dict[str, Any]
) -> None:
    rows = (np.random.default_rng(10).normal(size=(9, vocab_size)) * 3).astype(np.float32)
    bits = bfloat16(rows)
    rows = Logits(bits).whole(np.arange(9))
    kinds: list[dict[str, Any]] = [
        {},
        {"num_logprobs": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "num_logprobs": 3},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((5, 30.0), (6, -50.0))},
        {"logit_bias": ((int(rows[5].argmax()), -60.0),), "presence_penalty": 1.0},
        {"bad_words": ((int(rows[6].argmax()),),)},
        {"allowed_token_ids": (3, 9, 27)},
        {"min_tokens": 9, "stop_token_ids": frozenset({int(rows[8].argmax()), 3})},
    ]
    requests = [
        request(params(seed=i, **fields, **kind), generated=(3, 3, 9, int(rows[i].argmax())))
        for i, kind in enumerate(kinds)
    ]
    inverse_temperatures = np.array([each.sampling.inverse_temperature for each in requests], np.float32)
    reduction = reduce_with_numpy(rows, inverse_temperatures)
    model_sums = reduce_with_numpy(rows, np.ones(9, np.float32)).sums
    ours = sample(BatchSampler(), requests, Logits(bits, reduction, model_sums))
    plain = sample(BatchSampler(), requests, Logits(rows))
    assert [entry.token_id for entry in ours] == [entry.token_id for entry in plain]
    for one, other in zip(ours, plain, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.top_token_ids == other.logprobs.top_token_ids
            assert one.logprobs.rank == other.logprobs.rank
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([300, 2048]),
    reach=st.sampled_from([0.5, 10.0, 80.0]),
)
def test_runs_of_changed_logits_are_those_of_the_changed_rows(seed: int, size: int, reach: float) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(3, size)) * 4).astype(np.float32)
    which, token_ids = np.divmod(rng.choice(3 * size, 40, replace=False), size)
    values = np.where(rng.random(40) < 0.1, -np.inf, rows[which, token_ids] + reach * rng.normal(size=40))
    best = rows.argmax(axis=1)
    # The best of a row counts least of all, and is named twice: the last value counts.
    which, token_ids = np.append(which, np.arange(3)), np.append(token_ids, best)
    values = np.append(values, [-np.inf, -90.0, 3.0])
    places = Places(rows.shape, which, token_ids)
    before = rows[places.rows, places.token_ids]
    logits = Logits(rows).with_changes(Changes(places, before, values[places.order]))
    inverse_temperatures = np.array([0.5, 1.0, 5.0], np.float32)
    with np.errstate(all="ignore"):
        before_changes = reduce_with_numpy(rows, inverse_temperatures)
        after = Runs.made_of(logits, before_changes, inverse_temperatures)
        changed_rows = rows.copy()
        for row, token_id, value in zip(which, token_ids, values, strict=True):
            changed_rows[row, token_id] = value
        wanted = runs_of(changed_rows, inverse_temperatures)
    assert np.array_equal(logits.whole(np.arange(3)), changed_rows)
    assert np.array_equal(after.maxima, wanted.maxima)
    assert np.array_equal(after.best, wanted.best)
    np.testing.assert_allclose(after.sums, wanted.sums, rtol=3e-6, atol=1e-30)
