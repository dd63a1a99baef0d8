"""Makes the plan of a request: the model, the prompt, the sampling, and how to read the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from headrace.gateway.chat.conversation import Reader, conversation_of, conversation_with_tools
from headrace.gateway.chat.formats import Formats, ModelFormat
from headrace.gateway.chat.generation import Common, Job, Plan, plan_job
from headrace.gateway.chat.output import ChatChoice, Reading, reading_of
from headrace.gateway.chat.prompts import ChatPrompt, Conversation, Gap, Prompts
from headrace.gateway.chat.request import (
    Chat,
    Completion,
    Tokenization,
    check_chat,
    check_completion,
    predicted_text,
    prompts_of,
    sampling_of,
)
from headrace.gateway.chat.sampling import ContextTooLongError, Sampling
from headrace.gateway.chat.thinking import OF_EFFORTS, budget_of
from headrace.gateway.chat.tool_grammar import can_be_held
from headrace.gateway.chat.tools import ToolUse, functions_of
from headrace.gateway.checks import invalid
from headrace.gateway.images.refusal import ImageRefusal, Why
from headrace.gateway.structure.fields import Constraints, structure_of
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.image_tokens import PromptImage, shown
from headrace.gateway.text.models import Model, Models
from headrace.protos.cache_eviction import longest_context
from headrace.protos.inference_pb2 import TASK_UNSPECIFIED, ThinkingBudget
from headrace.protos.sampling_fields import DRY_BREAKERS
from headrace.protos.status import Reason, StatusError
from headrace.protos.tasks import check_task

# Models that a refusal of images names.
_MAX_NAMED = 8
# Fields of a tokenization that apply only to a conversation.
_OF_CONVERSATIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A checked chat."""

    model: Model
    plan: Plan
    reading: Reading

    def choices(self) -> list[ChatChoice]:
        """A reader for each choice."""
        return [self.reading.choice() for _ in range(self.plan.job.num_choices)]


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checked completion."""

    model: Model
    plans: Sequence[Plan]
    """One for each prompt."""
    echoes: Sequence[str]
    """The prompts' texts, if the answers begin with them; else empty."""


class Tokenized(NamedTuple):
    """The tokens of a prompt as they are computed: pseudo tokens tell its images apart."""

    model: Model
    token_ids: Sequence[int]

    @property
    def shown(self) -> list[int]:
        """The tokens as callers know them."""
        images = self.model.images
        return [*self.token_ids] if images is None else shown(self.token_ids, images)


class Copies(Protocol):
    """Copies requests to a model on trial; see `headrace.gateway.chat.shadowing`."""

    def offer(self, request: Chat | Completion, chats: Chats) -> None:
        """Copy a planned request, if it has a shadow. `chats` plans the copy."""
        ...


class Chats:
    """Plans chats and completions."""

    def __init__(
        self,
        models: Models,
        prompts: Prompts,
        constraints: Constraints,
        formats: Formats,
        copies: Copies,
        on_image_refused: Callable[[Why], None],
    ) -> None:
        """Planned requests are offered to `copies`. `on_image_refused` is called for each request that is refused
        because of an image."""
        self._models = models
        self._prompts = prompts
        self._constraints = constraints
        self._formats = formats
        self._copies = copies
        self._on_image_refused = on_image_refused

    async def plan(self, request: Chat, *, is_trial: bool = False) -> ChatPlan:
        """Check a chat and make its prompt. A trial, in whose place another chat may be generated, is not copied.
        Raises `StatusError`."""
        check_chat(request)
        sampling, expected = sampling_of(request), predicted_text(request)
        model, form, use, conversation, prompt = await self._prompted(request)
        sampling = await self._in_tokens(model, request, sampling)
        prediction = await self._prompts.of_text(model, expected, add_special_tokens=False) if expected else ()
        content = await self._constraints.of(request)
        if use.required and not can_be_held(form):
            form = self._formats.plain(model, model.chat_template(request.chat_template)) or form
        reading = reading_of(form, use, prompt.ending, conversation.continue_final_message, content)
        thinking_budget = _thinking_budget(request, model, reading)
        sampling = replace(sampling, structure=reading.structure, thinking_budget=thinking_budget)
        plan = plan_of(
            request,
            model,
            prompt.token_ids,
            sampling,
            reading.shown_ids,
            prediction=prediction,
            images=prompt.images,
        )
        if not is_trial:
            self.offer_copy(request)
        return ChatPlan(model, plan, reading)

    def offer_copy(self, request: Chat | Completion) -> None:
        """Copy a planned request to the model on trial, if there is one."""
        self._copies.offer(request, self)

    async def count(self, request: Chat) -> int:
        """Check a chat and count the tokens of its prompt. Raises `StatusError`."""
        structure_of(request)
        check_chat(request)
        *_, prompt = await self._prompted(request)
        return len(prompt.token_ids)

    def reasons(self, model: Model, template: ChatTemplate | None = None) -> bool:
        """Whether this model's format of reasoning is known; with this template, if it is another than its own."""
        return self._formats.of(model, template).reasons

    def calls_tools(self, model: Model) -> bool:
        """Whether this model's format of tool calls is known."""
        return self._formats.of(model).output.tools is not None

    def fills_gaps(self, model: Model) -> bool:
        """Whether this model has tokens for a text with a gap."""
        return self._prompts.fills_gaps(model)

    async def _prompted(self, request: Chat) -> tuple[Model, ModelFormat, ToolUse, Conversation, ChatPrompt]:
        """The model of a checked chat with its format, and the chat's tools, conversation and prompt."""
        model = await self._generating(request)
        _check_number(len(request.messages), model.card.max_context_tokens)
        template, reader = model.chat_template(request.chat_template), self._reader(model)
        form = self._formats.of(model, template)
        reasons = form.reasons
        with self._counting():
            conversation, use = conversation_with_tools(request, template, reasons, reader)
            return model, form, use, conversation, await self._prompts.of_conversation(model, conversation)

    def _reader(self, model: Model) -> Reader:
        """Inputs other than text that a model reads."""
        if model.images is not None:
            return Reader(model.images.placeholder)
        others = ", ".join(f"'{name}'" for name in self._models.readers_of_images[:_MAX_NAMED])
        remedy = f"models that read images: {others}" if others else "no model here reads images: leave them out"
        return Reader(why_no_images=f"the model '{model.name}' reads text only; {remedy}")

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Context manager: if an image is refused inside, count the refusal."""
        try:
            yield
        except ImageRefusal as refusal:
            self._on_image_refused(refusal.why)
            raise

    async def plan_completion(self, request: Completion, gap: Gap | None = None) -> CompletionPlan:
        """Check a completion and tokenize its prompts. With a suffix or a `gap`, the answers are the texts between.
        Raises `StatusError`."""
        check_completion(request)
        if request.suffix:
            gap = Gap(request.suffix)
        model = await self._generating(request)
        structure = await self._constraints.of(request)
        sampling = await self._in_tokens(model, request, replace(sampling_of(request), structure=structure))
        plans: list[Plan] = []
        echoes: list[str] = []
        prompts = prompts_of(request)
        common = Common() if len(prompts) > 1 else None
        num_answer_tokens = sampling.max_tokens or sampling.default_max_tokens or 1
        for prompt in prompts:
            if isinstance(prompt, str):
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await self._prompts.of_prompt(model, prompt, add_special_tokens=add_special_tokens)
            elif request.add_special_tokens:
                problem = "add_special_tokens is for texts: a prompt of tokens is taken as it is; leave it out"
                raise invalid("add_special_tokens", problem)
            else:
                token_ids = prompt
            if gap is not None:
                token_ids, ends = await self._prompts.with_gap(model, prompt, gap, num_answer_tokens)
                sampling = replace(sampling, stop_token_ids=[*(request.stop_token_ids or ()), *ends])
            plans.append(plan_of(request, model, token_ids, sampling, common=common))
            kept = plans[-1].job.token_ids
            if request.echo and isinstance(prompt, str) and (gap is not None or len(kept) == len(token_ids)):
                echoes.append(prompt)
            elif request.echo:
                echoes.append(detokenize(kept, model.text.tokenizer.token_bytes, model.text.tokenizer.special_ids))
        self.offer_copy(request)
        return CompletionPlan(model, plans, echoes)

    async def tokens_of(self, model: Model, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a part of a prompt that the caller wrote whole. Raises `StatusError`."""
        return await self._prompts.of_prompt(model, text, add_special_tokens=add_special_tokens)

    async def tokenize(self, request: Tokenization) -> Tokenized:
        """The tokens of a text or a conversation. Raises `StatusError`."""
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        for name in _OF_CONVERSATIONS if request.prompt is not None else ():
            if getattr(request, name) is not None:
                raise invalid(name, f"{name} needs messages; a text is tokenized as it is")
        model = await self._models.find(request.model or "")
        if request.prompt is not None:
            add_special_tokens = request.add_special_tokens is not False
            tokens = await self._prompts.of_prompt(model, request.prompt, add_special_tokens=add_special_tokens)
            return Tokenized(model, tokens)
        tools = functions_of(request.tools or ())
        with self._counting():
            conversation = conversation_of(
                request, model.chat_template(request.chat_template), tools, reader=self._reader(model)
            )
            prompt = await self._prompts.of_conversation(model, conversation)
        return Tokenized(model, prompt.token_ids)

    async def _in_tokens(self, model: Model, request: Chat | Completion, sampling: Sampling) -> Sampling:
        """The sampling with texts of the request in the model's tokens: banned words, and breakers of repetitions."""
        if request.bad_words:
            sampling = replace(sampling, bad_words=await self._prompts.of_words(model, request.bad_words))
        if sampling.numbers.dry_multiplier:
            given = sampling.dry_sequence_breakers
            texts = DRY_BREAKERS if given is None else tuple(given)
            sampling = replace(sampling, dry_breakers=await self._prompts.breakers(model, texts))
        return sampling

    async def _generating(self, request: Chat | Completion) -> Model:
        """The model of a request, if it generates text. Raises `StatusError`."""
        model = await self._models.find(request.model or "", key=request.prompt_cache_key or "")
        check_task(TASK_UNSPECIFIED, model.card.task, model.name)
        most = model.rules.best_of_limit
        if most and request.best_of is not None and request.best_of > most:
            raise invalid("best_of", f"best_of must be at most {most}, the limit that this model's operator has set")
        return model


def _thinking_budget(request: Chat, model: Model, reading: Reading) -> ThinkingBudget | None:
    """The budget of a chat's reasoning: the request's, or that of its effort if the model's template has no efforts."""
    budget = request.thinking_token_budget
    template = model.chat_template(request.chat_template)
    if budget is None and reading.output.reasoning is not None and not template.uses("reasoning_effort"):
        budget = OF_EFFORTS.get(request.reasoning_effort or "")
    encode = model.text.tokenizer.encode
    is_number = request.thinking_token_budget is not None
    return budget_of(budget, reading, lambda text: encode(text, add_special_tokens=False), is_number=is_number)


def _check_number(num_messages: int, max_context_tokens: int) -> None:
    """Raise StatusError (CONTEXT_TOO_LONG) for more messages than a context has tokens, before any is read."""
    if num_messages > max_context_tokens:
        problem = (
            f"This model's maximum context length is {max_context_tokens} tokens, too few for {num_messages} messages."
        )
        raise StatusError(Reason.CONTEXT_TOO_LONG, problem, field="messages")


def plan_of(
    request: Chat | Completion,
    model: Model,
    token_ids: Sequence[int],
    sampling: Sampling,
    shown_ids: frozenset[int] = frozenset(),
    common: Common | None = None,
    prediction: Sequence[int] = (),
    images: Sequence[PromptImage] = (),
) -> Plan:
    """The plan of a checked request for one prompt."""
    kept = _truncated(token_ids, request, sampling, model)
    if images and len(kept) < len(token_ids):
        problem = "truncate_prompt_tokens would cut a prompt with images, which stay whole; leave out earlier messages"
        raise invalid("truncate_prompt_tokens", problem)
    job = Job(
        model=model,
        token_ids=kept,
        images=images,
        sampling=sampling,
        num_choices=request.best_of or request.n or 1,
        shown_ids=shown_ids,
        session_key=request.prompt_cache_key or "",
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        common=common,
        prediction=prediction,
    )
    try:
        return plan_job(job)
    except ContextTooLongError as error:
        raise error.of_field("messages" if isinstance(request, Chat) else "prompt") from None


def _truncated(token_ids: Sequence[int], request: Chat | Completion, sampling: Sampling, model: Model) -> Sequence[int]:
    """As many tokens of a prompt as the request keeps."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        num_answer_tokens = sampling.max_tokens or sampling.default_max_tokens or 1
        longest = longest_context(model.card, sampling.cache_eviction)
        keep = max(min(longest - num_answer_tokens, model.card.max_context_tokens - 1), 1)
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]
