"""The prefix index against a naive model, and its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.router.prefix_index import PrefixIndex

WORKERS = ("a", "b", "c")
HASHES = st.lists(st.integers(0, 30), max_size=12)
TTL_S = 10.0


def index_of(holdings: dict[str, list[int]], max_entries: int = 1000, max_predicted: int = 1000) -> PrefixIndex:
    index = PrefixIndex(max_entries, max_predicted, TTL_S)
    for worker_id, hashes in holdings.items():
        index.add_worker(worker_id)
        index.store(worker_id, hashes)
    return index


def test_one_walk_answers_for_every_worker() -> None:
    index = index_of({"a": [1, 2, 3], "b": [1, 3], "c": []})
    assert index.match([1, 2, 3, 4], WORKERS) == {"a": 3, "b": 1, "c": 0}
    assert index.match([1, 2, 3, 4], ["b"]) == {"b": 1}
    assert index.match([], WORKERS) == {"a": 0, "b": 0, "c": 0}
    assert index.match([1], []) == {}


def test_a_block_without_its_parent_matches_nothing() -> None:
    assert index_of({"a": [2, 3]}).match([1, 2, 3], ["a"]) == {"a": 0}


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
    index.predict("a", [1, 2], now_s=0)
    assert index.match([1, 2], ["a"]) == {"a": 2}
    index.expire(TTL_S - 1)
    assert index.match([1, 2], ["a"]) == {"a": 2}
    index.expire(TTL_S)
    assert index.match([1, 2], ["a"]) == {"a": 0}
    assert index.num_predicted == 0


def test_a_confirmed_prediction_outlives_its_time_and_a_refuted_one_ends_at_once() -> None:
    index = index_of({"a": []})
    index.predict("a", [1, 2], now_s=0)
    index.store("a", [1])
    index.evict("a", [2])
    assert index.match([1, 2], ["a"]) == {"a": 1}
    index.expire(TTL_S)
    assert index.match([1, 2], ["a"]) == {"a": 1}
    index.check()


def test_a_full_index_drops_the_new_hashes_of_a_worker_with_its_share() -> None:
    index = index_of({"a": [1, 2, 3, 4]}, max_entries=3)
    assert index.match([1, 2, 3, 4], ["a"]) == {"a": 3}
    assert (len(index), index.num_dropped) == (3, 1)


def test_a_small_worker_takes_room_from_the_newest_of_the_largest() -> None:
    index = index_of({"a": [1, 2, 3, 4], "b": [9]}, max_entries=4)
    assert index.match([1, 2, 3, 4], ["a"]) == {"a": 3}
    assert index.match([9], ["b"]) == {"b": 1}
    assert (len(index), index.num_dropped) == (4, 1)


def test_predictions_have_a_bound_of_their_own() -> None:
    index = index_of({"a": [1, 2], "b": []}, max_entries=2, max_predicted=3)
    index.predict("a", [3, 4, 5, 6], now_s=0)
    index.predict("b", [1], now_s=0)
    assert index.match([1, 2, 3, 4, 5, 6], ["a", "b"]) == {"a": 5, "b": 0}
    index.check()


def test_a_worker_that_takes_over_a_slot_inherits_no_predictions() -> None:
    index = index_of({"a": []})
    index.predict("a", [1], now_s=0)
    index.remove_worker("a")
    index.add_worker("b")
    assert index.match([1], ["b"]) == {"b": 0}
    index.check()


class AgainstTheNaiveModel(RuleBasedStateMachine):
    """Sets of hashes, and predictions with their end, per worker; matching by asking each worker block by block."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(10_000, 10_000, TTL_S)
        self.confirmed: dict[str, set[int]] = {}
        self.predicted: dict[str, set[int]] = {}
        self.ends: list[tuple[float, str, int]] = []
        self.now_s = 0.0
        for worker_id in WORKERS:
            self.come(worker_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def come(self, worker_id: str) -> None:
        self.index.add_worker(worker_id)
        self.confirmed.setdefault(worker_id, set())
        self.predicted.setdefault(worker_id, set())

    @rule(worker_id=st.sampled_from(WORKERS))
    def go(self, worker_id: str) -> None:
        self.index.remove_worker(worker_id)
        self.confirmed.pop(worker_id, None)
        self.predicted.pop(worker_id, None)
        self.ends = [end for end in self.ends if end[1] != worker_id]

    @rule(worker_id=st.sampled_from(WORKERS))
    def reset(self, worker_id: str) -> None:
        if worker_id in self.confirmed:
            self.index.reset(worker_id)
            self.confirmed[worker_id] = set()
            self.predicted[worker_id] = set()
            self.ends = [end for end in self.ends if end[1] != worker_id]

    @rule(worker_id=st.sampled_from(WORKERS), evicted=HASHES, stored=HASHES)
    def report(self, worker_id: str, evicted: list[int], stored: list[int]) -> None:
        if worker_id in self.confirmed:
            self.index.evict(worker_id, evicted)
            self.index.store(worker_id, stored)
            self.confirmed[worker_id] = self.confirmed[worker_id].difference(evicted).union(stored)
            self.predicted[worker_id].difference_update(evicted, stored)

    @rule(worker_id=st.sampled_from(WORKERS), hashes=HASHES)
    def predict(self, worker_id: str, hashes: list[int]) -> None:
        if worker_id in self.confirmed:
            self.index.predict(worker_id, hashes, self.now_s)
            self.predicted[worker_id].update(hashes)
            self.ends.extend((self.now_s + TTL_S, worker_id, block_hash) for block_hash in hashes)

    @rule(elapsed_s=st.floats(0, 2 * TTL_S))
    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.index.expire(self.now_s)
        for end_s, worker_id, block_hash in self.ends:
            if end_s <= self.now_s:
                self.predicted[worker_id].discard(block_hash)
        self.ends = [end for end in self.ends if end[0] > self.now_s]

    @rule(hashes=HASHES)
    def match(self, hashes: list[int]) -> None:
        for worker_id, matched in self.index.match(hashes, list(self.confirmed)).items():
            held = self.confirmed[worker_id] | self.predicted[worker_id]
            expected = next((depth for depth, h in enumerate(hashes) if h not in held), len(hashes))
            assert matched == expected

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert len(self.index) == sum(len(hashes) for hashes in self.confirmed.values())


TestAgainstTheNaiveModel = AgainstTheNaiveModel.TestCase
TestAgainstTheNaiveModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
            index.predict(worker_id, hashes, now_s=0)
        index.check()
