"""A source that hangs delays only the fetches from itself."""

from __future__ import annotations

from tests.worker.peers.test_channels import Ended, Hanging, begin, hanging
from tests.worker.peers.test_peers import PROMPT, Peer, peers, until

__all__ = ["hanging", "peers"]


def test_a_source_that_hangs_does_not_delay_fetches_from_others(
    peers: tuple[Peer, Peer], hanging: list[Hanging]
) -> None:
    ended = Ended(peers)
    stuck = [begin(peers, hanging[0].address) for _ in range(4)]
    until(lambda: hanging[0].num_calls > 0)
    fetch = begin(peers, peers[0].address)
    until(lambda: ended.has(fetch))
    assert fetch.num_read == 6
    assert not any(ended.has(each) for each in stuck)
    hanging[0].go_on()
    until(lambda: ended.has(*stuck))
    assert all(each.num_read == 6 for each in stuck), "those that were queued too"
    assert hanging[0].num_calls == 4
    assert hanging[0].most_running == 2


def test_calls_that_wait_in_vain_leave_their_place_to_others(peers: tuple[Peer, Peer], hanging: list[Hanging]) -> None:
    ended = Ended(peers)
    stuck = [begin(peers, source.address) for source in (*hanging, hanging[0])]
    until(lambda: sum(source.num_calls for source in hanging) == 4)
    fetch = begin(peers, peers[0].address)
    until(lambda: ended.has(fetch))
    assert fetch.num_read == 6
    assert not any(ended.has(each) for each in stuck)
    for source in hanging:
        source.go_on()
    until(lambda: ended.has(*stuck))


def test_a_queued_fetch_that_nobody_waits_for_ends(peers: tuple[Peer, Peer], hanging: list[Hanging]) -> None:
    ended = Ended(peers)
    stuck = [begin(peers, hanging[0].address) for _ in range(3)]
    until(lambda: hanging[0].num_calls == 2)
    stuck[2].is_given_up = True
    until(lambda: ended.has(stuck[2]))
    assert not ended.has(stuck[0])
    hanging[0].go_on()
    until(lambda: ended.has(*stuck))
    assert hanging[0].num_calls == 2


def test_no_new_request_waits_for_a_source_that_hangs(peers: tuple[Peer, Peer], hanging: list[Hanging]) -> None:
    second, ended = peers[1], Ended(peers)
    before_s = second.tier.expected_s(1)
    stuck, address = begin(peers, hanging[0].address), hanging[0].address
    until(lambda: second.tier.is_resting(address))
    assert not ended.has(stuck)
    assert not second.fetching.begin(second.request(PROMPT, address, len(PROMPT)))
    assert not second.tier.is_resting(peers[0].address)
    assert second.tier.expected_s(1) <= before_s, "its blocks use no time of others"
    hanging[0].go_on()
    until(lambda: ended.has(stuck))
    assert stuck.num_read == 6
    assert not second.tier.is_resting(address), "it sends again"
