"""`headrace serve --join` before it starts a process. tests/e2e/test_pipeline.py runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.hosting.settings import ModelOptions, ModelSettings
from headrace.cli.main import cli
from headrace.cli.serving import joining
from headrace.cli.serving import serve as serving
from headrace.cli.serving.model_plans import with_usual_workers
from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import SecurityFiles, StageOptions, stage_specs
from headrace.cli.serving.topology import Core, Node, Topology
from headrace.common.host_memory import GIB
from headrace.worker.__main__ import config_of_arguments
from headrace.worker.kv.exclusions import refuse_flags

TWO_PLACES = (WorkerPlace(0, (0, 1), 2), WorkerPlace(1, (2, 3), 2))


def test_each_numa_node_is_a_stage_at_a_port_of_its_own() -> None:
    files = SecurityFiles(tls_dir=Path("/tls"), join_token_file=Path("/token"))
    options = StageOptions("m", Path("/models/m"), "127.0.0.1:50070", "0.0.0.0:50071", log_level="debug", files=files)
    first, second = stage_specs(options, TWO_PLACES, "python")
    assert [(spec.name, spec.role, spec.cpus) for spec in (first, second)] == [
        ("stage-0", "stage", (0, 1)),
        ("stage-1", "stage", (2, 3)),
    ]
    assert first.argv[:3] == ("python", "-m", "headrace.worker")
    assert first.argv[-6:] == ("--log-level", "debug", "--tls-dir", "/tls", "--join-token-file", "/token")
    configs = [config_of_arguments(spec.argv[3:-6]) for spec in (first, second)]
    assert all(config.serves_stage and config.join == "127.0.0.1:50070" for config in configs)
    assert [config.advertise for config in configs] == ["127.0.0.1:50071", "127.0.0.1:50072"]
    assert [config.memory_node for config in configs] == [0, 1]
    assert [config.kv_cache_share for config in configs] == [0.2, 0.2], "of the memory of the host"
    assert len({config.worker_id for config in configs}) == 2


def test_a_socket_of_a_further_stage_has_a_number() -> None:
    options = StageOptions("m", Path("/models/m"), "unix:/a", "unix:/b", kv_cache_gb=3.0)
    first, second = stage_specs(options, TWO_PLACES, "python")
    assert [first.address, second.address] == ["unix:/b", "unix:/b.1"]
    assert config_of_arguments(first.argv[3:]).kv_cache_bytes == 3 * GIB


def test_several_numa_nodes_are_a_stage_that_divides_its_layers() -> None:
    options = StageOptions("m", Path("/models/m"), "127.0.0.1:50070", "0.0.0.0:50071")
    (spec,) = stage_specs(options, [WorkerPlace(0, (0, 1, 2, 3), 2, 2, (1,))], "python")
    assert spec.cpus == (0, 1, 2, 3)
    config = config_of_arguments(spec.argv[3:])
    assert (config.tensor_parallel, config.threads, config.memory_node) == (2, 2, None)
    refuse_flags(config)


def test_the_plan_of_a_stage_says_among_how_many_ranks_it_divides_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = tuple(Core((cpu,), 0, cpu // 2, cpu) for cpu in range(4))
    machine = Topology(cores, tuple(Node(number, GIB, {}) for number in range(2)), None)
    monkeypatch.setattr(joining, "read_topology", lambda: machine)
    result = CliRunner().invoke(cli, ["serve", "m", "--join", "a:1", "--dry-run", "--tensor-parallel", "2"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "stage-0  node 0-1  CPUs 0-3  computes with 2 in each of 2 ranks\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("m", "--join", "a:1", "--tensor-parallel", "auto"), "which of them are for this host; give a number"),
        (("m", "--join", "a:1", "--port", "9"), "--port is for the server that has the first stage; leave it out"),
        (("m", "--join", "a:1", "--pipeline", "2"), "--pipeline is for the server that has the first stage"),
        (("m", "n", "--join", "a:1"), "--join needs one MODEL, the same as the server that has the first stage"),
        (("--join", "a:1"), "--join needs one MODEL"),
        (("m", "--stage-listen", "a:1"), "--stage-listen is for a stage; name with --join where it joins"),
    ],
)
def test_flags_that_a_stage_has_no_use_for_are_refused(arguments: tuple[str, ...], problem: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code == 2
    assert problem in result.stderr


def test_settings_of_servers_in_the_environment_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SERVE_PORT", "9")
    result = CliRunner().invoke(cli, ["serve", "m", "--join", "a:1", "--dry-run", "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("stage-0  node ")


def two_nodes() -> Topology:
    """A machine with two nodes of two cores each."""
    cores = tuple(Core((cpu,), 0, cpu // 2, cpu) for cpu in range(4))
    return Topology(cores, (Node(0, 8 * GIB, {}), Node(1, 8 * GIB, {})), None)


def test_a_pipeline_has_one_worker_and_says_how_other_nodes_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "read_topology", two_nodes)

    def planned(*flags: str) -> list[str]:
        result = CliRunner().invoke(cli, ["serve", "m", "--dry-run", *flags])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    one = "worker-0  node 0  CPUs 0-1  computes with 2"
    assert planned() == [one, "worker-1  node 1  CPUs 2-3  computes with 2"]
    assert planned("--pipeline", "2", "--workers", "1") == planned("--pipeline", "2", "--stage", "b:1") == [one]
    told, where = planned("--pipeline", "2")
    assert where == one
    assert "NUMA node 1 computes nothing yet; divide the worker with --tensor-parallel, or for a further stage" in told
    assert " there: taskset --cpu-list 2-3 headrace" in told
    assert told.endswith(" headrace serve MODEL --join 127.0.0.1:50070")
    assert planned("--pipeline", "2", "--await-stages", "10.0.0.5:7")[0].endswith("--join 10.0.0.5:7")
    result = CliRunner().invoke(cli, ["serve", "m", "--dry-run", "--pipeline", "2", "--workers", "2"])
    assert result.exit_code == 2
    assert "--pipeline is for a model with one worker, because a stage computes for one worker at a" in result.stderr
    assert "; leave out --workers" in result.stderr


def test_the_usual_number_of_workers_is_that_of_the_model() -> None:
    model = ModelSettings("m")
    assert with_usual_workers(model, {"pipeline": None}) == model
    assert with_usual_workers(model, {"pipeline": 2}).workers == 1
    own = replace(model, options=ModelOptions(worker={"pipeline": 2}))
    assert with_usual_workers(own, {}).workers == 1
    assert with_usual_workers(replace(own, workers=3), {}).workers == 3
