"""From texts to the tokens that a model encodes: finds the model, tokenizes, checks lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.gateway.chat.prompts import Prompts
from headrace.gateway.checks import check_range, invalid
from headrace.gateway.text.models import Model, Models
from headrace.protos.inference_pb2 import TASK_EMBED, Task
from headrace.protos.status import Reason, StatusError
from headrace.protos.tasks import check_task

MAX_TEXTS = 2048
_MOST = 2**31 - 1

Text = str | Sequence[int]
"""A text, or its tokens."""


@dataclass(frozen=True, slots=True)
class TextsToEmbed:
    """Texts of which vectors are wanted. `field` is their name in errors."""

    model: str
    texts: Sequence[Text]
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of the beginning of a longer text, special tokens included; -1: as many as the model takes.
    None: a text that is too long is refused."""
    priority: int = 0
    field: str = "input"


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """Checked tokens, in the order of the caller's texts."""

    model: Model
    prompts: Sequence[Sequence[int]]
    num_first_text_tokens: Sequence[int]
    """For each prompt that is a pair of texts, the tokens of the first one with its special tokens; 0 for others."""
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))


class Encodings:
    """Plans encodings with the models that are available."""

    def __init__(self, models: Models, prompts: Prompts) -> None:
        self._models = models
        self._prompts = prompts

    async def plan(self, request: TextsToEmbed) -> EncodingPlan:
        """Check a request for vectors and tokenize its texts. Raises `StatusError`."""
        texts, name = request.texts, request.field
        _check_number(len(texts), name)
        _check_truncation(request.truncate_prompt_tokens)
        model = await self._found(request.model, TASK_EMBED)
        written = [text for text in texts if isinstance(text, str)]
        encoded = iter(await self._prompts.of_texts(model, written))
        prompts: list[Sequence[int]] = []
        for number, text in enumerate(texts):
            at = f"{name}[{number}]" if len(texts) > 1 else name
            token_ids = next(encoded) if isinstance(text, str) else _checked(text, at, model)
            num_last = len(model.text.tokenizer.special_around[1]) if isinstance(text, str) else 0
            prompts.append(_fitting(token_ids, request.truncate_prompt_tokens, num_last, at, model))
        return EncodingPlan(model, prompts, [0] * len(prompts), request.priority)

    async def _found(self, name: str, task: Task) -> Model:
        model = await self._models.find(name)
        check_task(task, model.card.task, model.name)
        return model


def _check_number(number: int, name: str) -> None:
    if not number:
        raise invalid(name, f"{name} must have at least one text")
    if number > MAX_TEXTS:
        raise invalid(name, f"{name} takes at most {MAX_TEXTS} texts, these are {number}; send several requests")


def _check_truncation(keep: int | None) -> None:
    if keep is not None and keep != -1:
        check_range("truncate_prompt_tokens", keep, 1, _MOST)


def _checked(token_ids: Sequence[int], at: str, model: Model) -> Sequence[int]:
    """Tokens of a caller. Raises `StatusError`."""
    if not token_ids:
        raise invalid(at, f"{at} must have at least one token")
    size = model.card.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= size:
        raise invalid(at, f"{at}: tokens must be from 0 to {size - 1}")
    return token_ids


def _fitting(token_ids: Sequence[int], keep: int | None, num_last: int, at: str, model: Model) -> Sequence[int]:
    """The tokens as the model takes them, truncated if that is wanted; the last `num_last` are special and stay."""
    most = model.card.max_context_tokens
    if keep is not None:
        keep = most if keep == -1 else keep
        if len(token_ids) > keep:
            num_last = min(num_last, keep)
            token_ids = [*token_ids[: keep - num_last], *token_ids[len(token_ids) - num_last :]]
    if not token_ids:
        raise invalid(at, f"{at} must not be empty")
    if len(token_ids) > most:
        problem = f"{at} has {len(token_ids)} tokens, and the model '{model.name}' takes at most {most}"
        remedy = "split it, or set truncate_prompt_tokens to -1 to use its beginning"
        raise StatusError(Reason.CONTEXT_TOO_LONG, f"{problem}; {remedy}", field=at)
    return token_ids
