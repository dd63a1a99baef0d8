"""From a request to a plan: the model, the prompt, the sampling, and how the answers are to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.gateway.chat_output import ChatChoice, Reading, reading_of
from headrace.gateway.conversation import conversation_of
from headrace.gateway.detokenizer import detokenize
from headrace.gateway.formats import Formats
from headrace.gateway.generation import Job, Plan, plan_job
from headrace.gateway.models import Model, Models
from headrace.gateway.openai_types import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    check_chat,
    check_completion,
    check_tokenize,
    prompts_of,
    sampling_of,
)
from headrace.gateway.prompts import ChatPrompt, Conversation, Prompts
from headrace.gateway.sampling import Sampling, invalid
from headrace.gateway.tool_grammar import tool_structure
from headrace.gateway.tools import ToolUse, schemas_of, tool_use_of


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat that was checked."""

    model: Model
    plan: Plan
    reading: Reading

    def choices(self) -> list[ChatChoice]:
        """A reader for each choice."""
        return [self.reading.choice() for _ in self.plan.requests]


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A completion that was checked."""

    model: Model
    plans: Sequence[Plan]
    """One for each prompt."""
    echoes: Sequence[str]
    """The prompts' texts, as the answers begin with them; empty if they do not."""


class Chats:
    """Plans chats and completions."""

    def __init__(self, models: Models, prompts: Prompts, formats: Formats) -> None:
        self._models = models
        self._prompts = prompts
        self._formats = formats

    async def plan(self, request: ChatRequest) -> ChatPlan:
        """Check a chat and make its prompt. Raises `StatusError`."""
        model, use, conversation, prompt = await self._prompted(request)
        form = self._formats.of(model)
        sampling = await self._sampling(request, model)
        goes_on = conversation.continue_final_message
        only_content = sampling.structure is not None and not use.schemas
        reading = reading_of(form, use, prompt.ending, goes_on, only_content)
        structure = tool_structure(form, use, prompt.ending, reading.inside_reasoning, sampling.structure)
        sampling = replace(sampling, structure=structure)
        return ChatPlan(model, plan_of(request, model, prompt.token_ids, sampling, reading.shown_ids), reading)

    async def count(self, request: ChatRequest) -> int:
        """Check a chat; the number of tokens of its prompt. Raises `StatusError`."""
        _, _, _, prompt = await self._prompted(request)
        return len(prompt.token_ids)

    def reasons(self, model: Model) -> bool:
        """Whether it is known how this model writes reasoning."""
        output = self._formats.of(model).output
        return output.reasoning is not None or output.is_harmony

    async def _prompted(self, request: ChatRequest) -> tuple[Model, ToolUse, Conversation, ChatPrompt]:
        check_chat(request)
        use = tool_use_of(request)
        model = await self._models.find(request.model or "")
        conversation = conversation_of(request, model.chat_template(), use.listed)
        return model, use, conversation, await self._prompts.of_conversation(model, conversation)

    async def plan_completion(self, request: CompletionRequest) -> CompletionPlan:
        """Check a completion and tokenize its prompts. Raises `StatusError`."""
        check_completion(request)
        model = await self._models.find(request.model or "")
        sampling = await self._sampling(request, model)
        plans: list[Plan] = []
        echoes: list[str] = []
        for prompt in prompts_of(request):
            if isinstance(prompt, str):
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await self._prompts.of_text(model, prompt, add_special_tokens=add_special_tokens)
            else:
                token_ids = prompt
            plans.append(plan_of(request, model, token_ids, sampling))
            kept = plans[-1].job.token_ids
            if request.echo and isinstance(prompt, str) and len(kept) == len(token_ids):
                echoes.append(prompt)
            elif request.echo:
                echoes.append(detokenize(kept, model.text.tokenizer.token_bytes, model.text.tokenizer.special_ids))
        return CompletionPlan(model, plans, echoes)

    async def tokenize(self, request: TokenizeRequest) -> tuple[Model, list[int]]:
        """The model and the tokens of a text or a conversation. Raises `StatusError`."""
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        check_tokenize(request)
        model = await self._models.find(request.model or "")
        if request.prompt is not None:
            add_special_tokens = request.add_special_tokens is not False
            return model, await self._prompts.of_text(model, request.prompt, add_special_tokens=add_special_tokens)
        tools = request.tools or ()
        schemas_of(tools)
        conversation = conversation_of(request, model.chat_template(), tools)
        prompt = await self._prompts.of_conversation(model, conversation)
        return model, list(prompt.token_ids)

    async def _sampling(self, request: ChatRequest | CompletionRequest, model: Model) -> Sampling:
        """The sampling that a checked request asks for of this model."""
        sampling = sampling_of(request)
        if not request.bad_words:
            return sampling
        return replace(sampling, bad_words=await self._prompts.of_words(model, request.bad_words))


def plan_of(
    request: ChatRequest | CompletionRequest,
    model: Model,
    token_ids: Sequence[int],
    sampling: Sampling,
    shown_ids: frozenset[int] = frozenset(),
) -> Plan:
    """The plan of a checked request for one prompt."""
    return plan_job(
        Job(
            model=model,
            token_ids=_truncated(token_ids, request.truncate_prompt_tokens, sampling, model),
            sampling=sampling,
            num_choices=request.best_of or request.n or 1,
            shown_ids=shown_ids,
            session_key=request.prompt_cache_key or "",
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
        )
    )


def _truncated(token_ids: Sequence[int], keep: int | None, sampling: Sampling, model: Model) -> Sequence[int]:
    """The last `keep` tokens of a prompt; -1: as many as leave room for the answer."""
    if keep is None:
        return token_ids
    if keep == -1:
        num_answer_tokens = sampling.max_tokens or sampling.default_max_tokens or 1
        keep = max(model.card.max_context_tokens - num_answer_tokens, 1)
    return token_ids[-keep:]
