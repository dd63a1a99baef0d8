"""The import rules of the house, read from the source."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.gateway import protocols

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "common", "gateway", "router", "worker", "cli", "sim", "bench", "plan", "client", "ray")

# The folder of a package, where that has another name (setup.py).
FOLDERS = {"ray": "on_ray"}

# package -> headrace packages that it may import, besides itself
MAY_IMPORT = {
    "protos": set(),
    "common": {"protos"},
    "gateway": {"protos", "common"},
    "router": {"protos", "common"},
    "worker": {"protos", "common"},
    "cli": {"protos", "common", "bench"},
    "sim": {"protos", "common", "router", "worker"},
    "bench": {"protos", "common", "gateway", "sim"},
    "plan": {"protos", "common", "sim", "bench"},
    "client": {"protos", "common"},
    "ray": {"protos", "common", "cli", "worker"},
}

# modules of workers that actors of Ray may import: the registration with routers, which may move there
RAY_MAY_IMPORT = {"worker.server.registration"}

# modules of the benchmark client that commands may import: what it has measured on this host
CLI_MAY_IMPORT = {"bench.calibration"}

# modules of the gateway that the benchmark client may import: its tokenizer, which counts tokens
BENCH_MAY_IMPORT = {"gateway.text.tokenizer", "gateway.upstream.bundle"}

# modules of the simulator that the benchmark client may import: the costs of steps, which it measures
BENCH_MAY_IMPORT_OF_SIM = {"sim.step_cost", "sim.step_logs"}

# modules of router and worker that the simulator may import: those that do no I/O and start nothing
SIM_MAY_IMPORT = {
    "router.placement.answer_lengths",
    "router.placement.bookings",
    "router.placement.candidates",
    "router.placement.policy",
    "router.placement.predictions",
    "router.placement.prefix_index",
    "router.placement.rates",
    "router.placement.transfers",
    "worker.kv.block_pool",
    "worker.kv.fetch",
    "worker.kv.groups",
    "worker.engine.encoding",
    "worker.engine.fetching",
    "worker.engine.forecast",
    "worker.engine.mailbox",
    "worker.engine.pacing",
    "worker.engine.pipelined",
    "worker.engine.stages",
    "worker.engine.build",
    "worker.engine.engine",
    "worker.engine.thread",
    "worker.kv.cache",
    "worker.kv.chain",
    "worker.engine.scheduler",
    "worker.engine.step_cost",
    "worker.engine.step_meter",
    "worker.model.step_limits",
    "worker.request.images",
    "worker.request.params",
    "worker.request.request",
    "worker.request.step",
    "worker.server.arrivals",
    "worker.speculation.controller",
    "worker.speculation.proposer",
    "worker.vision.job",
    "worker.vision.states",
}

# foreign distribution -> the only files that may import it
ONLY_IN = {
    "openvino": {
        "cli/export/exporter.py",
        "cli/export/packed.py",
        "cli/export/rerankers.py",
        "cli/gguf/graph.py",
        "cli/gguf/tokenizer.py",
        "cli/gguf/weights.py",
        "cli/models/convert.py",
        "common/model_files/vocabulary.py",
        "worker/check.py",
        "worker/encoder/runner.py",
        "worker/model/eviction_tables.py",
        "worker/draft_heads/eagle_graph.py",
        "worker/draft_heads/eagle_runner.py",
        "worker/draft_heads/features.py",
        "worker/draft_heads/medusa_runner.py",
        "worker/draft_heads/hidden_states.py",
        "worker/model/adapted_linears.py",
        "worker/model/adapter_graph.py",
        "worker/model/adapter_memory.py",
        "worker/model/fused_projections.py",
        "worker/model/exact_rows.py",
        "worker/model/paging.py",
        "worker/multimodal/image_graph.py",
        "worker/multimodal/joining.py",
        "worker/multimodal/towers/attention.py",
        "worker/multimodal/towers/gemma4.py",
        "worker/multimodal/towers/integer_products.py",
        "worker/multimodal/towers/network.py",
        "worker/model/positions.py",
        "worker/model/rank_sum.py",
        "worker/model/runner.py",
        "worker/host/numa.py",
        "worker/host/precision.py",
        "worker/model/sampled_rows.py",
        "worker/grammar/compiler.py",
        "worker/model/lm_head.py",
        "worker/sampling/row_sums.py",
        "worker/model/state_tables.py",
        "worker/weights/scales.py",
        "worker/model/window_tables.py",
        "worker/ranks/adapters.py",
        "worker/pipeline/cutting.py",
        "worker/pipeline/ends.py",
        "worker/pipeline/runner.py",
        "worker/pipeline/speed.py",
        "worker/ranks/constants.py",
        "worker/ranks/cutting.py",
        "worker/ranks/division.py",
        "worker/ranks/group.py",
        "worker/ranks/member.py",
        "worker/ranks/patterns.py",
        "worker/ranks/rank.py",
        "worker/stage_serving.py",
        "gateway/text/tokenizer.py",
    },
    "openvino_tokenizers": {"cli/gguf/tokenizer.py", "common/model_files/vocabulary.py"},
    "llguidance": {"worker/grammar/compiler.py"},
    "openvino_genai": {"cli/models/convert.py", "bench/study/genai_server.py"},
    "gguf": {
        "cli/gguf/tokenizer.py",
        "cli/gguf/vocabulary.py",
        "cli/gguf/weights.py",
        "common/model_files/gguf_files.py",
        "worker/adapters/gguf.py",
    },
    "starlette": {"gateway/edge/http.py", "on_ray/actors.py"},
    "jinja2": {"gateway/text/chat_template.py"},
    "redis": {"common/stores/redis_link.py", "cli/fleet/key_store.py"},
    "opentelemetry": {"common/telemetry/otel.py"},
    "uvicorn": {"gateway/edge/http.py", "gateway/edge/connections.py", "bench/study/genai_server.py"},
    "xllamacpp": {"bench/study/llama_server.py"},
    "ray": {"on_ray/__main__.py", "on_ray/actors.py", "on_ray/app.py", "on_ray/nodes.py"},
}

# Package -> its wings by tier. A wing imports only from lower tiers; wings of one tier do not know each other.
TIERS = {
    "gateway": (
        ("checks", "hints", "telemetry", "access"),
        ("fields", "mcp"),
        ("cache_eviction", "field_names", "edge", "upstream", "structure", "images"),
        ("text",),
        ("chat",),
        ("encoding",),
        ("services",),
        ("operations",),
        ("protocol",),
        protocols.NAMES,
        ("protocols", "picking"),
        ("server",),
        ("__main__",),
    ),
    "worker": (
        ("config", "grammar"),
        ("host",),
        ("request",),
        ("kv", "multimodal", "sampling", "weights"),
        ("model", "peers"),
        ("draft_heads", "numerics", "pipeline"),
        ("ranks",),
        ("speculation", "vision"),
        ("engine", "adapters"),
        ("encoder", "tiers"),
        ("allocation", "model_card"),
        ("loading", "server", "check"),
        ("serving",),
        ("stage_serving",),
        ("__main__",),
    ),
    "router": (
        ("placement",),
        ("fleet",),
        ("dispatch",),
        ("draining", "explain", "keda", "picking"),
        ("service",),
        ("__main__",),
    ),
    "bench": (
        ("process_tree",),
        ("record", "lengths", "arrivals", "target", "apis", "calibration", "serving"),
        ("connection", "checks"),
        ("stream",),
        ("tokens", "sender", "fleet", "drafts"),
        ("calibrating",),
        ("texts",),
        ("datasets",),
        ("workload", "load"),
        ("measures", "display", "probes"),
        ("results",),
        ("benchmark", "sweep", "saved", "charts"),
        ("report",),
        ("plots",),
        ("telling",),
        ("options",),
        ("serve", "study", "calibrate"),
        ("__main__",),
    ),
    "plan": (
        ("objectives", "load", "fleet"),
        ("search", "start"),
        ("answer",),
        ("planning", "page"),
        ("__main__",),
    ),
    "ray": (
        ("settings", "signals", "scaling", "places", "processes"),
        ("directory", "llm_config", "commands"),
        ("nodes", "report"),
        ("actors",),
        ("app",),
        ("__main__",),
    ),
    "cli": (
        ("errors", "launch", "gguf", "completion"),
        ("http_client",),
        ("export",),
        ("models", "fleet"),
        ("chat",),
        ("hosting",),
        ("ovms",),
        ("serving",),
        ("main",),
        ("__main__",),
    ),
}


def modules(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / FOLDERS.get(package, package)).rglob("*.py")):
        if "_pb2" not in path.name:
            yield path


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names that a module imports, at any depth of its code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it out"
            assert node.module is not None
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_it_may(package: str) -> None:
    for path in modules(package):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "headrace":
                assert parts[1] == package or parts[1] in MAY_IMPORT[package], f"{path.name} imports {name}"


@pytest.mark.parametrize("package", ["protos", "common"])
def test_what_all_processes_share_imports_only_the_standard_library_grpc_protobuf_and_msgspec(package: str) -> None:
    for path in modules(package):
        for name in imported(path):
            top = name.split(".")[0]
            allowed = {"grpc", "grpc_health", "grpc_reflection", "google", "headrace", "msgspec"}
            # Imported only where tracing or metrics are on, with Redis, with Kubernetes, by commands, and where model
            # files are read.
            allowed |= {
                "otel.py": {"opentelemetry"},
                "redis_link.py": {"redis"},
                "vocabulary.py": {"numpy", "openvino", "openvino_tokenizers"},
                "flags.py": {"click"},
                "commands.py": {"click"},
                "worker_flags.py": {"click"},
                "gguf_files.py": {"numpy", "gguf"},
                "safetensors.py": {"numpy"},
                "scrapes.py": {"prometheus_client"},
                "vllm_metrics.py": {"prometheus_client"},
                "worker_metrics.py": {"prometheus_client"},
                "cluster.py": {"httpx"},
                "watches.py": {"prometheus_client"},
            }.get(path.name, set())
            # Imported only where a model takes images.
            allowed |= {"numpy", "PIL"} if path.is_relative_to(ROOT / "common/vision") else set()
            assert top in sys.stdlib_module_names or top in allowed, f"{path.name} imports {name}"


def test_the_simulator_imports_only_the_pure_parts_of_router_and_worker() -> None:
    for path in modules("sim"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "headrace" and parts[1] in ("router", "worker"):
                module = ".".join(parts[1:4])
                assert module in SIM_MAY_IMPORT, f"{path.name} imports {name}"


def test_commands_import_only_what_the_benchmark_client_has_measured() -> None:
    for path in modules("cli"):
        for name in imported(path):
            if name.startswith("headrace.bench"):
                assert ".".join(name.split(".")[1:3]) in CLI_MAY_IMPORT, f"{path.name} imports {name}"


def test_the_benchmark_client_imports_only_a_tokenizer_and_costs_of_steps() -> None:
    for path in modules("bench"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "headrace" and parts[1] == "gateway":
                assert ".".join(parts[1:4]) in BENCH_MAY_IMPORT, f"{path.name} imports {name}"
            if parts[0] == "headrace" and parts[1] == "sim":
                assert ".".join(parts[1:3]) in BENCH_MAY_IMPORT_OF_SIM, f"{path.name} imports {name}"


def test_actors_of_ray_import_only_the_registration_of_workers() -> None:
    for path in modules("ray"):
        for name in imported(path):
            if name.startswith("headrace.worker."):
                assert ".".join(name.split(".")[1:4]) in RAY_MAY_IMPORT, f"{path.name} imports {name}"


@pytest.mark.parametrize("distribution", ONLY_IN)
def test_a_foreign_library_is_imported_only_where_the_house_says(distribution: str) -> None:
    for package in PACKAGES:
        for path in modules(package):
            if any(name.split(".")[0] == distribution for name in imported(path)):
                assert str(path.relative_to(ROOT)) in ONLY_IN[distribution], f"{path} imports {distribution}"


def module_of(path: Path) -> str:
    """gateway/chat/planning.py is gateway.chat.planning."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    package = next((name for name, other in FOLDERS.items() if other == folder), folder)
    return ".".join((package, *rest)).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of headrace that it imports, for typing alone too."""
    paths = [path for package in PACKAGES for path in modules(package)]
    known = {module_of(path) for path in paths}
    graph = {}
    for path in paths:
        names = {name.removeprefix("headrace.") for name in imported(path) if name.startswith("headrace.")}
        own = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[module_of(path)] = (own & known) - {module_of(path)}
    return graph


def a_circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next and the last the first; none if there is no circle."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle = a_circle(import_graph())
    assert not circle, f"{' -> '.join(circle)}: move what both need to a module below them"


def test_a_circle_is_found() -> None:
    assert a_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) in (
        ["a", "b", "c", "a"],
        ["b", "c", "a", "b"],
        ["c", "a", "b", "c"],
    )
    assert a_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def upward_imports(package: str, graph: dict[str, set[str]]) -> Iterator[str]:
    """The imports that TIERS forbids, each as a sentence with the remedy."""
    tiers = TIERS[package]
    tier_of = {wing: number for number, wings in enumerate(tiers) for wing in wings}
    for module, names in sorted(graph.items()):
        parts = module.split(".")
        if parts[0] != package or len(parts) == 1:
            continue
        wing = parts[1]
        if wing not in tier_of:
            yield f"{package}/{wing} has no tier: add it to TIERS, above everything that it imports"
            continue
        lower = [name for wings in tiers[: tier_of[wing]] for name in wings]
        for name in sorted(names):
            other = name.split(".")
            if other[0] == package and len(other) > 1 and other[1] not in (wing, *lower):
                may = f"may import {', '.join(lower)}" if lower else "may import no other wing"
                yield f"{module} imports {name}, but {wing} {may}: move what both need into one of the lower wings"


@pytest.mark.parametrize("package", TIERS)
def test_wings_import_downward_only(package: str) -> None:
    problems = list(upward_imports(package, import_graph()))
    assert not problems, "\n".join(problems)


def test_an_upward_import_is_found_and_says_where_the_thing_belongs() -> None:
    graph = {"worker.kv.cache": {"worker.engine.scheduler", "worker.request.step"}, "worker.attic.box": set()}
    new_wing, upward = upward_imports("worker", graph)
    assert new_wing.startswith("worker/attic has no tier")
    assert upward.startswith("worker.kv.cache imports worker.engine.scheduler")
    assert "kv may import config, grammar, host, request" in upward


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_public_definition_has_a_docstring(package: str) -> None:
    for path in modules(package):
        tree = ast.parse(path.read_text())
        if path.name not in ("__init__.py",):
            assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if definition and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"
