"""Filters of llama.cpp, against definitions in plain Python over sorted lists, and cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headrace.protos.sampling_fields import FILTERS
from headrace.worker.request.params import DryBreakers, SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.chain import draw_by_chain
from headrace.worker.sampling.dry import DryPenalty
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.sampling_params import sample

VOCAB = 64
# Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625 of five tokens, and none of the others.
HALVES = np.array([math.log(p) for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)] + [-np.inf] * 3, np.float32)
DRAWS = (np.arange(64) + 0.5) / 64


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 1, **fields})


def shares(logits: Any, for_xtc: float = 0.0, mu: float = 10.0, **fields: Any) -> dict[int, float]:
    """How often each token is drawn by 64 evenly spread random numbers."""
    sampling = params(**fields)
    drawn = [draw_by_chain(logits, sampling, for_draw=u, for_xtc=for_xtc, vocab_size=VOCAB, mu=mu).place for u in DRAWS]
    return {token: drawn.count(token) / 64 for token in sorted(set(drawn))}


# --- by hand --------------------------------------------------------------------------------------------------------


def test_typical_keeps_what_is_nearest_to_the_expected_information() -> None:
    """The entropy is 1.875 bits. The tokens have 1, 2, 3, 4 and 4 bits: distances 0.875, 0.125, 1.125, 2.125, 2.125."""
    assert shares(HALVES, typical_p=0.2) == {1: 1.0}
    assert shares(HALVES, typical_p=0.5) == pytest.approx({0: 2 / 3, 1: 1 / 3}, abs=1 / 64)
    assert shares(HALVES, typical_p=0.8) == pytest.approx({0: 4 / 7, 1: 2 / 7, 2: 1 / 7}, abs=1 / 64)
    assert shares(HALVES, typical_p=0.99, min_p=0.001) == {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.0625, 4: 0.0625}


def test_xtc_leaves_the_least_probable_of_the_top_choices() -> None:
    """Over the threshold 0.1 are tokens 0, 1 and 2. The first two go."""
    assert shares(HALVES, xtc_probability=0.5, xtc_threshold=0.1, for_xtc=0.49) == {2: 0.5, 3: 0.25, 4: 0.25}
    assert set(shares(HALVES, xtc_probability=0.5, xtc_threshold=0.1, for_xtc=0.5)) == {0, 1, 2, 3, 4}
    assert set(shares(HALVES, xtc_probability=1.0, xtc_threshold=0.3, for_xtc=0.0)) == {0, 1, 2, 3, 4}


def test_xtc_over_a_half_is_off() -> None:
    assert not params(xtc_probability=1.0, xtc_threshold=0.51).has_chain
    assert params(xtc_probability=1.0, xtc_threshold=0.5).has_chain


def test_dynamic_temperature_is_the_middle_of_even_logits_and_the_least_of_certain_ones() -> None:
    """Four equal logits have the largest entropy, and so the highest temperature, which keeps them equal. One certain
    token has none: temperature 0.5 instead of 1 squares the ratio of its probability to the others."""
    even = shares(np.zeros(4, np.float32), temperature=1.0, dynatemp_range=0.5)
    assert even == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    entropy = sum(-p * math.log(p) for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)) / math.log(5)
    temperature = 0.5 + 1.0 * entropy**2
    weights = np.exp(HALVES[:5].astype(np.float64) / temperature)
    wanted = dict(enumerate(weights / weights.sum()))
    got = shares(HALVES, temperature=1.0, dynatemp_range=0.5, dynatemp_exponent=2.0)
    assert got == pytest.approx(wanted, abs=1 / 60)


def test_mirostat_2_by_hand() -> None:
    """With mu 3.5 bits, tokens of 1, 2 and 3 bits stay: 4/7, 2/7 and 1/7. The first has a surprise of log2(7/4)."""
    sampling = params(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5)
    drawn = draw_by_chain(HALVES, sampling, for_draw=0.1, for_xtc=0.0, vocab_size=VOCAB, mu=3.5)
    assert drawn.place == 0
    assert drawn.mu == pytest.approx(3.5 - 0.5 * (math.log2(7 / 4) - 3.0))
    assert shares(HALVES, mu=0.1, mirostat=2) == {0: 1.0}
    assert set(shares(HALVES, mu=3.5, mirostat=2, top_k=1, min_p=0.9)) == {0, 1, 2}, "other filters have no effect"


def test_an_order_of_its_own_decides_what_a_filter_sees() -> None:
    """At temperature 2 the probabilities are nearer: min_p 0.4 then keeps tokens 0, 1 and 2, before only 0 and 1."""
    after = shares(HALVES, temperature=2.0, min_p=0.4, samplers=("temperature", "min_p"))
    before = shares(HALVES, temperature=2.0, min_p=0.4, samplers=("min_p", "temperature"))
    assert (set(after), set(before)) == ({0, 1, 2}, {0, 1})
    assert set(shares(HALVES, top_k=1, samplers=("temperature",))) == {0, 1, 2, 3, 4}, "others have no effect"


def test_temperature_zero_after_xtc_takes_the_best_of_what_is_left() -> None:
    order = ("xtc", "temperature")
    fields = {"xtc_probability": 1.0, "xtc_threshold": 0.1, "temperature": 0.0}
    assert params(**fields, samplers=order).has_chain
    assert shares(HALVES, **fields, samplers=order) == {2: 1.0}
    assert params(**fields).is_greedy, "in the usual order one token is left before XTC"


# --- the reference --------------------------------------------------------------------------------------------------


def reference(logits: list[float], sampling: SamplingParams, u: float, chance: float, mu: float) -> tuple[int, float]:
    """The definition: a list of (token, logit), sorted, that each filter shortens."""

    def softmax(items: list[tuple[int, float]]) -> list[float]:
        best = max(logit for _, logit in items)
        weights = [math.exp(logit - best) for _, logit in items]
        return [weight / math.fsum(weights) for weight in weights]

    items = sorted(((i, x) for i, x in enumerate(logits) if x > -math.inf), key=lambda item: (-item[1], item[0]))
    order = ("temperature",) if sampling.mirostat else (sampling.samplers or FILTERS)
    for name in order:
        p = softmax(items)
        if name == "temperature":
            temperature = sampling.temperature
            if sampling.dynatemp_range and len(items) > 1:
                entropy = math.fsum(-q * math.log(q) for q in p if q > 0)
                low = max(0.0, temperature - sampling.dynatemp_range)
                high = temperature + sampling.dynatemp_range
                temperature = low + (high - low) * (entropy / math.log(len(items))) ** sampling.dynatemp_exponent
            items = [(i, x / temperature) for i, x in items]
        elif name == "top_k" and sampling.top_k:
            items = items[: sampling.top_k]
        elif name == "typical_p" and sampling.typical_p < 1:
            entropy = math.fsum(-q * math.log(q) for q in p if q > 0)
            ranked = sorted(range(len(items)), key=lambda i: (abs(-math.log(p[i]) - entropy), items[i][0]))
            total, kept = 0.0, []
            for i in ranked:
                kept.append(items[i])
                total += p[i]
                if total > sampling.typical_p:
                    break
            items = sorted(kept, key=lambda item: (-item[1], item[0]))
        elif name == "top_p" and sampling.top_p < 1:
            total = 0.0
            for count, q in enumerate(p, 1):
                total += q
                if total >= sampling.top_p:
                    items = items[:count]
                    break
        elif name == "min_p" and sampling.min_p:
            items = [item for item, q in zip(items, p, strict=True) if q >= sampling.min_p * p[0]]
        elif name == "xtc" and sampling.xtc_probability and sampling.xtc_threshold <= 0.5 and len(items) > 1:
            above = sum(q >= sampling.xtc_threshold for q in p)
            if chance < sampling.xtc_probability and above > 1:
                items = items[above - 1 :]
    if sampling.mirostat == 2:
        p = softmax(items)
        items = [item for item, q in zip(items, p, strict=True) if -math.log2(q) <= mu] or items[:1]
    elif sampling.mirostat == 1:
        p = softmax(items)
        steps = [(math.log((i + 2) / (i + 1)), math.log(p[i] / p[i + 1])) for i in range(min(len(items) - 1, 99))]
        slope = math.fsum(t * b for t, b in steps) / math.fsum(t * t for t, _ in steps)
        excess = slope - 1
        count = (excess * 2**mu / (1 - len(logits) ** -excess)) ** (1 / slope)
        items = items[: max(1, int(count))]
    p = softmax(items)
    by_id = sorted(zip(items, p, strict=True), key=lambda pair: pair[0][0])
    reach = 0.0
    for (token, _), q in by_id:
        reach += q
        if reach > u:
            if sampling.mirostat:
                mu -= sampling.mirostat_eta * (-math.log2(q) - sampling.mirostat_tau)
            return token, mu
    raise AssertionError


CASES: list[dict[str, Any]] = [
    {"typical_p": 0.3},
    {"typical_p": 0.9, "top_k": 20, "temperature": 0.7},
    {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1, "min_p": 0.02, "top_p": 0.95},
    {"dynatemp_range": 0.5, "temperature": 0.8, "dynatemp_exponent": 1.5},
    {"dynatemp_range": 1.0, "temperature": 0.5, "top_k": 10},
    {"mirostat": 1},
    {"mirostat": 1, "mirostat_tau": 2.0, "temperature": 1.5},
    {"mirostat": 2},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3, "dynatemp_range": 0.3},
    {"samplers": ("top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"), "top_k": 30, "typical_p": 0.9,
     "top_p": 0.9, "min_p": 0.01, "xtc_probability": 0.5, "xtc_threshold": 0.08, "temperature": 1.4},
    # The ends of the ranges.
    {"typical_p": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 2.0, "temperature": 0.0},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 0.0},
    {"dynatemp_range": 2.0, "dynatemp_exponent": 100.0, "temperature": 2.0},
    {"mirostat": 2, "mirostat_tau": 0.0, "mirostat_eta": 0.0},
    {"mirostat": 2, "mirostat_tau": 100.0, "mirostat_eta": 10.0},
    {"mirostat": 1, "mirostat_tau": 100.0, "mirostat_eta": 10.0},
]  # fmt: skip


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: "+".join(f"{name}={fields[name]}" for name in fields))
def test_each_draw_is_that_of_the_definition(fields: dict[str, Any]) -> None:
    sampling, rng = params(**fields), np.random.default_rng(3)
    for _ in range(300):
        logits = (rng.normal(size=VOCAB) * 2.5).astype(np.float32)
        u, chance, mu = rng.random(), rng.random(), rng.random() * 8
        drawn = draw_by_chain(logits, sampling, for_draw=u, for_xtc=chance, vocab_size=VOCAB, mu=mu)
        wanted, wanted_mu = reference(logits.tolist(), sampling, u, chance, mu)
        assert drawn.place == wanted
        if sampling.mirostat:
            assert drawn.mu == pytest.approx(wanted_mu, abs=1e-9)


# --- DRY ------------------------------------------------------------------------------------------------------------


def dry_of(tokens: list[int], breakers: DryBreakers | None = None, **fields: Any) -> dict[int, float]:
    """What tokens lose after these."""
    sampling = params(**{"dry_multiplier": 1.0, "dry_base": 2.0, "dry_breakers": breakers or DryBreakers(), **fields})
    token_ids, lost = DryPenalty(sampling).penalties(Request("r", tokens, sampling, 0))
    return dict(zip(token_ids.tolist(), lost.tolist(), strict=True))


def test_dry_by_hand() -> None:
    """1 2 3 4 | 9 | 1 2 3: the last three were followed by 4, so it loses 2 ^ (3 - 2)."""
    assert dry_of([1, 2, 3, 4, 9, 1, 2, 3]) == {4: 2.0}
    assert dry_of([1, 2, 3, 4, 9, 1, 2, 3], dry_allowed_length=3) == {4: 1.0}
    assert dry_of([1, 2, 3, 4, 9, 1, 2, 3], dry_allowed_length=4) == {}
    assert dry_of([1, 2, 3, 4, 9, 1, 2, 3], dry_penalty_last_n=7) == {4: 1.0}, "1 is out of the window"
    assert dry_of([1, 2, 3, 4, 9, 1, 2, 3], dry_penalty_last_n=4) == {}
    # Repeated 5s: at lag 1 the last three repeat the three before, and so on; the longest counts.
    assert dry_of([5, 5, 5, 5]) == {5: 2.0}


def test_dry_at_the_ends_of_its_ranges() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    assert dry_of(tokens, dry_base=1.0) == {4: 1.0}, "the length does not count"
    assert dry_of(tokens, dry_multiplier=100.0, dry_base=100.0) == {4: 10_000.0}
    assert dry_of(tokens, dry_allowed_length=2**31 - 1) == {}
    assert dry_of(tokens, dry_penalty_last_n=2**31 - 1) == {4: 2.0}
    assert not params(dry_multiplier=1.0, dry_penalty_last_n=0).has_dry
    far = dry_of([7] * 500, dry_multiplier=100.0, dry_base=100.0)
    assert far.keys() == {7}
    assert math.isfinite(far[7]), "a penalty without bound would make the logits of all others no numbers"


def test_dry_begins_anew_at_a_breaker() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    assert dry_of(tokens, DryBreakers(frozenset([1]))) == {4: 1.0}, "two tokens behind it"
    assert dry_of(tokens, DryBreakers(frozenset([2]))) == {}
    assert dry_of(tokens, DryBreakers(frozenset([9]))) == {4: 2.0}
    in_two = DryBreakers(frozenset(), ((2, frozenset([(9, 1)])),))
    assert dry_of(tokens, in_two) == {4: 1.0}, "a breaker of two tokens ends with the 1"
    assert dry_of(tokens, DryBreakers(frozenset(), ((2, frozenset([(3, 9)])),))) == {4: 2.0}, "it does not occur"


def dry_reference(tokens: list[int], sampling: SamplingParams) -> dict[int, float]:
    """The definition, by comparing all suffixes."""
    window = len(tokens) if sampling.dry_penalty_last_n < 0 else min(len(tokens), sampling.dry_penalty_last_n)
    recent = tokens[len(tokens) - window :]
    longest = window
    sequences = [(token,) for token in sampling.dry_breakers.single]
    sequences += [one for _, found in sampling.dry_breakers.sequences for one in found]
    for back in range(window):
        head = window - 1 - back
        ends = [len(one) for one in sequences if tuple(recent[head : head + len(one)]) == one]
        if ends:
            longest = back + 1 - max(ends)
            break
    if window <= sampling.dry_allowed_length or longest < sampling.dry_allowed_length:
        return {}
    found: dict[int, int] = {}
    for end in range(window - 1):
        length = 0
        while length <= end and recent[end - length] == recent[window - 1 - length]:
            length += 1
        length = min(length, longest)
        if length >= sampling.dry_allowed_length:
            found[recent[end + 1]] = max(found.get(recent[end + 1], 0), length)
    base = sampling.dry_base
    return {token: base ** (length - sampling.dry_allowed_length) for token, length in found.items()}


@pytest.mark.parametrize("last_n", [-1, 20, 3])
@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_dry_is_the_definition_token_by_token_and_from_the_beginning(last_n: int, allowed: int) -> None:
    """A request that has grown has the penalties of one that was resumed with the same tokens."""
    breakers = DryBreakers(frozenset([0]), ((2, frozenset([(1, 1), (2, 1)])), (3, frozenset([(1, 2, 3)]))))
    rng = np.random.default_rng(last_n + 10 * allowed + 5)
    for _ in range(4):
        sampling = params(
            dry_multiplier=1.0,
            dry_base=1.5,
            dry_allowed_length=allowed,
            dry_penalty_last_n=last_n,
            dry_breakers=breakers,
        )
        request = Request("r", rng.integers(0, 4, 5).tolist(), sampling, 0)
        growing = DryPenalty(sampling)
        for token in rng.integers(0, 4, 120).tolist():
            token_ids, lost = growing.penalties(request)
            got = dict(zip(token_ids.tolist(), lost.tolist(), strict=True))
            wanted = dry_reference(request.token_ids.tolist(), sampling)
            assert got == pytest.approx(wanted, rel=1e-6)
            resumed = Request("r", request.token_ids.tolist(), sampling, 0)
            again_ids, again = DryPenalty(sampling).penalties(resumed)
            assert (again_ids.tolist(), again.tolist()) == (token_ids.tolist(), lost.tolist())
            request.token_ids.append(token)


# --- in the sampler -------------------------------------------------------------------------------------------------


ALL: list[dict[str, Any]] = [
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "temperature": 0.0, "logit_bias": ((3, 2.0), (4, -1.0))},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"typical_p": 0.5, "top_k": 9},
    {"dynatemp_range": 0.7},
    {"top_p": 0.9},
    {"temperature": 0.0},
]


def rows_for(position: int) -> Any:
    """The logits of all requests at one position: each request has its own, whatever the batch."""
    rng = np.random.default_rng(position)
    return (rng.normal(size=(len(ALL), VOCAB)) * 2).astype(np.float32)


def test_a_stream_is_the_same_alone_in_a_batch_and_resumed() -> None:
    """A resumed request gets the tokens so far, and mirostat's state with them."""
    num_tokens, cut = 40, 17
    together = [Request(f"r{i}", [1, 2, 3], params(seed=i, **fields), 0) for i, fields in enumerate(ALL)]
    sampler = BatchSampler()
    states: list[float | None] = [None] * len(ALL)
    for position in range(num_tokens):
        if position == cut:
            states = [None if one.mirostat is None else one.mirostat.before(cut) for one in together]
        for one, sampled in zip(together, sample(sampler, together, Logits(rows_for(position))), strict=True):
            assert sampled.token_id >= 0
            one.token_ids.append(sampled.token_id)
    for i, fields in enumerate(ALL):
        for begin in (0, cut):
            request = Request(
                "again",
                [1, 2, 3],
                params(seed=i, **fields),
                0,
                resume_token_ids=together[i].token_ids[3 : 3 + begin],
                mirostat_mu=states[i] if begin else None,
            )
            other = BatchSampler()
            for position in range(begin, num_tokens):
                (sampled,) = sample(other, [request], Logits(rows_for(position)[i : i + 1]))
                request.token_ids.append(sampled.token_id)
            assert request.token_ids == together[i].token_ids, (fields, begin)


def test_a_token_that_is_sampled_again_comes_from_the_same_state() -> None:
    sampling = params(mirostat=2, mirostat_tau=3.0)
    request = Request("r", [1], sampling, 0)
    logits = rows_for(0)[:1]
    first = sample(BatchSampler(), [request], Logits(logits))
    assert request.mirostat is not None
    state = request.mirostat.before(1)
    assert sample(BatchSampler(), [request], Logits(logits)) == first
    assert request.mirostat.before(1) == state != 2 * 3.0


def test_dry_and_bias_of_one_token_add_up() -> None:
    """Token 4 would continue 1 2 3, and has a bias that just makes up for it."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 4], logits[0, 5] = 2.0, 1.0
    for bias, wanted in ((0.0, 5), (1.9, 4)):
        sampling = params(temperature=0.0, dry_multiplier=1.0, dry_base=2.0, logit_bias=((4, bias),))
        request = Request("r", [1, 2, 3, 4, 9, 1, 2, 3], sampling, 0)
        assert sample(BatchSampler(), [request], Logits(logits))[0].token_id == wanted


def test_a_grammar_and_allowed_tokens_leave_their_tokens_to_the_chain() -> None:
    allowed = (3, 7, 9)
    logits = rows_for(1)[:1]
    taken = set()
    for seed in range(60):
        request = Request("r", [1], params(seed=seed, typical_p=0.95, allowed_token_ids=allowed), 0)
        taken.add(sample(BatchSampler(), [request], Logits(logits))[0].token_id)
    assert taken <= set(allowed)
    assert len(taken) > 1
