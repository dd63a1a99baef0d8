"""Requests and responses about adapters. Pure."""

from __future__ import annotations

import msgspec

from headrace.gateway.edge.wire import Shape


class LoadRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace an adapter of this name."""
    base_model_name: str | None = None
    """The model; needed if there are several."""


class UnloadRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


class AdapterInfo(Shape):
    """An adapter: its name and model, the path and hash of its files, its rank and size, and how many workers know it
    and have it in memory."""

    id: str
    parent: str
    path: str
    sha256: str
    rank: int
    bytes: int
    created: int
    workers: int
    in_memory: int


class AdapterInfos(Shape):
    """All adapters, by name."""

    object: str
    data: list[AdapterInfo]


class LoadModelRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/load_model."""

    model: str
    path: str | None = None
    """The location of the model, if the host does not know the name: a name in its cache, OWNER/NAME on a hub, a
    directory or a GGUF file."""


class UnloadModelRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/unload_model."""

    model: str


class ModelState(Shape):
    """A model and its state."""

    id: str
    state: str
