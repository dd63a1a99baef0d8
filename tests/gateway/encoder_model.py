"""A model that encodes, for the fake router: a text becomes four numbers, two texts become one."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.protos import inference_pb2

DIMENSIONS = 4
VECTORS, SCORES = "vectors", "scores"
"""Names of the models."""
BOS, SEPARATOR = 0, 1


def vector_of(token_ids: list[int]) -> list[float]:
    """What the model makes of a text."""
    return [float(len(token_ids)), float(sum(token_ids)), 3.0, 4.0]


def score_of(token_ids: list[int], num_first: int) -> float:
    """The score of two texts: the share of the second one's tokens that the first one has."""
    first, second = set(token_ids[:num_first]), token_ids[num_first:]
    return sum(token_id in first for token_id in second) / len(second)


async def encode(router: Any, stream: Any, send: Any) -> None:
    """A script that answers with a vector or a score."""
    request = stream.request
    token_ids = list(request.token_ids)
    is_rank = request.task == inference_pb2.TASK_RANK
    numbers = [score_of(token_ids, request.num_first_text_tokens)] if is_rank else vector_of(token_ids)
    message = inference_pb2.GenerateResponse(num_cached_tokens=0, vector=np.array(numbers, "<f4").tobytes())
    message.finish.reason = inference_pb2.FINISH_REASON_ENCODED
    message.finish.num_prompt_tokens = len(token_ids)
    await router.context_of(stream).write(message)


def cards(router: Any) -> list[Any]:
    """The cards of an embedder and of a reranker, besides that of the ordinary model."""
    embeds = router.card(name=VECTORS, task=inference_pb2.TASK_EMBED, dimensions=DIMENSIONS, eos_token_ids=[])
    ranks = router.card(
        name=SCORES,
        task=inference_pb2.TASK_RANK,
        dimensions=1,
        pair_prefix_token_ids=[BOS],
        pair_separator_token_ids=[SEPARATOR],
    )
    return [router.card(), embeds, ranks]
