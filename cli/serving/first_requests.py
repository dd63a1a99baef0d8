"""The first requests that `headrace serve` suggests, depending on the model's task."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.common.model_files.task import task_of
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK


def first_requests(url: str, name: str, model_dir: Path, *, needs_key: bool = False) -> Sequence[str]:
    """Commands for a shell. If requests need a key, they send the one in HEADRACE_API_KEY."""
    task = task_of(model_dir)
    if task == TASK_EMBED:
        return [_curl(f"{url}/v1/embeddings", {"model": name, "input": "Hello!"}, needs_key)]
    if task == TASK_RANK:
        body = {"model": name, "query": "A bird?", "documents": ["A robin.", "A stone."]}
        return [_curl(f"{url}/v1/rerank", body, needs_key)]
    messages = [{"role": "user", "content": "Hello!"}]
    return [
        _curl(f"{url}/v1/chat/completions", {"model": name, "messages": messages}, needs_key),
        f"headrace chat --url {url}",
    ]


def _curl(url: str, body: dict[str, Any], needs_key: bool) -> str:
    compact = shlex.quote(json.dumps(body, separators=(",", ":")))
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if needs_key else ""
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {compact}"
