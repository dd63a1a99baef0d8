"""What is told of the sources of Kubernetes to the generator that describes its API."""

from __future__ import annotations

from pathlib import Path

from tests.infra.build_api_server import described


def test_packages_whose_types_are_described_have_the_paths_by_which_they_are_imported(tmp_path: Path) -> None:
    mark = "// +k8s:openapi-gen=true\n\npackage p\n"
    files = {
        "staging/src/k8s.io/api/apps/v1/doc.go": mark,
        "staging/src/k8s.io/api/apps/v1/types.go": mark,
        "staging/src/k8s.io/api/apps/v2/doc.go": "// says +k8s:openapi-gen=true\npackage p\n",
        "staging/src/k8s.io/sample-apiserver/pkg/doc.go": mark,
        "pkg/apis/abac/v0/types.go": "//+k8s:openapi-gen=true\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert described(tmp_path) == ["pkg/apis/abac/v0", "vendor/k8s.io/api/apps/v1"]
