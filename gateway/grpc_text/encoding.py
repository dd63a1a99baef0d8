"""Translates the Text service's messages of embeddings, rerank and scores (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.common.transport.channels import MAX_MESSAGE_BYTES
from headrace.gateway.checks import check_range, invalid
from headrace.gateway.encoding.planning import EncodingPlan, PairsToScore, Text, TextsToEmbed, paired
from headrace.gateway.encoding.vectors import best_first, floats_of
from headrace.protos import text_pb2

_MOST = 2**31 - 1
# Bytes of a message for each of its vectors; an upper bound.
_OVERHEAD_BYTES = 64


def texts_to_embed(message: text_pb2.EmbedRequest) -> TextsToEmbed:
    """The texts of a message. Raises `StatusError`."""
    texts = [_text(one, f"texts[{number}]") for number, one in enumerate(message.texts)]
    return TextsToEmbed(message.model, texts, _truncation(message), message.priority, field="texts")


def pairs_to_score(message: text_pb2.RerankRequest) -> PairsToScore:
    """The query with each document. Raises `StatusError`."""
    for name in ("top_n", "max_tokens_per_doc"):
        if message.HasField(name):
            check_range(name, getattr(message, name), 1, _MOST)
    num = len(message.documents)
    return PairsToScore(
        message.model,
        [(message.query, document) for document in message.documents],
        ["query"] * num,
        [f"documents[{number}]" for number in range(num)],
        "documents",
        _truncation(message),
        message.max_tokens_per_doc if message.HasField("max_tokens_per_doc") else None,
        message.priority,
    )


def pairs_of_texts(message: text_pb2.ScoreRequest) -> PairsToScore:
    """The pairs of a message. Raises `StatusError`."""
    firsts = message.first_texts
    seconds = message.second_texts
    pairs = paired(firsts, seconds, "first_texts", "second_texts")
    return PairsToScore(
        message.model,
        pairs,
        [f"first_texts[{0 if len(firsts) == 1 else number}]" for number in range(len(pairs))],
        [f"second_texts[{number}]" for number in range(len(pairs))],
        "second_texts",
        _truncation(message),
        priority=message.priority,
    )


def check_response_size(num_texts: int, dimensions: int) -> None:
    """Raise `StatusError` if the vectors of this many texts do not fit into a message."""
    most = MAX_MESSAGE_BYTES // (4 * dimensions + _OVERHEAD_BYTES)
    if num_texts > most:
        problem = f"vectors of {dimensions} dimensions of more than {most} texts do not fit into a message"
        raise invalid("texts", f"{problem}, these are {num_texts}; send several requests, or fewer dimensions")


def embed_response(vectors: Sequence[bytes], plan: EncodingPlan, request_id: str) -> text_pb2.EmbedResponse:
    """The vectors, little-endian float32, as a message."""
    embeddings = [text_pb2.Embedding(values=floats_of(vector)) for vector in vectors]
    return text_pb2.EmbedResponse(embeddings=embeddings, usage=_usage(plan), request_id=request_id)


def rerank_response(
    message: text_pb2.RerankRequest, scores: Sequence[float], plan: EncodingPlan, request_id: str
) -> text_pb2.RerankResponse:
    """The documents' order as a message."""
    results = [
        text_pb2.RerankResult(
            index=number,
            relevance_score=scores[number],
            document=message.documents[number] if message.return_documents else "",
        )
        for number in best_first(scores, message.top_n if message.HasField("top_n") else None)
    ]
    return text_pb2.RerankResponse(results=results, usage=_usage(plan), request_id=request_id)


def score_response(scores: Sequence[float], plan: EncodingPlan, request_id: str) -> text_pb2.ScoreResponse:
    """The scores of the pairs as a message."""
    return text_pb2.ScoreResponse(scores=scores, usage=_usage(plan), request_id=request_id)


def _text(message: text_pb2.EmbedText, at: str) -> Text:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise invalid(at, f"{at}: give either text or token_ids")
    return message.text if kind == "text" else list(message.token_ids.ids)


def _truncation(message: text_pb2.EmbedRequest | text_pb2.RerankRequest | text_pb2.ScoreRequest) -> int | None:
    return message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None


def _usage(plan: EncodingPlan) -> text_pb2.TextUsage:
    return text_pb2.TextUsage(prompt_tokens=plan.num_tokens)
