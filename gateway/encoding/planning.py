"""Prepares texts for a model: finds the model, tokenizes the texts, and checks their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.gateway.chat.prompts import Prompts
from headrace.gateway.checks import check_range, invalid
from headrace.gateway.text.models import Model, Models
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, Task
from headrace.protos.status import Reason, StatusError
from headrace.protos.tasks import check_task

MAX_TEXTS = 2048
_MOST = 2**31 - 1

Text = str | Sequence[int]
"""A text, or its tokens."""


@dataclass(frozen=True, slots=True)
class TextsToEmbed:
    """Texts to be turned into vectors. `field` is their name in errors."""

    model: str
    texts: Sequence[Text]
    truncate_prompt_tokens: int | None = None
    """Truncate a longer text to this many tokens, special tokens included; -1: to the model's maximum. None: a text
    that is too long is refused."""
    priority: int = 0
    field: str = "input"


@dataclass(frozen=True, slots=True)
class PairsToScore:
    """Pairs of a query and a document. Errors name them by `query_fields` and `document_fields`, and the list of pairs
    by `field`."""

    model: str
    pairs: Sequence[tuple[str, str]]
    query_fields: Sequence[str]
    document_fields: Sequence[str]
    field: str
    truncate_prompt_tokens: int | None = None
    """Truncate the document of a longer pair, so that the pair has this many tokens; -1: the model's maximum."""
    max_tokens_per_doc: int | None = None
    """Keep this many tokens of the beginning of a longer document."""
    priority: int = 0


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
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))


class Copies(Protocol):
    """Copies requests to a model on trial; see `headrace.gateway.encoding.running`."""

    def offer(self, request: TextsToEmbed | PairsToScore, encodings: Encodings) -> None:
        """Copy a planned request, if it has a shadow. `encodings` plans the copy."""
        ...


class Encodings:
    """Plans encodings with the models that are available."""

    def __init__(self, models: Models, prompts: Prompts, copies: Copies) -> None:
        """Planned requests are offered to `copies`."""
        self._models = models
        self._prompts = prompts
        self._copies = copies

    async def plan(self, request: TextsToEmbed) -> EncodingPlan:
        """Check a request for vectors and tokenize its texts. Raises `StatusError`."""
        texts, name = request.texts, request.field
        _check_number(len(texts), name)
        _check_truncation(request.truncate_prompt_tokens)
        model = await self._found(request.model, TASK_EMBED)
        keep = request.truncate_prompt_tokens
        if keep is None and model.rules.truncates_texts:
            keep = -1
        written = [text for text in texts if isinstance(text, str)]
        encoded = iter(await self._prompts.of_texts(model, written))
        prompts: list[Sequence[int]] = []
        for number, text in enumerate(texts):
            at = f"{name}[{number}]" if len(texts) > 1 else name
            token_ids = next(encoded) if isinstance(text, str) else _checked(text, at, model)
            num_last = len(model.text.tokenizer.special_around[1]) if isinstance(text, str) else 0
            prompts.append(_fitting(token_ids, keep, num_last, at, model))
        self._copies.offer(request, self)
        return EncodingPlan(model, prompts, [0] * len(prompts), request.priority)

    async def plan_pairs(self, request: PairsToScore) -> EncodingPlan:
        """Check pairs and tokenize each as: special tokens, query, separator, document, special tokens. Raises
        `StatusError`."""
        _check_number(len(request.pairs), request.field)
        _check_truncation(request.truncate_prompt_tokens)
        model = await self._found(request.model, TASK_RANK)
        limit = model.rules.max_documents
        if limit and len(request.pairs) > limit:
            problem = f"takes at most {limit} texts, the limit that this model's operator has set"
            raise invalid(request.field, f"{request.field} {problem}; send several requests")
        texts = await self._pair_texts(model, request.pairs)
        # The tokenizer may have been converted without them.
        before, behind = model.card.pair_prefix_token_ids, model.card.pair_suffix_token_ids
        most = model.card.max_context_tokens
        keep = most if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens
        prompts: list[Sequence[int]] = []
        num_firsts = []
        for number, (query_ids, document_ids) in enumerate(texts):
            first = [*before, *query_ids, *model.card.pair_separator_token_ids]
            document_ids = document_ids[: request.max_tokens_per_doc]
            room = most - len(first) - len(behind)
            if room < 1:
                raise _no_room(request.query_fields[number], len(query_ids), most, model)
            if keep is not None:
                document_ids = document_ids[: max(keep - len(first) - len(behind), 0)]
            if len(document_ids) > room:
                remedy = "split it, or set truncate_prompt_tokens to -1 to use its beginning"
                name = request.document_fields[number]
                raise _too_long(f"{name} with its query", len(document_ids) + most - room, most, model, remedy, name)
            prompts.append([*first, *document_ids, *behind])
            num_firsts.append(len(first))
        self._copies.offer(request, self)
        return EncodingPlan(model, prompts, num_firsts, request.priority)

    async def _pair_texts(
        self, model: Model, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        """The tokens of each query and document, with the text that the model's prompt has beside them."""
        card = model.card
        queries = {query: f"{card.pair_query_before}{query}{card.pair_query_after}" for query, _ in pairs}
        is_one_text = bool(card.pair_query_after) and not card.pair_separator_token_ids
        if is_one_text:
            documents = [queries[query] + document for query, document in pairs]
            # A space at the end becomes part of the document's first word.
            beginnings = [text.rstrip(" ") for text in queries.values()]
        else:
            documents = [card.pair_document_before + document for _, document in pairs]
            beginnings = list(queries.values())
        encoded = await self._prompts.of_texts(model, [*beginnings, *documents], add_special_tokens=False)
        query_ids = dict(zip(queries, encoded, strict=False))
        found: list[tuple[Sequence[int], Sequence[int]]] = []
        for (query, _), document_ids in zip(pairs, encoded[len(queries) :], strict=True):
            length = len(query_ids[query])
            both = document_ids[:length], document_ids[length:]
            found.append(both if is_one_text else (query_ids[query], document_ids))
        return found

    async def _found(self, name: str, task: Task) -> Model:
        model = await self._models.find(name)
        check_task(task, model.card.task, model.name)
        return model


def paired(firsts: Sequence[str], seconds: Sequence[str], first_field: str, second_field: str) -> list[tuple[str, str]]:
    """Pairs of texts: one first text with each second one, or two lists of the same length. Raises `StatusError`, which
    names the fields."""
    if len(firsts) == 1:
        firsts = [*firsts] * len(seconds)
    if len(firsts) != len(seconds):
        problem = f"{first_field} has {len(firsts)} texts, and {second_field} has {len(seconds)}"
        raise invalid(first_field, f"{problem}; {first_field} takes one text, or as many as {second_field}")
    return list(zip(firsts, seconds, strict=True))


def _check_number(number: int, name: str) -> None:
    if not number:
        raise invalid(name, f"{name} must have at least one text")
    if number > MAX_TEXTS:
        raise invalid(name, f"{name} takes at most {MAX_TEXTS} texts, these are {number}; send several requests")


def _check_truncation(keep: int | None) -> None:
    if keep is not None and keep != -1:
        check_range("truncate_prompt_tokens", keep, 1, _MOST)


def _checked(token_ids: Sequence[int], at: str, model: Model) -> Sequence[int]:
    """Check tokens that the caller sent. Raises `StatusError`."""
    if not token_ids:
        raise invalid(at, f"{at} must have at least one token")
    size = model.card.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= size:
        raise invalid(at, f"{at}: tokens must be from 0 to {size - 1}")
    return token_ids


def _fitting(token_ids: Sequence[int], keep: int | None, num_last: int, at: str, model: Model) -> Sequence[int]:
    """The tokens, truncated to the model's limit if the caller allows it. The last `num_last` are special tokens, which
    are kept."""
    most = model.card.max_context_tokens
    if keep is not None:
        keep = most if keep == -1 else keep
        if len(token_ids) > keep:
            num_last = min(num_last, keep)
            token_ids = [*token_ids[: keep - num_last], *token_ids[len(token_ids) - num_last :]]
    if not token_ids:
        raise invalid(at, f"{at} must not be empty")
    if len(token_ids) > most:
        remedy = "split it, or set truncate_prompt_tokens to -1 to use its beginning"
        raise _too_long(at, len(token_ids), most, model, remedy)
    return token_ids


def _no_room(at: str, num_tokens: int, most: int, model: Model) -> StatusError:
    problem = f"{at} has {num_tokens} tokens, which leave no room for a document: the model '{model.name}' takes"
    return StatusError(Reason.CONTEXT_TOO_LONG, f"{problem} at most {most} for both; shorten it", field=at)


def _too_long(at: str, num_tokens: int, most: int, model: Model, remedy: str, field: str = "") -> StatusError:
    problem = f"{at} has {num_tokens} tokens, and the model '{model.name}' takes at most {most}"
    return StatusError(Reason.CONTEXT_TOO_LONG, f"{problem}; {remedy}", field=field or at)
