"""Types of KServe's responses, for the OpenAPI document. Tests compare real responses with them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class KserveError(Shape):
    """The shape of failures in KServe's protocol."""

    error: str


class KserveServer(Shape):
    """Metadata of the server."""

    name: Literal["headrace"]
    version: str
    extensions: list[str]


class KserveTensor(Shape):
    """A tensor that a model takes or gives."""

    name: str
    datatype: str
    shape: list[int]


class KserveModel(Shape):
    """A model and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[KserveTensor]
    outputs: list[KserveTensor]


class KserveReady(Shape):
    """The response for a model that is ready."""

    name: str
    ready: bool


class KserveResult(Shape):
    """An output tensor. Its elements are in `data`, or in the binary data after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class KserveInferAnswer(Shape, kw_only=True):
    """The tensors of an answer."""

    model_name: str
    model_version: str
    outputs: list[KserveResult]
    id: str | msgspec.UnsetType = msgspec.UNSET


class KserveGenerateAnswer(Shape, kw_only=True):
    """An answer of `generate`; of several texts, each member is a list."""

    model_name: str
    model_version: str
    text_output: str | list[str]
    id: str | msgspec.UnsetType = msgspec.UNSET
    finish_reason: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    cumulative_logprob: float | list[float] | msgspec.UnsetType = msgspec.UNSET
    num_input_tokens: int | list[int] | msgspec.UnsetType = msgspec.UNSET
    num_output_tokens: int | list[int] | msgspec.UnsetType = msgspec.UNSET
