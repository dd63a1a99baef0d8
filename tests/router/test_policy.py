"""Placement: tables of who wins and why, and properties of the cost."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protos.load_report import LoadReport
from headrace.router.placement.candidates import Candidate, Candidates, Values
from headrace.router.placement.policy import Placement, PlacementReason, RequestFacts, place, place_at
from headrace.router.placement.rates import Priors

IDLE = LoadReport(
    num_blocks=1000, num_free_blocks=1000, prefill_tokens_per_s=1000.0, decode_step_ms=20.0, max_num_seqs=8
)


def load(**changes: Any) -> LoadReport:
    return LoadReport(**{name: changes.get(name, getattr(IDLE, name)) for name in IDLE.__slots__})


def candidate(worker_id: str, report: LoadReport = IDLE, **changes: Any) -> Candidate:
    return Candidate(worker_id, report, 16, **changes)


def placed(
    *candidates: Candidate, request: RequestFacts | None = None, seed: int = 0, **cached_blocks: int
) -> Placement:
    blocks = [cached_blocks.get(c.worker_id, 0) for c in candidates]
    facts = request or RequestFacts(num_prompt_tokens=320, max_new_tokens=16)
    placement = place(facts, Candidates.of(candidates), blocks, 0.0, random.Random(seed), num_described=99)
    assert placement is not None
    return placement


def test_the_longest_prefix_wins_among_equals() -> None:
    placement = placed(candidate("a"), candidate("b"), candidate("c"), a=3, b=10)
    assert (placement.worker_id, placement.reason) == ("b", PlacementReason.PREFIX)
    assert placement.predicted_cached_tokens == 160


@pytest.mark.parametrize(
    ("burden", "term"),
    [
        (load(num_running=2, num_uncached_tokens=5000), "backlog_ms"),
        (load(num_running=8, num_waiting=8), "queue_ms"),
        (load(num_running=7, decode_step_ms=80.0), "decode_ms"),
        (load(num_free_blocks=1), "pressure_ms"),
        (load(num_free_blocks=900, num_cached_blocks=900, prefill_tokens_per_s=1001), "eviction_ms"),
    ],
)
def test_each_kind_of_load_turns_a_cold_request_away(burden: LoadReport, term: str) -> None:
    placement = placed(candidate("busy", burden), candidate("idle"))
    assert (placement.worker_id, placement.reason) == ("idle", PlacementReason.LOAD)
    assert getattr(placement.costs["busy"], term) > getattr(placement.costs["idle"], term)


def test_a_prefix_outweighs_a_shorter_backlog_and_yields_to_a_longer_one() -> None:
    short, long = (load(num_running=4, num_uncached_tokens=tokens) for tokens in (100, 300))
    assert placed(candidate("warm", short), candidate("cold"), warm=15).worker_id == "warm"
    placement = placed(candidate("warm", long), candidate("cold"), warm=15)
    assert (placement.worker_id, placement.reason) == ("cold", PlacementReason.LOAD)


def test_a_long_prompt_that_a_short_one_overtakes_slows_its_answer_down() -> None:
    """The short prompt goes first, but then each of its tokens shares a step with a part of the long one until that is
    done."""
    free, busy, busier = (load(num_running=1, num_uncached_tokens=tokens) for tokens in (0, 4_000, 100_000))
    candidates = candidate("free", free), candidate("busy", busy), candidate("busier", busier)
    placement = placed(*candidates, request=RequestFacts(num_prompt_tokens=32, max_new_tokens=100), busy=1, busier=1)
    assert placement.worker_id == "free", "although the others have half of it cached"
    costs = placement.costs
    slower = {name: cost.decode_ms - costs["free"].decode_ms for name, cost in costs.items()}
    assert slower["busy"] == pytest.approx(2_000, rel=0.01), "half of what is left of the long prompt"
    assert slower["busier"] == pytest.approx(100 * 128), "as much as there is beside a hundred tokens"


def test_a_slow_host_loses_to_a_fast_one() -> None:
    slow = load(prefill_tokens_per_s=100.0)
    assert placed(candidate("slow", slow), candidate("fast")).worker_id == "fast"


def test_booked_requests_count_before_the_worker_reports_them() -> None:
    booked = candidate("a", num_booked_requests=1, num_booked_tokens=320)
    assert placed(booked, candidate("b")).worker_id == "b"


def test_a_worker_without_known_rates_is_taken_for_the_best_known() -> None:
    unknown = load(prefill_tokens_per_s=0.0, decode_step_ms=0.0)
    placement = placed(candidate("new", unknown), candidate("old"))
    assert placement.costs["new"] == placement.costs["old"]
    slower = load(prefill_tokens_per_s=500.0)
    assert placed(candidate("new", unknown), candidate("old", slower), candidate("older")).worker_id != "old"


def test_a_learned_rate_counts_a_tenth_against_the_fleets() -> None:
    slow, usual = load(prefill_tokens_per_s=250.0), load(prefill_tokens_per_s=1000.0)
    placement = placed(candidate("slow", slow), candidate("b", usual), candidate("c", usual))
    assert placement.costs["b"].prefill_ms == pytest.approx(320)
    assert placement.costs["slow"].prefill_ms == pytest.approx(4**0.1 * 320)


def test_the_priors_hold_when_no_rate_is_known() -> None:
    unknown = load(prefill_tokens_per_s=0.0, decode_step_ms=0.0)
    placement = placed(candidate("a", unknown), request=RequestFacts(500, 0))
    assert placement.cost.prefill_ms == pytest.approx(500 / Priors().prefill_tokens_per_s * 1000)


def test_ties_are_broken_at_random() -> None:
    winners = {placed(candidate("a"), candidate("b"), candidate("c"), seed=seed).worker_id for seed in range(50)}
    assert winners == {"a", "b", "c"}


def test_a_placement_says_what_was_believed_and_how_wrong_that_may_be() -> None:
    booked = {"num_booked_requests": 1, "num_booked_tokens": 50}
    warm = candidate("warm", load(num_running=2, num_waiting=1, num_uncached_tokens=100), **booked)
    placement = placed(warm, candidate("cold", load(num_uncached_tokens=900)), candidate("slow"), warm=19)
    belief = placement.belief
    assert placement.worker_id == "warm"
    assert (belief.num_requests, belief.num_uncached_tokens) == (4, 150)
    assert belief.ms_per_token == pytest.approx(1.0)
    assert belief.ms_per_request == pytest.approx(20.0 * 16 / (2 + 32)), "slower steps for each token of the answer"
    second_ms = sorted(cost.total_ms for cost in placement.costs.values())[1]
    assert belief.slack_ms == pytest.approx(second_ms - placement.cost.total_ms + Priors().give_back_ms)


def test_nothing_makes_the_only_worker_a_wrong_choice() -> None:
    assert placed(candidate("a", load(num_uncached_tokens=10_000))).belief.slack_ms == math.inf


def test_a_session_allows_its_worker_to_be_dearer() -> None:
    workers = candidate("a", load(num_uncached_tokens=100)), candidate("b")
    placement = placed(*workers, request=RequestFacts(320, 16, session_worker_id="a"))
    ahead_ms = placement.cost.total_ms - placement.costs["b"].total_ms
    slack_ms = Priors().session_slack_ms + Priors().give_back_ms - ahead_ms
    assert placement.belief.slack_ms == pytest.approx(slack_ms)


def test_a_session_stays_with_its_worker_while_load_allows() -> None:
    request = RequestFacts(320, 16, session_worker_id="a")
    near = placed(candidate("a", load(num_uncached_tokens=100)), candidate("b"), request=request)
    assert (near.worker_id, near.reason) == ("a", PlacementReason.SESSION)
    far = placed(candidate("a", load(num_running=4, num_uncached_tokens=10_000)), candidate("b"), request=request)
    assert (far.worker_id, far.reason) == ("b", PlacementReason.LOAD)
    gone = placed(candidate("b"), candidate("c"), request=request)
    assert gone.reason is PlacementReason.LOAD


def test_reported_backlog_is_worked_off_as_time_passes() -> None:
    report = load(num_uncached_tokens=1000)
    candidates = Candidates.of([candidate("a", report)])
    later = place(RequestFacts(2000, 16), candidates, [0], 0.4, random.Random(0))
    assert later is not None
    assert later.cost is not None
    assert later.cost.backlog_ms == pytest.approx(600.0)


def test_a_short_prompt_does_not_wait_for_all_of_the_long_ones_before_it() -> None:
    report = load(num_running=3, num_uncached_tokens=100_000)
    placement = placed(candidate("a", report), request=RequestFacts(32, 16))
    assert placement.cost.backlog_ms == pytest.approx(3 * placement.cost.prefill_ms)


def test_the_only_one_is_chosen_and_of_none_nobody() -> None:
    assert placed(candidate("c")).reason is PlacementReason.ONLY
    assert place(RequestFacts(320, 16), Candidates.of([]), [], 0.0, random.Random(0)) is None


def test_so_many_are_described_as_were_asked_for_cheapest_first() -> None:
    fleet = Candidates.of([candidate(str(number), load(num_uncached_tokens=900 - number)) for number in range(9)])
    placement = place(RequestFacts(320, 16), fleet, range(9), 0.0, random.Random(0), num_described=3)
    assert placement is not None
    assert [weighed.worker_id for weighed in placement.weighed] == ["8", "7", "6"]
    assert [weighed.num_cached_tokens for weighed in placement.weighed] == [128, 112, 96]
    assert (placement.num_candidates, placement.weighed[0].cost) == (9, placement.cost)


def test_a_prompt_waits_for_blocks_where_the_cache_is_full_of_running_requests() -> None:
    full = load(num_running=4, num_free_blocks=0)
    placement = placed(candidate("full", full), request=RequestFacts(320, 16))
    assert placement.cost.queue_ms > 0
    # Twenty blocks of a thousand, of requests that are half through.
    step_ms = 20.0 * (32 + 4 + 1) / (32 + 4)
    assert placement.cost.queue_ms == pytest.approx(20 / 1000 * 0.5 * Priors().answer_tokens * step_ms)


@pytest.mark.parametrize(
    "taken",
    [
        {"report": load(num_running=4, num_free_blocks=15, num_uncached_tokens=0)},
        {"report": load(num_running=4, num_free_blocks=30, num_uncached_tokens=16 * 20)},
        {"report": load(num_running=4, num_free_blocks=30), "num_booked_blocks": 15},
    ],
    ids=["held", "promised to prompts that are there", "booked"],
)
def test_blocks_that_others_will_have_are_not_free(taken: dict[str, Any]) -> None:
    request = RequestFacts(320, 16)
    assert placed(candidate("a", **taken), request=request).cost.queue_ms > 0
    free = load(num_running=4, num_free_blocks=30)
    assert placed(candidate("a", free), request=request).cost.queue_ms == 0


def test_a_worker_without_blocks_comes_behind_one_that_keeps_the_bound() -> None:
    # A long prefix is there, but the rest of the prompt would wait for blocks.
    full = load(num_running=4, num_free_blocks=0, num_blocks=100)
    request = RequestFacts(3200, 16, max_ttft_ms=3600.0)
    assert placed(candidate("full", full), candidate("cold"), request=request, full=60).worker_id == "cold"


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    assert placed(candidate("a"), a=20).predicted_cached_tokens == 319


LOADS = st.builds(
    LoadReport,
    num_running=st.integers(0, 64),
    num_waiting=st.integers(0, 64),
    num_uncached_tokens=st.integers(0, 10**6),
    num_blocks=st.integers(0, 10**4),
    num_free_blocks=st.integers(0, 10**4),
    num_cached_blocks=st.integers(0, 10**4),
    prefill_tokens_per_s=st.just(0.0) | st.floats(0.1, 1e5),
    decode_step_ms=st.floats(0, 1e3),
    max_num_seqs=st.integers(0, 64),
)


@given(
    st.lists(st.tuples(LOADS, st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(1, 320),
    st.none() | st.integers(0, 500),
    st.integers(0, 2**32),
)
def test_the_chosen_one_is_the_cheapest_up_to_noise_and_terms_add_up(
    fleet: list[tuple[LoadReport, int]], num_prompt_tokens: int, max_new_tokens: int | None, seed: int
) -> None:
    candidates = Candidates.of([candidate(str(number), report) for number, (report, _) in enumerate(fleet)])
    blocks = [cached for _, cached in fleet]
    facts = RequestFacts(num_prompt_tokens, max_new_tokens)
    placement, again = (place(facts, candidates, blocks, 0.0, random.Random(seed), num_described=9) for _ in "12")
    assert placement is not None
    assert placement == again
    best = min(terms.total_ms for terms in placement.costs.values())
    assert placement.cost.total_ms <= best + Priors().noise_ms
    for terms in placement.costs.values():
        parts = list(terms)
        assert all(part >= 0 for part in parts)
        assert terms.total_ms == pytest.approx(sum(parts))
    assert placement.predicted_cached_tokens < num_prompt_tokens


@given(LOADS, st.integers(0, 19))
def test_one_more_cached_block_never_costs_more(report: LoadReport, blocks: int) -> None:
    less, more = (placed(candidate("a", report), a=number).cost.total_ms for number in (blocks, blocks + 1))
    assert more <= less


@given(LOADS, st.integers(0, 20), st.integers(1, 320))
def test_an_only_candidate_is_placed_as_if_weighed(report: LoadReport, blocks: int, num_prompt_tokens: int) -> None:
    candidates, facts = Candidates.of([candidate("a", report)]), RequestFacts(num_prompt_tokens)
    weighed = place(facts, candidates, [blocks], 0.0, random.Random(0))
    assert weighed is not None
    assert weighed.belief is not None
    assert weighed.belief.slack_ms == math.inf, "no report makes another worker better"
    assert place_at(facts, "a", 16 * blocks) == msgspec.structs.replace(weighed, cost=None, belief=None)


def test_images_go_where_they_are_encoded_soonest() -> None:
    places = np.arange(16, 116)
    facts = RequestFacts(320, 16, image_places=places)
    fast = load(image_tokens_per_s=1000.0)
    placement = placed(candidate("fast", fast), candidate("slow", load(image_tokens_per_s=100.0)), request=facts)
    assert placement.worker_id == "fast"
    assert (placement.costs["fast"].image_ms, placement.costs["slow"].image_ms) == pytest.approx((100.0, 1000.0))
    assert placement.costs["fast"].ttft_ms == pytest.approx(420.0)
    busy = load(image_tokens_per_s=1000.0, encoding_tokens=300)
    placement = placed(candidate("busy", busy, num_booked_image_tokens=200), candidate("idle", fast), request=facts)
    assert placement.worker_id == "idle"
    assert placement.costs["busy"].image_ms == pytest.approx(600.0)
    placement = placed(candidate("unknown"), candidate("known", fast), request=facts)
    assert placement.costs["unknown"].image_ms == pytest.approx(100.0), "as fast as the best of the others"
    placement = placed(candidate("unknown"), candidate("also"), request=facts)
    assert placement.costs["also"].image_ms == pytest.approx(1000 * 100 / Priors().image_tokens_per_s)


def test_cached_images_need_no_encoding_however_many_wait_there() -> None:
    facts = RequestFacts(320, 16, image_places=np.arange(16, 116))
    busy = load(image_tokens_per_s=10.0, encoding_tokens=10_000)
    placement = placed(candidate("has", busy), candidate("half", busy), request=facts, has=8, half=2)
    assert placement.costs["has"].image_ms == 0.0
    assert placement.costs["half"].image_ms == pytest.approx(1000 * (10_000 + 84) / 10)
    text = placed(candidate("busy", busy), request=RequestFacts(320, 16))
    assert text.costs["busy"].image_ms == 0.0


def test_a_limit_counts_the_time_to_read_the_adapter() -> None:
    """The worker that has to read it is cheaper in all, but its first token would be late."""
    facts = RequestFacts(320, 16, max_ttft_ms=1000.0)
    priors = Priors(reuse_chance=3.0)  # what the other one would have to evict is dear
    slow, none = np.array([900.0, 0.0]), np.zeros(2)
    candidates = Candidates.of([candidate("a"), candidate("b", load(num_cached_blocks=1000))])

    def chosen(adapter_ms: Values) -> Placement:
        rng = random.Random(0)
        found = place(facts, candidates, [0, 0], 0.0, rng, num_described=2, priors=priors, adapter_ms=adapter_ms)
        assert found is not None
        return found

    assert chosen(none).worker_id == "a"
    found = chosen(slow)
    assert found.costs["a"].ttft_ms > facts.max_ttft_ms > found.costs["b"].ttft_ms
    assert found.costs["a"].total_ms < found.costs["b"].total_ms
    assert found.worker_id == "b"
