"""A plain beam search: it computes every beam from its beginning and sorts the whole vocabulary of all beams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LogprobsAfter = Callable[[Sequence[Sequence[int]]], npt.NDArray[np.floating[Any]]]
"""The log-probabilities `[n, vocab]` of the tokens after n contexts of one length."""


class Answer(NamedTuple):
    """A finished answer."""

    token_ids: list[int]
    score: float


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Log-probabilities of the logits `[..., vocab]`."""
    values = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs: npt.NDArray[np.float64] = values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return logprobs


def search(
    logprobs_after: LogprobsAfter,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    stops: Collection[int] = (),
    is_text_complete: Callable[[Sequence[int]], bool] = lambda token_ids: False,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    min_tokens: int = 0,
) -> list[Answer]:
    """The `width` best answers, best first. `early_stopping` is as in transformers. Answers end with one of `stops`, or
    where their text is complete."""

    def ends(token_ids: Sequence[int]) -> bool:
        return token_ids[-1] in stops or is_text_complete(token_ids)

    beams: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Answer] = []
    for length in range(1, max_tokens + 1):
        totals = np.array([[total] for _, total in beams])
        rows = totals + logprobs_after([[*prompt, *token_ids] for token_ids, _ in beams])
        if length <= min_tokens:
            rows[:, list(stops)] = -np.inf
        order = np.argsort(-rows, axis=None, kind="stable")[: width * (3 + len(stops))].tolist()
        places = [divmod(place, rows.shape[1]) for place in order]
        candidates = [([*beams[beam][0], token_id], float(rows[beam, token_id])) for beam, token_id in places]
        for token_ids, total in candidates[:width]:
            if length == max_tokens or ends(token_ids):
                finished.append(Answer(token_ids, total / length**length_penalty))
        finished = sorted(finished, key=lambda answer: -answer.score)[:width]
        beams = [candidate for candidate in candidates if not ends(candidate[0])][:width]
        if len(finished) == width:
            final = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or beams[0][1] / final**length_penalty <= finished[-1].score:
                break
    return finished
