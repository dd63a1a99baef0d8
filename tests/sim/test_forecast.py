"""A worker's forecasts of waiting times, compared with the actual waits in virtual time."""

from __future__ import annotations

import pytest

from headrace.protos.inference_pb2 import Belief
from headrace.sim import step_cost
from headrace.sim.trace import Job
from headrace.sim.worker import SimulatedWorker, WorkerSettings
from headrace.worker.engine.forecast import Forecast

COSTS = {
    "135M": step_cost.default(),
    "135M with AMX": step_cost.read(step_cost.DEFAULT_FILE.with_name("step_cost_amx.json")),
    "7B": step_cost.read(step_cost.DEFAULT_FILE.with_name("step_cost_7b.json")),
}
BLOCK_SIZE = 32


class Watched:
    """A worker in virtual time."""

    def __init__(self, machine: str) -> None:
        self.now_s = 0.0
        self.num_jobs = 0
        settings = WorkerSettings(COSTS[machine], kv_tokens=400_000, block_size=BLOCK_SIZE)
        self.worker = SimulatedWorker(settings, lambda: self.now_s)
        self.forecast = Forecast(self.worker.scheduler, 1e9, lambda: self.now_s)

    def job(self, prompt: int, output: int) -> Job:
        """A job that shares nothing with others, arriving now."""
        number, self.num_jobs = self.num_jobs, self.num_jobs + 1
        return Job(number, self.now_s, ((number, prompt),), output).hashed(BLOCK_SIZE)

    def step(self) -> set[str]:
        """Compute a step; the ids of requests that got a token."""
        step_ms = self.worker.begin_step()
        assert step_ms is not None
        self.now_s += step_ms / 1000
        return {output.request.request_id for output in self.worker.end_step(self.now_s)[0]}

    def take(self, prompt: int, output: int) -> None:
        """A request arrives."""
        job = self.job(prompt, output)
        self.worker.take(job.request(self.now_s), job, Belief())

    def learn(self) -> None:
        """Serve some prompts, one at a time."""
        for length in (1000, 3000, 6000):
            self.take(length, 20)
            while self.worker.scheduler.has_requests or length:
                self.step()
                length = 0


@pytest.mark.parametrize("prompt", [300, 3000, 10_000])
@pytest.mark.parametrize("num_streams", [0, 8])
@pytest.mark.parametrize("machine", COSTS)
def test_the_time_of_a_prompt_is_predicted_whatever_its_length_and_whatever_runs_beside_it(
    machine: str, num_streams: int, prompt: int
) -> None:
    watched = Watched(machine)
    watched.learn()
    for _ in range(num_streams):
        watched.take(64, 100_000)
    for _ in range(60 if num_streams else 0):
        watched.step()
    job = watched.job(prompt, 2)
    wait_s, own_s = watched.forecast.wait_s(job.request(watched.now_s))
    assert wait_s == 0.0
    watched.worker.take(job.request(watched.now_s), job, Belief())
    while str(job.number) not in watched.step():
        pass
    assert 0.5 < own_s / (watched.now_s - job.arrival_s) < 2.0


@pytest.mark.parametrize("machine", COSTS)
def test_the_wait_behind_prompts_of_several_lengths_is_predicted(machine: str) -> None:
    watched = Watched(machine)
    watched.learn()
    for length in (4000, 200, 1500):
        watched.take(length, 2)
    watched.step()
    job = watched.job(5000, 2)
    wait_s, own_s = watched.forecast.wait_s(job.request(watched.now_s))
    watched.worker.take(job.request(watched.now_s), job, Belief())
    while str(job.number) not in watched.step():
        pass
    assert 0.5 < (wait_s + own_s) / (watched.now_s - job.arrival_s) < 2.0
    assert wait_s > 0.3 * own_s
