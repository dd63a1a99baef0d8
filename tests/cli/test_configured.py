"""The models of `headrace serve --config` when their file is read again, with tiny programs in place of workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.hosting.planner import State
from headrace.cli.hosting.settings import ModelSettings
from headrace.cli.serving.configured import ConfiguredModels, ModelsFile, Reloaded
from headrace.cli.serving.host import NoSuchModelError
from headrace.cli.serving.host_calls import message_of
from headrace.cli.serving.plan import ModelPlan
from headrace.common.commands import CommandError
from tests.cli import ovms_files
from tests.cli.ovms_files import llm_graph
from tests.cli.test_host import ALL, BOUND_S, GOOD, PLACE, REFUSING, System, hosting
from tests.patience import patience


class Configured:
    """A host whose models are those of a file that the test writes."""

    def __init__(self, system: System, config: Path) -> None:
        self.system = system
        self.config = config
        self.planned: list[str] = []
        self.lines: list[str] = []
        self.file = ModelsFile(config, ModelSettings("", threads=2))
        self.file.settings()
        self.models = ConfiguredModels(self.file, system.host, self._plan, self.lines.append)

    def _plan(self, model: ModelSettings, first: int) -> ModelPlan:
        assert model.name is not None
        if model.options.worker.get("max_num_seqs") == 13:
            raise CommandError("it does not fit")
        self.planned.append(model.name)
        return ModelPlan(model.name, Path(model.model), (PLACE,), first, options=model.options, rules=model.rules)

    def write(self, *names: str, **more: Any) -> None:
        entries = [{"name": name, "base_path": name} for name in names]
        self.config.write_text(json.dumps({"mediapipe_config_list": entries, **more}))

    def graph(self, name: str, options: str = "") -> None:
        ovms_files.model(self.config.parent / name)
        (self.config.parent / name / "graph.pbtxt").write_text(llm_graph(f'models_path: "./" {options}'))

    async def reload(self) -> Reloaded:
        return await asyncio.wait_for(self.models.reload(), patience(BOUND_S))


@asynccontextmanager
async def configured(tmp_path: Path, **programs: str) -> AsyncIterator[Configured]:
    """A host with the models `a` and `b`, and programs for further ones."""
    config = ovms_files.repository(tmp_path, {"a": llm_graph(), "b": llm_graph()})
    async with hosting(later=tuple(programs), a=GOOD, b=GOOD, **programs) as system:
        system.fleet.ready = ALL
        await system.until_state("a", State.LOADED)
        await system.until_state("b", State.LOADED)
        yield Configured(system, config)


async def test_an_unchanged_file_changes_nothing(tmp_path: Path) -> None:
    async with configured(tmp_path) as made:
        pids = [model.processes[0].pid for model in made.system.host.models.values()]
        assert await made.reload() == Reloaded(has_changed=False)
        made.config.write_text(made.config.read_text() + "\n")
        assert await made.reload() == Reloaded(has_changed=False)
        assert [model.processes[0].pid for model in made.system.host.models.values()] == pids


async def test_new_models_are_loaded_and_removed_ones_unloaded_after_their_requests(tmp_path: Path) -> None:
    async with configured(tmp_path, c=GOOD) as made:
        made.graph("c")
        made.write("b", "c")
        made.system.fleet.busy = frozenset({"worker-0"})
        reloading = asyncio.create_task(made.reload())
        await made.system.until(lambda: "worker-0" in made.system.fleet.drained)
        assert not reloading.done()
        made.system.fleet.busy = frozenset()
        assert await reloading == Reloaded(has_changed=True)
        assert made.system.host.models.keys() == {"b", "c"}
        assert made.system.state("c") is State.LOADED
        with pytest.raises(NoSuchModelError):
            await made.system.host.load("a")
        assert made.lines == [f"a is unloaded: {made.config} does not name it any more"]


async def test_a_changed_graph_replaces_its_model_and_changed_limits_do_not(tmp_path: Path) -> None:
    async with configured(tmp_path) as made:
        pid = made.system.host.models["b"].processes[0].pid
        made.graph("a", "max_num_seqs: 7")
        made.graph("b", 'max_tokens_limit: 9 tool_parser: "hermes3"')
        assert await made.reload() == Reloaded(has_changed=True)
        assert made.planned == ["a"]
        assert made.system.host.models["a"].plan.options.worker["max_num_seqs"] == 7
        assert made.system.host.models["b"].processes[0].pid == pid
        rules = message_of(made.system.host.models["b"]).rules
        assert (rules.max_tokens_limit, rules.tool_parser) == (9, "hermes")
        assert await made.reload() == Reloaded(has_changed=False)


async def test_a_file_that_is_none_changes_nothing(tmp_path: Path) -> None:
    async with configured(tmp_path) as made:
        made.config.write_text("{")
        with pytest.raises(CommandError, match="is not JSON"):
            await made.reload()
        assert made.system.host.models.keys() == {"a", "b"}


async def test_models_with_wrong_settings_are_told_and_stay_as_they_are(tmp_path: Path) -> None:
    async with configured(tmp_path, c=REFUSING, d=GOOD) as made:
        made.graph("a", 'device: "GPU"')
        made.graph("b", "max_num_seqs: 13")
        made.graph("c")
        made.write("a", "b", "c", "none")
        made.system.fleet.ready = frozenset({"worker-0", "worker-1"})
        done = await made.reload()
        assert done.has_changed
        problems = dict(problem.split(": ", 1) for problem in done.problems)
        assert problems["a"].startswith("device GPU is not supported")
        assert problems["none"].startswith("there is no graph")
        assert (problems["b"], problems["c"]) == ("it does not fit", "the weights are damaged")
        assert [made.system.state(name) for name in "abc"] == [State.LOADED, State.LOADED, State.FAILED]
        assert sum("device GPU is not supported" in line for line in made.lines) == 1
        await made.reload()
        assert sum("device GPU is not supported" in line for line in made.lines) == 1, "it is said once"
        assert made.system.host.models["c"].num_failures == 2, "each reload tries again"
        assert any(line == "not served: b: it does not fit" for line in made.lines)
        made.graph("a")
        made.graph("b")
        made.graph("d")
        made.write("a", "b", "d")
        made.system.fleet.ready = ALL
        assert await made.reload() == Reloaded(has_changed=True)
        assert made.system.host.models.keys() == {"a", "b", "d"}


async def test_an_operators_own_models_are_not_the_files(tmp_path: Path) -> None:
    async with configured(tmp_path, mine=GOOD) as made:
        await made.system.host.add("mine", lambda first: ModelPlan("mine", Path("/"), (PLACE,), first))
        await made.system.until_state("mine", State.LOADED)
        made.write("b")
        assert (await made.reload()).has_changed
        assert made.system.host.models.keys() == {"b", "mine"}


async def test_the_file_is_followed(tmp_path: Path) -> None:
    async with configured(tmp_path, c=GOOD) as made:
        made.file.poll_s = 0.01
        following = asyncio.create_task(made.models.follow())
        try:
            await asyncio.sleep(0)
            made.config.write_text("{")
            await made.system.until(lambda: any("the configuration stays as it was" in line for line in made.lines))
            made.graph("c")
            made.write("a", "b", "c")
            await made.system.until(lambda: "c" in made.system.host.models)
            made.config.unlink()
            await made.system.until_state("c", State.LOADED)
            assert made.system.host.models.keys() == {"a", "b", "c"}
            assert not following.done()
        finally:
            following.cancel()


def test_flags_of_serve_are_defaults_of_each_model(tmp_path: Path) -> None:
    config = ovms_files.repository(
        tmp_path,
        {"a": llm_graph(), "b": llm_graph('models_path: "." plugin_config: \'{"INFERENCE_NUM_THREADS": 5}\'')},
    )
    settings, lines = ModelsFile(config, ModelSettings("", threads=3, workers=2, on_demand=True, idle_s=9)).settings()
    assert [(one.threads, one.workers, one.on_demand, one.idle_s) for one in settings.models] == [
        (3, 2, True, 9),
        (5, 2, True, 9),
    ]
    assert lines == []


def test_a_file_without_a_model_that_can_be_served_is_refused_at_the_start(tmp_path: Path) -> None:
    config = ovms_files.repository(tmp_path, {"a": llm_graph('models_path: "." device: "GPU"')})
    with pytest.raises(CommandError, match="has no model that can be served: a: device GPU is not supported"):
        ModelsFile(config, ModelSettings("")).settings()
    config.write_text('{"model_config_list": []}')
    with pytest.raises(CommandError, match="has no model that can be served: it names none"):
        ModelsFile(config, ModelSettings("")).settings()
