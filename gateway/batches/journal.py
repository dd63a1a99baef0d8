"""The state of batches in the store. All objects are written once, except heartbeats, so any gateway may read and
write.

    open/FOLDER--ID              the batch has not ended (FOLDER is the tenant's); the index that gateways poll
    gateways/GATEWAY             a heartbeat; its time of writing, by the clock of the store, says who is alive
    TENANT/batches/ID/
      batch.json                 as it was created
      cancel                     since when it is cancelled, in Unix time
      index, plan.json           the lines in the order in which they run, and what the check has found
      claims/PART-N              the gateway that runs a part: the one with the highest N, as long as it is alive
      lines/PART/NUMBER.KIND     the answer to a line, as soon as it is there; KIND is ok or failed
      parts/PART-OK-FAILED       all answers of a part and their counts; replaces its lines
      end.json                   the batch as it has ended

A part is a run of lines. A gateway claims parts one after another; if it dies, another one claims them with N + 1, and
runs only the lines without an answer. A gateway that was taken for dead may still write answers: each line has one name
for either kind, the first answer of a kind stays, and readers prefer `ok`. So a line has one answer in the output,
whoever writes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from headrace.gateway.batches.lines import PlannedLine
from headrace.gateway.batches.records import (
    Batch,
    BatchRecord,
    BatchStatus,
    LineErrors,
    PlanSummary,
    RequestCounts,
    now_s,
    tenant_folder,
)
from headrace.gateway.batches.store import BatchStore
from headrace.gateway.edge.wire import encode
from headrace.protos.status import Reason, StatusError

PART_LINES = 32
"""Lines of a part."""
LEASE_S = 20.0
"""A gateway without a heartbeat for this long counts as dead."""
_MAX_SHOWN_CHARS = 64
PLAN = "plan"
END = "end"


class OpenBatch(msgspec.Struct, frozen=True):
    """A batch that has not ended, by the folder of its tenant and its id."""

    folder: str
    id: str

    @property
    def path(self) -> str:
        """The folder of its objects in the store."""
        return f"tenants/{self.folder}/batches/{self.id}"

    @property
    def marker(self) -> str:
        """The name of the object that marks the batch as open."""
        return f"open/{self.folder}--{self.id}"


class Plan(msgspec.Struct, frozen=True):
    """The lines of a batch, in the order in which they run."""

    summary: PlanSummary
    lines: Sequence[PlannedLine] = ()

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return -(-len(self.lines) // PART_LINES)

    def part(self, number: int) -> Sequence[PlannedLine]:
        """The lines of a part."""
        return self.lines[number * PART_LINES : (number + 1) * PART_LINES]


@dataclass(slots=True)
class Progress:
    """The state of the parts of a batch: the names of the objects of completed parts, the claims of all parts, and
    counts of lines."""

    done: dict[int, str]
    counts: RequestCounts
    claims: dict[str, tuple[int, str]]
    """For each claimed thing, the number of its last claim, and who made it."""


class Journal:
    """Reads and writes the state of batches in the store, for the gateway named `own`."""

    def __init__(self, store: BatchStore, own: str, lease_s: float = LEASE_S) -> None:
        self._lease = timedelta(seconds=lease_s)
        self._store = store
        self._own = own
        self._claimants: dict[str, str] = {}  # names of claims never change hands

    # --- life -------------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Record that this gateway is alive."""
        await self._store.put(f"gateways/{self._own}", str(time.time()).encode())

    async def alive(self) -> set[str]:
        """The gateways that are alive. Heartbeats of those long gone are deleted. Call it right after `beat`, whose
        time is that of the store's clock now."""
        beats = {entry.name.rpartition("/")[2]: entry.written for entry in await self._store.entries("gateways/")}
        now = beats.get(self._own) or max(beats.values(), default=datetime.min)
        gone = [name for name, written in beats.items() if now - written > 100 * self._lease]
        await self._store.delete(f"gateways/{name}" for name in gone)
        return {name for name, written in beats.items() if now - written <= self._lease} | {self._own}

    async def leave(self) -> None:
        """Record that this gateway has ended, so that others take over its parts at once."""
        await self._store.delete([f"gateways/{self._own}"])

    # --- creation and state -----------------------------------------------------------------------------------------

    async def create(self, record: BatchRecord) -> OpenBatch:
        """Write a new batch, and the object that marks it as open."""
        batch = OpenBatch(tenant_folder(record.tenant).partition("/")[2], record.id)
        await self._store.create(f"{batch.path}/batch.json", encode(record))
        await self._store.create(batch.marker, b"")
        return batch

    async def open_batches(self, folder: str = "") -> list[OpenBatch]:
        """All batches that have not ended, of a tenant's folder or of all; the oldest first."""
        found = []
        for entry in await self._store.entries("open/"):
            tenant, _, batch_id = entry.name.removeprefix("open/").partition("--")
            if not folder or tenant == folder:
                found.append(OpenBatch(tenant, batch_id))
        return sorted(found, key=lambda batch: batch.id)

    async def record(self, batch: OpenBatch) -> BatchRecord | None:
        """The batch as it was created."""
        raw = await self._store.get(f"{batch.path}/batch.json")
        return None if raw is None else msgspec.json.decode(raw, type=BatchRecord)

    async def find(self, tenant: str, batch_id: str) -> tuple[OpenBatch, BatchRecord]:
        """A batch of this tenant, open or not. Raises `StatusError` (NOT_FOUND)."""
        digits = batch_id.removeprefix("batch_")
        if digits != batch_id and digits.isascii() and digits.isalnum() and len(digits) <= _MAX_SHOWN_CHARS:
            batch = OpenBatch(tenant_folder(tenant).partition("/")[2], batch_id)
            record = await self.record(batch)
            if record is not None:
                return batch, record
        problem = f"there is no batch '{batch_id[:_MAX_SHOWN_CHARS]}'; has it expired?"
        raise StatusError(Reason.NOT_FOUND, problem, field="batch_id")

    async def ids(self, tenant: str) -> list[str]:
        """The ids of all batches of a tenant, the newest first."""
        return (await self._store.folders(f"{tenant_folder(tenant)}/batches/"))[::-1]

    async def cancel(self, batch: OpenBatch) -> None:
        """Cancel a batch, unless it is already cancelled."""
        await self._store.create(f"{batch.path}/cancel", str(now_s()).encode())

    async def cancelled_at(self, batch: OpenBatch) -> int | None:
        """The Unix time at which a batch was cancelled; None if it was not."""
        raw = await self._store.get(f"{batch.path}/cancel")
        return None if raw is None else int(raw)

    async def ended(self, batch: OpenBatch) -> Batch | None:
        """The batch as it has ended; None if it has not."""
        raw = await self._store.get(f"{batch.path}/end.json")
        return None if raw is None else msgspec.json.decode(raw, type=Batch)

    async def shown(self, batch: OpenBatch, record: BatchRecord) -> Batch:
        """The batch as the API shows it now."""
        ended = await self.ended(batch)
        if ended is not None:
            return ended
        summary = await self.summary(batch)
        cancelled_at = await self.cancelled_at(batch)
        counts = RequestCounts()
        finalizing = False
        if summary is not None:
            progress = await self.progress(batch)
            counts = progress.counts
            counts.total = summary.num_lines
            finalizing = END in progress.claims
        status: BatchStatus = "validating" if summary is None else "finalizing" if finalizing else "in_progress"
        return self.batch_of(record, "cancelling" if cancelled_at else status, summary, counts, cancelled_at)

    def batch_of(
        self,
        record: BatchRecord,
        status: BatchStatus,
        summary: PlanSummary | None,
        counts: RequestCounts,
        cancelled_at: int | None,
    ) -> Batch:
        """A batch in this state."""
        errors = [] if summary is None else summary.errors
        return Batch(
            id=record.id,
            endpoint=record.endpoint,
            model=None if summary is None else summary.model,
            errors=LineErrors(data=errors) if errors else None,
            input_file_id=record.input_file_id,
            completion_window=record.completion_window,
            status=status,
            created_at=record.created_at,
            in_progress_at=None if summary is None or errors else summary.at,
            expires_at=record.expires_at,
            cancelling_at=cancelled_at,
            request_counts=counts,
            metadata=record.metadata,
        )

    # --- the plan ---------------------------------------------------------------------------------------------------

    async def summary(self, batch: OpenBatch) -> PlanSummary | None:
        """The summary of the check of the input file; None while it is being checked."""
        raw = await self._store.get(f"{batch.path}/plan.json")
        return None if raw is None else msgspec.json.decode(raw, type=PlanSummary)

    async def plan(self, batch: OpenBatch) -> Plan | None:
        """The plan; None while the input file is being checked."""
        summary = await self.summary(batch)
        if summary is None:
            return None
        raw = await self._store.get(f"{batch.path}/index")
        return Plan(summary, msgspec.msgpack.decode(raw, type=list[PlannedLine]) if raw else ())

    async def write_plan(self, batch: OpenBatch, plan: Plan) -> None:
        """Write a plan. Of several, the first one stays; they are equal."""
        await self._store.create(f"{batch.path}/index", msgspec.msgpack.encode(plan.lines))
        await self._store.create(f"{batch.path}/plan.json", encode(plan.summary))

    # --- claims -----------------------------------------------------------------------------------------------------

    async def progress(self, batch: OpenBatch) -> Progress:
        """The state of all parts."""
        counts = RequestCounts()
        lines = await self._kinds(batch)  # before the parts: a part replaces its lines
        done, part_counts = await self._parts(batch)
        for ok, failed in part_counts.values():
            counts.completed += ok
            counts.failed += failed
        for part, kinds in lines.items():
            if part not in done:
                counts.completed += sum(kind == "ok" for kind in kinds.values())
                counts.failed += sum(kind == "failed" for kind in kinds.values())
        claims: dict[str, tuple[int, str]] = {}
        for entry in await self._store.entries(f"{batch.path}/claims/"):
            what, _, number_text = entry.name.rpartition("/")[2].rpartition("-")
            claims[what] = int(number_text), entry.name  # in order of their names, so the last one stays
        owners = {what: (number, await self._claimant(name)) for what, (number, name) in claims.items()}
        return Progress(done, counts, owners)

    async def _parts(self, batch: OpenBatch) -> tuple[dict[int, str], dict[int, tuple[int, int]]]:
        """The objects of parts that are done, and the numbers of answers and of errors in each."""
        done: dict[int, str] = {}
        counts: dict[int, tuple[int, int]] = {}
        for entry in await self._store.entries(f"{batch.path}/parts/"):
            number, ok, failed = map(int, entry.name.rpartition("/")[2].split("-"))
            if number not in done:
                done[number], counts[number] = entry.name, (ok, failed)
        return done, counts

    async def _claimant(self, name: str) -> str:
        if name not in self._claimants:
            raw = await self._store.get(name)
            if raw is None:
                return ""
            self._claimants[name] = raw.decode()
        return self._claimants[name]

    async def claim(self, batch: OpenBatch, what: str, progress: Progress, alive: set[str]) -> bool:
        """Claim a part, the plan or the end for this gateway. Returns whether it is this gateway's now. `alive` is what
        this gateway last knew, and learns of those who came since."""
        number, owner = progress.claims.get(what, (-1, ""))
        if number >= 0:
            if owner == self._own:
                return True
            if owner not in alive:
                alive |= await self.alive()  # its heartbeat is older than its claim
            if owner in alive:
                return False
        name = f"{batch.path}/claims/{what}-{number + 1:06d}"
        if not await self._store.create(name, self._own.encode()):
            return False
        self._claimants[name] = self._own
        progress.claims[what] = number + 1, self._own
        return True

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _kinds(self, batch: OpenBatch, part: int | None = None) -> dict[int, dict[int, str]]:
        """The answered lines of parts without a part object: for each part, the kind of answer by line number."""
        found: dict[int, dict[int, str]] = {}
        below = f"{batch.path}/lines/" if part is None else f"{batch.path}/lines/{part:06d}/"
        for entry in await self._store.entries(below):
            folder, _, name = entry.name.rpartition("/")
            number, _, kind = name.partition(".")
            kinds = found.setdefault(int(folder.rpartition("/")[2]), {})
            if kinds.get(int(number)) != "ok":
                kinds[int(number)] = kind
        return found

    async def answered(self, batch: OpenBatch, part: int) -> dict[int, str]:
        """The lines of a part that have an answer, by number, with its kind."""
        return (await self._kinds(batch, part)).get(part, {})

    async def write_answer(self, batch: OpenBatch, part: int, number: int, row: bytes, *, is_ok: bool) -> None:
        """Keep the answer to a line. If there is one of this kind, that one stays."""
        kind = "ok" if is_ok else "failed"
        await self._store.create(f"{batch.path}/lines/{part:06d}/{number:09d}.{kind}", row)

    async def end_part(self, batch: OpenBatch, part: int, num_lines: int) -> None:
        """Combine all answers of a part into one object, and delete the separate ones. Each of the part's `num_lines`
        lines must have an answer, unless another gateway has already combined them; otherwise raises StatusError
        (INTERNAL)."""
        rows = await self._rows(batch, part)
        if len(rows) == num_lines:
            num_ok = sum(is_ok for _, is_ok, _ in rows)
            name = f"{batch.path}/parts/{part:06d}-{num_ok}-{num_lines - num_ok}"
            await self._store.create(name, msgspec.msgpack.encode(rows))
        elif part not in (await self._parts(batch))[0]:
            problem = f"part {part} has {len(rows)} answers to {num_lines} lines"
            raise StatusError(Reason.INTERNAL, problem)
        await self._store.delete_below(f"{batch.path}/lines/{part:06d}/")

    async def _rows(self, batch: OpenBatch, part: int) -> list[tuple[int, bool, bytes]]:
        rows = []
        for number, kind in sorted((await self.answered(batch, part)).items()):
            row = await self._store.get(f"{batch.path}/lines/{part:06d}/{number:09d}.{kind}")
            if row is not None:
                rows.append((number, kind == "ok", row))
        return rows

    async def answers(
        self, batch: OpenBatch, num_parts: int, progress: Progress
    ) -> AsyncGenerator[list[tuple[int, bool, bytes]], None]:
        """The answers of each part: numbers of lines, whether each is an answer or an error, and the rows."""
        for part in range(num_parts):
            rows = [] if part in progress.done else await self._rows(batch, part)
            if part not in progress.done:
                progress.done, _ = await self._parts(batch)  # its lines may have been replaced while they were read
            if part in progress.done:
                raw = await self._store.get(progress.done[part])
                rows = msgspec.msgpack.decode(raw, type=list[tuple[int, bool, bytes]]) if raw else []
            yield rows

    # --- the end ----------------------------------------------------------------------------------------------------

    async def end(self, batch: OpenBatch, ended: Batch) -> bool:
        """Write the end of a batch. Returns whether this was the first one."""
        is_first = await self._store.create(f"{batch.path}/end.json", encode(ended))
        await self.close(batch)
        return is_first

    async def close(self, batch: OpenBatch) -> None:
        """Delete the objects that only an open batch needs."""
        for below in ("lines", "parts", "claims"):
            await self._store.delete_below(f"{batch.path}/{below}/")
        await self._store.delete([f"{batch.path}/index", batch.marker])
        self._claimants = {name: who for name, who in self._claimants.items() if not name.startswith(batch.path)}
