"""Sends copies of requests to another model and drops the answers, to try that model under real load.

A copy never delays or fails its original. Copies have a lower priority at the workers than requests of callers. At most
`MAX_RUNNING` run at a time; further ones are dropped. A copy never causes its model to be loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from msgspec import structs

from headrace.common.tasks import end_tasks
from headrace.common.telemetry.logs import request_id_var
from headrace.gateway.access.caller import Caller, authorization_var
from headrace.gateway.chat.generation import Generator, Plan
from headrace.gateway.chat.planning import Chats
from headrace.gateway.chat.request import Chat, Completion
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.text.models import Models
from headrace.protos.priorities import SHADOW_PRIORITY
from headrace.protos.status import StatusError

MAX_RUNNING = 16
_LOG = logging.getLogger(__name__)

Copy = Callable[[str, Caller], Awaitable[None]]
"""Runs a copy of a request for this model to its end, on behalf of this caller."""


class Shadows:
    """Runs the copies."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics
        self._running: set[asyncio.Task[None]] = set()

    def offer(self, name: str, key: str, copy: Copy) -> None:
        """Run a copy of a planned request for this name and conversation, if the name has a shadow and its share
        includes the request."""
        authorization = authorization_var.get()
        model = self._models.shadow_of(name, key)
        if not model or (authorization is not None and not authorization.may_use(name)):
            return
        if len(self._running) >= MAX_RUNNING:
            self._metrics.shadowed(model, "left_out")
            return
        task = asyncio.create_task(self._run(copy, model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """End all running copies."""
        await end_tasks(*self._running)

    async def _run(self, copy: Copy, model: str) -> None:
        try:
            await self._models.find(model, loads=False)
            await copy(model, Caller(f"shadow-{request_id_var.get()}", "", time.monotonic()))
        except StatusError as error:
            _LOG.info("a copy for %s failed: %s", model, error.message)
            self._metrics.shadowed(model, error.reason.name.lower())
        except Exception:
            _LOG.exception("a copy for %s failed", model)
            self._metrics.shadowed(model, "internal")
        else:
            self._metrics.shadowed(model, "ok")


class ChatCopies:
    """Copies chats and completions."""

    def __init__(self, shadows: Shadows, generator: Generator) -> None:
        self._shadows = shadows
        self._generator = generator

    def offer(self, request: Chat | Completion, chats: Chats) -> None:
        """Copy a request that was planned, if it has a shadow. `chats` plans the copy."""

        async def copy(model: str, caller: Caller) -> None:
            plans = await _plans(chats, structs.replace(request, model=model, priority=SHADOW_PRIORITY))
            if (authorization := authorization_var.get()) is not None:
                for plan in plans:  # so that cached prefixes of the copies stay with the tenant
                    plan.scope_to(authorization.key)
            async with aclosing(self._generator.stream(plans, caller)) as pieces:
                async for _ in pieces:
                    pass

        self._shadows.offer(request.model or "", request.prompt_cache_key or "", copy)


async def _plans(chats: Chats, request: Chat | Completion) -> Sequence[Plan]:
    if isinstance(request, Chat):
        return [(await chats.plan(request)).plan]
    return (await chats.plan_completion(request)).plans
