"""What `headrace serve` proposes to try first, by what the model is for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.common.model_files.task import task_of
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK


def first_requests(url: str, name: str, model_dir: Path) -> Sequence[str]:
    """Commands for a shell."""
    task = task_of(model_dir)
    if task == TASK_EMBED:
        return [_curl(f"{url}/v1/embeddings", {"model": name, "input": "Hello!"})]
    if task == TASK_RANK:
        return [_curl(f"{url}/v1/rerank", {"model": name, "query": "A bird?", "documents": ["A robin.", "A stone."]})]
    messages = [{"role": "user", "content": "Hello!"}]
    return [
        _curl(f"{url}/v1/chat/completions", {"model": name, "messages": messages}),
        f"headrace chat --url {url}",
    ]


def _curl(url: str, body: dict[str, Any]) -> str:
    compact = json.dumps(body, separators=(",", ":"))
    return f"curl {url} -H 'Content-Type: application/json' -d '{compact}'"
