"""Settings of a fleet on Ray: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.ray.llm_config import fleet_of_llm_configs
from headrace.ray.settings import Fleet, Model, SettingsError, fleet_of, name_of


def test_a_mapping_of_yaml_becomes_a_fleet() -> None:
    fleet = fleet_of(
        {
            "models": [{"model": "smollm2-135m", "max_workers": 4, "flags": {"kv_cache_gb": 8, "max_num_seqs": 16}}],
            "gateways": 2,
            "gateway_args": ["--api-keys", "/keys"],
        }
    )
    assert fleet == Fleet(
        models=(Model("smollm2-135m", max_workers=4, flags={"kv_cache_gb": 8, "max_num_seqs": 16}),),
        gateways=2,
        gateway_args=("--api-keys", "/keys"),
    )
    assert fleet.models[0].most_workers == 4
    assert name_of(Model("/models/some-model/")) == "some-model"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "missing required field `models`"),
        ({"models": []}, "models names no model"),
        ({"models": [{"model": "a", "workers": 2}]}, r"unknown field `workers` - at `\$.models\[0\]`"),
        ({"models": [{"model": "a"}], "gateways": 0}, "gateways is 0"),
        ({"models": [{"model": "a"}], "port": 70000}, "port is 70000"),
        ({"models": [{"model": "a"}], "worker_drain_s": -1}, "worker_drain_s is -1"),
        ({"models": [{"model": "a", "min_workers": 3, "max_workers": 2}]}, r"models\[0\].max_workers is 2, less than"),
        ({"models": [{"model": "a", "min_workers": -1}]}, r"models\[0\].min_workers is -1"),
        ({"models": [{"model": "a", "min_workers": 0}]}, r"models\[0\].max_workers is missing; without it"),
        ({"models": [{"model": "a", "min_workers": 0, "max_workers": 0}]}, r"models\[0\].max_workers is 0; it must"),
        ({"models": [{"model": "a", "numa_nodes": 0}]}, r"models\[0\].numa_nodes is 0"),
        ({"models": [{"model": "a"}, {"model": "x/a"}]}, "models has 'a' twice"),
        ({"models": [{"model": "a", "scaling": {"kv_pressure": 0}}]}, r"models\[0\].scaling.kv_pressure is 0"),
        (
            {"models": [{"model": "a", "flags": {"kv_cache_gbs": 8}}]},
            r"models\[0\].flags: workers have no flag 'kv_cache_gbs'; did you mean 'kv_cache_gb'",
        ),
        ({"models": [{"model": "a", "flags": {"kv_cache_gb": -1}}]}, r"models\[0\].flags.kv_cache_gb: .*-1"),
        ({"models": [{"model": "a", "flags": {"max_num_seqs": "many"}}]}, r"models\[0\].flags.max_num_seqs: 'many'"),
        ({"models": [{"model": "a", "flags": {"tensor_parallel": "auto"}}]}, "flags.tensor_parallel: give a number"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fleet_of(settings)


def test_an_application_of_ray_serve_llm_is_taken() -> None:
    fleet = fleet_of_llm_configs(
        {
            "llm_configs": [
                {
                    "model_loading_config": {"model_id": "chat", "model_source": "smollm2-135m"},
                    "deployment_config": {
                        "autoscaling_config": {"min_replicas": 2, "max_replicas": 6, "downscale_delay_s": 60}
                    },
                    "engine_kwargs": {"max_model_len": 4096, "max_num_seqs": 8, "tensor_parallel_size": 2},
                    "accelerator_type": None,
                    "llm_engine": "vLLM",
                }
            ],
            "gateways": 2,
        }
    )
    (model,) = fleet.models
    assert (model.model, model.name, model.min_workers, model.max_workers) == ("smollm2-135m", "chat", 2, 6)
    assert model.flags == {"max_context_tokens": 4096, "max_num_seqs": 8, "tensor_parallel": 2}
    assert model.num_places == 2
    assert model.scaling.down_delay_s == 60
    assert fleet.gateways == 2


def test_a_fixed_number_of_replicas_does_not_scale() -> None:
    config = {"model_loading_config": {"model_id": "m"}, "deployment_config": {"num_replicas": 3}}
    (model,) = fleet_of_llm_configs({"llm_configs": [config]}).models
    assert (model.model, model.min_workers, model.most_workers) == ("m", 3, 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"llm_configs\[0\].model_loading_config.model_id is missing"),
        ({"model_loading_config": {"model_id": "m"}, "lora_config": {"x": 1}}, r"llm_configs\[0\].lora_config is not"),
        (
            {"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"quantization": "awq"}},
            r"engine_kwargs.quantization is no flag of headrace's workers; there are .*kv_cache_gb",
        ),
        (
            {"model_loading_config": {"model_id": "m"}, "deployment_config": {"user_config": {}}},
            "deployment_config.user_config is not taken",
        ),
        ({"model_loading_config": {"model_id": "m", "model_source": {"bucket_uri": "s3://b"}}}, "model_source must be"),
    ],
)
def test_what_changes_the_answer_or_the_fleet_and_is_not_known_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fleet_of_llm_configs({"llm_configs": [config]})


def test_what_has_no_meaning_on_cpus_is_said_once_and_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ray.serve")
    config = {"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"gpu_memory_utilization": 0.9}}
    (model,) = fleet_of_llm_configs({"llm_configs": [config]}).models
    assert model.flags == {}
    assert caplog.text.count("engine_kwargs.gpu_memory_utilization (0.9) is not applied") == 1
