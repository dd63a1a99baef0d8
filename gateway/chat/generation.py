"""From token ids to pieces of text: the path that HTTP and gRPC share.

A `Job` is one prompt and the number of its answers. Each answer is one generation upstream, with its own seed; but a
beam search is one generation, with all answers in its last message. One
iterator gives the pieces of all answers in the order of their arrival. Closing the iterator, or cancelling the task
that iterates, cancels all generations. A stop string cancels the generation of its choice.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from headrace.common.stores.api_keys import ApiKey
from headrace.common.tasks import end_tasks
from headrace.common.telemetry.tracing import current_span
from headrace.common.transport.wire_request import SharedPart
from headrace.common.vision.family import Detail
from headrace.gateway.access.admission import Authorization
from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.beams import add_stop_texts, answers_of, check_beside_beams, in_callers_names
from headrace.gateway.chat.choice import Choice, Ending, Piece
from headrace.gateway.chat.sampling import Sampling, check_sampling, sampling_params, take_large_fields
from headrace.gateway.checks import invalid
from headrace.gateway.structure.fields import in_callers_terms
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.telemetry.partings import Partings
from headrace.gateway.telemetry.spans import describe_generation
from headrace.gateway.text.image_tokens import PromptImage, shown
from headrace.gateway.text.models import Model
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.cache_scope import cache_scope, scoped_salt
from headrace.protos.inference_pb2 import (
    IMAGE_DETAIL_HIGH,
    IMAGE_DETAIL_LOW,
    IMAGE_DETAIL_UNSPECIFIED,
    GenerateRequest,
    GenerateResponse,
    Image,
    SamplingParams,
)
from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.protos.status import Reason, StatusError

MAX_GENERATIONS = 4096
MAX_CHOICES_PER_REQUEST = 256
_QUEUED_PIECES_PER_CHOICE = 4
_IMAGE = re.compile(r"images\[(\d{1,9})\]")
_DETAILS = {Detail.LOW: IMAGE_DETAIL_LOW, Detail.HIGH: IMAGE_DETAIL_HIGH, Detail.AUTO: IMAGE_DETAIL_UNSPECIFIED}


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, with the parameters of its answers."""

    model: Model
    token_ids: Sequence[int]
    sampling: Sampling
    num_choices: int = 1
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that the parsers of the answer read as text."""
    session_key: str = ""
    cache_salt: str = ""
    priority: int = 0
    prediction: Sequence[int] = ()
    """Tokens that the answer is expected to have."""
    common: Common | None = None
    """Given to all jobs of one request that have the same sampling."""
    images: Sequence[PromptImage] = ()
    """The images in the prompt, in the order of their places."""

    @property
    def shown_ids_of_prompt(self) -> Sequence[int]:
        """The prompt's tokens as callers know them."""
        if not self.images or self.model.images is None:
            return self.token_ids
        return shown(self.token_ids, self.model.images)

    @property
    def num_image_tokens(self) -> int:
        """Image tokens in the prompt."""
        return sum(image.num_tokens for image in self.images)


class Common:
    """The large fields that the jobs of one request share, serialized once."""

    def __init__(self) -> None:
        self._part: SharedPart | None = None

    def part(self, params: SamplingParams) -> SharedPart:
        """Take the large fields out of `params` and return them as a shared part."""
        large = take_large_fields(params)
        if self._part is None:
            self._part = SharedPart(GenerateRequest(sampling=large).SerializeToString())
        return self._part


@dataclass(frozen=True, slots=True)
class Plan:
    """A job that was checked: the messages for upstream, one for each choice, or a single one for a beam search."""

    job: Job
    requests: Sequence[GenerateRequest]
    shared: tuple[SharedPart, ...] = ()
    """The parts that all of the requests share: prompt, grammar, long lists."""

    @property
    def is_search(self) -> bool:
        """Whether it is a beam search."""
        return self.job.sampling.beam_search is not None

    def scope_to(self, key: ApiKey) -> None:
        """Give the requests the tenant of a key, and salts of its scope: they find no cached prefixes of others."""
        scope = cache_scope(key.tenant, key.cache_group)
        for request in self.requests:
            request.tenant = key.tenant
            request.cache_salt = scoped_salt(scope, self.job.cache_salt)
            if self.job.session_key:
                request.session_key = scoped_salt(scope, self.job.session_key)


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one request, in tokens. Prompts are counted once, whatever the number of choices."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens, predicted by the caller or found by the worker, that became part of the answer."""
    num_rejected_tokens: int = 0
    """Draft tokens that were verified and rejected."""
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0
    """Cached tokens that a worker read from a disk, and that it got from another worker."""
    num_image_tokens: int = 0
    """Prompt tokens that stand for images."""

    def plus(self, other: Usage) -> Usage:
        """The usage of both."""
        return Usage(*(getattr(self, name) + getattr(other, name) for name in Usage.__dataclass_fields__))


class Account:
    """Adds up the usage of a request as its choices end."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._num_prompt_tokens = sum(len(plan.job.token_ids) for plan in plans)
        self._num_image_tokens = sum(plan.job.num_image_tokens for plan in plans)
        firsts = [0]
        for plan in plans:
            firsts.append(firsts[-1] + plan.job.num_choices)
        self.num_choices = firsts.pop()
        self.num_open = self.num_choices
        """Choices that have not ended."""
        self._firsts = frozenset(firsts)
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_drafted_tokens = self._num_accepted_tokens = 0
        self._num_disk_tokens = self._num_peer_tokens = 0

    def ended(self, index: int, ending: Ending) -> None:
        """Apply the end of a choice. The cached tokens of a prompt are those of its first choice."""
        self.num_open -= 1
        self._num_generated_tokens += ending.num_generated_tokens
        self._num_reasoning_tokens += ending.num_reasoning_tokens
        self._num_drafted_tokens += ending.num_drafted_tokens
        self._num_accepted_tokens += ending.num_accepted_tokens
        if index in self._firsts:
            self._num_cached_tokens += ending.num_cached_tokens
            self._num_disk_tokens += ending.num_disk_tokens
            self._num_peer_tokens += ending.num_peer_tokens

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(
            self._num_prompt_tokens,
            self._num_generated_tokens,
            self._num_cached_tokens,
            self._num_reasoning_tokens,
            self._num_accepted_tokens,
            self._num_drafted_tokens - self._num_accepted_tokens,
            self._num_disk_tokens,
            self._num_peer_tokens,
            self._num_image_tokens,
        )


def plan_job(job: Job) -> Plan:
    """Check a job and write its requests (pure but for the random seed and ids). Raises `StatusError`."""
    card = job.model.card
    check_sampling(job.sampling, card.vocab_size)
    if job.sampling.beam_search is not None:
        check_beside_beams(job.sampling)
    if not job.token_ids:
        raise invalid("prompt", "the prompt has no tokens")
    limit = job.model.rules.max_tokens_limit
    params = sampling_params(job.sampling, card, len(job.token_ids), secrets.randbits(63), limit)
    if job.sampling.beam_search is not None:
        add_stop_texts(params.beam_search, job.sampling, job.shown_ids)
    if min(job.token_ids) < 0 or max(job.shown_ids_of_prompt) >= card.vocab_size:
        raise invalid("prompt", f"prompt: tokens must be from 0 to {card.vocab_size - 1}")
    token_ids, prediction = job.token_ids, job.prediction[: card.max_context_tokens]
    images = [Image(data=image.data, detail=_DETAILS[image.detail]) for image in job.images]
    shared: tuple[SharedPart, ...] = ()
    num_requests = job.num_choices if job.sampling.beam_search is None else 1
    if num_requests > 1 or job.common is not None:
        shared = ((job.common or Common()).part(params),)
    if num_requests > 1:
        common = GenerateRequest(token_ids=token_ids, prediction_token_ids=prediction, images=images)
        shared = (*shared, SharedPart(common.SerializeToString()))
        token_ids, prediction, images = (), (), []
    requests = []
    for i in range(num_requests):
        request = GenerateRequest(
            request_id=secrets.token_hex(16),
            model=card.parent or card.name,
            adapter=card.name if card.parent else "",
            tokenizer_sha256=card.tokenizer_sha256,
            token_ids=token_ids,
            sampling=params,
            cache_salt=job.cache_salt,
            session_key=job.session_key,
            priority=job.priority,
            prediction_token_ids=prediction,
            images=images,
            image_view_pixels=card.images.max_view_pixels if job.images else 0,
        )
        request.sampling.seed = (params.seed + i) % 2**64
        requests.append(request)
    return Plan(job, requests, shared)


class _Generation(NamedTuple):
    """One generation upstream, and the number of its first choice among those of the request."""

    first: int
    plan: Plan
    request: GenerateRequest

    @property
    def num_choices(self) -> int:
        """How many choices it has."""
        return self.plan.job.num_choices if self.plan.is_search else 1


class Generator:
    """Runs plans. At most `MAX_GENERATIONS` run at a time; more are refused."""

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._partings = Partings(metrics.parted)
        self._num_running = 0

    def stream(self, plans: Sequence[Plan], caller: Caller) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all choices, each with its index: choices are numbered plan by plan.

        The last piece of each choice has an ending. If a choice fails and another one is running or has succeeded, the
        failed one ends with reason `error`. Raises `StatusError` when no choice succeeds.
        """
        pieces = self._pieces(plans, caller)
        return pieces if caller.authorization is None else self._paid(pieces, plans, caller.authorization)

    async def _paid(
        self, pieces: AsyncGenerator[tuple[int, Piece], None], plans: Sequence[Plan], authorization: Authorization
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces, charged to the caller's key; see `access.admission`."""
        num_prompt_tokens = num_taken = num_used = 0
        for plan in plans:
            authorization.check(plan.job.model.asked_as, plan.job.priority)
            num_prompt_tokens += len(plan.job.token_ids)
            plan.scope_to(authorization.key)
            for request in plan.requests:
                if plan.job.sampling.max_tokens is not None:
                    num_answers = plan.job.num_choices // len(plan.requests)
                    num_taken += num_answers * request.sampling.max_tokens
        num_taken += num_prompt_tokens
        with authorization.held():
            await authorization.take_tokens(num_taken)
            try:
                async with aclosing(pieces):
                    async for indexed in pieces:
                        num_used = (num_used or num_prompt_tokens) + indexed[1].num_tokens
                        yield indexed
            finally:
                authorization.settle(num_used - num_taken)

    async def _pieces(self, plans: Sequence[Plan], caller: Caller) -> AsyncGenerator[tuple[int, Piece], None]:
        """As `stream`, without charging a key."""
        num_choices = sum(plan.job.num_choices for plan in plans)
        if num_choices > MAX_CHOICES_PER_REQUEST:
            field = plans[0].job.sampling.choices_field
            raise invalid(field, f"one request takes at most {MAX_CHOICES_PER_REQUEST} answers, this is {num_choices}")
        if self._num_running + num_choices > MAX_GENERATIONS:
            raise StatusError(Reason.QUEUE_FULL, "the gateway has its maximum of streams", retry_after_s=1.0)
        generations: list[_Generation] = []
        first = 0
        for plan in plans:
            generations += (_Generation(first + number, plan, request) for number, request in enumerate(plan.requests))
            first += plan.job.num_choices
        self._num_running += num_choices
        if caller.is_background:
            for generation in generations:
                generation.request.priority = BACKGROUND_PRIORITY
        for plan in plans:
            self._metrics.images(len(plan.job.images), plan.job.num_image_tokens)
            for request in plan.requests[:1]:
                self._partings.prompt(plan.job.model.name, request.cache_salt, request.tenant, plan.job.token_ids)
        if generations:
            num_tokens = sum(len(plan.job.token_ids) for plan in plans)
            describe_generation(generations[0].request, num_choices, num_tokens)
        try:
            if len(generations) == 1:
                merged = self._of(generations[0], caller)
            else:
                merged = self._merged(generations, caller)
            async with aclosing(merged):
                async for indexed in merged:
                    yield indexed
        finally:
            self._num_running -= num_choices

    async def _of(self, generation: _Generation, caller: Caller) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of one generation, each with the number of its choice."""
        first, plan, request = generation
        if plan.is_search:
            async with aclosing(self._found(plan, request, caller)) as found:
                async for number, piece in found:
                    yield first + number, piece
            return
        async with aclosing(self._one(plan, request, caller)) as pieces:
            async for piece in pieces:
                yield first, piece

    async def _found(
        self, plan: Plan, request: GenerateRequest, caller: Caller
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """The answers of a beam search, each in one piece with its number, best first."""
        job = plan.job
        num_tokens = num_cached_tokens = 0
        try:
            answers: Sequence[GenerateResponse] = ()
            async with aclosing(self._messages(plan, request, caller)) as messages:
                async for message in messages:
                    answers = answers_of(message)
            if len(answers) != job.num_choices:
                problem = f"the worker's search has {len(answers)} answers instead of {job.num_choices}"
                raise StatusError(Reason.INTERNAL, problem)
            if not caller.is_background:
                self._metrics.first_token(job.model.name, time.monotonic() - caller.arrived_s)
                self._metrics.timed(job.model.name, message.finish)
            current_span().event("first token")
            for number, answer in enumerate(answers):
                choice = _choice_of(job)
                piece = choice.push(answer)
                num_cached_tokens = choice.num_cached_tokens
                num_tokens += piece.num_tokens
                self._metrics.recent.delivered(job.model.name, piece.num_tokens)
                if piece.ending is not None:
                    current_span().append("gen_ai.response.finish_reasons", piece.ending.reason)
                yield number, piece
        except StatusError as error:
            raise _of_image(in_callers_names(error, job.sampling), job.images) from error
        finally:
            current_span().add("gen_ai.usage.output_tokens", num_tokens)
            self._metrics.choice_ended(job.model.name, len(job.token_ids), num_cached_tokens, num_tokens)

    def _messages(self, plan: Plan, request: GenerateRequest, caller: Caller) -> AsyncGenerator[GenerateResponse, None]:
        """The messages of one generation."""
        return self._upstream.generate(
            request,
            caller.metadata,
            caller.deadline_s,
            shared=plan.shared,
            num_prompt_tokens=len(plan.job.token_ids),
            card=plan.job.model.card,
        )

    async def _one(self, plan: Plan, request: GenerateRequest, caller: Caller) -> AsyncGenerator[Piece, None]:
        """Pieces of one choice."""
        job = plan.job
        choice = _choice_of(job)
        first_s = last_s = 0.0
        num_tokens = 0
        check = None if job.sampling.structure is None else job.sampling.structure.check
        texts: list[str] = []
        try:
            async with aclosing(self._messages(plan, request, caller)) as messages:
                async for message in messages:
                    piece = choice.push(message)
                    num_tokens += piece.num_tokens
                    if check is not None:
                        texts.append(piece.text)
                    last_s = time.monotonic()
                    self._metrics.recent.delivered(job.model.name, piece.num_tokens)
                    if not first_s:
                        first_s = last_s
                        if not caller.is_background:
                            self._metrics.first_token(job.model.name, last_s - caller.arrived_s)
                        current_span().event("first token")
                    if piece.ending is not None:
                        current_span().append("gen_ai.response.finish_reasons", piece.ending.reason)
                        if not caller.is_background:
                            self._metrics.timed(job.model.name, message.finish)
                        break
                    yield piece
            if check is not None and piece.ending is not None and piece.ending.reason == "stop":
                check("".join(texts))
            yield piece  # if a stop string ended the choice, the generation has been cancelled
        except StatusError as error:
            raise _of_image(in_callers_terms(error, job.sampling.structure), job.images) from error
        finally:
            current_span().add("gen_ai.usage.output_tokens", num_tokens)
            decoding_s = last_s - first_s if last_s > first_s and not caller.is_background else None
            name = job.model.name
            self._metrics.choice_ended(name, len(job.token_ids), choice.num_cached_tokens, num_tokens, decoding_s)

    async def _merged(
        self, generations: Sequence[_Generation], caller: Caller
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of several choices as they arrive. One that fails does not end the others."""
        num_choices = sum(generation.num_choices for generation in generations)
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(_QUEUED_PIECES_PER_CHOICE * num_choices)

        async def follow(generation: _Generation) -> None:
            try:
                async with aclosing(self._of(generation, caller)) as pieces:
                    async for indexed in pieces:
                        await queue.put(indexed)
            except Exception as error:  # raised again where the pieces are iterated over
                for number in range(generation.num_choices):
                    await queue.put((generation.first + number, error))

        tasks = [asyncio.create_task(follow(generation)) for generation in generations]
        failures = _Failures(num_choices)
        try:
            num_open = num_choices
            while num_open:
                index, item = await queue.get()
                if isinstance(item, Piece):
                    failures.count(index, item)
                    num_open -= item.ending is not None
                    yield index, item
                elif isinstance(item, StatusError):
                    failures.add(index, item)
                    num_open -= 1
                else:
                    raise item
                for failed in failures.due():
                    yield failed
        finally:
            await end_tasks(*tasks)


def _choice_of(job: Job) -> Choice:
    tokenizer = job.model.text.tokenizer
    return Choice(
        tokenizer.token_bytes,
        tokenizer.special_ids,
        job.sampling,
        job.shown_ids,
        job.shown_ids_of_prompt if job.sampling.prompt_logprobs is not None else (),
        block_size=job.model.card.block_size,
    )


def _of_image(error: StatusError, images: Sequence[PromptImage]) -> StatusError:
    """A worker's error, with the name that the caller gave to the image at fault, if an image is at fault."""
    found = _IMAGE.match(error.field or "")
    if found is None or int(found[1]) >= len(images):
        return error
    name, field = images[int(found[1])].name, error.field or ""
    message = error.message.replace(found[0], name)
    return StatusError(error.reason, message, field=name + field[found.end() :], retry_after_s=error.retry_after_s)


class _Failures:
    """The failed choices of one request. They are shown once another one has begun, and raised if all have failed."""

    def __init__(self, num_choices: int) -> None:
        self._num_tokens = [0] * num_choices
        self._num_failed = 0
        self._has_begun = False
        self._first: StatusError | None = None
        self._pending: list[tuple[int, StatusError]] = []

    def count(self, index: int, piece: Piece) -> None:
        """Count a piece."""
        self._has_begun = True
        self._num_tokens[index] += piece.num_tokens

    def add(self, index: int, error: StatusError) -> None:
        """Record that a choice failed. Raises the error of the first choice if no choice is left."""
        self._first = self._first or error
        self._num_failed += 1
        if self._num_failed == len(self._num_tokens):
            raise self._first
        self._pending.append((index, error))

    def due(self) -> Sequence[tuple[int, Piece]]:
        """The last pieces of failed choices. While no choice has a piece, the whole request may still be refused."""
        if not self._has_begun:
            return ()
        pending, self._pending = self._pending, []
        return [
            (index, Piece("", 0, (), Ending("error", None, self._num_tokens[index], 0, error=error)))
            for index, error in pending
        ]
