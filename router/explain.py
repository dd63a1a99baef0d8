"""Explains where a request would be placed now, with the terms of the policy."""

from __future__ import annotations

from headrace.protos import router_pb2
from headrace.protos.answer_bounds import check_context
from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.links import WorkerLink
from headrace.router.fleet.routed_request import RoutedRequest
from headrace.router.placement.policy import CostTerms, PlacementReason, Weighed
from headrace.router.placement.prompt import Prompt

_REASONS = {
    PlacementReason.ONLY: router_pb2.PLACEMENT_REASON_ONLY,
    PlacementReason.PREFIX: router_pb2.PLACEMENT_REASON_PREFIX,
    PlacementReason.LOAD: router_pb2.PLACEMENT_REASON_LOAD,
    PlacementReason.SESSION: router_pb2.PLACEMENT_REASON_SESSION,
}


async def explain(fleet: Fleet, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
    """Decide as for a placement, without booking.

    Raises StatusError: INVALID_FIELD for an empty prompt, CONTEXT_TOO_LONG for one that leaves no room for an answer,
    NO_CAPACITY while no worker of the model has been reached, and what `Fleet.resolve` raises.
    """
    if not request.token_ids:
        problem = "token_ids is empty: give the tokens of the prompt"
        raise StatusError(Reason.INVALID_FIELD, problem, field="token_ids")
    card, message = fleet.described(request)
    check_context(len(request.token_ids), 0, card.max_context_tokens, encodes=bool(card.task))
    routed = RoutedRequest(message, Prompt(request.token_ids))
    fleet.adapters.choose(routed, card)
    await routed.prepare(fleet.cards(card.name))
    placement = fleet.weigh(routed, card)
    links = [link for link in fleet.links() if link.card is not None and link.card.name == card.name]
    response = router_pb2.ExplainResponse(num_prompt_tokens=len(request.token_ids))
    costs: dict[str, CostTerms[float]] = {}
    described: dict[str, Weighed] = {}
    if placement is not None:
        costs = placement.costs
        described = {weighed.worker_id: weighed for weighed in placement.weighed}
        response.reason = _REASONS[placement.reason]
        response.worker_id = next(link.worker_id for link in links if link.address == placement.worker_id)
        links.sort(key=lambda link: _rank(costs.get(link.address)))
    for link in links:
        worker = response.workers.add()
        worker.CopyFrom(_described(link))
        if link.address in costs:
            worker.num_cached_tokens = described[link.address].num_cached_tokens
            worker.num_transferred_tokens = described[link.address].num_moved_tokens
            worker.num_disk_tokens = described[link.address].num_disk_tokens
            worker.cost.CopyFrom(_terms(costs[link.address]))
    return response


def _rank(cost: CostTerms[float] | None) -> tuple[bool, float]:
    """Sort key: weighed workers first, by cost."""
    return (True, 0.0) if cost is None else (False, cost.total_ms)


def _described(link: WorkerLink) -> router_pb2.ExplainedWorker:
    known = link.info()
    return router_pb2.ExplainedWorker(
        worker_id=known.worker_id, address=known.address, state=known.state, detail=known.detail, role=known.role
    )


def _terms(cost: CostTerms[float]) -> router_pb2.CostTerms:
    return router_pb2.CostTerms(**cost._asdict(), total_ms=cost.total_ms, ttft_ms=cost.ttft_ms)
