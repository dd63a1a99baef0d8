"""The import rules of the house, read from the source."""

from __future__ import annotations

import ast
import graphlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "common", "gateway", "router", "worker", "cli", "sim", "client")

# package -> headrace packages that it may import, besides itself
MAY_IMPORT = {
    "protos": set(),
    "common": {"protos"},
    "gateway": {"protos", "common"},
    "router": {"protos", "common"},
    "worker": {"protos", "common"},
    "cli": {"protos", "common"},
    "sim": {"protos", "common", "router", "worker"},
    "client": {"protos", "common"},
}

# modules of router and worker that the simulator may import: those that do no I/O and start nothing
SIM_MAY_IMPORT = {
    "router.answer_lengths",
    "router.beliefs",
    "router.bookings",
    "router.candidates",
    "router.policy",
    "router.predictions",
    "router.prefix_index",
    "worker.kv.block_pool",
    "worker.engine.engine",
    "worker.engine.thread",
    "worker.kv.manager",
    "worker.engine.request",
    "worker.engine.scheduler",
    "worker.engine.step_cost",
    "worker.server.arrivals",
}

# foreign distribution -> the only files that may import it
ONLY_IN = {
    "openvino": {
        "worker/model/fused_projections.py",
        "worker/model/exact_rows.py",
        "worker/model/runner.py",
        "worker/host/numa.py",
        "worker/model/sampled_rows.py",
        "worker/sampling/vocabulary.py",
        "worker/model/head.py",
        "worker/sampling/vocabulary_reducer.py",
        "gateway/text/tokenizer.py",
    },
    "openvino_tokenizers": {"worker/sampling/vocabulary.py", "gateway/text/tokenizer.py"},
    "llguidance": {"worker/sampling/grammar.py"},
    "openvino_genai": {"cli/convert.py"},
    "gguf": {"cli/convert.py"},
    "starlette": {"gateway/edge/http.py"},
    "jinja2": {"gateway/text/chat_template.py"},
    "redis": {"common/stores/redis_link.py", "cli/key_store.py"},
    "opentelemetry": {"common/telemetry/otel.py"},
    "uvicorn": {"gateway/edge/http.py", "gateway/__main__.py", "gateway/edge/connections.py"},
}

# inside the worker, each module may import only those before it
WORKER_ORDER = (
    "engine.request",
    "kv.block_pool",
    "kv.manager",
    "engine.scheduler",
    "model.batch",
    "engine.engine",
)


# Wings of the gateway, each of which may import those before it; wings in one line do not know each other.
GATEWAY_TIERS = (
    ("checks", "telemetry", "access"),
    ("field_names", "edge", "upstream", "structure"),
    ("text",),
    ("chat",),
    ("services",),
    ("openai", "responses", "anthropic", "grpc_text", "console"),
    ("operations",),
    ("endpoints",),
    ("__main__",),
)


def modules(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if "_pb2" not in path.name:
            yield path


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it out"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def test_a_wheel_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(("headrace", *path.relative_to(ROOT).parent.parts)) for name in PACKAGES for path in modules(name)
    }
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_it_may(package: str) -> None:
    for path in modules(package):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "headrace":
                assert parts[1] == package or parts[1] in MAY_IMPORT[package], f"{path.name} imports {name}"


@pytest.mark.parametrize("package", ["protos", "common"])
def test_what_all_processes_share_imports_only_the_standard_library_grpc_and_protobuf(package: str) -> None:
    for path in modules(package):
        for name in imported(path):
            top = name.split(".")[0]
            allowed = {"grpc", "grpc_health", "grpc_reflection", "google", "headrace"}
            # Imported only where tracing is on, and where there is a Redis.
            allowed |= {"otel.py": {"opentelemetry"}, "redis_link.py": {"redis"}}.get(path.name, set())
            assert top in sys.stdlib_module_names or top in allowed, f"{path.name} imports {name}"


def test_the_simulator_imports_only_the_pure_parts_of_router_and_worker() -> None:
    for path in modules("sim"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "headrace" and parts[1] in ("router", "worker"):
                module = ".".join(parts[1 : 4 if parts[1] == "worker" else 3])
                assert module in SIM_MAY_IMPORT, f"{path.name} imports {name}"


@pytest.mark.parametrize("distribution", ONLY_IN)
def test_a_foreign_library_is_imported_only_where_the_house_says(distribution: str) -> None:
    for package in PACKAGES:
        for path in modules(package):
            if any(name.split(".")[0] == distribution for name in imported(path)):
                assert str(path.relative_to(ROOT)) in ONLY_IN[distribution], f"{path} imports {distribution}"


def module_of(path: Path) -> str:
    """gateway/chat/planning.py is gateway.chat.planning."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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


def test_wings_of_the_gateway_import_downward_only() -> None:
    tier = {wing: number for number, wings in enumerate(GATEWAY_TIERS) for wing in wings}
    for module, names in import_graph().items():
        parts = module.split(".")
        if parts[0] != "gateway" or len(parts) == 1:
            continue
        assert parts[1] in tier, f"gateway/{parts[1]} has no tier: say in GATEWAY_TIERS what it may import"
        for name in names:
            other = name.split(".")
            if other[0] == "gateway" and len(other) > 1 and other[1] != parts[1]:
                assert tier[other[1]] < tier[parts[1]], f"{module} imports {name}: what both need belongs below them"


def test_the_worker_is_layered() -> None:
    for position, module in enumerate(WORKER_ORDER):
        path = ROOT / "worker" / f"{module.replace('.', '/')}.py"
        for name in imported(path):
            parts = name.split(".")
            if parts[:2] == ["headrace", "worker"] and ".".join(parts[2:4]) in WORKER_ORDER:
                assert WORKER_ORDER.index(".".join(parts[2:4])) <= position, f"{module} imports {name}"


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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_fits_on_a_screen(package: str) -> None:
    for path in modules(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= 70, f"{path}: {node.name} has {length} lines"
