"""From token ids to pieces of text: the path that HTTP and gRPC share.

A `Job` is one prompt and the number of answers wanted to it. Every answer is one generation upstream, with a seed of
its own; their pieces come out of one iterator in the order in which they arrive. Closing the iterator, or cancelling
who iterates, cancels all generations at once, and a choice that a stop string ended is cancelled at once too.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.gateway.choice import Choice, Ending, Piece
from headrace.gateway.door import Visit
from headrace.gateway.metrics import Metrics
from headrace.gateway.models import Model
from headrace.gateway.sampling import Sampling, check_sampling, invalid, sampling_params
from headrace.gateway.spans import describe_plans
from headrace.gateway.structure import in_callers_terms
from headrace.gateway.upstream import Metadata, Upstream
from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.status import Reason, StatusError
from headrace.protos.tracing import current_span

MAX_GENERATIONS = 4096
MAX_CHOICES_PER_REQUEST = 256
_QUEUED_PIECES_PER_CHOICE = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as logs and traces know it, and since when."""

    request_id: str
    traceparent: str
    """W3C trace context; empty for none."""
    arrived_s: float
    """Monotonic time of the request's arrival."""
    visit: Visit | None = None
    """What its key allows; None without keys."""

    @property
    def metadata(self) -> Metadata:
        """What goes with calls upstream."""
        found = (("x-request-id", self.request_id),)
        return (*found, ("traceparent", self.traceparent)) if self.traceparent else found


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and how it is to be answered."""

    model: Model
    token_ids: Sequence[int]
    sampling: Sampling
    num_choices: int = 1
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are text to whoever reads the answer."""
    session_key: str = ""
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A job that was checked: the messages for upstream, one for each choice."""

    job: Job
    requests: Sequence[GenerateRequest]


@dataclass(frozen=True, slots=True)
class Usage:
    """The account of one request, in tokens. Prompts are counted once, whatever the number of choices."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0


class Account:
    """Adds up the usage of a request while its choices end."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._num_prompt_tokens = sum(len(plan.job.token_ids) for plan in plans)
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

    def ended(self, index: int, ending: Ending) -> None:
        """Take the ending of a choice. What was cached of a prompt is what its first choice says."""
        self.num_open -= 1
        self._num_generated_tokens += ending.num_generated_tokens
        self._num_reasoning_tokens += ending.num_reasoning_tokens
        if index in self._firsts:
            self._num_cached_tokens += ending.num_cached_tokens

    @property
    def usage(self) -> Usage:
        """The account so far."""
        return Usage(
            self._num_prompt_tokens, self._num_generated_tokens, self._num_cached_tokens, self._num_reasoning_tokens
        )


def plan_job(job: Job) -> Plan:
    """Check a job and write its requests (pure but for the random seed and ids). Raises `StatusError`."""
    card = job.model.card
    check_sampling(job.sampling, card.vocab_size)
    if not job.token_ids:
        raise invalid("prompt", "the prompt has no tokens")
    if min(job.token_ids) < 0 or max(job.token_ids) >= card.vocab_size:
        raise invalid("prompt", f"prompt: tokens must be from 0 to {card.vocab_size - 1}")
    params = sampling_params(job.sampling, card, len(job.token_ids), secrets.randbits(63))
    requests = []
    for i in range(job.num_choices):
        request = GenerateRequest(
            request_id=secrets.token_hex(16),
            model=card.name,
            token_ids=job.token_ids,
            sampling=params,
            cache_salt=job.cache_salt,
            session_key=job.session_key,
            priority=job.priority,
        )
        request.sampling.seed = (params.seed + i) % 2**64
        requests.append(request)
    return Plan(job, requests)


class Generator:
    """Runs plans. At most `MAX_GENERATIONS` run at a time; more are refused."""

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._num_running = 0
        upstream.on_retry = metrics.retried

    def stream(self, plans: Sequence[Plan], caller: Caller) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all choices, each with its index: choice i of plan p is the i-th behind those of earlier plans.

        The last piece of each choice has an ending. Raises `StatusError`; then nothing more comes of any choice.
        """
        pieces = self._pieces(plans, caller)
        return pieces if caller.visit is None else self._paid(pieces, plans, caller.visit)

    async def _paid(
        self, pieces: AsyncGenerator[tuple[int, Piece], None], plans: Sequence[Plan], visit: Visit
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces, on the account of the caller's key: see `door` for what is taken and when it is settled."""
        num_prompt_tokens = num_taken = num_used = 0
        for plan in plans:
            visit.check(plan.job.model.name, plan.job.priority)
            num_prompt_tokens += len(plan.job.token_ids)
            for request in plan.requests:
                request.tenant = visit.key.tenant
                if plan.job.sampling.max_tokens is not None:
                    num_taken += request.sampling.max_tokens
        num_taken += num_prompt_tokens
        with visit.held():
            await visit.take_tokens(num_taken)
            try:
                async with aclosing(pieces):
                    async for indexed in pieces:
                        num_used = (num_used or num_prompt_tokens) + indexed[1].num_tokens
                        yield indexed
            finally:
                visit.settle(num_used - num_taken)

    async def _pieces(self, plans: Sequence[Plan], caller: Caller) -> AsyncGenerator[tuple[int, Piece], None]:
        """As `stream`, whoever pays."""
        asked = [(plan.job, request) for plan in plans for request in plan.requests]
        if len(asked) > MAX_CHOICES_PER_REQUEST:
            raise invalid("n", f"one request takes at most {MAX_CHOICES_PER_REQUEST} answers, this is {len(asked)}")
        if self._num_running + len(asked) > MAX_GENERATIONS:
            raise StatusError(Reason.QUEUE_FULL, "the gateway has as many streams as it takes", retry_after_s=1.0)
        self._num_running += len(asked)
        describe_plans(plans)
        try:
            if len(asked) == 1:
                job, request = asked[0]
                async with aclosing(self._one(job, request, caller)) as pieces:
                    async for piece in pieces:
                        yield 0, piece
            else:
                async with aclosing(self._merged(asked, caller)) as merged:
                    async for indexed in merged:
                        yield indexed
        finally:
            self._num_running -= len(asked)

    async def _one(self, job: Job, request: GenerateRequest, caller: Caller) -> AsyncGenerator[Piece, None]:
        """Pieces of one choice."""
        tokenizer = job.model.text.tokenizer
        choice = Choice(tokenizer.token_bytes, tokenizer.special_ids, job.sampling, job.shown_ids, job.token_ids)
        first_s = last_s = 0.0
        num_tokens = 0
        try:
            async with aclosing(self._upstream.generate(request, caller.metadata)) as messages:
                async for message in messages:
                    piece = choice.push(message)
                    num_tokens += piece.num_tokens
                    last_s = time.monotonic()
                    self._metrics.recent.delivered(piece.num_tokens)
                    if not first_s:
                        first_s = last_s
                        self._metrics.first_token(last_s - caller.arrived_s)
                        current_span().event("first token")
                    if piece.ending is not None:
                        current_span().append("gen_ai.response.finish_reasons", piece.ending.reason)
                        self._metrics.timed(message.finish)
                        break
                    yield piece
            yield piece  # the generation is cancelled by now, if a stop string ended the choice
        except StatusError as error:
            raise in_callers_terms(error, job.sampling.structure) from error
        finally:
            current_span().add("gen_ai.usage.output_tokens", num_tokens)
            self._metrics.choice_ended(len(job.token_ids), choice.num_cached_tokens, num_tokens, last_s - first_s)

    async def _merged(
        self, asked: Sequence[tuple[Job, GenerateRequest]], caller: Caller
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of several choices as they arrive. The first failure ends all."""
        queue: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue(_QUEUED_PIECES_PER_CHOICE * len(asked))

        async def follow(index: int, job: Job, request: GenerateRequest) -> None:
            try:
                async with aclosing(self._one(job, request, caller)) as pieces:
                    async for piece in pieces:
                        await queue.put((index, piece))
            except Exception as error:  # whatever it is, the one who iterates gets it
                await queue.put(error)

        tasks = [asyncio.create_task(follow(i, *one)) for i, one in enumerate(asked)]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                num_open -= item[1].ending is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
