"""The types of answers to operators, for the OpenAPI document.

Real answers are written from prepared bytes; tests compare them with these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class RedisStates(Shape):
    """Whether Redis can be read and written. Requests are served in any case."""

    leases: Literal["ok", "unwritable", "unreachable"] | msgspec.UnsetType = msgspec.UNSET
    responses: Literal["ok", "unwritable", "unreachable"] | msgspec.UnsetType = msgspec.UNSET


class Health(Shape):
    """The state in a word or two, and that of each Redis that is used."""

    status: str
    redis: RedisStates | msgspec.UnsetType = msgspec.UNSET


class Version(Shape):
    """The version of the gateway."""

    version: str


class VersionError(Shape):
    """The error of a version of a model; there is never one."""

    error_code: str
    error_message: str


class VersionStatus(Shape):
    """The state of a version."""

    version: str
    state: str
    status: VersionError


class ModelStatus(Shape):
    """The versions of a model; here there is one."""

    model_version_status: list[VersionStatus]


Config = dict[str, ModelStatus]
Document = dict[str, Any]
