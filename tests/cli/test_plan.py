"""The processes of a host and their arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from headrace.cli.hosting.settings import ModelOptions
from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import ModelPlan, ProcessSpec, ServeOptions, base_url, front_specs, worker_specs
from headrace.cli.serving.serve import serve
from headrace.common.worker_flags import TENSOR_PARALLEL, WORKER_FLAGS, WorkerFlag
from headrace.worker.__main__ import command as worker_command

OPTIONS = ServeOptions(
    host="127.0.0.1",
    port=8000,
    grpc_port=8001,
    socket_directory=Path("/run/h/8000"),
)
ONE_PLACE = (WorkerPlace(0, (0, 1, 2, 3), 4),)
TWO_PLACES = (WorkerPlace(0, (0, 1), 2), WorkerPlace(1, (2, 3), 2))


def with_flags(options: ServeOptions = OPTIONS, **worker: Any) -> ServeOptions:
    """The options with these flags for workers."""
    return replace(options, worker=worker)


def processes_of(
    options: ServeOptions, places: tuple[WorkerPlace, ...] = ONE_PLACE, /, **plan: Any
) -> tuple[ProcessSpec, ...]:
    """The workers of one model, the gateway and the router."""
    model = ModelPlan("m", Path("/models/m"), places, **plan)
    return (*worker_specs(options, model, "python"), *front_specs(options, "python"))


def argument(argv: tuple[str, ...], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_one_worker_one_gateway_and_one_router_find_each_other() -> None:
    worker, gateway, router = processes_of(OPTIONS)
    assert (worker.name, gateway.name, router.name) == ("worker-0", "gateway", "router")
    assert argument(worker.argv, "--router") == argument(gateway.argv, "--router") == router.address
    assert argument(worker.argv, "--listen") == worker.address == "unix:/run/h/8000/worker-0.sock"
    assert argument(router.argv, "--listen") == router.address
    assert gateway.address == "http://127.0.0.1:8000"


def test_the_gateway_stops_before_router_and_workers() -> None:
    worker, gateway, router = processes_of(OPTIONS)
    assert gateway.stop_phase < router.stop_phase == worker.stop_phase


def test_what_was_not_asked_for_is_left_to_the_worker() -> None:
    worker, *_ = processes_of(OPTIONS)
    flags = (
        "--kv-cache-gb",
        "--kv-cache-share",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-num-mixed-tokens",
        "--execution-mode",
        "--decode-graph",
        "--cache-eviction",
        "--kv-precision",
        "--max-context-tokens",
        "--max-ttft-s",
        "--stuck-after-s",
        "--log-level",
    )
    assert [argument(worker.argv, flag) for flag in flags] == [None] * len(flags)


def test_what_was_asked_for_reaches_every_worker() -> None:
    asked = with_flags(
        kv_cache_gb=1.5,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_num_mixed_tokens=32,
        execution_mode="accuracy",
        decode_graph="off",
        speculation="draft",
        draft_model=Path("/models/small"),
        cache_eviction="max_cache_size=4096",
    )
    for worker in processes_of(asked, TWO_PLACES)[:2]:
        assert argument(worker.argv, "--threads") == "2"
        assert argument(worker.argv, "--kv-cache-gb") == "1.5"
        assert argument(worker.argv, "--max-num-seqs") == "8"
        assert argument(worker.argv, "--max-num-batched-tokens") == "64"
        assert argument(worker.argv, "--max-num-mixed-tokens") == "32"
        assert argument(worker.argv, "--execution-mode") == "accuracy"
        assert argument(worker.argv, "--decode-graph") == "off"
        assert argument(worker.argv, "--speculation") == "draft"
        assert argument(worker.argv, "--draft-model") == "/models/small"
        assert argument(worker.argv, "--cache-eviction") == "max_cache_size=4096"


@pytest.mark.parametrize("flag", WORKER_FLAGS, ids=lambda flag: flag.flag)
def test_every_flag_that_workers_share_with_serve_is_passed_on(flag: WorkerFlag) -> None:
    value = flag.type.choices[-1] if isinstance(flag.type, click.Choice) else 7
    given = (value, value) if flag.is_repeated else value
    # The number of ranks is that of the worker's place.
    places = tuple(replace(place, num_ranks=7) for place in ONE_PLACE) if flag is TENSOR_PARALLEL else ONE_PLACE
    (worker,) = (one for one in processes_of(with_flags(**{flag.option: given}), places) if one.role == "worker")
    assert argument(worker.argv, flag.flag) == str(value)
    assert worker.argv.count(flag.flag) == (2 if flag.is_repeated else 1)
    of_worker, of_serve = (
        next(option for option in command.params if name in option.opts)
        for command, name in ((worker_command, flag.flag), (serve, flag.serve_flag or flag.flag))
    )
    assert of_worker.type is flag.type
    assert of_serve.type is (flag.serve_type or flag.type)
    assert of_serve.name == flag.option


def test_several_workers_share_the_memory_of_one() -> None:
    first, second, *_ = processes_of(OPTIONS, TWO_PLACES)
    assert argument(first.argv, "--kv-cache-share") == argument(second.argv, "--kv-cache-share") == "0.2"
    assert argument(first.argv, "--kv-cache-node-share") == argument(second.argv, "--kv-cache-node-share") == "0.4"
    on_one_node = (WorkerPlace(0, (0, 1), 2), WorkerPlace(0, (2, 3), 2))
    third, fourth, *_ = processes_of(OPTIONS, on_one_node)
    assert argument(third.argv, "--kv-cache-node-share") == argument(fourth.argv, "--kv-cache-node-share") == "0.2"
    (asked, *_) = processes_of(with_flags(kv_cache_gb=1), TWO_PLACES)
    assert argument(asked.argv, "--kv-cache-share") is None


def test_a_worker_of_several_ranks_divides_its_cpus_and_memory_itself() -> None:
    place = WorkerPlace(0, (0, 1, 2, 3), 2, 2, (1,))
    (worker, *_) = processes_of(with_flags(tensor_parallel=2), (place,))
    assert argument(worker.argv, "--tensor-parallel") == argument(worker.argv, "--threads") == "2"
    assert argument(worker.argv, "--memory-node") is None
    assert (worker.cpus, worker.memory_flag) == ((0, 1, 2, 3), "--kv-memory")
    beside = WorkerPlace(1, (4, 5, 6, 7), 2, 2, (2,))
    (first, second, *_) = processes_of(with_flags(tensor_parallel=2), (place, beside))
    assert argument(first.argv, "--kv-cache-node-share") == argument(second.argv, "--kv-cache-node-share") == "0.2"


def test_several_workers_have_cpus_of_their_own() -> None:
    first, second, *_ = processes_of(OPTIONS, TWO_PLACES)
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3))


def test_no_grpc_edge_means_no_flag() -> None:
    _, gateway, _ = processes_of(replace(OPTIONS, grpc_port=0))
    assert argument(gateway.argv, "--grpc-port") is None


def test_an_ipv6_address_has_brackets_in_a_url() -> None:
    assert base_url("::1", 80) == "http://[::1]:80"


def test_every_process_tells_what_it_does_in_the_way_that_was_asked_for() -> None:
    asked = replace(OPTIONS, log_format="json", otlp_endpoint="http://c:4317", metrics_port=9101)
    *workers, gateway, router = processes_of(asked, TWO_PLACES)
    for process in (*workers, gateway, router):
        assert argument(process.argv, "--log-format") == "json"
        assert argument(process.argv, "--otlp-endpoint") == "http://c:4317"
    addresses = [argument(process.argv, "--metrics") for process in (router, *workers, gateway)]
    assert addresses == ["127.0.0.1:9101", "127.0.0.1:9102", "127.0.0.1:9103", None]


def test_flags_of_serve_reach_the_process_that_knows_them() -> None:
    asked = replace(
        with_flags(kv_precision="u4", max_context_tokens=4096, max_ttft=7.5, stuck_after_s=20.0),
        tool_parser="hermes",
        reasoning_parser="think",
        chat_templates=("a=/a.jinja", "b=/b.jinja"),
        mcp_servers=("docs=https://a.example/mcp", "sums=http://b.example/"),
        mcp_headers=Path("/mcp-headers.json"),
        mcp_config=Path("/mcp.json"),
        ollama_manage=True,
        ollama_blobs=Path("/blobs"),
        special_tokens_in_text="never",
        cors_origins=("https://a.example", "https://b.example"),
        redis_url="redis://127.0.0.1:6379",
    )
    worker, gateway, router = processes_of(asked)
    assert argument(worker.argv, "--kv-precision") == "u4"
    templates = [
        after for flag, after in zip(gateway.argv, gateway.argv[1:], strict=False) if flag == "--chat-template"
    ]
    assert templates == ["a=/a.jinja", "b=/b.jinja"]
    servers = [after for flag, after in zip(gateway.argv, gateway.argv[1:], strict=False) if flag == "--mcp-server"]
    assert servers == ["docs=https://a.example/mcp", "sums=http://b.example/"]
    assert argument(gateway.argv, "--mcp-headers") == "/mcp-headers.json"
    assert argument(gateway.argv, "--mcp-config") == "/mcp.json"
    assert argument(gateway.argv, "--ollama-blobs") == "/blobs"
    assert "--ollama-manage" in gateway.argv
    assert argument(worker.argv, "--max-context-tokens") == "4096"
    assert argument(worker.argv, "--max-ttft-s") == argument(router.argv, "--max-ttft") == "7.5"
    assert argument(worker.argv, "--stuck-after-s") == "20.0"
    assert argument(gateway.argv, "--tool-parser") == "hermes"
    assert argument(gateway.argv, "--reasoning-parser") == "think"
    assert argument(gateway.argv, "--special-tokens-in-text") == "never"
    assert argument(gateway.argv, "--redis") == "redis://127.0.0.1:6379"
    origins = [value for flag, value in zip(gateway.argv, gateway.argv[1:], strict=False) if flag == "--cors-origin"]
    assert origins == ["https://a.example", "https://b.example"]


def test_the_first_workers_are_for_prompts_and_the_others_for_answers() -> None:
    def roles(options: ServeOptions) -> list[str | None]:
        return [argument(spec.argv, "--role") for spec in processes_of(options, TWO_PLACES) if spec.role == "worker"]

    assert roles(replace(OPTIONS, prefill_workers=1)) == ["prefill", "decode"]
    assert roles(OPTIONS) == [None, None]


def test_plain_grpc_reaches_whoever_calls() -> None:
    worker, gateway, router = processes_of(replace(OPTIONS, plain_grpc=True))
    assert ["--plain-grpc" in process.argv for process in (worker, gateway, router)] == [False, True, True]
    assert not any("--plain-grpc" in process.argv for process in processes_of(OPTIONS))


def test_a_model_among_several_has_workers_names_and_ports_of_its_own() -> None:
    asked = with_flags(replace(OPTIONS, metrics_port=9101), kv_cache_gb=2.0, max_context_tokens=4096)
    own = ModelOptions(worker={"max_context_tokens": 1024})
    second, *_ = processes_of(asked, first_worker=2, kv_cache_gb=0.5, options=own, is_essential=False)
    assert second.name == "worker-2"
    assert second.address == "unix:/run/h/8000/worker-2.sock"
    assert argument(second.argv, "--metrics") == "127.0.0.1:9104"
    assert argument(second.argv, "--kv-cache-gb") == "0.5"
    assert argument(second.argv, "--max-context-tokens") == "1024"
    assert not second.is_essential


def test_models_share_the_memory_for_kv_caches() -> None:
    workers = processes_of(OPTIONS, TWO_PLACES, kv_share=0.25)[:2]
    assert [argument(worker.argv, "--kv-cache-share") for worker in workers] == ["0.05", "0.05"]
    assert [argument(worker.argv, "--kv-cache-node-share") for worker in workers] == ["0.1", "0.1"]


def test_an_encoder_beside_other_models_has_no_options_of_generation() -> None:
    options = with_flags(
        replace(OPTIONS, prefill_workers=1),
        kv_cache_gb=2.0,
        decode_graph="on",
        speculation="on",
        cache_eviction="on-request",
        max_context_tokens=8192,
        kv_disk=Path("/disk"),
        kv_disk_gb=1.0,
        max_ttft=9.0,
    )
    of_generation = {"--kv-cache-gb", "--decode-graph", "--speculation", "--cache-eviction", "--kv-disk", "--role"}
    worker, *_ = processes_of(options)
    assert of_generation < set(worker.argv)
    worker, *_ = processes_of(options, is_encoder=True, kv_share=0.5)
    assert not {*of_generation, "--kv-cache-share", "--max-context-tokens"} & set(worker.argv)
    assert argument(worker.argv, "--max-ttft-s") == "9.0"
    worker, *_ = processes_of(
        options, is_encoder=True, options=ModelOptions(worker={"max_context_tokens": 256}), kv_cache_gb=1.0
    )
    assert argument(worker.argv, "--max-context-tokens") == "256"
    assert argument(worker.argv, "--kv-cache-gb") == "1.0", "what the file says of it is refused by its worker"


def test_options_of_one_model_take_the_place_of_those_of_all() -> None:
    options = with_flags(max_num_seqs=9, kv_precision="u4", execution_mode="performance", speculation="off")
    own = {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 77,
        "execution_mode": "accuracy",
        "kv_precision": "bf16",
        "speculation": "draft",
        "draft_model": Path("/d"),
        "cache_eviction": "on-request",
    }
    plan = ModelPlan("m", Path("/m"), ONE_PLACE, options=ModelOptions(worker=own))
    (worker,) = worker_specs(options, plan, "python")
    flags = {
        "--max-num-seqs": "7",
        "--max-num-batched-tokens": "77",
        "--execution-mode": "accuracy",
        "--kv-precision": "bf16",
        "--speculation": "draft",
        "--draft-model": "/d",
        "--cache-eviction": "on-request",
    }
    assert {flag: argument(worker.argv, flag) for flag in flags} == flags
    other, *_ = processes_of(options)
    assert (argument(other.argv, "--max-num-seqs"), argument(other.argv, "--kv-precision")) == ("9", "u4")


def test_gateways_wait_for_the_rules_of_models() -> None:
    for has_rules in (False, True):
        gateway, _ = front_specs(replace(OPTIONS, has_rules=has_rules), "python")
        assert ("--await-model-host" in gateway.argv) == has_rules


def test_an_encoders_pooling_and_normalisation_reach_its_worker() -> None:
    plan = ModelPlan("m", Path("/m"), ONE_PLACE, is_encoder=True, options=ModelOptions(pooling="last"))
    (worker,) = worker_specs(OPTIONS, replace(plan, options=ModelOptions(pooling="last", normalizes=False)), "python")
    assert argument(worker.argv, "--pooling") == "last"
    assert "--no-normalize" in worker.argv
    (worker,) = worker_specs(OPTIONS, replace(plan, options=ModelOptions(normalizes=True)), "python")
    assert "--normalize" in worker.argv
    assert "--pooling" not in worker.argv


def test_adapters_of_a_model_are_its_own() -> None:
    own = ModelOptions(worker={"adapters": ("a=/x", "b=/y"), "max_adapters": 3})
    worker, *_ = processes_of(with_flags(adapters=("c=/z",), max_adapters=1), options=own)
    adapters = [value for flag, value in zip(worker.argv, worker.argv[1:], strict=False) if flag == "--adapter"]
    assert adapters == ["a=/x", "b=/y"]
    assert argument(worker.argv, "--max-adapters") == "3"


def test_the_gateway_knows_aliases_and_the_host_of_the_models() -> None:
    _, gateway, _ = processes_of(replace(OPTIONS, aliases=("chat=m",)))
    assert argument(gateway.argv, "--alias") == "chat=m"
    assert argument(gateway.argv, "--model-host") == "unix:/run/h/8000/host.sock"
