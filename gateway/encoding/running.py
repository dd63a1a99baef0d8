"""Runs encodings, and copies of them on a model on trial.

Each text is one call to a router, and a request has a bounded number of calls at a time.

The longest texts go first, so that a worker has texts of about the same length at a time, and batches with little
padding. The first failure ends the request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from headrace.common.tasks import end_tasks
from headrace.gateway.access.admission import Authorization
from headrace.gateway.access.caller import Caller, authorization_var
from headrace.gateway.chat.shadowing import Shadows
from headrace.gateway.encoding.planning import EncodingPlan, Encodings, PairsToScore, TextsToEmbed
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.telemetry.spans import describe_generation
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.inference_pb2 import GenerateRequest, SamplingParams
from headrace.protos.priorities import BACKGROUND_PRIORITY, SHADOW_PRIORITY
from headrace.protos.status import Reason, StatusError

# Number of calls of one request at a time. They fill batches of a few workers and leave room for other requests.
MAX_CALLS = 64
# Maximum number of texts of all requests together.
MAX_TEXTS = 65536


class EncodingRunner:
    """Runs plans."""

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._num_texts = 0

    async def run(self, plan: EncodingPlan, caller: Caller) -> list[bytes]:
        """The vectors of the prompts, in the same order, as little-endian float32. Raises `StatusError`."""
        if caller.authorization is None:
            return await self._counted(plan, caller, "")
        return await self._paid(plan, caller, caller.authorization)

    async def run_copy(self, plan: EncodingPlan, caller: Caller, tenant: str) -> None:
        """Run the copy of a request. It is not charged, and takes no room from other texts. Raises `StatusError`."""
        await self._all(plan, caller, tenant)

    async def _paid(self, plan: EncodingPlan, caller: Caller, authorization: Authorization) -> list[bytes]:
        """Run a plan, and charge the caller's key for all tokens, or for none if the request fails."""
        authorization.check(plan.model.asked_as, plan.priority)
        with authorization.held():
            await authorization.take_tokens(plan.num_tokens)
            num_used = 0
            try:
                vectors = await self._counted(plan, caller, authorization.key.tenant)
                num_used = plan.num_tokens
                return vectors
            finally:
                authorization.settle(num_used - plan.num_tokens)

    async def _counted(self, plan: EncodingPlan, caller: Caller, tenant: str) -> list[bytes]:
        number = len(plan.prompts)
        if self._num_texts + number > MAX_TEXTS:
            raise StatusError(Reason.QUEUE_FULL, "the gateway has its maximum of texts to encode", retry_after_s=1.0)
        describe_generation(self._request(plan, 0, tenant), number, plan.num_tokens)
        self._num_texts += number
        try:
            return await self._all(plan, caller, tenant)
        finally:
            self._num_texts -= number

    async def _all(self, plan: EncodingPlan, caller: Caller, tenant: str) -> list[bytes]:
        prompts = plan.prompts
        vectors = [b""] * len(prompts)
        order = iter(sorted(range(len(prompts)), key=lambda number: -len(prompts[number])))
        await _together([self._some(plan, caller, tenant, order, vectors) for _ in prompts[:MAX_CALLS]])
        return vectors

    async def _some(
        self, plan: EncodingPlan, caller: Caller, tenant: str, order: Iterator[int], vectors: list[bytes]
    ) -> None:
        """Encode one text after another until none is left."""
        for number in order:
            request = self._request(plan, number, tenant)
            if caller.is_background:
                request.priority = BACKGROUND_PRIORITY
            answer = self._upstream.generate(request, caller.metadata, caller.deadline_s, card=plan.model.card)
            num_tokens = len(plan.prompts[number])
            async with aclosing(answer) as messages:
                async for message in messages:
                    if message.HasField("finish") and not caller.is_background:
                        self._metrics.timed(plan.model.name, message.finish)
                    vectors[number] = message.vector
            if not vectors[number]:
                raise StatusError(Reason.INTERNAL, "the worker sent no vector; its version is older than the gateway's")
            self._metrics.choice_ended(plan.model.name, num_tokens)

    def _request(self, plan: EncodingPlan, number: int, tenant: str) -> GenerateRequest:
        card = plan.model.card
        return GenerateRequest(
            request_id=secrets.token_hex(16),
            model=card.name,
            tokenizer_sha256=card.tokenizer_sha256,
            token_ids=plan.prompts[number],
            sampling=SamplingParams(max_tokens=0),
            tenant=tenant,
            priority=plan.priority,
            task=card.task,
            num_first_text_tokens=plan.num_first_text_tokens[number],
        )


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them to the end. The first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)


class EncodingCopies:
    """Copies embeddings, rerank and scores to a model on trial, and drops its answers."""

    def __init__(self, shadows: Shadows, runner: EncodingRunner) -> None:
        self._shadows = shadows
        self._runner = runner

    def offer(self, request: TextsToEmbed | PairsToScore, encodings: Encodings) -> None:
        """Copy a request that was planned, if it has a shadow. `encodings` plans the copy."""

        async def copy(model: str, caller: Caller) -> None:
            if isinstance(request, TextsToEmbed):
                plan = await encodings.plan(replace(request, model=model, priority=SHADOW_PRIORITY))
            else:
                plan = await encodings.plan_pairs(replace(request, model=model, priority=SHADOW_PRIORITY))
            authorization = authorization_var.get()
            await self._runner.run_copy(plan, caller, authorization.key.tenant if authorization is not None else "")

        self._shadows.offer(request.model, "", copy)
