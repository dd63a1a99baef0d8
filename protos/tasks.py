"""The tasks of models. A request's task must be that of its model; gateway and worker share this rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, Task
from headrace.protos.status import Reason, StatusError

TaskName: TypeAlias = Literal["generate", "embed", "rank"]
NAMES: Mapping[Task, TaskName] = {TASK_UNSPECIFIED: "generate", TASK_EMBED: "embed", TASK_RANK: "rank"}
"""The tasks in words, as users see them."""
_WANTED = {TASK_UNSPECIFIED: "text generation", TASK_EMBED: "embeddings", TASK_RANK: "scores of documents"}
_OFFERED = {
    TASK_UNSPECIFIED: "chat/completions and completions",
    TASK_EMBED: "embeddings (POST /v1/embeddings)",
    TASK_RANK: "rerank and score (POST /v1/rerank, /v1/score)",
}


def check_task(wanted: Task, offered: Task, model: str) -> None:
    """Raise StatusError (UNSUPPORTED) unless the model has the requested task."""
    if wanted != offered:
        problem = f"the model '{model}' offers {_OFFERED[offered]}, not {_WANTED.get(wanted, 'this task')}"
        raise StatusError(Reason.UNSUPPORTED, problem, field="model")
