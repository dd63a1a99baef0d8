"""Steps that are skipped together, compared with the same steps one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headrace.sim import step_cost
from headrace.sim.images import FAMILIES, ImageSettings
from headrace.sim.process_cost import NOTHING, ProcessCost
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, JobRecord, Outcome, Simulation
from headrace.sim.trace import Generated, Job, at_rate
from headrace.sim.worker import WorkerSettings
from headrace.worker.engine.step_cost import StepShape

COST = step_cost.default()


def outcome_of(jobs: list[Job], policy: str, fleet: FleetSettings, *, skips_steps: bool) -> tuple[Outcome, int]:
    """The outcome, and the number of runs of steps."""
    worker = replace(fleet.worker, skips_steps=skips_steps)
    simulation = Simulation(jobs, POLICIES[policy], replace(fleet, worker=worker))
    num_runs = 0
    for simulated in simulation.workers:
        begin_run = simulated.begin_run

        def counted(begin_run=begin_run):  # type: ignore[no-untyped-def]
            nonlocal num_runs
            run = begin_run()
            num_runs += run is not None
            return run

        simulated.begin_run = counted  # type: ignore[method-assign]
    return simulation.run(), num_runs


def facts(record: JobRecord) -> tuple[object, ...]:
    """All that is known of a request's way, to the last bit."""
    return (
        record.job.number,
        record.worker,
        record.arrived_s,
        record.first_token_s,
        record.ended_s,
        record.cached_tokens,
        record.num_tokens,
        record.num_given_back,
    )


@given(
    seed=st.integers(0, 10_000),
    num_workers=st.integers(1, 6),
    num_routers=st.sampled_from([1, 4]),
    policy=st.sampled_from(["headrace", "oracle", "longest-prefix", "least-loaded", "random"]),
    concurrency=st.sampled_from([None, None, 7]),
    block_size=st.sampled_from([16, 64, 512]),
    turns=st.sampled_from([1.0, 4.0]),
    per_s=st.sampled_from([2.0, 15.0]),
    hop_s=st.sampled_from([0.0, 0.003]),
    num_hosts=st.sampled_from([None, 0, 1]),
    cost=st.sampled_from([NOTHING, ProcessCost(3000.0, 10.0, 100.0, 200.0)]),
)
@settings(max_examples=25, deadline=None)
def test_skipped_steps_give_the_outcome_of_single_steps_to_the_last_bit(
    seed: int,
    num_workers: int,
    num_routers: int,
    policy: str,
    concurrency: int | None,
    block_size: int,
    turns: float,
    per_s: float,
    hop_s: float,
    num_hosts: int | None,
    cost: ProcessCost,
) -> None:
    images = None if num_hosts is None else ImageSettings(FAMILIES["smolvlm:low"], num_hosts=num_hosts)
    worker = WorkerSettings(COST, 12_288, block_size, max_num_seqs=8, max_num_batched_tokens=128, images=images)
    trace = Generated(
        *(40, 3, 200),
        prompt_median=150.0,
        output_mean=60.0,
        max_prompt_tokens=1500,
        turns=turns,
        image_share=0.0 if images is None else 0.4,
        image_tokens=64,
        num_pictures=5,
    )
    jobs = [job for job in trace.jobs(random.Random(seed)) if worker.holds(job)]
    jobs = [job.hashed(block_size) for job in at_rate(jobs, per_s)]
    fleet = FleetSettings(
        worker, num_workers, num_routers, seed=seed, concurrency=concurrency, hop_s=hop_s, process_cost=cost
    )
    alone, num_none = outcome_of(jobs, policy, fleet, skips_steps=False)
    together, num_runs = outcome_of(jobs, policy, fleet, skips_steps=True)
    assert num_none == 0
    assert num_runs > 0
    assert [facts(record) for record in together.records] == [facts(record) for record in alone.records]
    assert together.busy_s == alone.busy_s
    assert together.num_steps == alone.num_steps
    assert together.num_preemptions == alone.num_preemptions


@pytest.mark.parametrize("sequences", [1, 3, 64])
def test_the_cost_of_steps_together_is_that_of_each(sequences: int) -> None:
    contexts = [sequences * past for past in (1, 700, 40_000)]
    cost = structs.replace(COST, saving=COST.per_context / 3)
    for shared in (0, sequences // 2):
        shapes = [StepShape(sequences, 0, 0, context, sequences, shared=shared) for context in contexts]
        each = [cost.milliseconds(shape) for shape in shapes]
        assert cost.decode_ms(np.array(contexts, np.float64), sequences, shared).tolist() == each
