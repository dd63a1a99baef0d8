"""Finds the model of a request and answers it as a whole, for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.choice import WholeChoice
from headrace.gateway.chat.generation import Plan
from headrace.gateway.kserve.answers import whole
from headrace.gateway.kserve.requests import NAMES, Inference, check_version
from headrace.gateway.kserve.tensors import Tensor
from headrace.gateway.services import Services
from headrace.gateway.text.models import Model


async def find_model(services: Services, name: str, version: str, *, loads: bool = True) -> Model:
    """The model of this name. Raises `StatusError` if there is none, or if it has no such version."""
    check_version(name, version)
    return await services.models.find(name, loads=loads)


async def answer_whole(services: Services, model: Model, inference: Inference, caller: Caller) -> list[Tensor]:
    """Generate the whole answer and return its tensors. Raises `StatusError`, with the request's names of fields."""
    with NAMES.in_callers_terms():
        plans = await plans_of(services, model, inference)
        choices = [WholeChoice() for _ in plans]
        await services.answering.gather(caller, plans, choices)
        return whole(inference, choices, [len(plan.job.token_ids) for plan in plans])


async def plans_of(services: Services, model: Model, inference: Inference) -> Sequence[Plan]:
    """The plan of each text. A text with images is the message of a user: the model's chat template has a place for
    them. Raises `StatusError`."""
    if inference.images:
        return [(await services.chats.plan(inference.chat(model.asked_as))).plan]
    return (await services.chats.plan_completion(inference.completion(model.asked_as))).plans
