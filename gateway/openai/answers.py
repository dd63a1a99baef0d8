"""Whole answers in OpenAI's format, and the parts that streams share with them (pure).

The concatenation of a stream equals the whole answer: both are made of the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import UNSET, UnsetType, field
from msgspec.structs import asdict

from headrace.gateway.chat.choice import Ending, Piece, WholeChoice
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    ShownChatLogprobs,
    ShownCompletionLogprobs,
    prompt_logprobs_value,
)
from headrace.gateway.chat.output import ToolCall, WholeChat
from headrace.gateway.chat.timings import Stopwatch, Timings
from headrace.gateway.edge.failures import ErrorDetail, detail_of, failure_of
from headrace.gateway.edge.wire import Shape, encode
from headrace.gateway.text.models import ListedModel, ModelState
from headrace.protos import worker_pb2
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK
from headrace.protos.tasks import NAMES, TaskName

FinishReason = Literal["stop", "length", "tool_calls", "error"]


class Identity(Shape):
    """The fields that whole answers and all chunks of a stream begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CachedTokensByTier(Shape):
    """Cached prompt tokens by where they were found: in a worker's memory, on its disk, at other workers."""

    memory: int
    disk: int
    peers: int


class PromptTokensDetails(Shape):
    """The number of prompt tokens that were found in a prefix cache, and their number in each tier if some were not in
    the worker's memory. The number of those that stand for images, if there are any."""

    cached_tokens: int
    cached_tokens_by_tier: CachedTokensByTier | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Shape):
    """The number of reasoning tokens among the generated tokens, and the numbers of accepted and rejected draft
    tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenCounts(Shape):
    """The tokens of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class UsageShape(TokenCounts, kw_only=True):
    """The usage of a request, in tokens."""

    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(Shape):
    """The called function; arguments are JSON text."""

    name: str
    arguments: str


class CalledCustomTool(Shape):
    """The called custom tool; its input is any text."""

    name: str
    input: str


class Call(Shape):
    """A call of a function or of a custom tool for the caller to make."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET


class AssistantMessage(Shape, kw_only=True):
    """The message of the model. It has reasoning and calls only if there are any."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: tuple[()] = ()
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Shape, kw_only=True):
    """One answer to a chat; `error` only if it failed."""

    index: int
    message: AssistantMessage
    logprobs: ShownChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: ErrorDetail | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class LastDelta(Shape, kw_only=True):
    """The choice of the last chunk of a choice of a chat."""

    index: int
    delta: dict[str, str] = field(default_factory=dict)
    logprobs: None = None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: ErrorDetail | UnsetType = UNSET


class ChatCompletion(Identity, kw_only=True):
    """The answer to a chat."""

    choices: list[ChatChoice]
    usage: UsageShape
    timings: Timings | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Shape, kw_only=True):
    """One continuation of a prompt; `error` only if it failed."""

    index: int
    text: str
    logprobs: ShownCompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: ErrorDetail | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Identity, kw_only=True):
    """The answer to a completion."""

    choices: list[CompletionChoice]
    usage: UsageShape
    timings: Timings | UnsetType = UNSET


class Architecture(Shape):
    """What a model reads and writes."""

    modality: str
    input_modalities: list[str]
    output_modalities: list[str]


class ImagesOfModel(Shape):
    """The images that a request to a model may have: their number, and of each its bytes and its pixels."""

    max_images: int
    max_bytes: int
    max_pixels: int


class ContextOfModel(Shape):
    """The context where clients of llama.cpp and Ollama look for it, such as goose."""

    n_ctx: int


class ModelCard(Shape, kw_only=True):
    """A model, loaded or not."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    root: str
    parent: str | None
    max_model_len: int | None
    meta: ContextOfModel | None
    task: TaskName
    dimensions: int | None
    architecture: Architecture | None
    images: ImagesOfModel | None
    state: ModelState
    problem: str | None


class ModelList(Shape, kw_only=True):
    """The list of models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EmbeddingUsage(Shape):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Shape, kw_only=True):
    """A vector: its numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Shape, kw_only=True):
    """A vector for each text, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(Shape, kw_only=True):
    """Tokens of a text or a conversation, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int | dict[str, Any]]
    token_strs: list[str] | None = None


class DetokenizedText(Shape):
    """The text of tokens, by the names of vLLM and of llama.cpp."""

    prompt: str
    content: str


def identity(prefix: str, kind: str, request_id: str, created_s: int, card: worker_pb2.ModelCard) -> Identity:
    """Identity of an answer with an id of this prefix; `kind` is its `object`."""
    return Identity(f"{prefix}-{request_id}", kind, created_s, card.name, f"fp_{card.fingerprint[:12]}")


def tokens_of(usage: Usage) -> TokenCounts:
    """The part of the `usage` object that is known before the end."""
    total = usage.num_prompt_tokens + usage.num_generated_tokens
    return TokenCounts(usage.num_prompt_tokens, usage.num_generated_tokens, total)


def usage_of(usage: Usage) -> UsageShape:
    """The `usage` object."""
    cached = PromptTokensDetails(usage.num_cached_tokens, image_tokens=usage.num_image_tokens or UNSET)
    elsewhere = usage.num_disk_tokens + usage.num_peer_tokens
    if elsewhere:
        memory = max(0, usage.num_cached_tokens - elsewhere)
        cached.cached_tokens_by_tier = CachedTokensByTier(memory, usage.num_disk_tokens, usage.num_peer_tokens)
    return UsageShape(
        **asdict(tokens_of(usage)),
        prompt_tokens_details=cached,
        completion_tokens_details=CompletionTokensDetails(
            usage.num_reasoning_tokens, usage.num_accepted_tokens, usage.num_rejected_tokens
        ),
    )


def end_of(ending: Ending | None) -> dict[str, Any]:
    """The fields of a choice about its end."""
    assert ending is not None
    error = UNSET if ending.error is None else detail_of(failure_of(ending.error))
    return {"finish_reason": ending.reason, "stop_reason": ending.stop_reason, "error": error}


@dataclass(frozen=True, slots=True)
class Shown:
    """Options for parts of an answer in addition to its text and log-probabilities. Sequences have one entry per
    choice."""

    usage: bool = False
    """A stream ends with the usage."""
    running_usage: bool = False
    """Every chunk of it has the usage so far."""
    num_prompt_tokens: int = 0
    """Log-probabilities of all prompts."""
    prompts: Sequence[Sequence[int]] = ()
    """Tokens of the prompts."""
    token_ids: bool = False
    """The tokens of prompts and answers."""
    echoes: Sequence[str] = ()
    """Prompts, if the choices begin with them; else empty."""
    prompt_logprobs: int | None = None
    """Alternatives at each token of the prompts; None for no such list."""
    pads: bool = False
    """Chunks of a stream have padding that hides the length of their text."""
    reasoning: bool = True
    """The reasoning before a chat's answer."""
    watch: Stopwatch | None = None
    """Measures the times of the request, for an answer that has them."""

    @property
    def timings(self) -> Timings | UnsetType:
        """The times of the request so far, if the answer has them."""
        return UNSET if self.watch is None else self.watch.timings(self.num_prompt_tokens)


def whole_chat(
    who: Identity,
    choices: Sequence[WholeChat],
    logprobs: ChatLogprobs | None,
    usage: Usage,
    shown: Shown,
    token_bytes: Sequence[bytes],
) -> bytes:
    """Body of a chat's answer."""
    answer = ChatCompletion(
        **asdict(who),
        choices=[
            ChatChoice(
                index=index,
                message=message_of(choice, shows_reasoning=shown.reasoning),
                logprobs=None if logprobs is None else logprobs.value(choice.logprobs),
                **end_of(choice.ending),
                token_ids=choice.token_ids if shown.token_ids else UNSET,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_of(usage),
        timings=shown.timings,
    )
    if shown.prompt_logprobs is not None:
        known = choices[0].prompt_logprobs
        answer.prompt_logprobs = prompt_logprobs_value(known, shown.prompt_logprobs, token_bytes)
    if shown.token_ids:
        answer.prompt_token_ids = list(shown.prompts[0])
    return encode(answer)


def message_of(choice: WholeChat, *, shows_reasoning: bool = True) -> AssistantMessage:
    """The message of a chat's choice."""
    calls = [call_of(call) for call in choice.calls]
    return AssistantMessage(
        content=None if calls and not choice.content else choice.content,
        reasoning_content=choice.reasoning if choice.reasoning and shows_reasoning else UNSET,
        tool_calls=calls or UNSET,
    )


def call_of(call: ToolCall) -> Call:
    """A call of a message."""
    if call.is_custom:
        return Call(call.call_id, "custom", custom=CalledCustomTool(call.name, call.arguments))
    return Call(call.call_id, "function", CalledFunction(call.name, call.arguments))


def whole_completion(
    who: Identity,
    choices: Sequence[WholeChoice],
    logprobs: CompletionLogprobs | None,
    usage: Usage,
    shown: Shown,
    token_bytes: Sequence[bytes],
) -> bytes:
    """Body of a completion's answer."""
    values = []
    for index, choice in enumerate(choices):
        value = CompletionChoice(
            index=index,
            text=shown.echoes[index] + choice.text if shown.echoes else choice.text,
            logprobs=None if logprobs is None else completion_logprobs_value(logprobs, shown, index, choice),
            **end_of(choice.ending),
        )
        if shown.prompt_logprobs is not None:
            known = choice.prompt_logprobs
            value.prompt_logprobs = prompt_logprobs_value(known, shown.prompt_logprobs, token_bytes)
        if shown.token_ids:
            value.token_ids = choice.token_ids
            value.prompt_token_ids = list(shown.prompts[index])
        values.append(value)
    return encode(Completion(**asdict(who), choices=values, usage=usage_of(usage), timings=shown.timings))


def completion_logprobs_value(
    logprobs: CompletionLogprobs, shown: Shown, index: int, part: WholeChoice | Piece, is_first: bool = True
) -> ShownCompletionLogprobs:
    """The `logprobs` of a completion or of a piece of it, including those of an echoed prompt."""
    if not shown.echoes:
        return logprobs.value(part.logprobs)
    if not is_first:
        return logprobs.value(part.logprobs, shown.echoes[index])
    return logprobs.value(part.logprobs, shown.echoes[index], shown.prompts[index][0], part.prompt_logprobs)


def card_of(model: ListedModel) -> ModelCard:
    """A model as GET /v1/models shows it, for clients of OpenAI and of Anthropic. Most values of a model that was not
    loaded yet are null."""
    card = model.card
    created_s = 0 if card is None else card.created_s
    return ModelCard(
        id=model.name,
        created=created_s,
        display_name=model.name,
        created_at=datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z"),
        root=model.alias_of or model.name,
        parent=None if card is None else card.parent or None,
        max_model_len=None if card is None else card.max_context_tokens,
        meta=None if card is None else ContextOfModel(card.max_context_tokens),
        task=NAMES[model.task],
        dimensions=None if card is None else card.dimensions or None,
        architecture=None if card is None else _architecture(card),
        images=_images_of(card),
        state=model.state,
        problem=model.problem or None,
    )


def _architecture(card: worker_pb2.ModelCard) -> Architecture:
    """The types of input and output of a model. Clients read them to offer images only for models that accept
    images."""
    read = ["text", "image"] if card.HasField("images") else ["text"]
    written = {TASK_EMBED: "embeddings", TASK_RANK: "scores"}.get(card.task, "text")
    return Architecture(f"{'+'.join(read)}->{written}", read, [written])


def _images_of(card: worker_pb2.ModelCard | None) -> ImagesOfModel | None:
    if card is None or not card.HasField("images"):
        return None
    return ImagesOfModel(card.images.max_images, card.images.max_bytes, card.images.max_pixels)
