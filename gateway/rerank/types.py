"""Bodies of rerank and score (pure). docs/reference/http-api.md has every field."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class DocumentText(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/rerank."""

    model: str | None = None
    query: str
    documents: list[str | DocumentText]
    top_n: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/score."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None
