"""Simulates one worker and records when each request gets each of its tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protos.inference_pb2 import Belief
from headrace.sim.trace import Job
from headrace.sim.worker import SimulatedWorker, WorkerSettings


class OneWorker:
    """A worker with its own clock, which starts at 0."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.now_s = 0.0
        self.worker = SimulatedWorker(settings, lambda: self.now_s)

    def run(self, jobs: Sequence[Job]) -> list[list[float]]:
        """Serve jobs, which are numbered from 0 in order of arrival. Returns each job's token times in seconds."""
        worker = self.worker
        token_s: list[list[float]] = [[] for _ in jobs]
        coming = list(reversed(jobs))
        while coming or worker.scheduler.has_requests:
            while coming and coming[-1].arrival_s <= self.now_s:
                job = coming.pop()
                worker.take(job.request(job.arrival_s), job, Belief())
            step_ms = worker.begin_step()
            if step_ms is None:
                self.now_s = coming[-1].arrival_s
                continue
            self.now_s += step_ms / 1000
            for output in worker.end_step(self.now_s)[0]:
                token_s[int(output.request.request_id)] += [self.now_s] * len(output.token_ids)
        return token_s
