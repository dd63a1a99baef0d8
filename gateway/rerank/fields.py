"""What happens to each field of rerank and score (pure)."""

from __future__ import annotations

from headrace.gateway.fields import Applied, FieldTable, Hint, Row
from headrace.gateway.rerank.types import RerankRequest, ScoreRequest

_SHARED: dict[str, Row] = {
    "model": Applied("name", "Optional while there is only one model"),
    "truncate_prompt_tokens": Applied("1 or more, or -1", "Keep only this many tokens of each pair"),
    "priority": Applied("32 bits", "Higher priorities go first"),
    "user": Hint("it concerns the provider's own monitoring"),
}
RERANK = FieldTable(
    "POST /v1/rerank",
    (RerankRequest,),
    {
        "query": Applied("text"),
        "documents": Applied("texts, or objects with `text`"),
        "documents[].text": Applied("text"),
        "top_n": Applied("1 or more", "Return only this many, best first"),
        "return_documents": Applied("bool", "The results have the documents, too"),
        "max_tokens_per_doc": Applied("1 or more", "Keep only this many tokens of each document"),
        **_SHARED,
    },
)
SCORE = FieldTable(
    "POST /v1/score",
    (ScoreRequest,),
    {
        "text_1": Applied("text, or list of texts"),
        "text_2": Applied("text, or list of texts", "Of the same length as `text_1`, unless that is one text"),
        **_SHARED,
    },
)
TABLES = (RERANK, SCORE)
