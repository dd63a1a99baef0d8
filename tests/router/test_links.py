"""Links to scripted workers: states, gaps, restarts, silence, bookings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from headrace.protos import router_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.fleet.reported_load import report_interval_ms
from headrace.router.placement.prefix_index import PrefixIndex
from tests.patience import patience
from tests.router.conftest import HEARTBEAT_MS, StartWorker
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, until

PROMPT = list(range(40, 52))
HASHES = block_hashes(root_hash("f" * 64), PROMPT, BLOCK_SIZE)

Linked = Callable[[FakeWorker], Awaitable[tuple[WorkerLink, PrefixIndex]]]


@pytest.fixture
async def linked() -> AsyncIterator[Linked]:
    """Link a worker; the link ends with the test."""
    links: list[WorkerLink] = []

    async def link_to(worker: FakeWorker) -> tuple[WorkerLink, PrefixIndex]:
        index = PrefixIndex(1000, 1000, 30.0)
        link = WorkerLink(worker.address, index, heartbeat_ms=HEARTBEAT_MS)
        links.append(link)
        link.start()
        await until(lambda: link.is_ready)
        return link, index

    yield link_to
    for link in links:
        await link.close()


def test_many_workers_report_less_often_each() -> None:
    assert [report_interval_ms(number) for number in (1, 64, 512, 4096)] == [20, 20, 160, 250]


async def test_a_watch_keeps_pace_with_the_number_of_workers(start_worker: StartWorker) -> None:
    worker = await start_worker("w")
    size = [1]
    link = WorkerLink(
        worker.address,
        PrefixIndex(1000, 1000, 30.0),
        heartbeat_ms=HEARTBEAT_MS,
        report_interval_ms=lambda: report_interval_ms(size[0]),
        watcher_id=7,
    )
    link.start()
    try:
        await until(lambda: link.is_ready)
        for size[0] in (512, 500, 600, 4096, 64):
            num_running = worker.load.num_running + 1
            worker.report(num_running=num_running)
            await until(lambda number=num_running: link.reported.load.num_running == number)  # type: ignore[misc]
            await asyncio.sleep(0.05)
        assert worker.intervals_ms == [20, 160, 250, 20]
        assert (worker.num_watches, link.is_ready) == (1, True)
    finally:
        await link.close()


def num_matched(index: PrefixIndex, link: WorkerLink) -> int:
    return index.match(HASHES, [link.address])[link.address]


async def test_the_snapshot_and_what_follows_reach_the_index(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker("w")
    worker.store(PROMPT[:BLOCK_SIZE])
    link, index = await linked(worker)
    assert num_matched(index, link) == 1
    worker.store(PROMPT)
    await until(lambda: num_matched(index, link) == 3)
    worker.report(evicted=HASHES[1:2])
    await until(lambda: num_matched(index, link) == 1)
    assert (link.worker_id, link.epoch) == ("w", worker.epoch)


async def test_a_gap_is_followed_by_a_new_watch_with_a_snapshot(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, index = await linked(worker)
    incarnation = link.incarnation
    worker.skip_sequence = True
    await until(lambda: worker.num_watches == 2)
    worker.cached.update(HASHES)  # known from the snapshot alone
    worker.skip_sequence = True
    await until(lambda: worker.num_watches == 3)
    await until(lambda: num_matched(index, link) == 3)
    assert link.incarnation == incarnation, "a gap takes no worker out of service"


async def test_a_link_that_fails_is_made_anew(
    start_worker: StartWorker, linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker()
    link, index = await linked(worker)
    incarnation = link.incarnation
    failures = [ZeroDivisionError("a spoiled index")]
    store = index.store

    def store_or_fail(address: str, hashes: Sequence[int]) -> None:
        if failures and hashes:
            raise failures.pop()
        store(address, hashes)

    monkeypatch.setattr(index, "store", store_or_fail)
    worker.store(PROMPT)
    await until(lambda: not failures)
    await until(lambda: link.is_ready and num_matched(index, link) == 3)
    assert link.incarnation > incarnation


async def test_a_restart_on_the_same_address_is_seen_and_voids_the_index(
    start_worker: StartWorker, linked: Linked
) -> None:
    worker = await start_worker()
    link, index = await linked(worker)
    incarnation = link.incarnation
    worker.store(PROMPT)
    await until(lambda: num_matched(index, link) == 3)
    await worker.kill()
    await until(lambda: link.state is LinkState.UNREACHABLE)
    assert link.detail
    assert (link.silent_s, link.info().state) == (0.0, router_pb2.WORKER_STATE_UNREACHABLE)
    await worker.restart()
    await until(lambda: link.is_ready)
    assert (link.epoch, num_matched(index, link)) == (worker.epoch, 0)
    assert link.incarnation > incarnation


async def test_silence_makes_a_worker_suspect_then_lost_and_its_voice_makes_it_ready(
    start_worker: StartWorker, linked: Linked
) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)

    class Call:
        why = ""

        def abandon(self, why: str) -> None:
            self.why = why

    call = Call()
    with link.running(call):
        worker.is_silent = True
        await until(lambda: link.state is LinkState.SUSPECT)
        assert (call.why, link.is_ready) == ("", False)
        await until(lambda: link.state is LinkState.UNREACHABLE)
        assert "silent" in call.why
    await until(lambda: link.silent_s > 0)
    assert link.info().state == router_pb2.WORKER_STATE_NOT_ANSWERING
    assert "it has not answered for" in link.info().detail
    worker.is_silent = False
    await until(lambda: link.is_ready)
    assert (link.silent_s, link.info().state) == (0.0, router_pb2.WORKER_STATE_READY)


async def test_a_suspect_worker_is_ready_when_it_is_heard_again(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    incarnation = link.incarnation
    link.suspect("a call failed")
    assert (link.state, link.detail) == (LinkState.SUSPECT, "a call failed")
    await until(lambda: link.is_ready)
    assert link.detail == ""
    assert link.incarnation > incarnation


async def test_a_draining_worker_says_so_and_may_come_back(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    worker.report(draining=True)
    await until(lambda: link.state is LinkState.DRAINING)
    worker.report(draining=False)
    await until(lambda: link.is_ready)


async def test_a_booking_counts_until_reports_show_it_and_is_in_flight_until_released(
    start_worker: StartWorker, linked: Linked
) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    first, second = link.book(100, 7), link.book(10, 1)
    assert link.candidate().num_booked_tokens == 110
    link.settle(second)
    assert (link.candidate().num_booked_requests, link.candidate().num_booked_blocks) == (1, 7)
    worker.report(placement_ids=[first.placement_id])
    await until(lambda: link.candidate().num_booked_requests == 0)
    assert link.num_in_flight == 2
    for booking in (first, second):
        link.release(booking)
    link.check()
    assert link.num_in_flight == 0


async def test_a_booking_is_settled_by_its_name(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    first, second, third = link.book(100, 7), link.book(10, 1), link.book(1, 1)
    worker.report(num_running=1)  # of a step that began before they came
    await until(lambda: link.reported.load.num_running == 1)
    assert link.candidate().num_booked_requests == 3
    worker.report(placement_ids=[second.placement_id, 99], num_arrived=1, arrived_tokens=10, arrived_blocks=1)
    await until(lambda: not second.is_pending)
    assert (first.is_pending, third.is_pending) == (True, True)
    assert link.candidate().num_booked_tokens == 111, "two that are booked, and one that has arrived"
    assert (link.candidate().num_booked_requests, link.candidate().num_booked_blocks) == (3, 9)
    for booking in (first, second, third):
        link.release(booking)
    link.check()


async def test_a_new_watch_shows_what_was_booked_before_it(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    booking = link.book(100, 7)
    worker.skip_sequence = True
    await until(lambda: worker.num_watches == 2)
    await until(lambda: not booking.is_pending)


async def test_the_backlog_is_as_old_as_the_worker_says(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    worker.report(age_ms=5000, num_running=2)
    await until(lambda: link.reported.load.num_running == 2)
    assert 5.0 <= time.monotonic() - link.reported.load.as_of_s < 10.0
    assert link.info().report_age_ms < 5000, "the report itself is new"


async def test_rates_that_are_no_numbers_count_as_unknown(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    link, _ = await linked(worker)
    worker.report(prefill_tokens_per_s=float("nan"), decode_step_ms=float("inf"))
    await until(lambda: link.reported.load.prefill_tokens_per_s == 0.0)
    assert link.reported.load.decode_step_ms == 0.0


async def test_a_large_snapshot_is_applied_whole(start_worker: StartWorker, linked: Linked) -> None:
    worker = await start_worker()
    worker.cached.update(range(1, 900), HASHES)
    link, index = await linked(worker)
    assert len(index) == 902
    link.retire()
    assert len(index) == 0


async def test_a_link_to_nobody_says_why_and_can_be_closed() -> None:
    link = WorkerLink("127.0.0.1:1", PrefixIndex(10, 10, 1.0))
    link.start()
    await until(lambda: "UNAVAILABLE" in link.detail)
    assert link.state is LinkState.UNREACHABLE
    assert link.info().worker_id == "127.0.0.1:1"
    async with asyncio.timeout(patience(10)):
        await link.close()
