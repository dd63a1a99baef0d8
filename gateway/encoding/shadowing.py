"""Copies requests for embeddings, reranking and scores to a model on trial, and drops its answers."""

from __future__ import annotations

from dataclasses import replace

from headrace.gateway.access.caller import Caller, authorization_var
from headrace.gateway.chat.shadowing import LOWEST_PRIORITY, Shadows
from headrace.gateway.encoding.planning import Encodings, PairsToScore, TextsToEmbed
from headrace.gateway.encoding.running import EncodingRunner


class EncodingCopies:
    """Copies embeddings, rerank and scores."""

    def __init__(self, shadows: Shadows, runner: EncodingRunner) -> None:
        self._shadows = shadows
        self._runner = runner

    def offer(self, request: TextsToEmbed | PairsToScore, encodings: Encodings) -> None:
        """Copy a request that was planned, if it has a shadow. `encodings` plans the copy."""

        async def copy(model: str, caller: Caller) -> None:
            if isinstance(request, TextsToEmbed):
                plan = await encodings.plan(replace(request, model=model, priority=LOWEST_PRIORITY))
            else:
                plan = await encodings.plan_pairs(replace(request, model=model, priority=LOWEST_PRIORITY))
            authorization = authorization_var.get()
            await self._runner.run_copy(plan, caller, authorization.key.tenant if authorization is not None else "")

        self._shadows.offer(request.model, "", copy)
