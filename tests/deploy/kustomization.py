"""Renders the overlays of deploy/kubernetes as kustomize would, where there is no kustomize.

Knows the few fields that the overlays use and refuses any other, so that nothing is left out silently. Patches are
strategic merges: maps by key, lists of things that have an identity by that, other lists as a whole; null removes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_FIELDS = {
    "apiVersion", "kind", "namespace", "labels", "resources", "components", "patches", "replicas", "images",
}  # fmt: skip
_CLUSTER_WIDE = {"Namespace"}
# what tells the items of a list apart (x-kubernetes-patch-merge-key in the API's description)
_IDENTITY = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
}


def render(directory: Path) -> list[Resource]:
    """All resources of an overlay, in any order."""
    return _accumulate(directory, [])


def _accumulate(directory: Path, resources: list[Resource]) -> list[Resource]:
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    unknown = set(kustomization) - _FIELDS
    assert not unknown, f"{directory}: {unknown} is more than this renderer knows"
    for name in kustomization.get("resources", []):
        path = directory / name
        resources = resources + (_accumulate(path, []) if path.is_dir() else documents(path))
    for name in kustomization.get("components", []):
        resources = _accumulate(directory / name, resources)
    for patch in kustomization.get("patches", []):
        assert set(patch) == {"path"}, patch
        for change in documents(directory / patch["path"]):
            (target,) = (resource for resource in resources if identity(resource) == identity(change))
            resources[resources.index(target)] = merge(target, change)
    return [_transform(resource, kustomization) for resource in resources]


def documents(path: Path) -> list[Resource]:
    """The documents of a YAML file, without empty ones."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def identity(resource: Resource) -> tuple[str, str]:
    """Kind and name."""
    return resource["kind"], resource["metadata"]["name"]


def merge(original: Any, change: Any, field: str = "") -> Any:
    """The strategic merge of a patch; neither argument is changed."""
    if isinstance(original, dict) and isinstance(change, dict):
        merged = {key: value for key, value in original.items() if change.get(key, value) is not None}
        for key, value in change.items():
            if value is not None:
                merged[key] = merge(original.get(key), value, key)
        return merged
    if isinstance(original, list) and isinstance(change, list) and (key := _key_of(field, change)):
        changes = {item[key]: item for item in change}
        kept = [merge(item, changes.pop(item[key], {})) for item in original]
        return kept + [copy.deepcopy(item) for item in changes.values()]
    return copy.deepcopy(change)


def _key_of(field: str, items: list[Any]) -> str | None:
    if field == "ports":
        return "containerPort" if items and "containerPort" in items[0] else None
    return _IDENTITY.get(field)


def _transform(resource: Resource, kustomization: Resource) -> Resource:
    resource = copy.deepcopy(resource)
    if "namespace" in kustomization and resource["kind"] not in _CLUSTER_WIDE:
        resource["metadata"]["namespace"] = kustomization["namespace"]
        for subject in resource.get("subjects", []):
            subject["namespace"] = kustomization["namespace"]
    for label in kustomization.get("labels", []):
        assert set(label) == {"pairs"}, label
        resource["metadata"].setdefault("labels", {}).update(label["pairs"])
    for count in kustomization.get("replicas", []):
        if resource["kind"] in ("Deployment", "StatefulSet") and resource["metadata"]["name"] == count["name"]:
            resource["spec"]["replicas"] = count["count"]
    for image in kustomization.get("images", []):
        for container in containers(resource):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return resource


def containers(resource: Resource) -> list[Resource]:
    """The containers of a workload, including init containers; none for other objects."""
    if resource["kind"] not in ("Deployment", "StatefulSet"):
        return []
    pod = resource["spec"]["template"]["spec"]
    found: list[Resource] = pod.get("initContainers", []) + pod["containers"]
    return found
