"""Three models with memory for two, under Poisson load: nobody is refused, and memory stays within the budget.

`python -m tests.soak models` takes ten minutes instead of 20 seconds. The models then have different weights,
workers are killed while they load and while they serve, an alias is split 90 to 10, and one model cannot be loaded.
HEADRACE_SEED repeats a run's choices.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from headrace.cli.models.model_cache import model_directory
from tests.e2e.serving import MODEL, READY_BOUND_S, Serve, headrace
from tests.e2e.small_model import LAYERS, small_model
from tests.infra.few_layers import write_few_layers
from tests.infra.memory_cgroup import MemoryCgroup, memory_cgroup
from tests.patience import patience

pytestmark = pytest.mark.e2e

IS_SOAK = bool(os.environ.get("HEADRACE_SOAK"))
LOAD_S = 600.0 if IS_SOAK else 20.0
REQUESTS_PER_S = 0.5
SEED = int(os.environ.get("HEADRACE_SEED", "7"))
NAMES = ("a", "b", "c")
SPLIT, BAD = "split", "bad"
SHARE = 0.1
"""The share of the second model, `b`, in the alias."""
# A load that is disturbed three times fails, so disturbances are rarer than loads are long.
KILL_EVERY_S = 45.0
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


class Answer(NamedTuple):
    """One request: the name it asked for, the status, the model that answered, prompt and text or error, seconds."""

    asked: str
    status: int
    model: str
    text: str
    took_s: float


async def ask(http: httpx.AsyncClient, number: int, name: str) -> Answer:
    begun_s = time.monotonic()
    body = {"model": name, "prompt": f"Story {number % 3}:", "max_tokens": 12, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    took_s = time.monotonic() - begun_s
    if answer.status_code != 200:
        return Answer(name, answer.status_code, "", answer.text, took_s)
    found = answer.json()
    return Answer(name, 200, found["model"], f"{number % 3} {found['choices'][0]['text']}", took_s)


async def poisson_load(base_url: str, names: list[str], rng: random.Random) -> list[Answer]:
    """Requests to these names at random times, and their answers."""
    begun_s = time.monotonic()
    async with httpx.AsyncClient(base_url=base_url, timeout=patience(10 * READY_BOUND_S)) as http:
        asked = []
        while time.monotonic() - begun_s < LOAD_S:
            asked.append(asyncio.create_task(ask(http, len(asked), rng.choice(names))))
            await asyncio.sleep(rng.expovariate(REQUESTS_PER_S))
        answers = list(await asyncio.gather(*asked))
        # On a slow machine there were few requests. One of these is for a model that has left by now.
        return answers + [await ask(http, len(answers) + number, name) for number, name in enumerate(NAMES)]


async def kill_workers(serve: Serve, rng: random.Random, killed: Counter[str]) -> None:
    """Kill a worker now and then, one that is loading if there is one. Runs until it is cancelled.

    No load is killed twice in a row: a model whose worker ends three times while it loads counts as one that cannot be
    loaded."""
    spared = ""
    while True:
        await asyncio.sleep(KILL_EVERY_S / 2)
        for _ in range(round(KILL_EVERY_S)):
            rows = await asyncio.to_thread(serve.status)
            workers = [row for row in rows if row["role"] == "worker" and row["pid"] is not None]
            loading = [row for row in workers if row["model"] is None and row["name"] != spared]
            if loading or rng.random() < 0.05:
                break
        serving = [row for row in workers if row["model"] is not None]
        if loading or serving:
            row = rng.choice(loading or serving)
            spared = row["name"] if loading else ""
            with suppress(ProcessLookupError):  # its model may just have left
                os.kill(row["pid"], signal.SIGKILL)
                killed["loading" if loading else "serving"] += 1


def model_paths(directory: Path) -> dict[str, Path]:
    """Name -> directory of each model. In a soak each has other weights, and one is damaged."""
    paths = dict.fromkeys(NAMES, small_model())
    if IS_SOAK:
        for name, num_layers in zip(NAMES[1:], (LAYERS - 1, LAYERS + 1), strict=True):
            paths[name] = directory / name
            write_few_layers(model_directory(MODEL), paths[name], num_layers)
        paths[BAD] = shutil.copytree(small_model(), directory / BAD, ignore=shutil.ignore_patterns("headrace.json"))
        weights = paths[BAD] / "openvino_model.bin"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return paths


async def disturbed_load(serve: Serve) -> tuple[list[Answer], Counter[str]]:
    """The answers to the load, and how many workers were killed in which state."""
    rng, killed = random.Random(SEED), Counter[str]()
    if not IS_SOAK:
        return await poisson_load(serve.base_url, list(NAMES), rng), killed
    alias = headrace("models", "alias", SPLIT, f"a:{round(100 * (1 - SHARE))},b:{round(100 * SHARE)}", "--port",
                     str(serve.port))  # fmt: skip
    assert alias.returncode == 0, alias.stderr
    killing = asyncio.create_task(kill_workers(serve, random.Random(SEED + 1), killed))
    try:
        # A twentieth of the requests is for the model that cannot be loaded.
        return await poisson_load(serve.base_url, [*NAMES, *NAMES, SPLIT] * 3 + [BAD], rng), killed
    finally:
        killing.cancel()


@pytest.mark.timeout(LOAD_S + 400)
async def test_three_models_in_memory_for_two_serve_everybody_within_the_budget(tmp_path: Path) -> None:
    paths = model_paths(tmp_path)
    path = tmp_path / "models.toml"
    table = '[[models]]\nmodel = "{}"\nname = "{}"\non_demand = true\nkv_cache_gb = 0.1\n'
    path.write_text(f"memory_gb = {BUDGET_GB}\n" + "".join(table.format(where, name) for name, where in paths.items()))
    with memory_cgroup() as cgroup:
        # Answers that were resumed after a kill have the same texts in this mode only.
        serve = Serve("--models", str(path), "--port", "0", "--execution-mode", "accuracy")
        cgroup.procs.write_text(str(serve.pid))
        try:
            serve.until_ready()
            front_bytes = cgroup.allocated_bytes
            cgroup.limit(int(BUDGET_GB * GIB) + front_bytes + GIB // 2)
            meter = Meter(cgroup)
            with meter.running():
                answers, killed = await disturbed_load(serve)
        finally:
            serve.end()
        num_oom_kills = cgroup.num_oom_kills
    loads = [line for line in serve.logs if " is loaded after " in line]
    good, bad = ([one for one in answers if (one.asked == BAD) is is_bad] for is_bad in (False, True))
    durations_s = sorted(one.took_s for one in good)
    print(
        f"HEADRACE_SEED={SEED}: {len(answers)} requests, {Counter((one.asked, one.status) for one in answers)}; "
        f"{len(loads)} loads; killed {dict(killed)}; "
        f"median {durations_s[len(durations_s) // 2]:.1f} s, longest {durations_s[-1]:.1f} s; "
        f"memory of models at most {(meter.most_bytes - front_bytes) / GIB:.2f} GiB of {BUDGET_GB} GiB"
    )
    assert {one.status for one in good} == {200}, [one for one in good if one.status != 200]
    assert all(one.status == 503 and "cannot be loaded" in one.text for one in bad), bad
    assert all(one.model == one.asked for one in good if one.asked != SPLIT)
    # Each model always gives the same answer to a prompt, whatever became of the worker that began it.
    texts = {(one.model, one.text) for one in good}
    assert max(Counter(model for model, _ in texts).values()) <= 3, sorted(texts)
    assert len({one.text for one in good}) == 3 * (len(NAMES) if IS_SOAK else 1), "weights differ in a soak only"
    assert len(loads) > len(NAMES), "models came and went"
    assert num_oom_kills == 0
    assert 0 < meter.most_bytes - front_bytes <= BUDGET_GB * GIB
