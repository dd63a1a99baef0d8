"""The Helm chart as Helm renders it, for tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomization import Resource

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
_TOOL = ROOT / ".make" / "helm"


def helm_library() -> Any:
    """Helm as a library, which `make test` and `make check` fetch; skips the test where it is not."""
    if not (_TOOL / "helm_python").is_dir():
        pytest.skip("Helm is not there; make .make/helm/.done fetches it")
    sys.path.insert(0, str(_TOOL))
    try:
        return importlib.import_module("helm_python")
    finally:
        sys.path.remove(str(_TOOL))


def rendered(helm: Any, values: dict[str, Any], namespace: str = "headrace", chart: Any = None) -> list[Resource]:
    """The objects of an installation with these values, of our chart or another."""
    files = (chart or helm.Chart.load(CHART)).render(values, name="demo", namespace=namespace, is_install=True)
    assert list(files) == ["headrace/templates/NOTES.txt", "headrace/templates/headrace.yaml"]
    return [document for document in yaml.safe_load_all(files["headrace/templates/headrace.yaml"]) if document]
