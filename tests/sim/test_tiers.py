"""Disks and other workers as tiers of simulated workers."""

from __future__ import annotations

import random

import pytest

from headrace.sim import step_cost, trace
from headrace.sim.report import Objective, PolicyReport, report_of
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Outcome, Simulation
from headrace.sim.tiers import DiskSlots, SimulatedDisk, TierSettings, Timer
from headrace.sim.worker import WorkerSettings
from headrace.worker.kv.chain import Content
from headrace.worker.kv.fetch import NO_SLOT, Fetch, Wanted

BLOCK = 64
UNBOUNDED = 3_000_000
MEMORY = 7_000


def run(kv_tokens: int, tiers: TierSettings = TierSettings()) -> tuple[Outcome, PolicyReport]:  # noqa: B008  frozen
    """Prompts of 800 tokens, half of them one of 160 prefixes, at 2 workers."""
    generated = trace.Generated(
        num_requests=700, num_system_prompts=160, system_prompt_tokens=512, prompt_median=120, output_mean=16
    )
    worker = WorkerSettings(step_cost.default(), kv_tokens, BLOCK, max_num_seqs=8, tiers=tiers)
    jobs = trace.at_rate([job.hashed(BLOCK) for job in generated.jobs(random.Random(2))], 3.0)
    outcome = Simulation(jobs, POLICIES["headrace"], FleetSettings(worker, num_workers=2, seed=3)).run()
    return outcome, report_of("headrace", 1, outcome, Objective(10_000, 300))


@pytest.fixture(scope="module")
def unbounded() -> PolicyReport:
    return run(UNBOUNDED)[1]


@pytest.fixture(scope="module")
def memory_only() -> PolicyReport:
    return run(MEMORY)[1]


def test_a_disk_brings_the_hits_of_an_unbounded_cache(unbounded: PolicyReport, memory_only: PolicyReport) -> None:
    outcome, found = run(MEMORY, TierSettings(disk_tokens=UNBOUNDED, disk_rate=200_000))
    assert memory_only.hit_share < 0.6 * unbounded.hit_share
    assert found.hit_share >= 0.97 * unbounded.hit_share
    assert found.disk_share > 0.3 * found.hit_share
    assert found.peer_share == 0.0
    assert found.ttft_ms.mean < memory_only.ttft_ms.mean
    assert all(record.disk_tokens <= record.cached_tokens for record in outcome.records)


def test_others_share_what_they_have(memory_only: PolicyReport) -> None:
    found = run(MEMORY, TierSettings(peer_rate=80_000))[1]
    assert found.peer_share > 0.0
    assert found.disk_share == 0.0
    assert found.hit_share > 0.95 * memory_only.hit_share


def test_tiers_slower_than_computing_change_nothing(memory_only: PolicyReport) -> None:
    found = run(MEMORY, TierSettings(UNBOUNDED, 100.0, 100.0))[1]
    assert (found.disk_share, found.peer_share) == (0.0, 0.0)
    assert found.hit_share == pytest.approx(memory_only.hit_share, rel=0.1)


def test_a_disk_reads_one_after_the_other_and_the_oldest_blocks_give_way() -> None:
    now_s, events, woken = 0.0, [], []
    timer = Timer(lambda: now_s, lambda at_s, do: events.append((at_s, do)), lambda: woken.append(now_s))
    disk = SimulatedDisk(DiskSlots(3), 0.5, 128.0, timer)
    for block_hash in (1, 2, 3):
        disk.spill(0, NO_SLOT, Content(block_hash, 0, b"", is_first=True))
    disk.spill(0, NO_SLOT, Content(1, 0, b"", is_first=True))  # is recent again
    disk.spill(0, NO_SLOT, Content(4, 0, b"", is_first=True))
    assert [disk.has(block_hash) for block_hash in (1, 2, 3, 4)] == [True, False, True, True]
    assert disk.take_changes() == {1: True, 2: False, 3: True, 4: True}
    first, second = (
        Fetch([Wanted(0, number, 0, b"", is_first=True) for number in wanted]) for wanted in ((1, 3), (2, 4))
    )
    disk.fetch(first)
    assert disk.expected_s(2) == 2.0
    disk.fetch(second)
    assert [at_s for at_s, _ in events] == [1.0, 2.0]
    for at_s, do in events:
        now_s = at_s
        do()
    assert disk.take_ended() == [first, second]
    assert (first.num_read, second.num_read) == (2, 0), "a block that has gone ends the fetch"
    assert woken == [1.0, 2.0]


def test_workers_see_what_others_wrote_to_a_shared_disk() -> None:
    slots, timer = DiskSlots(2), Timer(lambda: 0.0, lambda at_s, do: do(), lambda: None)
    first, second = (SimulatedDisk(slots, 0.5, 128.0, timer) for _ in range(2))
    first.spill(0, NO_SLOT, Content(1, 0, b"", is_first=True))
    assert (first.has(1), second.has(1)) == (True, False), "as far as it knows"
    second.spill(0, NO_SLOT, Content(1, 0, b"", is_first=True))
    assert second.has(1)
    assert (first.num_written, second.num_written) == (1, 0)
    for block_hash in (2, 3):
        second.spill(0, NO_SLOT, Content(block_hash, 0, b"", is_first=True))
    fetch = Fetch([Wanted(0, 1, 0, b"", is_first=True)])
    first.fetch(fetch)
    assert fetch.num_read == 0
    assert first.take_changes() == {1: False, 2: True, 3: True}
    assert second.take_changes() == {1: False, 2: True, 3: True}


def test_copies_do_not_cost_hits_where_memory_is_full_and_workers_are_busy() -> None:
    """40 prefixes of 512 tokens at 4 workers, which have room for each prefix once."""

    def found(tiers: TierSettings) -> PolicyReport:
        generated = trace.Generated(500, 40, 512, prompt_median=60, prompt_sigma=0.5, output_mean=16)
        worker = WorkerSettings(step_cost.default(), MEMORY, BLOCK, max_num_seqs=8, tiers=tiers)
        jobs = trace.at_rate([job.hashed(BLOCK) for job in generated.jobs(random.Random(2))], 12.0)
        outcome = Simulation(jobs, POLICIES["headrace"], FleetSettings(worker, num_workers=4, seed=3)).run()
        return report_of("headrace", 1, outcome, Objective(10_000, 300))

    alone, together = found(TierSettings()), found(TierSettings(peer_rate=80_000))
    assert together.peer_share > 0.0
    assert together.hit_share >= alone.hit_share
    assert together.ttft_ms.mean <= alone.ttft_ms.mean


def test_long_prompts_are_computed_at_one_worker_and_answered_at_others() -> None:
    generated = trace.Generated(200, 8, 512, prompt_median=900, prompt_sigma=1.0, output_mean=30)
    tiers = TierSettings(peer_rate=80_000)
    worker = WorkerSettings(step_cost.default(), 60_000, BLOCK, max_num_seqs=16, tiers=tiers)
    jobs = trace.at_rate([job.hashed(BLOCK) for job in generated.jobs(random.Random(2))], 1.5)

    def found(num_prefill: int) -> tuple[Outcome, PolicyReport]:
        fleet = FleetSettings(worker, num_workers=4, num_prefill=num_prefill, num_routers=2, seed=3)
        outcome = Simulation(jobs, POLICIES["headrace"], fleet).run()
        return outcome, report_of("headrace", 1, outcome, Objective(10_000, 300))

    (outcome, apart), (_, together) = found(2), found(0)
    moved = [record for record in outcome.records if record.prefill_worker >= 0]
    assert 20 < len(moved) < 180
    assert all(record.prefill_worker < 2 <= record.worker for record in moved)
    assert all(record.num_tokens == record.job.num_output_tokens for record in outcome.records)
    assert all(record.worker >= 2 for record in outcome.records if record.num_tokens > 1)
    assert max(record.job.num_prompt_tokens for record in outcome.records if record not in moved) < 4096
    assert apart.tpot_ms.p99 < together.tpot_ms.p99
    assert all(record.cached_tokens < record.job.num_prompt_tokens for record in moved)
