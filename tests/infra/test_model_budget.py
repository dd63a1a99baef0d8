"""Three models with memory for two, under Poisson load: nobody is refused, and memory stays within the budget."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import READY_BOUND_S, Serve
from tests.e2e.small_model import small_model
from tests.infra.memory_cgroup import MemoryCgroup, memory_cgroup

pytestmark = pytest.mark.e2e

IS_SOAK = bool(os.environ.get("HEADRACE_SOAK"))
LOAD_S = 600.0 if IS_SOAK else 30.0
REQUESTS_PER_S = 0.5
NAMES = ("a", "b", "c")
GIB = 1 << 30
BUDGET_GB = 1.8
"""A model counts for 0.1 GiB of KV cache and 0.5 GiB to 0.7 GiB otherwise, by the copies of its weights."""


class Meter:
    """The largest memory that the processes of a cgroup have allocated."""

    def __init__(self, cgroup: MemoryCgroup) -> None:
        self.most_bytes = 0
        self._cgroup = cgroup
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            self.most_bytes = max(self.most_bytes, self._cgroup.allocated_bytes)


async def ask(http: httpx.AsyncClient, number: int, model: str) -> tuple[str, int, str, float]:
    """Model, status, text or error, and seconds of one request."""
    begun_s = time.monotonic()
    body = {"model": model, "prompt": f"Story {number % 3}:", "max_tokens": 12, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
    return model, answer.status_code, f"{number % 3} {text}", time.monotonic() - begun_s


async def poisson_load(base_url: str, seed: int) -> list[tuple[str, int, str, float]]:
    """Requests to all models at random times, and their answers."""
    rng = random.Random(seed)
    begun_s = time.monotonic()
    async with httpx.AsyncClient(base_url=base_url, timeout=10 * READY_BOUND_S) as http:
        asked = []
        while time.monotonic() - begun_s < LOAD_S:
            asked.append(asyncio.create_task(ask(http, len(asked), rng.choice(NAMES))))
            await asyncio.sleep(rng.expovariate(REQUESTS_PER_S))
        return list(await asyncio.gather(*asked))


@pytest.mark.timeout(LOAD_S + 400)
async def test_three_models_in_memory_for_two_serve_everybody_within_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    table = '[[models]]\nmodel = "{}"\nname = "{}"\non_demand = true\nkv_cache_gb = 0.1\n'
    path.write_text(f"memory_gb = {BUDGET_GB}\n" + "".join(table.format(small_model(), name) for name in NAMES))
    with memory_cgroup() as cgroup:
        serve = Serve("--models", str(path), "--port", "0")
        cgroup.procs.write_text(str(serve.pid))
        try:
            serve.until_ready()
            front_bytes = cgroup.allocated_bytes
            cgroup.limit(int(BUDGET_GB * GIB) + front_bytes + GIB // 2)
            meter = Meter(cgroup)
            with meter.running():
                answers = await poisson_load(serve.base_url, seed=7)
        finally:
            serve.end()
        num_oom_kills = cgroup.num_oom_kills
    loads = [line for line in serve.logs if " is loaded after " in line]
    durations_s = sorted(seconds for *_, seconds in answers)
    print(
        f"{len(answers)} requests, {Counter(status for _, status, *_ in answers)}; {len(loads)} loads; "
        f"median {durations_s[len(durations_s) // 2]:.1f} s, longest {durations_s[-1]:.1f} s; "
        f"memory of models at most {(meter.most_bytes - front_bytes) / GIB:.2f} GiB of {BUDGET_GB} GiB"
    )
    assert {status for _, status, *_ in answers} == {200}, [one for one in answers if one[1] != 200]
    assert len({text for *_, text, _ in answers}) == 3, "every model gives the same answers to the same prompts"
    assert len(loads) > len(NAMES), "models came and went"
    assert num_oom_kills == 0
    assert 0 < meter.most_bytes - front_bytes <= BUDGET_GB * GIB
