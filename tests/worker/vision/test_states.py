"""The store of images' states: bounded, least recently used first, and never without what a request holds."""

from __future__ import annotations

import random

import pytest

from headrace.worker.vision.states import StateStore
from tests.worker.images import Picture, states_of

SIZE = 8 * 4
"""Bytes of a picture of 4 tokens."""


def digest(number: int) -> bytes:
    return Picture(number, 4).digest


def encoded(store: StateStore, *numbers: int) -> None:
    """Ask for pictures, which are encoded at once, and let go of them."""
    wanted = {digest(number): SIZE for number in numbers}
    for new in store.hold(wanted) or ():
        store.put(new, states_of(new, 4))
    for held in wanted:
        store.release(held)
    store.check()


def test_states_stay_until_others_need_their_room() -> None:
    store = StateStore(2 * SIZE)
    encoded(store, 1, 2)
    encoded(store, 1)
    assert (store.num_hits, store.num_misses) == (1, 2)
    encoded(store, 3)
    assert digest(1) in store
    assert digest(2) not in store, "the least recently used one goes first"
    assert store.num_evictions == 1
    assert store.num_bytes == 2 * SIZE


def test_what_a_request_holds_is_not_evicted_and_others_wait_for_its_room() -> None:
    store = StateStore(2 * SIZE)
    assert store.hold({digest(1): SIZE, digest(2): SIZE}) == [digest(1), digest(2)]
    assert store.hold({digest(3): SIZE}) is None
    assert store.hold({digest(1): SIZE}) == [], "equal images are promised already"
    store.put(digest(1), states_of(digest(1), 4))
    assert not store.release(digest(1))
    assert store.hold({digest(3): SIZE}) is None, "another request holds the first image"
    assert not store.release(digest(1))
    assert store.hold({digest(3): SIZE}) == [digest(3)]
    assert digest(1) not in store
    store.check()


def test_what_nobody_waits_for_any_more_is_forgotten_unless_it_comes_all_the_same() -> None:
    store = StateStore(SIZE)
    store.hold({digest(1): SIZE})
    assert store.release(digest(1)), "the caller may stop encoding it"
    assert digest(1) not in store
    store.put(digest(1), states_of(digest(1), 4))
    assert store.states_of(digest(1)) is not None, "there is room"
    store.put(digest(2), states_of(digest(2), 4))
    assert digest(2) not in store, "nothing is evicted for it"
    store.check()


def test_a_request_that_is_alone_may_exceed_the_budget() -> None:
    store = StateStore(SIZE)
    encoded(store, 1)
    assert store.hold({digest(2): SIZE, digest(3): SIZE}) == [digest(2), digest(3)]
    assert digest(1) not in store
    for number in (2, 3):
        store.put(digest(number), states_of(digest(number), 4))
        store.release(digest(number))
    store.check()
    assert store.num_bytes <= SIZE


def test_announced_images_count_once_while_they_are_neither_here_nor_promised() -> None:
    store = StateStore(SIZE)
    encoded(store, 1)
    for number in (1, 2, 2, 3):
        store.announce(digest(number), 4)
    assert store.num_missing_tokens == 8, "the first is here"
    store.hold({digest(2): SIZE})
    assert store.num_missing_tokens == 8, "the second is promised, and takes the room of the first"
    store.release(digest(2))
    assert store.num_missing_tokens == 12
    store.withdraw(digest(2))
    assert store.num_missing_tokens == 12, "another request waits for it"
    for number in (1, 2, 3):
        store.withdraw(digest(number))
    assert store.num_missing_tokens == 0
    store.check()


@pytest.mark.parametrize("seed", range(20))
def test_sums_agree_in_any_order(seed: int) -> None:
    rng, store = random.Random(seed), StateStore(5 * SIZE)
    held: list[bytes] = []
    announced: list[bytes] = []
    for _ in range(300):
        wanted = {digest(rng.randrange(9)): SIZE for _ in range(rng.randrange(1, 4))}
        if rng.random() < 0.5:
            announced += wanted
            for each in wanted:
                store.announce(each, each[0] % 5)
        elif announced:
            store.withdraw(announced.pop(rng.randrange(len(announced))))
        if rng.random() < 0.5 and store.hold(wanted) is not None:
            held += wanted
        if held and rng.random() < 0.4:
            chosen = rng.choice(held)
            store.put(chosen, states_of(chosen, 4))
        if held and rng.random() < 0.6:
            gone = held.pop(rng.randrange(len(held)))
            store.release(gone)
        store.check()
        assert store.num_holders == len(held)
