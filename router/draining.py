"""Drains workers for operators, and hands the cached blocks of a draining worker over to others.

The worker names its blocks. This router distributes those that no other worker has, and the other workers fetch them.
They fetch in small parts: each part can be stopped soon, and none delays requests. If several routers watch the worker,
it gives them turns: the first one does the work, and the next one what is left if the first one ends before all is done
or knows no other worker. What a worker does not take is distributed over the others. Blocks that no worker takes are
computed again when they are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

import grpc

from headrace.common.tasks import end_tasks
from headrace.protos import router_pb2, worker_pb2
from headrace.protos.status import Reason, StatusError, error_of
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.placement.block_distribution import Handed, distribute, rooms

log = logging.getLogger(__name__)

# Quoted, because the class is not generic at run time.
_Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.HandOverRequest, worker_pb2.HandOverResponse]"

# Longer than a worker waits for its handover.
_MAX_S = 90.0
# Number of workers that fetch from the draining one at a time. That worker serves one more, for requests.
_MAX_TAKERS = 3
_BLOCKS_A_CALL = 64
_CALL_TIMEOUT_S = 30.0
# Of a call of DrainWorker without a deadline, and the time before the deadline at which the worker is to answer.
_DRAIN_S = 600.0
_SLACK_S = 0.1
# Workers that an error names.
_MAX_NAMED = 20


async def drain_worker(
    fleet: Fleet, request: router_pb2.DrainWorkerRequest, timeout_s: float | None
) -> router_pb2.DrainWorkerResponse:
    """Pass Drain on to the worker with this name or address, which answers within `timeout_s`.

    Raises StatusError: INVALID_FIELD for an unknown or ambiguous name, and what the worker or the connection to it
    fails with.
    """
    link = _named(fleet, request.worker)
    left_s = max(_SLACK_S, (_DRAIN_S if timeout_s is None else timeout_s) - _SLACK_S)
    try:
        answer = await link.drain(worker_pb2.DrainRequest(undo=request.undo), timeout=left_s)
    except grpc.aio.AioRpcError as error:
        failure = error_of(error)
        raise StatusError(failure.reason, f"worker {link.worker_id}: {failure.message}") from None
    return router_pb2.DrainWorkerResponse(worker_id=link.worker_id, num_running=answer.num_running)


def _named(fleet: Fleet, name: str) -> WorkerLink:
    """The worker with this address, or the only one with this name. Raises StatusError (INVALID_FIELD)."""
    links = fleet.links()
    found = [link for link in links if link.address == name] or [link for link in links if link.worker_id == name]
    if len(found) == 1:
        return found[0]
    if found:
        addresses = _listed(each.address for each in found)
        problem = f"several workers are named {name[:100]!r}; give the address: {addresses}"
    else:
        there_are = _listed(each.worker_id for each in links) or "none"
        problem = f"there is no worker {name[:100]!r}; there is {there_are}"
    raise StatusError(Reason.INVALID_FIELD, problem, field="worker")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:_MAX_NAMED])


class _Given(NamedTuple):
    """What a worker took of its part: the number of blocks, and how many blocks of the part precede those that it did
    not take."""

    num_taken: int
    num_passed: int


class Handovers:
    """One task for each worker that drains. For one event loop."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._running: dict[WorkerLink, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # with those that were cancelled and have not ended yet
        fleet.states.add(self._state_changed)

    async def close(self) -> None:
        """End all running handovers."""
        await end_tasks(*self._tasks)

    def _state_changed(self, link: WorkerLink) -> None:
        running = self._running.get(link)
        if link.state is LinkState.DRAINING and link.card is not None and link.card.kv_layout:
            if running is None:
                task = asyncio.create_task(self._run(link), name=f"handover of {link.address}")
                self._running[link] = task
                self._tasks.add(task)
                task.add_done_callback(lambda task: self._ended(link, task))
        elif link.state is not LinkState.SUSPECT and running is not None:
            running.cancel()
            del self._running[link]  # the next one need not wait for its end

    def _ended(self, link: WorkerLink, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before it starts runs none of its own code.
        self._tasks.discard(task)
        if self._running.get(link) is task:
            del self._running[link]

    async def _run(self, link: WorkerLink) -> None:
        try:
            async with asyncio.timeout(_MAX_S):
                await self._hand_over(link)
        except grpc.aio.AioRpcError as error:  # another router has done it
            log.info("no blocks of %s are handed over: %s", link.worker_id, error.details())
        except TimeoutError:
            log.warning("the blocks of %s were not handed over in %.0f s", link.worker_id, _MAX_S)
        except Exception:
            log.exception("the blocks of %s were not handed over", link.worker_id)

    async def _hand_over(self, link: WorkerLink) -> None:
        assert link.card is not None, "checked before"
        layout = link.card.kv_layout
        async with _handover(link) as handover:
            named = await handover.named_blocks()
            # Those that there are now: it may have taken a while until it was this router's turn.
            others = [other for other in self._fleet.links() if other.is_ready and other.card is not None]
            takers = [other for other in others if other.card is not None and other.card.kv_layout == layout]
            if not takers:
                await handover.end(worker_pb2.HANDOVER_END_NO_TAKERS)
                return
            blocks = [
                Handed(block.hash, block.parent_hash, block.is_first, self._holders(block.hash, takers))
                for block in named
            ]
            num_missing = sum(not block.holders for block in blocks)
            num_taken = await self._distribute(link, blocks, takers)
            await handover.end(worker_pb2.HANDOVER_END_DONE)
            self._metrics.handovers.inc()
            self._metrics.blocks_handed_over.inc(num_taken)
            log.info("handed %d of %d KV blocks of %s over", num_taken, num_missing, link.worker_id)

    async def _distribute(self, link: WorkerLink, blocks: list[Handed], takers: Sequence[WorkerLink]) -> int:
        """Give the blocks to the takers. What one does not take is distributed over the others, as long as there are
        any. Returns how many were taken."""
        room = rooms([taker.reported.load for taker in takers], sum(not block.holders for block in blocks))
        num_taken = 0
        while any(parts := await asyncio.to_thread(distribute, blocks, room)):
            at_once = asyncio.Semaphore(_MAX_TAKERS)
            results = await asyncio.gather(
                *(self._give(link, taker, part, at_once) for taker, part in zip(takers, parts, strict=True))
            )
            holders: dict[int, set[int]] = {}
            for number, (part, result) in enumerate(zip(parts, results, strict=True)):
                num_taken += result.num_taken
                room[number] = room[number] - len(part) if result.num_passed == len(part) else 0
                for block in part[: result.num_passed]:
                    holders.setdefault(block.block_hash, set()).add(number)
            if all(result.num_passed == len(part) for part, result in zip(parts, results, strict=True)):
                break
            blocks = [
                block._replace(holders=block.holders.union(holders.get(block.block_hash, ()))) for block in blocks
            ]
        return num_taken

    def _holders(self, block_hash: int, takers: Sequence[WorkerLink]) -> frozenset[int]:
        found = self._fleet.index.holders(block_hash)
        return frozenset(number for number, taker in enumerate(takers) if found >> taker.slot & 1)

    async def _give(
        self, link: WorkerLink, taker: WorkerLink, part: Sequence[Handed], at_once: asyncio.Semaphore
    ) -> _Given:
        """Let one worker take blocks until it takes no more."""
        assert link.card is not None, "checked before"
        num_taken = 0
        async with at_once:
            for start in range(0, len(part), _BLOCKS_A_CALL):
                blocks = [
                    worker_pb2.ChainedBlock(
                        hash=block.block_hash, parent_hash=block.parent_hash, is_first=block.is_first
                    )
                    for block in part[start : start + _BLOCKS_A_CALL]
                ]
                request = worker_pb2.TakeBlocksRequest(
                    kv_layout=link.card.kv_layout, source=link.address, blocks=blocks
                )
                try:
                    response = await taker.take_blocks(request, timeout=_CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    log.info("%s takes no blocks of %s: %s", taker.worker_id, link.worker_id, error.details())
                    return _Given(num_taken, start)
                if not response.num_present:
                    return _Given(num_taken, start)
                num_taken += response.num_blocks
        return _Given(num_taken, len(part))


class _Handover:
    """A running call of HandOver. Its methods raise AioRpcError if another router has done the work, or the worker is
    lost."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    async def named_blocks(self) -> list[worker_pb2.ChainedBlock]:
        """The worker's blocks, when it is this router's turn."""
        await self._call.write(worker_pb2.HandOverRequest())
        blocks: list[worker_pb2.ChainedBlock] = []
        while (message := await self._call.read()) is not grpc.aio.EOF:
            assert isinstance(message, worker_pb2.HandOverResponse)
            if not message.blocks:
                break
            blocks.extend(message.blocks)
        return blocks

    async def end(self, how: worker_pb2.HandoverEnd) -> None:
        """Tell the worker how the handover ended, and wait until the worker confirms."""
        with contextlib.suppress(asyncio.InvalidStateError):  # it did not wait any longer
            await self._call.write(worker_pb2.HandOverRequest(end=how))
        while await self._call.read() is not grpc.aio.EOF:
            pass


@asynccontextmanager
async def _handover(link: WorkerLink) -> AsyncIterator[_Handover]:
    """Context manager: the call of HandOver. If it ends without a final message, the worker knows that the handover
    broke off."""
    call = link.hand_over()
    try:
        yield _Handover(call)
    finally:
        call.cancel()
