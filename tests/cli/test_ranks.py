"""What `--tensor-parallel auto` chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from headrace.bench import calibration as files
from headrace.bench.calibration import this_host
from headrace.cli.hosting.settings import ModelOptions, ModelSettings
from headrace.cli.main import cli
from headrace.cli.serving import ranks as choosing
from headrace.cli.serving.model_plans import places_of
from headrace.cli.serving.ranks import Ranks, chosen, describe_limits, most_weights
from headrace.cli.serving.topology import Core, Node, Topology
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB
from tests.plan.calibrations import calibration


def machine(num_nodes: int, gib: int = 32) -> Topology:
    """A machine whose nodes have four cores each and so much memory."""
    cores = tuple(Core((cpu,), 0, cpu // 4, cpu) for cpu in range(4 * num_nodes))
    nodes = tuple(Node(number, gib * GIB, {}) for number in range(num_nodes))
    return Topology(cores, nodes, None)


def test_a_model_that_fits_into_a_node_stays_whole() -> None:
    assert chosen(machine(2), 4 * GIB).num_ranks == 1
    assert "most throughput" in chosen(machine(2), 4 * GIB).why


def test_one_node_leaves_no_choice() -> None:
    assert chosen(machine(1), 400 * GIB, token_ms=500, target_ms=100) == (1, "this machine has one NUMA node")


@pytest.mark.parametrize(
    ("num_nodes", "weights_gib", "expected"), [(2, 20, 2), (4, 20, 2), (4, 40, 4), (6, 20, 2), (6, 30, 3), (3, 20, 3)]
)
def test_a_model_larger_than_a_node_gets_as_few_nodes_as_hold_it(
    num_nodes: int, weights_gib: int, expected: int
) -> None:
    found = chosen(machine(num_nodes), weights_gib * GIB)
    assert found.num_ranks == expected
    assert f"{weights_gib}.0 GiB" in found.why


def test_adapters_take_a_second_copy_of_the_weights() -> None:
    assert chosen(machine(4), 12 * GIB).num_ranks == 1
    found = chosen(machine(4), 12 * GIB, has_adapters=True)
    assert found.num_ranks == chosen(machine(4), 24 * GIB).num_ranks == 2
    assert found.why.startswith("its weights take 24.0 GiB with the second copy for adapters, and a NUMA node has room")


def test_a_model_larger_than_all_nodes_is_refused_with_the_remedy() -> None:
    with pytest.raises(CommandError, match="choose a smaller model or quantisation, or give a number"):
        chosen(machine(2), 100 * GIB)


@pytest.mark.parametrize(
    ("token_ms", "target_ms", "expected"), [(90, 100, 1), (150, 100, 2), (250, 100, 4), (900, 100, 4), (None, 100, 1)]
)
def test_a_slow_model_gets_as_many_nodes_as_reach_the_target(
    token_ms: float | None, target_ms: float, expected: int
) -> None:
    assert chosen(machine(4), GIB, token_ms=token_ms, target_ms=target_ms).num_ranks == expected
    assert chosen(machine(4), GIB, token_ms=token_ms).num_ranks == 1


def test_the_limits_are_those_of_the_choice() -> None:
    for number, most in most_weights(machine(4)).items():
        assert chosen(machine(4), most).num_ranks == number
    assert describe_limits(machine(2, 64)).startswith("1 rank up to ")
    assert ", 2 ranks up to " in describe_limits(machine(2, 64))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as a model with a few weights, and a cache without calibrations."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "openvino_model.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(choosing, "find_model", lambda model, *, offline: (directory, "m"))
    return directory


def test_a_calibration_of_this_machine_says_how_long_a_token_takes(model: Path) -> None:
    told: list[str] = []
    ranks = Ranks("auto", 0.5, tell=told.append)
    asked = ModelSettings(str(model))
    assert ranks.of(asked, machine(2)) == 1
    path = files.usual_path("m")
    path.parent.mkdir(parents=True)
    here = calibration(workers=2)
    here = files_with(here, cpu=this_host().cpu)
    path.write_bytes(files.encoded(here))
    assert ranks.of(asked, machine(2)) == 2
    assert told[0].startswith("m: --tensor-parallel 1, because it fits into a NUMA node")
    assert "as calibrated, and --target-tpot-ms is 0.5" in told[1]
    path.write_bytes(files.encoded(files_with(here, cpu="another")))
    assert ranks.of(asked, machine(2)) == 1


def test_a_stage_of_a_pipeline_has_its_part_of_the_weights(model: Path) -> None:
    weights, settings = model / "openvino_model.bin", ModelSettings(str(model))
    with weights.open("wb") as file:
        file.truncate(20 * GIB)
    assert Ranks("auto").of(settings, machine(2)) == 2
    assert Ranks("auto", pipeline=2).of(settings, machine(2)) == 1
    own = replace(settings, options=replace(settings.options, worker={"pipeline": 2}))
    assert Ranks("auto").of(own, machine(2)) == 1


@pytest.mark.parametrize(
    ("of_all", "changed"),
    [
        (True, {}),
        (False, {"adapters": ("a=b",)}),
        (False, {"max_adapters": 2}),
        (False, {"options": ModelOptions(worker={"max_adapters": 2})}),
    ],
)
def test_whoever_asks_for_adapters_they_are_counted(model: Path, of_all: bool, changed: dict[str, Any]) -> None:
    most = most_weights(machine(2))[1]
    with (model / "openvino_model.bin").open("wb") as file:
        file.truncate(most)
    asked = ModelSettings(str(model))
    assert Ranks("auto").of(asked, machine(2)) == 1
    with pytest.raises(CommandError, match="with the second copy for adapters, and all NUMA nodes"):
        Ranks("auto", has_adapters=of_all).of(replace(asked, **changed), machine(2))


def files_with(found: files.Calibration, *, cpu: str) -> files.Calibration:
    """The calibration of another CPU."""
    return msgspec.structs.replace(found, host=msgspec.structs.replace(found.host, cpu=cpu))


def test_a_model_of_its_own_number_keeps_it(model: Path) -> None:
    settings = ModelSettings(str(model))
    own = replace(settings, options=replace(settings.options, worker={"tensor_parallel": 2}))
    assert Ranks("auto").of(own, machine(2)) == 2
    one, two = places_of(machine(4), [replace(own, cores=8), replace(settings, cores=8)], Ranks("auto"))
    assert [place.num_ranks for place in one] == [2]
    assert [place.num_ranks for place in two] == [1, 1]


def test_topology_says_what_auto_means_here() -> None:
    done = CliRunner().invoke(cli, ["topology", "--tensor-parallel", "auto"])
    assert done.exit_code == 0, done.output
    assert "--tensor-parallel auto chooses by the model's weights: 1 rank up to " in done.output
    wrong = CliRunner().invoke(cli, ["topology", "--tensor-parallel", "most"])
    assert wrong.exit_code == 2
