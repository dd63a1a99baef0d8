"""What is kept of a batch, whoever writes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headrace.gateway.batches.journal import Journal, OpenBatch, Plan
from headrace.gateway.batches.lines import PlannedLine
from headrace.gateway.batches.records import BatchRecord, PlanSummary, RequestCounts
from headrace.gateway.batches.store import BatchStore
from headrace.protos.status import StatusError

LEASE_S = 100.0
RECORD = BatchRecord(
    id="batch_1",
    tenant="ann",
    key_id="",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=2,
    output_ttl_s=3,
)


@pytest.fixture(params=["directory", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BatchStore:
    return BatchStore(str(tmp_path / "store") if request.param == "directory" else request.param)


async def created(journal: Journal, num_lines: int) -> OpenBatch:
    batch = await journal.create(RECORD)
    lines = [PlannedLine(number + 1, number, 1) for number in range(num_lines)]
    await journal.write_plan(batch, Plan(PlanSummary(at=1, num_lines=num_lines), lines))
    return batch


async def rows_of(journal: Journal, batch: OpenBatch, num_parts: int) -> list[tuple[int, bool, bytes]]:
    progress = await journal.progress(batch)
    return [row async for rows in journal.answers(batch, num_parts, progress) for row in rows]


async def test_of_all_who_claim_a_part_one_has_it(store: BatchStore) -> None:
    journals = [Journal(store, f"g{number}", LEASE_S) for number in range(8)]
    batch = await created(journals[0], 3)
    await asyncio.gather(*(journal.beat() for journal in journals))
    alive = await journals[0].alive()
    assert alive == {f"g{number}" for number in range(8)}
    progress = [await journal.progress(batch) for journal in journals]
    won = await asyncio.gather(
        *(journal.claim(batch, "000000", its, alive) for journal, its in zip(journals, progress, strict=True))
    )
    assert sum(won) == 1
    owner = journals[won.index(True)]
    assert await owner.claim(batch, "000000", await owner.progress(batch), alive)
    other = journals[won.index(False)]
    assert not await other.claim(batch, "000000", await other.progress(batch), alive)
    await owner.leave()
    left = alive - {f"g{won.index(True)}"}
    assert await other.claim(batch, "000000", await other.progress(batch), left)
    assert not await owner.claim(batch, "000000", await owner.progress(batch), alive)


async def test_who_began_after_the_living_were_counted_keeps_its_claims(store: BatchStore) -> None:
    one, new = Journal(store, "one", LEASE_S), Journal(store, "new", LEASE_S)
    batch = await created(one, 3)
    await one.beat()
    alive = await one.alive()
    await new.beat()
    assert await new.claim(batch, "000000", await new.progress(batch), {"new"})
    assert not await one.claim(batch, "000000", await one.progress(batch), alive)
    assert alive == {"one", "new"}


async def test_who_is_not_heard_of_is_dead(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path))
    one, other = Journal(store, "one", LEASE_S), Journal(store, "other", LEASE_S)
    await one.beat()
    await other.beat()
    heartbeat = tmp_path / "gateways" / "one"
    now_s = heartbeat.stat().st_mtime
    for ago_s, expected in ((0.5 * LEASE_S, {"one", "other"}), (2 * LEASE_S, {"other"})):
        os.utime(heartbeat, (now_s - ago_s, now_s - ago_s))
        await other.beat()
        assert await other.alive() == expected
    await other.leave()
    assert await one.alive() == {"one"}


async def test_a_line_has_one_answer_whoever_writes_it(store: BatchStore) -> None:
    journal, late = Journal(store, "one"), Journal(store, "late")
    batch = await created(journal, 3)
    await journal.write_answer(batch, 0, 1, b"first", is_ok=True)
    await late.write_answer(batch, 0, 1, b"second", is_ok=True)
    await late.write_answer(batch, 0, 1, b"failed", is_ok=False)
    await late.write_answer(batch, 0, 2, b"failed", is_ok=False)
    assert await journal.answered(batch, 0) == {1: "ok", 2: "failed"}
    assert (await journal.progress(batch)).counts == RequestCounts(completed=1, failed=1)
    expected = [(1, True, b"first"), (2, False, b"failed")]
    assert await rows_of(journal, batch, 1) == expected
    await journal.write_answer(batch, 0, 3, b"third", is_ok=True)
    await journal.end_part(batch, 0, 3)
    await late.write_answer(batch, 0, 2, b"too late", is_ok=True)
    await late.end_part(batch, 0, 3)
    expected.append((3, True, b"third"))
    assert await rows_of(journal, batch, 1) == expected
    assert (await journal.progress(batch)).counts == RequestCounts(completed=2, failed=1)


async def test_lines_that_are_put_together_while_they_are_read_are_not_lost(store: BatchStore) -> None:
    journal, other = Journal(store, "one"), Journal(store, "other")
    batch = await created(journal, 1)
    await journal.write_answer(batch, 0, 1, b"row", is_ok=True)
    progress = await journal.progress(batch)
    await other.end_part(batch, 0, 1)
    assert [row async for rows in journal.answers(batch, 1, progress) for row in rows] == [(1, True, b"row")]


async def test_a_batch_ends_once_and_leaves_only_what_is_shown(store: BatchStore) -> None:
    journal = Journal(store, "one")
    batch = await created(journal, 1)
    await journal.write_answer(batch, 0, 1, b"row", is_ok=True)
    first = journal.batch_of(RECORD, "completed", None, RequestCounts(total=1, completed=1), None)
    second = journal.batch_of(RECORD, "expired", None, RequestCounts(total=1), None)
    assert await journal.end(batch, first)
    assert not await journal.end(batch, second)
    assert await journal.shown(batch, RECORD) == first
    assert await journal.open_batches() == []
    names = [entry.name.rpartition("/")[2] for entry in await store.entries("tenants/")]
    assert sorted(names) == ["batch.json", "end.json", "plan.json"]
    assert (await journal.find("ann", "batch_1"))[0] == batch
    with pytest.raises(StatusError, match="there is no batch"):
        await journal.find("bob", "batch_1")


def test_a_place_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no directory"):
        BatchStore(str(tmp_path / "file" / "store"))
    with pytest.raises(ValueError, match="none of s3://"):
        BatchStore("ftp://host/x")
