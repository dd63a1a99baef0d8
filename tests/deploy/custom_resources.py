"""The shape of the custom resources in our manifests, as the references of their APIs describe the fields that we use.

A field that is not here is refused, so that a misspelt one is found; the real APIs have more of them.

    InferencePool    gateway-api-inference-extension.sigs.k8s.io/reference/spec
    HTTPRoute        gateway-api.sigs.k8s.io/reference/spec, durations as of GEP-2257
    ScaledObject     keda.sh/docs/2.18/reference/scaledobject-spec
    RayService       ray-project/kuberay, ray-operator/config/crd/bases, ray.io/v1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema_rs

Schema = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(most: int, *, least: int = 1, pattern: str | None = None) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most, **({"pattern": pattern} if pattern else {})}


_DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = _text(253)
_GROUP = _text(253, least=0, pattern=rf"^$|^{_DNS}(\.{_DNS})*$")
_KIND = _text(63, pattern=r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$")
_NAMESPACE = _text(63, pattern=rf"^{_DNS}$")
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABEL = _text(63, least=0, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
_DURATION = _text(64, pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")

_INFERENCE_POOL = _object(
    ("selector", "targetPorts", "endpointPickerRef"),
    selector=_object(
        ("matchLabels",), matchLabels={"type": "object", "additionalProperties": _LABEL, "maxProperties": 64}
    ),
    targetPorts=_list(_object(("number",), number=_PORT), 1, 8),
    appProtocol={"type": "string", "enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_object(
        # The port may only be left out if the kind is not Service, which ours always is.
        ("name", "port"),
        group=_GROUP,
        kind=_KIND,
        name=_NAME,
        port=_object(("number",), number=_PORT),
        failureMode={"type": "string", "enum": ["FailOpen", "FailClose"]},
    ),
)
_HTTP_ROUTE = _object(
    ("parentRefs", "rules"),
    parentRefs=_list(
        _object(("name",), group=_GROUP, kind=_KIND, namespace=_NAMESPACE, name=_NAME, sectionName=_NAME, port=_PORT),
        1,
        32,
    ),
    hostnames=_list(_text(253), 0, 16),
    rules=_list(
        _object(
            name=_NAME,
            matches=_list(
                _object(
                    path=_object(
                        type={"type": "string", "enum": ["Exact", "PathPrefix", "RegularExpression"]},
                        value=_text(1024, pattern="^/"),
                    )
                ),
                0,
                64,
            ),
            backendRefs=_list(
                _object(
                    ("name",),
                    group=_GROUP,
                    kind=_KIND,
                    namespace=_NAMESPACE,
                    name=_NAME,
                    port=_PORT,
                    weight={"type": "integer", "minimum": 0, "maximum": 1_000_000},
                ),
                0,
                16,
            ),
            timeouts=_object(request=_DURATION, backendRequest=_DURATION),
        ),
        1,
        16,
    ),
)

_COUNT: Schema = {"type": "integer", "minimum": 0}
_SCALING = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"type": "string", "enum": ["Max", "Min", "Disabled"]},
    policies=_list(
        _object(
            ("type", "value", "periodSeconds"),
            type={"type": "string", "enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        ),
        1,
        16,
    ),
)
_SCALED_OBJECT = _object(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_object(("name",), apiVersion=_NAME, kind=_KIND, name=_NAME),
    pollingInterval=_COUNT,
    cooldownPeriod=_COUNT,
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=_SCALING, scaleDown=_SCALING)),
    ),
    triggers=_list(
        _object(
            ("type", "metadata"),
            type=_text(64),
            # Numbers are texts here, too.
            metadata={"type": "object", "additionalProperties": {"type": "string"}},
            metricType={"type": "string", "enum": ["AverageValue", "Value", "Utilization"]},
        ),
        1,
        16,
    ),
)

# The schemas of Pods are those of the Kubernetes release: tests check them as Pods.
_POD_TEMPLATE: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_RAY_SERVICE = _object(
    ("rayClusterConfig",),
    serveConfigV2={"type": "string"},
    rayClusterDeletionDelaySeconds=_COUNT,
    upgradeStrategy=_object(type={"type": "string"}),
    rayClusterConfig=_object(
        ("headGroupSpec",),
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=_object(
            idleTimeoutSeconds=_COUNT,
            upscalingMode={"type": "string", "enum": ["Default", "Aggressive", "Conservative"]},
            version={"type": "string", "enum": ["v1", "v2"]},
        ),
        gcsFaultToleranceOptions=_object(
            backend={"type": "string", "enum": ["redis", "rocksdb"]},
            externalStorageNamespace={"type": "string"},
            redisAddress={"type": "string"},
        ),
        headGroupSpec=_object(("template",), rayStartParams=_TEXTS, template=_POD_TEMPLATE),
        workerGroupSpecs={
            "type": "array",
            "items": _object(
                ("groupName", "minReplicas", "maxReplicas", "template"),
                groupName={"type": "string"},
                replicas=_COUNT,
                minReplicas=_COUNT,
                maxReplicas=_COUNT,
                idleTimeoutSeconds=_COUNT,
                rayStartParams=_TEXTS,
                template=_POD_TEMPLATE,
            ),
        },
    ),
)

SPECS: Mapping[tuple[str, str], Schema] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): _INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _HTTP_ROUTE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("ray.io/v1", "RayService"): _RAY_SERVICE,
}
"""The schema of the `spec` of each kind, by API version and kind."""


def is_custom(resource: Mapping[str, Any]) -> bool:
    """Whether a cluster has this kind only if somebody has installed it."""
    return (resource["apiVersion"], resource["kind"]) in SPECS


def check(resource: Mapping[str, Any]) -> None:
    """Raise `jsonschema_rs.ValidationError` if a custom resource is not of its shape."""
    schema = SPECS[resource["apiVersion"], resource["kind"]]
    metadata = _object(("name",), name=_NAME, namespace=_NAMESPACE, labels={"type": "object"})
    whole = _object(("apiVersion", "kind", "metadata", "spec"), apiVersion={}, kind={}, metadata=metadata, spec=schema)
    jsonschema_rs.validator_for(whole).validate(resource)


def definitions() -> list[dict[str, Any]]:
    """What makes an API server take the custom resources: their definitions, with the same shapes."""
    found = []
    for (api_version, kind), schema in SPECS.items():
        group, _, version = api_version.partition("/")
        names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower(), "listKind": f"{kind}List"}
        whole = {"type": "object", "properties": {"spec": _structural(schema)}, "required": ["spec"]}
        served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": whole}}
        found.append(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                # Names below k8s.io are for those whom its community has approved; this one is a test's.
                "metadata": {
                    "name": f"{names['plural']}.{group}",
                    "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
                },
                "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
            }
        )
    return found


def _structural(schema: Any) -> Any:
    """The schema as definitions may have it: a server drops what they do not name, rather than refuse it."""
    if isinstance(schema, list):
        return [_structural(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _structural(value) for key, value in schema.items() if (key, value) != ("additionalProperties", False)}
    return {key: value for key, value in kept.items() if (key, value) != ("required", [])}
