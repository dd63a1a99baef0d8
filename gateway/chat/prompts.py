"""Turns texts and conversations into token ids: short ones at once, long ones in a small thread pool."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headrace.common.telemetry.tracing import current_span
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.text.control_text import Marking
from headrace.gateway.text.models import Model
from headrace.protos.status import Reason, StatusError

# Tokenizing this much takes about 0.2 ms, too short to delay a running stream noticeably.
MAX_INLINE_CHARS = 2000
MAX_PENDING = 256
# The cost of a message besides its content, in characters.
_MESSAGE_CHARS = 20

# The cost of a text in a list besides its content, in characters.
_TEXT_CHARS = 100

# The cost of tokenizing a word twice, in characters of one long text.
_WORD_CHARS = 500

# Number of characters at the end of a prompt that are examined.
_ENDING_CHARS = 100

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template. Messages are in the form that templates expect, with `content` as a text."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    """Whether to add special tokens around the template's text, which usually has its own."""
    template: ChatTemplate | None = None
    """The template for this conversation; by default the model's."""

    @property
    def num_chars(self) -> int:
        """The approximate length of its text."""
        total = sum(len(msgspec.json.encode(values)) for values in (self.tools, self.variables) if values)
        for message in self.messages:
            total += _MESSAGE_CHARS
            for value in message.values():
                total += len(value if isinstance(value, str) else msgspec.json.encode(value))
        return total


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt that a chat template made of a conversation."""

    token_ids: Sequence[int]
    ending: str
    """The end of the prompt's text, which the answer continues; the content of a message that is continued."""


class SpecialTokensInText(enum.StrEnum):
    """Where the text of a special token in what callers write becomes the token."""

    NEVER = "never"
    PROMPTS = "prompts"
    """In prompts that the caller writes whole, as for /v1/completions, instead of having a template write them."""
    ANYWHERE = "anywhere"


class Prompts:
    """Makes token ids. At most `MAX_PENDING` long texts wait for the threads; more are refused."""

    def __init__(
        self, executor: Executor, special_tokens_in_text: SpecialTokensInText = SpecialTokensInText.PROMPTS
    ) -> None:
        self._executor = executor
        self._special_tokens_in_text = special_tokens_in_text
        self._num_pending = 0

    async def of_prompt(self, model: Model, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that the caller wrote whole, with the markup of the model's turns."""
        is_text = self._special_tokens_in_text is SpecialTokensInText.NEVER
        return await self._of_text(model, text, is_text, add_special_tokens)

    async def of_text(self, model: Model, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text without a template. The texts of special tokens stay text."""
        return await self._of_text(model, text, self._stays_text, add_special_tokens)

    @property
    def _stays_text(self) -> bool:
        return self._special_tokens_in_text is not SpecialTokensInText.ANYWHERE

    async def _of_text(self, model: Model, text: str, is_text: bool, add_special_tokens: bool) -> list[int]:
        encode = model.text.encoding.plain if is_text else model.text.tokenizer.encode
        num_chars = len(text)
        if is_text and num_chars <= MAX_INLINE_CHARS and model.text.controls.occur_in(text):
            num_chars += MAX_INLINE_CHARS
        return await self._run(lambda: encode(text, add_special_tokens=add_special_tokens), num_chars)

    async def of_texts(self, model: Model, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts as `of_text` gives them."""

        def encode() -> list[list[int]]:
            several = model.text.encoding.plain_many if self._stays_text else model.text.tokenizer.encode_many
            return several(texts, add_special_tokens=add_special_tokens)

        return await self._run(encode, sum(map(len, texts)) + len(texts) * _TEXT_CHARS)

    async def of_words(self, model: Model, words: Sequence[str]) -> list[list[int]]:
        """Token ids of words, each at the beginning of a text and after a space."""

        def encode() -> list[list[int]]:
            one = model.text.encoding.plain if self._stays_text else model.text.tokenizer.encode
            found: dict[tuple[int, ...], None] = {}
            for word in words:
                for text in (word, " " + word.lstrip(" ")):
                    found[tuple(one(text, add_special_tokens=False))] = None
            return [list(token_ids) for token_ids in found if token_ids]

        return await self._run(encode, len(words) * _WORD_CHARS)

    async def of_conversation(self, model: Model, conversation: Conversation) -> ChatPrompt:
        """The prompt of a conversation. Raises `StatusError` if the model's template refuses it."""
        num_chars = conversation.num_chars
        if num_chars <= MAX_INLINE_CHARS and self._marking(model, conversation) is not None:
            num_chars += MAX_INLINE_CHARS  # the first such text may have to wait until a graph is compiled
        return await self._run(lambda: self._rendered(model, conversation), num_chars)

    def _marking(self, model: Model, conversation: Conversation) -> Marking | None:
        """How to mark texts of control tokens in a conversation; None if it has none."""
        if not self._stays_text:
            return None
        template = conversation.template or model.chat_template()
        given = conversation.messages, conversation.tools, conversation.variables
        return model.text.controls.marking_for(*given, also=[template.source])

    def _rendered(self, model: Model, conversation: Conversation) -> ChatPrompt:
        side, template = model.text, conversation.template or model.chat_template()
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        marking = self._marking(model, conversation)
        if marking is not None:
            messages = [
                {name: value if name == "role" else marking.value(value) for name, value in message.items()}
                for message in messages
            ]
            tools, variables = marking.value(tools), marking.value(variables)
        text = template.render(
            messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=variables,
            tools=tools,
            marking=marking,
        )
        if not self._stays_text:
            token_ids = side.tokenizer.encode(text, add_special_tokens=conversation.add_special_tokens)
        else:
            mark = "" if marking is None else marking.mark
            token_ids = side.encoding.marked(text, mark, add_special_tokens=conversation.add_special_tokens)
            text = text.replace(mark, "") if mark else text
        goes_on = conversation.continue_final_message
        return ChatPrompt(token_ids, conversation.messages[-1]["content"] if goes_on else text[-_ENDING_CHARS:])

    async def _run(self, work: Callable[[], _T], num_chars: int) -> _T:
        with current_span().child("tokenize"):
            return await self._run_in_turn(work, num_chars)

    async def _run_in_turn(self, work: Callable[[], _T], num_chars: int) -> _T:
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        if self._num_pending >= MAX_PENDING:
            raise StatusError(Reason.QUEUE_FULL, "too many long prompts are being tokenized", retry_after_s=1.0)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._num_pending -= 1
