"""The answers to operators."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from headrace.gateway.edge.wire import Shape


class Health(Shape):
    """The state in a word or two, and that of each Redis that is used."""

    status: str
    redis: dict[str, str] | UnsetType = UNSET


class Version(Shape):
    """The version of the gateway."""

    version: str


class VersionError(Shape):
    """The error of a version of a model; there is never one."""

    error_code: str
    error_message: str


class VersionStatus(Shape, kw_only=True):
    """The state of a version."""

    version: str = "1"
    state: str
    status: VersionError


class ModelStatus(Shape):
    """The versions of a model; here there is one."""

    model_version_status: list[VersionStatus]


Config = dict[str, ModelStatus]
Document = dict[str, Any]
