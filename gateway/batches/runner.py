"""Runs the batches of the store, together with the other gateways of the store.

Every gateway polls the batches that are open, claims parts of the oldest, at most as many lines at a time as it may
run, and runs them in the background. A line that finds no room is tried again when another line has ended, or after a
growing time. When all parts of a batch have their answers, or it is cancelled or its time is over, one gateway writes
the files and ends it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from headrace.common.tasks import end_tasks
from headrace.gateway.access.admission import AdmissionControl
from headrace.gateway.batches.files import Bounds, Files
from headrace.gateway.batches.inside import Answer, run_inside
from headrace.gateway.batches.journal import END, PLAN, Journal, OpenBatch, Plan, Progress
from headrace.gateway.batches.lines import BatchLine, Lines, PlannedLine, check_lines, parse_line
from headrace.gateway.batches.records import (
    OUTPUT_PURPOSE,
    BatchRecord,
    BatchStatus,
    LineError,
    PlanSummary,
    RequestCounts,
    now_s,
    row_of_answer,
    row_of_error,
)
from headrace.gateway.batches.store import BatchStore
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Bodies
from headrace.gateway.telemetry.metrics import Metrics
from headrace.protos.status import Reason, StatusError

POLL_S = 2.0
SWEEP_S = 3600.0
MAX_TRIES = 3
"""Attempts of a line that fails for another reason than lack of room."""
_LEAST_WAIT_S = 0.5
_MOST_WAIT_S = 15.0
_NO_ROOM = frozenset(
    {
        Reason.QUEUE_FULL,
        Reason.NO_CAPACITY,
        Reason.MODEL_NOT_LOADED,
        Reason.MODEL_CHANGED,
        Reason.DRAINING,
        Reason.GIVEN_BACK,
        Reason.QUOTA,
    }
)
_ONCE_MORE = frozenset({Reason.WORKER_LOST, Reason.INTERNAL, Reason.DEADLINE, Reason.CANCELLED})
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Known:
    """What this gateway knows of an open batch: its record and plan, which never change, and its own work on the
    batch."""

    record: BatchRecord
    plan: Plan | None = None
    parts: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    other: asyncio.Task[None] | None = None
    """The check of its file, or its end."""

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [*self.parts.values(), *([] if self.other is None else [self.other])]


class BatchRunner:
    """Runs batches, `num_lines` lines at a time, and takes over those of gateways that have not been heard of for
    `lease_s`. `meet` tells it the endpoints. For one event loop."""

    def __init__(
        self,
        store: BatchStore,
        files: Files,
        bounds: Bounds,
        admission: AdmissionControl,
        metrics: Metrics,
        num_lines: int,
        lease_s: float,
    ) -> None:
        self._store = store
        self._files = files
        self._bounds = bounds
        self._admission = admission
        self._metrics = metrics
        self._num_lines = num_lines
        self.journal = Journal(store, f"gateway-{secrets.token_hex(8)}", lease_s)
        self._heartbeat_s = lease_s / 4
        self._endpoints: Mapping[str, Endpoint] = {}
        self._slots = asyncio.Semaphore(num_lines)
        self._bodies = Bodies(bounds.max_line_bytes)
        self._known: dict[OpenBatch, _Known] = {}
        self._pending: dict[tuple[OpenBatch, int], int] = {}
        """Lines without an answer, by claimed part."""
        self._wake = asyncio.Event()
        self._room = asyncio.Condition()
        self._alive: set[str] = set()
        self._beat_s = self._swept_s = -SWEEP_S
        self._is_stopping = False
        self._is_reachable = True

    def meet(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Learn the endpoints for lines, by path."""
        self._endpoints = endpoints

    @property
    def line_endpoints(self) -> Sequence[str]:
        """The paths of endpoints that lines may ask for."""
        return tuple(self._endpoints)

    def wake(self) -> None:
        """Look for work at once, because a batch was created or cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self._look()
            except StatusError as error:
                if self._is_reachable:
                    _LOG.warning("batches wait: %s: %s", error.message, error.__cause__)
                self._is_reachable = False
            except Exception:
                _LOG.exception("batches wait")
            else:
                self._is_reachable = True
            try:
                async with asyncio.timeout(min(POLL_S, self._heartbeat_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def drain(self, timeout_s: float) -> None:
        """Claim nothing more, let lines end within this time, and leave the rest to other gateways or to the next
        start."""
        self._is_stopping = True
        tasks = [task for known in self._known.values() for task in known.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        await end_tasks(*tasks)
        if self._beat_s >= 0:
            try:
                await self.journal.leave()
            except StatusError as error:
                _LOG.debug("others wait before they take over: %s", error.message)

    # --- one look at the store --------------------------------------------------------------------------------------

    async def _look(self) -> None:
        if self._store.is_empty:
            return
        now = time.monotonic()
        if now - self._swept_s >= SWEEP_S:
            self._swept_s = now
            await self._sweep()
        batches = await self.journal.open_batches()
        if batches and now - self._beat_s >= self._heartbeat_s:
            await self.journal.beat()
            self._alive = await self.journal.alive()
            self._beat_s = now
        self._metrics.batches_open.set(len(batches))
        for batch in self._known.keys() - set(batches):
            await end_tasks(*self._known.pop(batch).tasks)
        for batch in self._in_turn(batches):
            if self._is_stopping:
                return
            known = await self._known_of(batch)
            if known is not None:
                await self._advance(batch, known)

    def _in_turn(self, batches: list[OpenBatch]) -> list[OpenBatch]:
        """The batches of tenants for which little runs here first; then the oldest."""
        num_parts: dict[str, int] = {}
        for batch, known in self._known.items():
            num_parts[batch.folder] = num_parts.get(batch.folder, 0) + len(known.parts)
        return sorted(batches, key=lambda batch: (num_parts.get(batch.folder, 0), batch.id))

    async def _known_of(self, batch: OpenBatch) -> _Known | None:
        known = self._known.get(batch)
        if known is None:
            record = await self.journal.record(batch)
            if record is None or await self.journal.ended(batch) is not None:
                # Its gateway ended between two writes.
                await self.journal.close(batch)
                return None
            known = self._known[batch] = _Known(record)
        return known

    async def _advance(self, batch: OpenBatch, known: _Known) -> None:
        """Do the next thing that this gateway can do for a batch."""
        if known.other is not None:
            if not known.other.done():
                return
            known.other = None
        if known.plan is None:
            known.plan = await self.journal.plan(batch)
        status: BatchStatus = "completed"
        if await self.journal.cancelled_at(batch) is not None:
            status = "cancelled"
        elif now_s() >= known.record.expires_at:
            status = "expired"
        elif known.plan is None:
            await self._start(batch, known, PLAN, lambda: self._check(batch, known))
            return
        elif known.plan.summary.errors:
            status = "failed"
        elif not await self._claim_parts(batch, known, known.plan):
            return
        await end_tasks(*known.parts.values())
        known.parts.clear()
        await self._start(batch, known, END, lambda: self._end(batch, known, status))

    async def _start(self, batch: OpenBatch, known: _Known, what: str, work: Callable[[], Awaitable[None]]) -> None:
        progress = await self.journal.progress(batch)
        if await self.journal.claim(batch, what, progress, self._alive) and not self._is_stopping:
            known.other = asyncio.create_task(self._logged(batch, work()), name=f"{batch.id} {what}")

    async def _logged(self, batch: OpenBatch, work: Awaitable[None]) -> None:
        try:
            await work
        except StatusError as error:
            _LOG.warning("%s waits: %s: %s", batch.id, error.message, error.__cause__)
        except Exception:
            _LOG.exception("%s waits", batch.id)
        finally:
            self._wake.set()

    async def _claim_parts(self, batch: OpenBatch, known: _Known, plan: Plan) -> bool:
        """Claim parts while this gateway has room for their lines. Returns whether all parts are done."""
        for number in [number for number, task in known.parts.items() if task.done()]:
            del known.parts[number]
        if known.parts and self._num_pending() >= self._num_lines:
            return False
        progress = await self.journal.progress(batch)
        for number in range(plan.num_parts):
            if self._num_pending() >= self._num_lines:
                break
            if number in progress.done or number in known.parts:
                continue
            is_own = await self.journal.claim(batch, f"{number:06d}", progress, self._alive)
            if self._is_stopping:
                return False
            if is_own:
                self._run_part_soon(batch, known, number, plan.part(number))
        return len(progress.done) == plan.num_parts

    def _num_pending(self) -> int:
        return sum(self._pending.values())

    def _run_part_soon(self, batch: OpenBatch, known: _Known, number: int, lines: Sequence[PlannedLine]) -> None:
        part = batch, number
        self._pending[part] = len(lines)
        work = self._run_part(batch, known.record, number, lines)
        task = known.parts[number] = asyncio.create_task(self._logged(batch, work), name=f"{batch.id} {number}")
        task.add_done_callback(lambda task: self._pending.pop(part, None))

    # --- the check of a file ----------------------------------------------------------------------------------------

    async def _check(self, batch: OpenBatch, known: _Known) -> None:
        record = known.record
        with tempfile.TemporaryFile(prefix="headrace-batch-") as copy:
            try:
                async with aclosing(self._files.content(record.tenant, record.input_file_id)) as pieces:
                    async for piece in pieces:
                        copy.write(piece)
            except FileNotFoundError:
                problem = "the input file was deleted, or it has expired"
                lines = Lines(errors=[LineError(code="file_not_found", line=None, message=problem)])
            else:
                copy.seek(0)
                lines = await asyncio.to_thread(self._checked, copy, record.endpoint)
        model = next(iter(lines.models)) if len(lines.models) == 1 else None
        planned = [] if lines.errors else lines.planned
        summary = PlanSummary(at=now_s(), num_lines=len(planned), model=model, errors=lines.errors)
        await self.journal.write_plan(batch, Plan(summary, planned))

    def _checked(self, copy: IO[bytes], endpoint: str) -> Lines:
        pieces = iter(lambda: copy.read(1 << 18), b"")
        return check_lines(pieces, endpoint, self._bounds.max_lines, self._bounds.max_line_bytes)

    # --- lines ------------------------------------------------------------------------------------------------------

    async def _run_part(self, batch: OpenBatch, record: BatchRecord, number: int, lines: Sequence[PlannedLine]) -> None:
        """Run the lines of a part that have no answer, in order, and put all answers together."""
        answered = await self.journal.answered(batch, number)
        unanswered = [line for line in lines if line.number not in answered]
        self._pending[batch, number] = len(unanswered)

        async def run(line: PlannedLine) -> None:
            await self._run_line(batch, record, number, line)
            self._pending[batch, number] -= 1
            if self._num_pending() < self._num_lines:
                self._wake.set()

        tasks: list[asyncio.Task[None]] = []
        try:
            for line in unanswered:
                await self._slots.acquire()
                tasks.append(asyncio.create_task(run(line), name=f"{batch.id} line {line.number}"))
                tasks[-1].add_done_callback(lambda task: self._slots.release())
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
        await self.journal.end_part(batch, number, len(lines))

    async def _run_line(self, batch: OpenBatch, record: BatchRecord, part: int, line: PlannedLine) -> None:
        """Run a line until it has an answer, and write it."""
        self._metrics.batch_lines_running.inc()
        try:
            request = await self._patiently(lambda: self._line(record, line))
            if request is None:
                custom_id, answer = f"line {line.number}", None
                row = row_of_error(batch.id, custom_id, "file_not_found", "the input file was deleted meanwhile")
            else:
                custom_id = request.custom_id
                answer = await self._answered(record, bytes(request.body))
                row = row_of_answer(batch.id, custom_id, answer.request_id, answer.status, answer.body)
            is_ok = answer is not None and answer.status == 200
            await self._patiently(
                lambda: self.journal.write_answer(batch, part, line.number, row, is_ok=is_ok),
            )
            self._metrics.batch_line("ok" if is_ok else "failed")
        finally:
            self._metrics.batch_lines_running.dec()

    async def _line(self, record: BatchRecord, line: PlannedLine) -> BatchLine | None:
        try:
            return parse_line(await self._files.part(record.tenant, record.input_file_id, line.start, line.length))
        except FileNotFoundError:
            return None

    async def _patiently(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat an operation of the store until it succeeds. The store may be unreachable for any time."""
        wait_s = _LEAST_WAIT_S
        while True:
            try:
                return await work()
            except StatusError as error:
                _LOG.debug("a line waits: %s", error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)

    async def _answered(self, record: BatchRecord, body: bytes) -> Answer:
        """The answer to a request, which is tried again until there is room for it."""
        endpoint = self._endpoints[record.endpoint]
        wait_s = _LEAST_WAIT_S
        num_tries = 0
        while True:
            try:
                authorization = self._admission.background(record.key_id)
            except StatusError as error:
                answer = Answer("", error=error, status=error.row.http_status)
                if error.reason is not Reason.NO_CAPACITY:
                    problem = "the key that created the batch is not valid any more"
                    answer.body = msgspec.json.encode({"error": {"code": error.row.openai_code, "message": problem}})
                    return answer
            else:
                # A task of its own has a context of its own.
                work = run_inside(endpoint, body, authorization, self._bodies)
                answer = await asyncio.create_task(work, name=f"{record.id} attempt")
            reason = None if answer.error is None else answer.error.reason
            if reason in _ONCE_MORE:
                num_tries += 1
                if reason is Reason.INTERNAL and answer.error is not None and answer.error.__cause__ is not None:
                    _LOG.error("a line of %s failed", record.id, exc_info=answer.error.__cause__)
            if reason not in _NO_ROOM and (reason not in _ONCE_MORE or num_tries >= MAX_TRIES):
                async with self._room:
                    self._room.notify()
                return answer
            self._metrics.batch_line("retry")
            try:
                async with asyncio.timeout(wait_s * (0.75 + random.random() / 2)), self._room:
                    await self._room.wait()
            except TimeoutError:
                wait_s = min(2 * wait_s, _MOST_WAIT_S)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _end(self, batch: OpenBatch, known: _Known, status: BatchStatus) -> None:
        """Write the files of a batch, and its end."""
        record, journal = known.record, self.journal
        plan = known.plan or Plan(PlanSummary(at=now_s()))
        began = now_s()
        cancelled_at = await journal.cancelled_at(batch)
        counts = RequestCounts(total=plan.summary.num_lines)
        with (
            tempfile.NamedTemporaryFile(prefix="headrace-batch-") as output,
            tempfile.NamedTemporaryFile(prefix="headrace-batch-") as errors,
        ):
            await self._gather(batch, known, plan, status, counts, output, errors)
            output_id = await self._kept(record, output, "output")
            error_id = await self._kept(record, errors, "error")
        ended = journal.batch_of(record, status, plan.summary, counts, cancelled_at)
        ended.output_file_id, ended.error_file_id = output_id, error_id
        if status != "failed":
            ended.finalizing_at = began
        setattr(ended, f"{status}_at", now_s())
        if await journal.end(batch, ended):
            _LOG.info("%s has ended: %s, %d of %d lines", batch.id, status, counts.completed, counts.total)

    async def _gather(
        self,
        batch: OpenBatch,
        known: _Known,
        plan: Plan,
        status: BatchStatus,
        counts: RequestCounts,
        output: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        """Write the answers into the files of output and errors, and count them. The lines of an expired batch that
        have none are errors."""
        progress: Progress = await self.journal.progress(batch)
        part = 0
        async for rows in self.journal.answers(batch, plan.num_parts, progress):
            for _, is_ok, row in rows:
                (output if is_ok else errors).write(row + b"\n")
                counts.completed += is_ok
                counts.failed += not is_ok
            if status == "expired":
                answered = {number for number, _, _ in rows}
                missing = [line for line in plan.part(part) if line.number not in answered]
                for request in await asyncio.gather(*(self._line(known.record, line) for line in missing)):
                    if request is not None:
                        problem = "the request was not answered before the completion window ended"
                        errors.write(row_of_error(batch.id, request.custom_id, "batch_expired", problem) + b"\n")
                counts.failed += len(missing)
            part += 1

    async def _kept(self, record: BatchRecord, content: IO[bytes], what: str) -> str | None:
        """Keep a file, unless it is empty. Its id follows from the batch, so a second writer replaces it."""
        content.flush()
        num_bytes = content.tell()
        if not num_bytes:
            return None
        digest = hashlib.sha256(f"{record.id} {what}".encode()).hexdigest()
        name = f"{record.id}_{what}.jsonl"
        file = await self._files.add(
            record.tenant,
            Path(content.name),
            num_bytes,
            name,
            OUTPUT_PURPOSE,
            record.output_ttl_s,
            file_id=f"file-{digest[:31]}",
        )
        return file.id

    async def _sweep(self) -> None:
        """Delete files that have expired, and batches that were created before files are kept."""
        now = now_s()
        for folder in await self._store.folders("tenants/"):
            await self._files.sweep(f"tenants/{folder}", now)
            for batch_id in await self._store.folders(f"tenants/{folder}/batches/"):
                ended = await self.journal.ended(OpenBatch(folder, batch_id))
                if ended is not None and now - ended.created_at > self._bounds.retention_s:
                    await self._store.delete_below(f"tenants/{folder}/batches/{batch_id}/")
