"""The list of models for callers (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from headrace.protos.host_pb2 import HOSTED_MODEL_STATE_LOADED, HostedModel, HostedModelState
from headrace.protos.inference_pb2 import Task
from headrace.protos.worker_pb2 import ModelCard

ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in the list for callers: its name, its state in a word, its task, why it could not be loaded, and its
    card, if it is known. `alias_of` is the model that the name stands for, if it is an alias. `hosted` is what the
    model's host reports."""

    name: str
    state: ModelState
    task: Task
    problem: str = ""
    card: ModelCard | None = None
    alias_of: str = ""
    hosted: HostedModel | None = None


def word_for(state: HostedModelState) -> ModelState:
    """The state of a model that has no live worker. One that was loaded has a worker that is restarting."""
    if state == HOSTED_MODEL_STATE_LOADED:
        return "loading"
    return cast(ModelState, HostedModelState.Name(state).removeprefix("HOSTED_MODEL_STATE_").lower())
