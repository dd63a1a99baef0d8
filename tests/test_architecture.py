"""The import rules of the house, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protos", "gateway", "router", "worker", "cli", "sim", "client")

# package -> headrace packages that it may import, besides itself
MAY_IMPORT = {
    "protos": set(),
    "gateway": {"protos"},
    "router": {"protos"},
    "worker": {"protos"},
    "cli": {"protos"},
    "sim": {"protos", "router", "worker"},
    "client": {"protos"},
}

# modules of router and worker that the simulator may import: those that do no I/O and start nothing
SIM_MAY_IMPORT = {
    "router.answer_lengths",
    "router.bookings",
    "router.policy",
    "router.prefix_index",
    "worker.block_pool",
    "worker.engine",
    "worker.engine_thread",
    "worker.kv_cache",
    "worker.request",
    "worker.scheduler",
    "worker.step_cost",
    "worker.step_rates",
}

# foreign distribution -> the only files that may import it
ONLY_IN = {
    "openvino": {
        "worker/fused_projections.py",
        "worker/model_runner.py",
        "worker/numa.py",
        "worker/sampled_rows.py",
        "worker/vocabulary.py",
        "worker/vocabulary_head.py",
        "worker/vocabulary_reducer.py",
        "gateway/tokenizer.py",
    },
    "openvino_tokenizers": {"worker/vocabulary.py", "gateway/tokenizer.py"},
    "llguidance": {"worker/grammar.py"},
    "openvino_genai": {"cli/convert.py"},
    "gguf": {"cli/convert.py"},
    "starlette": {"gateway/http.py"},
    "jinja2": {"gateway/chat_template.py"},
    "redis": {"protos/redis_link.py", "cli/key_store.py"},
    "opentelemetry": {"protos/otel.py"},
    "uvicorn": {"gateway/http.py", "gateway/__main__.py", "gateway/connections.py"},
}

# inside the worker, each module may import only those before it
WORKER_ORDER = ("request", "block_pool", "kv_cache", "scheduler", "batch", "engine")


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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_the_packages_it_may(package: str) -> None:
    for path in modules(package):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "headrace":
                assert parts[1] == package or parts[1] in MAY_IMPORT[package], f"{path.name} imports {name}"


def test_protos_imports_only_the_standard_library_grpc_and_protobuf() -> None:
    for path in modules("protos"):
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
                assert ".".join(parts[1:3]) in SIM_MAY_IMPORT, f"{path.name} imports {name}"


@pytest.mark.parametrize("distribution", ONLY_IN)
def test_a_foreign_library_is_imported_only_where_the_house_says(distribution: str) -> None:
    for package in PACKAGES:
        for path in modules(package):
            if any(name.split(".")[0] == distribution for name in imported(path)):
                assert str(path.relative_to(ROOT)) in ONLY_IN[distribution], f"{path} imports {distribution}"


def test_the_worker_is_layered() -> None:
    for position, module in enumerate(WORKER_ORDER):
        path = ROOT / "worker" / f"{module}.py"
        if not path.exists():
            continue
        for name in imported(path):
            parts = name.split(".")
            if parts[:2] == ["headrace", "worker"] and parts[2] in WORKER_ORDER:
                assert WORKER_ORDER.index(parts[2]) <= position, f"{module} imports {name}"


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
