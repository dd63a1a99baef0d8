"""The application of Ray Serve that a fleet becomes. Needs Ray, but no cluster."""

from __future__ import annotations

import importlib.util
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.ray.settings import Fleet, Model, Scaling, SettingsError
from headrace.router.__main__ import command as router

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def deployments(application: Any) -> dict[str, Any]:
    """The deployments of an application, by name."""
    from ray.serve._private.build_app import build_app as built

    made = built(application, name="x", make_deployment_handle=lambda *_: SimpleNamespace())
    return {deployment.name: deployment for deployment in made.deployments}


def test_a_fleet_is_a_directory_gateways_and_the_workers_of_each_model() -> None:
    from headrace.ray.app import build_app

    models = (Model("x/chat", max_workers=4, scaling=Scaling(down_delay_s=60)), Model("y", name="o", min_workers=2))
    found = deployments(build_app(Fleet(models, gateways=3)))
    assert set(found) == {"fleet", "gateway", "worker-chat", "worker-o"}
    assert found["gateway"].num_replicas == 3
    assert found["worker-o"].num_replicas == 2
    scaling = found["worker-chat"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.downscale_delay_s) == (1, 4, 60)
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
    context = SimpleNamespace(
        aggregated_metrics={"workers": {"a": 1.0}, "workers_wanted": {"a": 1.0}, "queue_wait_s": {"a": 6.0}},
        target_num_replicas=1,
    )
    assert policy(context)[0] == 3


def test_a_worker_is_a_placement_group_with_a_bundle_for_each_numa_node() -> None:
    from headrace.ray.app import build_app

    found = deployments(build_app({"models": [{"model": "m", "numa_nodes": 2, "cpus": 8, "resource": "socket"}]}))
    config = found["worker-m"]._replica_config
    assert config.placement_group_bundles == [{"socket": 1.0, "CPU": 8.0}] * 2
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.resource_dict == {"CPU": 8.0, "socket": 1.0}


def test_gateways_of_one_port_are_on_different_nodes_and_others_are_replaced_before_they_stop() -> None:
    from headrace.ray.app import build_app

    one_port = deployments(build_app({"models": [{"model": "m"}], "port": 8000}))["gateway"]
    any_port = deployments(build_app({"models": [{"model": "m"}]}))["gateway"]
    assert one_port._replica_config.max_replicas_per_node == 1
    assert any_port._deployment_config.max_surge_percent == 100
    # Serve kills what takes longer than the processes' own limits.
    assert any_port._deployment_config.graceful_shutdown_timeout_s > 60 + 5


def test_a_model_may_be_without_workers_and_its_routers_hold_requests_for_it() -> None:
    from headrace.ray.app import build_app

    scaling = Scaling(down_delay_s=60)
    on_demand = Model("x/chat", min_workers=0, max_workers=2, scaling=scaling)
    found = deployments(build_app(Fleet((on_demand, Model("y")), router_args=("--cold-start", "600"))))
    config = found["worker-chat"]._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (0, 2)
    assert config.policy.get_policy()(**config.policy.policy_kwargs).least == 0
    _, worker, _ = found["worker-chat"].init_args
    assert worker.name == "chat", "routers know it by this name"
    of_gateways = found["gateway"].init_args[0]
    told = router.make_context("router", ["--listen", "127.0.0.1:1", *of_gateways.router_args]).params
    assert (told["on_demand"], told["idle_after"], told["cold_start"]) == (("chat",), 60.0, 600.0)


@pytest.mark.parametrize(
    ("of_models", "args", "told_s"),
    [
        ([{}], (), 60.0),
        ([{"max_ttft": 5}], (), 5.0),
        ([{"max_ttft": 5}, {}], (), 60.0),
        ([{"max_ttft": 5}, {"max_ttft": 300}], (), 300.0),
        ([{"max_ttft": 300}], ("--max-ttft", "7"), 7.0),
    ],
)
def test_requests_wait_at_routers_as_long_as_at_the_most_patient_workers(
    of_models: list[dict[str, Any]], args: tuple[str, ...], told_s: float
) -> None:
    from headrace.ray.app import build_app

    models = tuple(Model(f"m{number}", flags=flags) for number, flags in enumerate(of_models))
    of_gateways = deployments(build_app(Fleet(models, router_args=args)))["gateway"].init_args[0]
    told = router.make_context("router", ["--listen", "127.0.0.1:1", *of_gateways.router_args]).params
    assert told["max_ttft"] == told_s


@pytest.mark.parametrize(
    ("flag", "default"),
    [("--scaling-window", "WINDOW_S"), ("--idle-after", "IDLE_AFTER_S"), ("--max-ttft", "MAX_TTFT.default")],
)
def test_the_times_of_routers_are_known(flag: str, default: str) -> None:
    from headrace.ray import app

    (option,) = (option for option in router.params if flag in option.opts)
    assert option.default == attrgetter(default)(app)


def versions(**changed: Any) -> dict[str, str]:
    """The versions of the deployments of a fleet with some settings changed, `model_` those of its model."""
    from headrace.ray.app import build_app

    of_model = {name.removeprefix("model_"): value for name, value in changed.items() if name.startswith("model_")}
    of_fleet = {name: value for name, value in changed.items() if not name.startswith("model_")}
    found = deployments(build_app({"models": [{"model": "m", **of_model}], **of_fleet}))
    return {name: deployment._version for name, deployment in found.items()}


@pytest.mark.parametrize(
    ("changed", "replaced"),
    [
        ({}, set()),
        ({"model_max_workers": 4, "model_scaling": {"kv_pressure": 0.5}, "gateways": 3}, set()),
        ({"model_flags": {"max_num_seqs": 4}}, {"worker-m"}),
        ({"worker_drain_s": 5}, {"worker-m"}),
        ({"gateway_args": ["--alias", "a=m"]}, {"gateway"}),
        ({"model_scaling": {"down_delay_s": 20}}, {"gateway"}),  # its routers' --scaling-window
        ({"join_token_file": "/token"}, {"worker-m", "gateway"}),
    ],
)
def test_only_actors_whose_settings_have_changed_are_replaced(changed: dict[str, Any], replaced: set[str]) -> None:
    before, after = versions(), versions(**changed)
    assert {name for name in before if before[name] != after[name]} == replaced


def test_applications_of_ray_serve_llm_need_only_another_import_path() -> None:
    import headrace.ray

    config = {"model_loading_config": {"model_id": "chat"}, "deployment_config": {"num_replicas": 2}}
    found = deployments(headrace.ray.build_openai_app({"llm_configs": [config]}))
    assert found["worker-chat"].num_replicas == 2
    with pytest.raises(SettingsError, match="llm_configs must be a list"):
        headrace.ray.build_openai_app({})
