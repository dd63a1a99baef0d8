"""Requests in the background at the door of a router. Real servers, scripted workers."""

from __future__ import annotations

import grpc
import pytest

from headrace.protos.load_report import LoadReport
from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.protos.status import Reason, error_of
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import answer, until

PROMPT = [7, 8, 9, 10, 11]


async def test_it_goes_where_half_of_a_batch_is_empty_and_never_waits(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    busy, free = [await start_worker(name) for name in "ab"]
    router = await start_router(busy, free)
    busy.report(num_running=8)
    free.report(num_running=7)
    await until(lambda: sorted(link.reported.load.num_running for link in router.fleet.links()) == [7, 8])
    tokens, _ = await router.generate(PROMPT, priority=BACKGROUND_PRIORITY)
    assert tokens == answer(PROMPT, 20)
    assert (len(busy.requests), len(free.requests)) == (0, 1)
    free.report(num_running=8)
    await until(lambda: all(link.reported.load.num_running == 8 for link in router.fleet.links()))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generate(PROMPT, priority=BACKGROUND_PRIORITY)
    assert error_of(refused.value).reason is Reason.QUEUE_FULL
    assert router.server.admission.num_waiting == 0
    tokens, _ = await router.generate(PROMPT)
    assert tokens == answer(PROMPT, 20)


def test_a_worker_with_only_such_requests_has_room_for_others() -> None:
    full = LoadReport(num_running=16, num_waiting=9, max_num_seqs=16)
    assert not full.has_room(0)
    assert LoadReport(16, 9, max_num_seqs=16, num_running_background=16, num_waiting_background=9).has_room(0)
    assert not LoadReport(16, 9, max_num_seqs=16, num_running_background=16).has_room(0)
    assert LoadReport(7, 0, max_num_seqs=16).has_background_room(0)
    assert not LoadReport(7, 0, max_num_seqs=16).has_background_room(1)
    assert LoadReport(0, 0, max_num_seqs=1).has_background_room(0)
