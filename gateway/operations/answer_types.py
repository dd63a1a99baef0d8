"""What answers to operators look like, for the OpenAPI document. Tests hold real answers to these types.

Answers are written from prepared bytes and not from these; a field that is not here is in no answer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.edge.description import Shape


class RedisStates(Shape):
    """Whether what is kept in Redis can be read and written. None of it keeps requests from being served."""

    leases: Literal["ok", "unwritable", "unreachable"] | msgspec.UnsetType = msgspec.UNSET
    responses: Literal["ok", "unwritable", "unreachable"] | msgspec.UnsetType = msgspec.UNSET


class Health(Shape):
    """The state in a word or two, and that of each Redis that is used."""

    status: str
    redis: RedisStates | msgspec.UnsetType = msgspec.UNSET


class Version(Shape):
    """Of the gateway."""

    version: str


class VersionError(Shape):
    """What is wrong with a version of a model: nothing."""

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
