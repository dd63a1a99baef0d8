"""Removes the billing header that agents write at the beginning of a conversation for their own provider (pure).

Claude Code begins its system prompt with

    x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;

whose checksum is another one in each request. Anthropic's API takes it out before the model reads the prompt. Left
where it is, no request would share a prefix with the one before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.gateway.hints import ignored

NAME = "x-anthropic-billing-header"
# Only at the head of a text, and only NAME=VALUE; pairs: what follows them, even on the same line, is the prompt.
_HEADER = re.compile(rf"\s*{NAME}:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=\s|\Z)))+\s*")
_WHY = "it is for the billing of another service, and differs in each request"


def is_billing(text: str) -> bool:
    """Whether a text is such a header, and nothing else."""
    found = _HEADER.fullmatch(text) is not None
    if found:
        ignored(NAME, _WHY)
    return found


def without_billing(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the billing header at the beginning of system texts. A message that becomes empty is left
    out, unless it is the only one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        header = None
        if message["role"] in ("system", "developer") and isinstance(content, str):
            header = _HEADER.match(content)
        if header is None:
            found.append(dict(message))
            continue
        ignored(NAME, _WHY)
        if (rest := content[header.end() :]) or len(messages) == 1:
            found.append({**message, "content": rest})
    return found
