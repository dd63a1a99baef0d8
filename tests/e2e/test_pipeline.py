"""`headrace serve --pipeline 2 --tensor-parallel 2`: the last layers of a model are in another process, which has
joined, and both divide theirs among two ranks. One of the four processes dies, stops, or is slow under load.

`make test` disturbs a few times. With `python -m tests.soak stages` there is a second pipeline, whose stages are not
divided, and it is 200 times, or HEADRACE_SOAK_ROUNDS, in one run or in several (see `soak_tally`). HEADRACE_SEED
repeats the choices.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from headrace.cli.main import cli
from tests.certificates import make_certificates
from tests.e2e.groups import (
    IS_SOAK,
    NUM_ROUNDS,
    Fault,
    Group,
    Scene,
    hang_any,
    hang_last,
    joining_worker,
    kept,
    kill_any,
    kill_last,
    nothing_left,
    ranks_behind,
    served_worker,
    slow_down_any,
    stopped,
    survive,
    tally_of,
)
from tests.e2e.serving import HTTP, MODEL, Serve, alive, serving
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body
from tests.patience import patience, until
from tests.ports import free_port
from tests.worker.pipeline.stages import Stage

# A rank needs a CPU of its own.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs"),
]

NUM_RANKS = 2
NUM_PIPELINES = 2 if IS_SOAK else 1
NUM_STREAMS, MAX_TOKENS = 4 * NUM_PIPELINES, 40


class Pipelines(NamedTuple):
    """A system whose worker is the first stage of a pipeline, which others join at `joins`, and the second stage. In a
    soak there is another such worker with a stage of its own, which it names. `member` are the flags of all."""

    system: Serve
    stages: list[Stage]
    groups: list[Group]
    joins: str
    member: tuple[str, ...]

    def joining(self, directory: Path, *flags: str) -> Serve:
        """Another host that joins, on a socket in a directory."""
        where = ("--join", self.joins, "--stage-listen", f"unix:{directory}/stage.sock", "--workers", "1")
        return Serve(str(small_model()), *where, *flags)

    def stage_of(self, scene: Scene) -> Stage:
        """The second stage of the pipeline in which something happens."""
        return self.stages[self.groups.index(scene.group)]

    def freeze_stage(self, scene: Scene) -> None:
        """The second stage stands still until the worker has given it up. Neither can go on with the other then."""
        with stopped(self.stage_of(scene).process.pid):
            until(lambda: not alive(scene.processes[0]), "the worker has given the stage up", 60)

    def freeze_any(self, scene: Scene) -> None:
        """The same, or the worker stands still until the stage has given it up."""
        stage = self.stage_of(scene)
        if scene.rng.random() < 0.5:
            self.freeze_stage(scene)
            return
        starts = stage.num_starts
        with stopped(scene.processes[0]):
            until(lambda: stage.num_starts > starts, "the stage has given the worker up", 60)

    def check_stage(self, scene: Scene) -> None:
        """The process of the second stage is the same: it has started again by itself."""
        assert self.stage_of(scene).process.pid in scene.processes

    def check_death(self, scene: Scene) -> None:
        """The same where a rank of the second stage has died. A stage without ranks has died itself, and is a new
        process."""
        if len(scene.processes) > 2:
            self.check_stage(scene)
        else:
            assert self.stage_of(scene).process.pid not in scene.processes


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipelines]:
    """Stages and workers authenticate one another with certificates and a join token, and are started again. Those of
    the first pipeline are divided among ranks, whose processes are after those of their stage."""
    directory, joins = tmp_path_factory.mktemp("stages"), f"127.0.0.1:{free_port()}"
    certificates = make_certificates(directory / "tls")
    member = ("--tls-dir", str(certificates), "--join-token-file", str(certificates / "join-token"))
    divided = ("--tensor-parallel", str(NUM_RANKS))
    stages = [
        Stage(small_model(), directory, f"stage-{number}", *member, *own, listen=f"127.0.0.1:{free_port()}")
        for number, own in zip(range(NUM_PIPELINES), (("--join", joins, *divided), ()), strict=False)
    ]
    flags = (*member, "--pipeline", "2", "--execution-mode", "accuracy", "--threads", "1", "--kv-cache-gb", "0.01")
    flags += ("--stuck-after-s", f"{patience(8):.1f}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_left())
        stack.enter_context(kept([stage.process for stage in stages]))
        for stage in stages:
            stage.until_listening()
        # Requests wait: on a crowded machine a step takes a second.
        first = ("--workers", "1", "--await-stages", joins, "--max-ttft", "600", *divided)
        system = stack.enter_context(serving(*first, *flags, model=small_model()))
        groups = [Group("worker-0", lambda: served_worker(system), lambda worker: others_of(worker, stages[0]))]
        for number, stage in enumerate(stages[1:], 1):
            joined = joining_worker(system, f"worker-{number}", directory, "--stage", stage.address, *flags)
            stack.enter_context(kept([joined]))
            groups.append(Group(joined.name, lambda of=joined: of.pid, lambda _, of=stage: [of.process.pid]))  # type: ignore[misc]
        until(lambda: len(system.workers()) == NUM_PIPELINES, "all workers are there", 60)
        yield Pipelines(system, stages, groups, joins, member)
        before = stages[0].num_starts
        system.end()
        # It serves the next worker.
        stages[0].until_listening(before + 1)


def others_of(worker: int, stage: Stage) -> list[int]:
    """The processes of a pipeline besides the worker: its ranks, and the second stage with its ranks."""
    return [*ranks_behind(worker), stage.process.pid, *ranks_behind(stage.process.pid)]


def test_a_stage_that_joins_is_part_of_one_worker(pipelines: Pipelines) -> None:
    system, stage = pipelines.system, pipelines.stages[0]
    first, second = system.process_of("worker-0")["stages"]
    assert (first["address"], second["address"]) == (None, stage.address)
    assert (first["first_layer"], second["first_layer"]) == (0, first["num_layers"])
    assert all(one["compute_s"] > 0 for one in (first, second))
    assert len(pipelines.groups[0].processes()) == 2 * NUM_RANKS
    for stage_ranks in (first["ranks"], second["ranks"]):
        assert len(stage_ranks) == NUM_RANKS
        assert len({rank["cpus"] for rank in stage_ranks}) == NUM_RANKS
        assert all(rank["step_s"] > 0 for rank in stage_ranks)
    for kind in ("compute", "wait"):
        assert system.metric(f"headrace_worker_stage_{kind}_seconds_total") > 0
    told = "\n".join(system.logs)
    assert "cached prefixes are not exchanged with other workers: a block of a pipeline" in told
    assert "the stages are this worker, " in told
    assert any("joined the pipeline of worker-0 on " in line for line in stage.process.logs)


def test_a_further_host_that_joins_is_a_spare(pipelines: Pipelines, tmp_path: Path) -> None:
    spare = pipelines.joining(tmp_path, *pipelines.member)
    try:
        why = f"waiting for the worker at {pipelines.joins}: the pipeline of worker-0 on "
        until(lambda: any(why in line for line in spare.logs), "it waits for its turn")
        rows = json.loads(CliRunner().invoke(cli, ["status", "--json"]).stdout)
        (row,) = (row for row in rows if row["serve_pid"] == spare.pid)
        assert (row["role"], row["name"], row["state"], row["worker"]) == ("stage", "stage-0", "waiting", None)
        assert row["join"] == pipelines.joins
    finally:
        spare.end()
    assert spare.process.returncode == 0, spare.tail()


def test_a_host_with_another_join_token_is_refused(pipelines: Pipelines, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("fedcba9876543210")
    stranger = pipelines.joining(tmp_path, *pipelines.member[:2], "--join-token-file", str(tmp_path / "other"))
    try:
        assert stranger.wait() == 2
    finally:
        stranger.end()
    problem = f"error: --join {pipelines.joins}: the join token is missing or wrong: "
    assert stranger.logs[-1].startswith(problem), stranger.tail()


def test_cached_prefixes_are_found_and_change_nothing(pipelines: Pipelines) -> None:
    asked = {"model": MODEL, "prompt": [(11 * place) % 40_000 for place in range(200)], "max_tokens": 24}
    found = []
    for _ in range(2):
        response = HTTP.post(
            f"{pipelines.system.base_url}/v1/completions", json={**asked, "temperature": 0, "return_token_ids": True}
        )
        assert response.status_code == 200, response.text
        body = response.json()
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((cached, body["choices"][0]["token_ids"]))
    assert [cached for cached, _ in found] == [0, 192]
    assert found[0][1] == found[1][1]


@pytest.mark.timeout(300 + 90 * NUM_ROUNDS)
async def test_streams_survive_what_happens_to_a_stage(pipelines: Pipelines) -> None:
    """When a process ends or a stage is silent, the worker is another process afterwards, which waits for the stage.
    The last process is a rank of the second stage."""
    faults = [
        Fault("a death", kill_last, replaces=True, check=pipelines.check_death),
        # A stage that is not divided and stands still may count as silent before its worker counts as stuck.
        Fault("a hang", hang_last, replaces=None if IS_SOAK else False),
        Fault("silence", pipelines.freeze_stage, replaces=True, check=pipelines.check_stage),
        Fault("a slow-down", slow_down_any, replaces=False),
    ]
    of_any = [
        Fault("any death", kill_any, replaces=True),
        Fault("any silence", pipelines.freeze_any, replaces=True),
        Fault("any hang", hang_any),
    ]
    faults += of_any if IS_SOAK else []
    asked = [chat_body(number, MAX_TOKENS, temperature=0.9, top_p=0.95, seed=7) for number in range(NUM_STREAMS)]
    rounds = NUM_ROUNDS or len(faults)
    await survive(pipelines.system, pipelines.groups, faults, asked, rounds, tally_of("stages"))
