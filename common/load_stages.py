"""The stages in which a worker loads a model. Its log names them, and commands that wait for it show the last one."""

from __future__ import annotations

from enum import StrEnum


class LoadStage(StrEnum):
    """The stages of a worker before it serves."""

    COMPILING = "reading and compiling the model"
    HASHING = "allocating the KV cache, and identifying the weights"
    WARMING = "warming up"
    ADAPTERS = "reading adapters"


def line_of(stage: LoadStage) -> str:
    """The message of the log with which a stage begins."""
    return f"loading: {stage}"


def stage_in(line: str) -> LoadStage | None:
    """The stage that begins with a line of a log, in whatever format; None if none does."""
    return next((stage for stage in LoadStage if line_of(stage) in line), None)
