"""Log-probabilities in OpenAI's format (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.gateway.chat.choice import TokenLogprob
from headrace.gateway.edge.wire import Shape

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class ShownToken(Shape):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(ShownToken):
    """A token of the answer, and the most probable ones at its position."""

    top_logprobs: list[ShownToken]


class ShownChatLogprobs(Shape):
    """Log-probabilities of a chat's choice."""

    content: list[ChosenToken]
    refusal: None = None


class ShownCompletionLogprobs(Shape):
    """Parallel lists, with null at the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Shape):
    """A possible token of the prompt, by its id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""Null for the first token of the prompt and for tokens of images, else one object by token id for each token."""


def token_bytes_of(token_bytes: Sequence[bytes], token_id: int) -> bytes:
    """Bytes of a token; none for rows that pad a model's vocabulary."""
    return token_bytes[token_id] if token_id < len(token_bytes) else b""


class _TokenNames:
    """Names of tokens: their text, or `token_id:7` for callers that need unique names."""

    def __init__(self, token_bytes: Sequence[bytes], as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids

    def named(self, token_id: int) -> tuple[str, bytes]:
        """The name and the bytes."""
        raw = token_bytes_of(self._token_bytes, token_id)
        return f"token_id:{token_id}" if self._as_ids else raw.decode(errors="replace"), raw

    def name(self, token_id: int) -> str:
        return self.named(token_id)[0]


class ChatLogprobs:
    """The `logprobs` of a chat choice."""

    def __init__(self, token_bytes: Sequence[bytes], as_ids: bool = False) -> None:
        self._names = _TokenNames(token_bytes, as_ids)

    def tokens(self, logprobs: Iterable[TokenLogprob]) -> list[ChosenToken]:
        """Some tokens of a choice; later ones are appended."""
        return [
            ChosenToken(*self._token(one.token_id, one.logprob), [ShownToken(*self._token(*top)) for top in one.top])
            for one in logprobs
        ]

    def value(self, logprobs: Iterable[TokenLogprob]) -> ShownChatLogprobs:
        """The object for some tokens of a choice; those of later tokens are appended to its `content`."""
        return ShownChatLogprobs(self.tokens(logprobs))

    def _token(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        name, raw = self._names.named(token_id)
        return name, max(logprob, LEAST_LOGPROB), list(raw)


class CompletionLogprobs:
    """The `logprobs` of a completion choice: at each position the chosen token and the `num_top` most probable ones."""

    def __init__(self, token_bytes: Sequence[bytes], num_top: int, as_ids: bool = False) -> None:
        self._names = _TokenNames(token_bytes, as_ids)
        self._num_top = num_top

    def value(
        self,
        logprobs: Iterable[TokenLogprob],
        echo: str = "",
        first_token_id: int | None = None,
        prompt_logprobs: Sequence[TokenLogprob] = (),
    ) -> ShownCompletionLogprobs:
        """The object for some tokens of a choice; those of later tokens are appended to each of its lists.

        `echo` is the prompt that the choice begins with. With `first_token_id`, the prompt's tokens are listed too:
        the first one, which has no log-probability, and the rest from `prompt_logprobs`.
        """
        ones = list(prompt_logprobs) if first_token_id is not None else []
        offsets = [min(one.offset, len(echo)) for one in ones]
        for one in logprobs:
            ones.append(one)
            offsets.append(len(echo) + one.offset)
        first = [] if first_token_id is None else [first_token_id]
        none = [None for _ in first]
        return ShownCompletionLogprobs(
            tokens=[self._names.name(token_id) for token_id in (*first, *(one.token_id for one in ones))],
            token_logprobs=[*none, *(max(one.logprob, LEAST_LOGPROB) for one in ones)],
            top_logprobs=[*none, *(self._top(one) for one in ones)],
            text_offset=[*(0 for _ in none), *offsets],
        )

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """Best first. Of several tokens with one name, the most probable is listed."""
        found: dict[str, float] = {}
        for token_id, logprob in (*one.top[: self._num_top], (one.token_id, one.logprob)):
            found.setdefault(self._names.name(token_id), max(logprob, LEAST_LOGPROB))
        return found


def prompt_logprobs_value(
    logprobs: Iterable[TokenLogprob], num_top: int, token_bytes: Sequence[bytes]
) -> PromptLogprobs:
    """The `prompt_logprobs` of an answer."""
    found: PromptLogprobs = [None]
    for one in logprobs:
        if not one.rank:  # a token of an image has no probability
            found.append(None)
            continue
        opinions = {one.token_id: (one.logprob, one.rank)}
        for rank, (token_id, logprob) in enumerate(one.top[:num_top], 1):
            opinions.setdefault(token_id, (logprob, rank))
        found.append(
            {
                str(token_id): PromptToken(
                    max(logprob, LEAST_LOGPROB), rank, token_bytes_of(token_bytes, token_id).decode(errors="replace")
                )
                for token_id, (logprob, rank) in opinions.items()
            }
        )
    return found
