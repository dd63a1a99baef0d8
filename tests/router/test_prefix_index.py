"""The prefix index against a naive model that asks each worker for block after block, and its bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.router.placement import predictions
from headrace.router.placement.prefix_index import PrefixIndex

WORKERS = ("a", "b", "c")
HASHES = st.lists(st.integers(0, 30), max_size=12)
# A prompt whose blocks are letters; many are beginnings of others.
PROMPTS = st.text("ab", max_size=7)
TTL_S = 10.0


def chain(prompt: str) -> list[int]:
    """Hashes that depend on all earlier ones, like block hashes."""
    return [int("1" + prompt[:end].replace("a", "0").replace("b", "1"), 2) for end in range(1, len(prompt) + 1)]


def is_behind(block_hash: int, others: Sequence[int]) -> bool:
    """Whether a block is one of these or follows one of them in its chain."""
    return any(block_hash >> shift in others for shift in range(block_hash.bit_length()))


def index_of(holdings: dict[str, list[int]], max_entries: int = 1000, max_predicted: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_entries, max_predicted, TTL_S)
    for worker_id, hashes in holdings.items():
        index.add_worker(worker_id)
        index.store(worker_id, hashes)
    return index


def test_one_search_answers_for_every_worker() -> None:
    index = index_of({"a": [1, 2, 3], "b": [1], "c": []})
    assert index.match([1, 2, 3, 4], WORKERS) == {"a": 3, "b": 1, "c": 0}
    assert index.match([1, 2, 3, 4], ["b"]) == {"b": 1}
    assert index.match([], WORKERS) == {"a": 0, "b": 0, "c": 0}
    assert index.match([1], []) == {}


def test_a_block_without_its_parent_matches_nothing() -> None:
    assert index_of({"a": [2, 3]}).match([1, 2, 3], ["a"]) == {"a": 0}


def test_each_of_many_workers_drops_out_of_a_long_chain_at_its_own_depth() -> None:
    rng = random.Random(1)
    worker_ids = [str(number) for number in range(64)]
    for length in (1, 2, 3, 100, 512):
        hashes = rng.sample(range(10**9), length)
        depths = {worker_id: rng.choice([0, 1, length - 1, length, rng.randint(0, length)]) for worker_id in worker_ids}
        index = index_of({worker_id: hashes[:depth] for worker_id, depth in depths.items()}, max_entries=10**6)
        assert index.match(hashes, worker_ids) == depths
        assert index.match([*hashes, 10**9], worker_ids) == depths


def test_a_worker_that_comes_short_of_a_block_in_a_full_index_is_matched_block_by_block() -> None:
    index = index_of({"a": chain("aaaa"), "b": chain("b")}, max_entries=4)
    index.check()
    assert index.match(chain("aaaa"), ["a"]) == {"a": 3}
    index.evict("b", chain("b"))
    index.store("a", chain("aaaaa")[4:])
    assert index.match(chain("aaaaa"), WORKERS[:2]) == {"a": 3, "b": 0}
    index.reset("a")
    index.store("a", chain("aaaa"))
    assert index.match(chain("aaaa"), ["a"]) == {"a": 4}


def test_predicted_blocks_go_on_where_the_confirmed_ones_end() -> None:
    index = index_of({"a": [1, 2], "b": [1], "c": []})
    index.predict("a", [1, 2, 3, 4], 2, now_s=0)
    index.predict("b", [1, 2, 3, 4], 2, now_s=0)
    index.predict("c", [1], 0, now_s=0)
    assert index.match([1, 2, 3, 4, 5], WORKERS) == {"a": 4, "b": 1, "c": 1}
    index.store("a", [3])
    index.predict("b", [1, 2], 1, now_s=1)
    assert index.match([1, 2, 3, 4, 5], WORKERS) == {"a": 4, "b": 4, "c": 1}


def test_a_removed_worker_leaves_nothing_and_its_slot_is_used_again() -> None:
    index = index_of({"a": [1, 2], "b": [1]})
    index.remove_worker("a")
    index.check()
    assert len(index) == 1
    index.add_worker("c")
    assert index.match([1, 2], ["b", "c"]) == {"b": 1, "c": 0}
    index.check()


def test_a_prediction_counts_until_its_time_is_over() -> None:
    index = index_of({"a": []})
    index.predict("a", [1, 2], 0, now_s=0)
    assert index.match([1, 2], ["a"]) == {"a": 2}
    index.expire(TTL_S - 1)
    assert index.match([1, 2], ["a"]) == {"a": 2}
    index.expire(TTL_S)
    assert index.match([1, 2], ["a"]) == {"a": 0}
    assert index.num_predicted == 0


def test_a_confirmed_prediction_outlives_its_time_and_is_over_when_its_block_is_evicted() -> None:
    index = index_of({"a": []})
    index.predict("a", [1, 2, 3], 0, now_s=0)
    index.store("a", [1, 2])
    index.evict("a", [2])
    assert index.match([1, 2, 3], ["a"]) == {"a": 1}
    index.expire(TTL_S)
    assert index.match([1, 2, 3], ["a"]) == {"a": 1}
    index.check()


def test_siblings_of_a_predicted_prompt_are_matched_as_far_as_they_go_along() -> None:
    prompt = list(range(1, 101))
    index = index_of({"a": prompt[:7], "b": []})
    index.predict("a", prompt, 7, now_s=0)
    index.predict("b", prompt, 0, now_s=0)
    for shared in range(len(prompt) + 1):
        sibling = [*prompt[:shared], *range(1000, 1050)]
        assert index.match(sibling, WORKERS[:2]) == {"a": shared, "b": shared}
    for confirmed in range(7, len(prompt)):
        index.store("a", [prompt[confirmed]])
        index.check()
        assert index.match(prompt, WORKERS[:2]) == {"a": 100, "b": 100}
    index.expire(TTL_S)
    index.check()
    assert index.match(prompt, WORKERS[:2]) == {"a": 100, "b": 0}


def test_a_full_index_drops_the_new_hashes_of_a_worker_with_its_share() -> None:
    index = index_of({"a": [1, 2, 3, 4]}, max_entries=3)
    assert index.match([1, 2, 3, 4], ["a"]) == {"a": 3}
    assert (len(index), index.num_dropped) == (3, 1)


def test_a_small_worker_takes_room_from_the_newest_of_the_largest() -> None:
    index = index_of({"a": [1, 2, 3, 4], "b": [9]}, max_entries=4)
    assert index.match([1, 2, 3, 4], ["a"]) == {"a": 3}
    assert index.match([9], ["b"]) == {"b": 1}
    assert (len(index), index.num_dropped) == (4, 1)


def test_a_prediction_that_was_withdrawn_counts_no_more_and_one_that_has_ended_may_be() -> None:
    index = index_of({"a": [1], "b": []})
    withdrawn = index.predict("a", [1, 2, 3], 1, now_s=0)
    index.predict("b", [1, 2, 3], 0, now_s=0)
    assert withdrawn is not None
    index.withdraw(withdrawn)
    assert index.match([1, 2, 3], ["a", "b"]) == {"a": 1, "b": 3}
    index.expire(TTL_S + 1)
    index.withdraw(withdrawn)
    assert index.num_predicted == 0
    index.check()


def test_predictions_have_a_bound_of_their_own() -> None:
    index = index_of({"a": [1, 2], "b": []}, max_entries=2, max_predicted=3)
    index.predict("a", [1, 2, 3, 4, 5, 6], 2, now_s=0)
    index.predict("b", [1], 0, now_s=0)
    assert index.match([1, 2, 3, 4, 5, 6], ["a", "b"]) == {"a": 5, "b": 0}
    index.check()


def test_a_worker_that_takes_over_a_slot_inherits_no_predictions() -> None:
    index = index_of({"a": []})
    index.predict("a", [1], 0, now_s=0)
    index.remove_worker("a")
    index.add_worker("b")
    assert index.match([1], ["b"]) == {"b": 0}
    index.check()


@dataclass
class Expected:
    """A prediction in the reference model. Confirmed hashes are removed."""

    worker_id: str
    ends_at: float
    hashes: list[int]
    num_blocks: int
    made: predictions.Run | None


class AgainstTheNaiveModel(RuleBasedStateMachine):
    """Sets of hashes, and predictions with their end, per worker; matching by asking each worker block by block. In an
    index that is too small the sets are the index's own."""

    @initialize(
        max_entries=st.sampled_from([10_000, 6, 12]),
        max_predicted=st.sampled_from([10_000, 10]),
        stride=st.sampled_from([1, 2, 3, 16]),
    )
    def start(self, max_entries: int, max_predicted: int, stride: int) -> None:
        self.stride, predictions.STRIDE = predictions.STRIDE, stride
        self.index = PrefixIndex(max_entries, max_predicted, TTL_S)
        self.confirmed: dict[str, set[int]] = {}
        self.expected: list[Expected] = []
        self.now_s = 0.0
        for worker_id in WORKERS:
            self.come(worker_id)

    def teardown(self) -> None:
        predictions.STRIDE = getattr(self, "stride", predictions.STRIDE)

    @rule(worker_id=st.sampled_from(WORKERS))
    def come(self, worker_id: str) -> None:
        self.index.add_worker(worker_id)
        self.confirmed.setdefault(worker_id, set())

    @rule(worker_id=st.sampled_from(WORKERS))
    def go(self, worker_id: str) -> None:
        self.index.remove_worker(worker_id)
        self.confirmed.pop(worker_id, None)
        self.expected = [run for run in self.expected if run.worker_id != worker_id]

    @rule(worker_id=st.sampled_from(WORKERS))
    def reset(self, worker_id: str) -> None:
        if worker_id in self.confirmed:
            self.index.reset(worker_id)
            self.confirmed[worker_id] = set()
            self.expected = [run for run in self.expected if run.worker_id != worker_id]

    @rule(worker_id=st.sampled_from(WORKERS), gone=st.lists(PROMPTS, max_size=2), come=st.lists(PROMPTS, max_size=3))
    def report(self, worker_id: str, gone: list[str], come: list[str]) -> None:
        if worker_id not in self.confirmed:
            return
        held = self.confirmed[worker_id]
        ends = [chain(prompt)[-1] for prompt in gone if prompt]
        evicted = sorted((block_hash for block_hash in held if is_behind(block_hash, ends)), reverse=True)
        left = held.difference(evicted)
        stored = [block_hash for prompt in come for block_hash in chain(prompt) if block_hash not in left]
        self.index.evict(worker_id, evicted)
        self.index.store(worker_id, stored)
        self.confirmed[worker_id] = left.union(stored)
        for run in self.expected:
            for block_hash in stored:
                if run.worker_id == worker_id and run.hashes[:1] == [block_hash]:
                    del run.hashes[0]
        self.match([*gone, *come])

    @rule(worker_id=st.sampled_from(WORKERS), prompt=PROMPTS, start=st.none() | st.integers(0, 6))
    def predict(self, worker_id: str, prompt: str, start: int | None) -> None:
        if worker_id in self.confirmed:
            hashes = chain(prompt)
            if start is None:  # as a router does
                start = self.index.match(hashes, [worker_id])[worker_id]
            room = self.index.max_predicted - sum(run.num_blocks for run in self.expected)
            made = self.index.predict(worker_id, hashes, start, self.now_s)
            expected = hashes[start:][:room]
            assert (made is None) == (not expected)
            self.expected.append(Expected(worker_id, self.now_s + TTL_S, expected, len(expected), made))
            self.match([prompt])

    @rule(number=st.integers(0, 9), prompt=PROMPTS)
    def withdraw(self, number: int, prompt: str) -> None:
        if number < len(self.expected) and (made := self.expected[number].made) is not None:
            self.index.withdraw(made)
            self.expected[number].hashes = []
            self.match([prompt])

    @rule(elapsed_s=st.floats(0, 2 * TTL_S))
    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.index.expire(self.now_s)
        self.expected = [run for run in self.expected if run.ends_at > self.now_s]

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=5))
    def match(self, prompts: list[str]) -> None:
        for prompt in prompts:
            hashes = chain(prompt)
            matched = self.index.match(hashes, list(self.confirmed))
            for worker_id, depth in matched.items():
                predicted = {h for run in self.expected if run.worker_id == worker_id for h in run.hashes}
                held = predicted | self.index.hashes_of(worker_id)
                assert depth == next((depth for depth, h in enumerate(hashes) if h not in held), len(hashes))

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            if self.index.max_entries == 10_000:
                for worker_id, hashes in self.confirmed.items():
                    assert self.index.hashes_of(worker_id) == hashes
            assert self.index.num_predicted == sum(run.num_blocks for run in self.expected)


TestAgainstTheNaiveModel = AgainstTheNaiveModel.TestCase
TestAgainstTheNaiveModel.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.sampled_from(WORKERS), HASHES, st.sampled_from(["store", "evict", "predict"]))))
def test_the_bounds_hold_and_no_worker_is_denied_its_share(steps: list[tuple[str, list[int], str]]) -> None:
    index = index_of({worker_id: [] for worker_id in WORKERS}, max_entries=9, max_predicted=20)
    for worker_id, hashes, what in steps:
        if what == "store":
            index.store(worker_id, hashes)
            assert index.num_entries_of(worker_id) >= min(3, len(set(hashes)))
        elif what == "evict":
            index.evict(worker_id, hashes)
        else:
            index.predict(worker_id, hashes, 0, now_s=0)
        index.check()
