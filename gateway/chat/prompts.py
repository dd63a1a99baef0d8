"""Turns texts and conversations into token ids: short ones at once, long ones in a small thread pool."""

from __future__ import annotations

import asyncio
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from headrace.common.telemetry.tracing import current_span
from headrace.common.vision.family import check_not_reduced
from headrace.common.vision.header import ImageError
from headrace.gateway.checks import invalid
from headrace.gateway.images.given import GivenImage
from headrace.gateway.images.loading import ImageLoader, check_number
from headrace.gateway.images.refusal import ImageRefusal, Why
from headrace.gateway.text.breakers import Breakers, breakers_of
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.text.content import images_in, text_of
from headrace.gateway.text.control_text import ControlTexts, Marking
from headrace.gateway.text.fill import FillTokens, cut_to, fill_tokens
from headrace.gateway.text.image_tokens import ImageTokens, PromptImage, with_images
from headrace.gateway.text.models import Model, TextSide
from headrace.gateway.text.plain_encoding import PlainEncoding
from headrace.protos.answer_bounds import max_image_bytes
from headrace.protos.status import Reason, StatusError

if TYPE_CHECKING:
    from headrace.gateway.text.tokenizer import Tokenizer

# Tokenizing this much takes about 0.2 ms, too short to delay a running stream noticeably.
MAX_INLINE_CHARS = 2000
MAX_PENDING = 256
# The cost of a message besides its content, in characters.
_MESSAGE_CHARS = 20

# The cost of a text in a list besides its content, in characters.
_TEXT_CHARS = 100

# The cost of tokenizing a word twice, in characters of one long text.
_WORD_CHARS = 500

# Breakers of repetitions that are kept for each model, and the most sequences that begin one of them.
_MOST_KEPT_BREAKERS = 32
_NO_GAPS = "none"
MAX_BREAKER_SEQUENCES = 1 << 16

# Number of characters at the end of a prompt that are examined.
_ENDING_CHARS = 100

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template. Messages are in the form that templates expect, but for their `content`, which is
    a text, or texts and places of images (`text.content`)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    """Whether to add special tokens around the template's text, which usually has its own."""
    template: ChatTemplate | None = None
    """The template for this conversation; by default the model's."""
    images: Sequence[tuple[str, GivenImage]] = ()
    """The images by their numbers, each with the name of its field."""

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
    """With the images' tokens, if there are any."""
    ending: str
    """The end of the prompt's text, which the answer continues; the content of a message that is continued."""
    images: Sequence[PromptImage] = ()
    """In the order of their places."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The text after a gap: the model writes the text between the prompt and this one."""

    suffix: str
    files: Sequence[tuple[str, str]] = ()
    """Names and texts of files that belong to them."""
    field: str = "suffix"
    """The caller's name of the suffix."""
    cuts: bool = False
    """Leave out what is farthest from the gap, if prompt and suffix are too long."""


class _Rendered(NamedTuple):
    """A conversation as its template writes it."""

    token_ids: list[int]
    """With a placeholder for each image."""
    ending: str
    images: Sequence[int]
    """The numbers of its images, in their order."""


class SpecialTokensInText(enum.StrEnum):
    """Where in the texts of callers the text of a special token becomes the token."""

    NEVER = "never"
    PROMPTS = "prompts"
    """In prompts that the caller writes whole, as for /v1/completions, instead of having a template write them."""
    ANYWHERE = "anywhere"


class Prompts:
    """Makes token ids. At most `MAX_PENDING` long texts wait for the threads; more are refused."""

    def __init__(
        self,
        executor: Executor,
        special_tokens_in_text: SpecialTokensInText = SpecialTokensInText.PROMPTS,
        images: ImageLoader | None = None,
    ) -> None:
        self._executor = executor
        self._loader = images or ImageLoader(executor)
        self._special_tokens_in_text = special_tokens_in_text
        self._num_pending = 0
        self._fills: WeakKeyDictionary[Tokenizer, FillTokens | str] = WeakKeyDictionary()
        self._breakers: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], Breakers]] = WeakKeyDictionary()

    async def of_prompt(self, model: Model, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt that the caller wrote whole, with the markup of the model's turns. Texts of the tokens
        of images stay text even here: images are parts of messages."""
        stays_text = self._special_tokens_in_text is SpecialTokensInText.NEVER
        return await self._of_text(model, text, stays_text, add_special_tokens)

    async def of_text(self, model: Model, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text without a template. The texts of special tokens stay text."""
        return await self._of_text(model, text, self._stays_text, add_special_tokens)

    @property
    def _stays_text(self) -> bool:
        return self._special_tokens_in_text is not SpecialTokensInText.ANYWHERE

    async def _of_text(self, model: Model, text: str, stays_text: bool, add_special_tokens: bool) -> list[int]:
        controls, encoding = _kept_as_text(model.text, stays_text)
        encode = model.text.tokenizer.encode if encoding is None else encoding.plain
        num_chars = len(text)
        if controls is not None and num_chars <= MAX_INLINE_CHARS and controls.occur_in(text):
            num_chars += MAX_INLINE_CHARS
        return await self._run(lambda: encode(text, add_special_tokens=add_special_tokens), num_chars)

    async def of_texts(self, model: Model, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts as `of_text` gives them."""

        def encode() -> list[list[int]]:
            _, encoding = _kept_as_text(model.text, self._stays_text)
            several = model.text.tokenizer.encode_many if encoding is None else encoding.plain_many
            return several(texts, add_special_tokens=add_special_tokens)

        return await self._run(encode, sum(map(len, texts)) + len(texts) * _TEXT_CHARS)

    async def of_words(self, model: Model, words: Sequence[str]) -> list[list[int]]:
        """Token ids of words, each at the beginning of a text and after a space."""

        def encode() -> list[list[int]]:
            _, encoding = _kept_as_text(model.text, self._stays_text)
            one = model.text.tokenizer.encode if encoding is None else encoding.plain
            found: dict[tuple[int, ...], None] = {}
            for word in words:
                for text in (word, " " + word.lstrip(" ")):
                    found[tuple(one(text, add_special_tokens=False))] = None
            return [list(token_ids) for token_ids in found if token_ids]

        return await self._run(encode, len(words) * _WORD_CHARS)

    async def breakers(self, model: Model, texts: tuple[str, ...]) -> Breakers:
        """The tokens at which repetitions begin anew. They are kept: finding them reads the vocabulary."""
        tokenizer = model.text.tokenizer
        of_model = self._breakers.setdefault(tokenizer, {})
        found = of_model.get(texts)
        if found is None:

            def find() -> Breakers:
                return breakers_of(
                    texts, tokenizer.token_bytes, lambda text: tokenizer.encode(text, add_special_tokens=False)
                )

            found = await self._run(find, len(tokenizer.token_bytes) * max(1, sum(map(len, texts))))
            if len(found.sequences) > MAX_BREAKER_SEQUENCES:
                problem = (
                    "dry_sequence_breakers begin in too many ways in this model's tokens; use fewer or shorter texts"
                )
                raise invalid("dry_sequence_breakers", problem)
            if len(of_model) >= _MOST_KEPT_BREAKERS:
                of_model.pop(next(iter(of_model)))
            of_model[texts] = found
        return found

    def fills_gaps(self, model: Model) -> bool:
        """Whether the model has tokens for a text with a gap."""
        return self._fill_tokens(model) is not None

    def _fill_tokens(self, model: Model) -> FillTokens | None:
        tokenizer = model.text.tokenizer
        tokens = self._fills.get(tokenizer)
        if tokens is None:
            tokens = self._fills[tokenizer] = fill_tokens(tokenizer.token_bytes) or _NO_GAPS
        return None if isinstance(tokens, str) else tokens

    async def with_gap(
        self, model: Model, prompt: str | Sequence[int], gap: Gap, num_answer_tokens: int
    ) -> tuple[list[int], Sequence[int]]:
        """Token ids of a prompt and its suffix in the model's own form, and the tokens that end the text between them.
        Raises `StatusError` if the model has no such form."""
        tokenizer = model.text.tokenizer
        tokens = self._fill_tokens(model)
        if tokens is None:
            problem = f"{gap.field} is not supported: the model '{model.name}' has no tokens to fill a gap in a text"
            raise StatusError(Reason.UNSUPPORTED, f"{problem}; use a model for code that has them", field=gap.field)
        found = tokens

        def made() -> list[int]:
            _, encoding = _kept_as_text(model.text, self._stays_text)
            one = tokenizer.encode if encoding is None else encoding.plain

            def encode(text: str) -> list[int]:
                return one(text, add_special_tokens=False) if text else []

            begin = tokenizer.special_around[0]
            before: Sequence[int] = encode(prompt) if isinstance(prompt, str) else prompt
            after: Sequence[int] = encode(gap.suffix)
            files = list(gap.files)
            if gap.cuts:
                room = model.card.max_context_tokens - num_answer_tokens - len(begin) - found.num_marks
                while files and len(found.prompt((), (), files, encode=encode)) > room // 2:
                    files.pop(0)
                room -= len(found.prompt((), (), files, encode=encode)) - found.num_marks
                before, after = cut_to(max(room, 1), before, after)
            return found.prompt(before, after, files, encode=encode, begin=begin)

        num_chars = len(prompt) + len(gap.suffix) + sum(len(name) + len(text) for name, text in gap.files)
        return await self._run(made, num_chars), found.ends

    async def of_conversation(self, model: Model, conversation: Conversation) -> ChatPrompt:
        """The prompt of a conversation. Raises `StatusError` if the model's template refuses it, or an image in it is
        refused."""
        num_chars = conversation.num_chars
        if num_chars <= MAX_INLINE_CHARS and self._marking(model, conversation) is not None:
            num_chars += MAX_INLINE_CHARS  # the first such text may have to wait until a graph is compiled
        if not conversation.images or model.images is None:
            token_ids, ending, _ = await self._run(lambda: self._rendered(model, conversation), num_chars)
            return ChatPrompt(token_ids, ending)
        check_number(conversation.images, model.card.images)
        token_ids, ending, order = await self._run(lambda: self._rendered(model, conversation), num_chars)
        if sorted(order) != [*range(len(conversation.images))] or model.images.count_in(token_ids) != len(order):
            raise _without_place(model, conversation)
        images = await self._loaded(model, model.images, [conversation.images[number] for number in order])
        placeholder_id = model.images.placeholder_id
        placed = await self._run(lambda: with_images(token_ids, placeholder_id, images), len(token_ids))
        return ChatPrompt(placed, ending, images)

    async def _loaded(
        self, model: Model, tokens: ImageTokens, given: Sequence[tuple[str, GivenImage]]
    ) -> Sequence[PromptImage]:
        """The images for a prompt. Raises `StatusError`."""
        files = await self._loader.load(given, model.card.images, max_image_bytes(model.card))
        images = []
        left = model.card.max_context_tokens
        for (name, image), (data, header) in zip(given, files, strict=True):
            try:
                if image.is_refused_if_reduced:
                    check_not_reduced(tokens.family, header.width, header.height, image.detail)
                making = functools.partial(tokens.image, data, header.width, header.height, image.detail, name)
                images.append(await self._loader.run(making, len(data)))
            except ImageError as error:
                raise ImageRefusal(Why.PIXELS, name, f"{name}: {error}") from None
            left -= images[-1].num_tokens
            if left < 0:
                most = model.card.max_context_tokens
                problem = (
                    f"This model's maximum context length is {most} tokens, and the images alone take more. Send fewer "
                    "or smaller ones, or ask for a detail of low."
                )
                raise StatusError(Reason.CONTEXT_TOO_LONG, problem, field="messages")
        return images

    def _marking(self, model: Model, conversation: Conversation) -> Marking | None:
        """How to mark texts of control tokens in a conversation; None if it has none."""
        controls, _ = _kept_as_text(model.text, self._stays_text)
        if controls is None:
            return None
        template = conversation.template or model.chat_template()
        given = conversation.messages, conversation.tools, conversation.variables
        return controls.marking_for(*given, also=[template.source])

    def _rendered(self, model: Model, conversation: Conversation) -> _Rendered:
        template = conversation.template or model.chat_template()
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        marking = self._marking(model, conversation)
        if marking is not None:
            messages = [
                {name: value if name == "role" else marking.value(value) for name, value in message.items()}
                for message in messages
            ]
            tools, variables = marking.value(tools), marking.value(variables)
        text, order = template.render(
            messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=variables,
            tools=tools,
            marking=marking,
        )
        if order and model.images is not None:
            text = model.images.expanded_text(text)
        _, encoding = _kept_as_text(model.text, self._stays_text)
        if encoding is None:
            token_ids = model.text.tokenizer.encode(text, add_special_tokens=conversation.add_special_tokens)
        else:
            mark = "" if marking is None else marking.mark
            token_ids = encoding.marked(text, mark, add_special_tokens=conversation.add_special_tokens)
            text = text.replace(mark, "") if mark else text
        if conversation.continue_final_message:
            return _Rendered(token_ids, text_of(conversation.messages[-1]["content"]), order)
        return _Rendered(token_ids, text[-_ENDING_CHARS:], order)

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


def _kept_as_text(side: TextSide, stays_text: bool) -> tuple[ControlTexts | None, PlainEncoding | None]:
    """The control tokens whose texts stay text in what callers write, and how to tokenize it: all of them, or those of
    images alone; None if there are none."""
    return (side.controls, side.encoding) if stays_text else (side.image_controls, side.image_encoding)


def _without_place(model: Model, conversation: Conversation) -> ImageRefusal:
    """The refusal of images for which the template has no place, or not one for each."""
    template, placeholder = conversation.template or model.chat_template(), model.images and model.images.placeholder
    for message in conversation.messages:
        held = images_in(message.get("content"))
        if held and not template.places_images(message["role"], placeholder or ""):
            name, _ = conversation.images[held[0].number]
            where = f"a message of the role {message['role']}"
            problem = f"{name}: the model's chat template has no place for an image in {where}; put it into a message"
            return ImageRefusal(Why.PLACE, name, f"{problem} of the user", Reason.UNSUPPORTED)
    name, _ = conversation.images[0]
    problem = f"{name}: the model's chat template does not write one place for each image of this conversation"
    return ImageRefusal(Why.PLACE, name, f"{problem}; send one image, before the text of the user", Reason.UNSUPPORTED)
