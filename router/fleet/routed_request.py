"""A request in the form that placement needs, before and after it is placed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.common.telemetry.span import Span
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.block_hash import root_hash
from headrace.protos.cache_eviction import longest_context_of, rule_for
from headrace.protos.model_identity import model_identity
from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.protos.status import StatusError
from headrace.router.fleet.links import WorkerLink
from headrace.router.placement.bookings import Booking
from headrace.router.placement.candidates import Places
from headrace.router.placement.policy import CostTerms, Placement, belief_message
from headrace.router.placement.predictions import Run
from headrace.router.placement.prompt import Prompt
from headrace.router.placement.rates import Priors


class Prefilled(NamedTuple):
    """A worker that has just computed the first `num_tokens` tokens, in blocks of this layout. The index may not have
    them yet. Without a layout, no other worker can fetch them."""

    address: str
    kv_layout: str
    num_tokens: int

    @classmethod
    def at(cls, placed: PlacedRequest, num_tokens: int) -> Prefilled:
        """The first `num_tokens` tokens of a request, at the worker where it was placed."""
        return cls(placed.link.address, placed.card.kv_layout, num_tokens)


class RoutedRequest:
    """The parts of a request that placement needs. Block hashes are computed once for each fingerprint."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        prompt: Prompt,
        generated: Sequence[int] = (),
        model_identity: str = "",
    ) -> None:
        """`generated` are the tokens already delivered after the prompt, and `model_identity` the identity of the model
        that generated them; both are empty if the answer has not begun. The prompt comes from `prompt`, not from
        `request`."""
        self.num_tokens = prompt.num_tokens + len(generated)
        self._prompt = prompt
        self._generated = array("I", generated)
        self.model_identity = model_identity
        self.tokenizer_sha256 = request.tokenizer_sha256
        self.image_view_pixels = request.image_view_pixels
        """The bound within which the images in the prompt were measured; 0 without images, or if it is not known."""
        self.session_key = request.session_key
        self.max_ttft_ms = math.inf
        self.prefilled: Prefilled | None = None
        """The worker that has its tokens, if the answer has to continue elsewhere."""
        self.num_described = 0
        """Number of candidates that the placement describes."""
        self.max_new_tokens: int | None = None
        if request.sampling.HasField("max_tokens"):
            self.max_new_tokens = max(request.sampling.max_tokens - len(generated), 0)
        self.adapter = request.adapter
        self.adapter_sha256 = ""
        """Hash of the adapter's files; empty until `FleetAdapters.choose` sets it."""
        self._sampling = request.sampling
        self.has_begun = bool(generated or model_identity)
        """Whether tokens of the answer have been delivered."""
        self.is_background = request.priority == BACKGROUND_PRIORITY
        """Whether it only takes what all other requests leave."""
        self.has_eviction_rule = request.sampling.HasField("cache_eviction")
        """Whether it has a rule for evicting its KV blocks. Not all workers of a model may allow that."""
        self._cache_salt = request.cache_salt
        self._hashes: dict[tuple[str, int, str], list[int]] = {}

    def num_expected_tokens(self, priors: Priors) -> int:
        """How many tokens the request is expected to take in all: those of its prompt, and of an answer of the length
        that `priors` assume."""
        answer = priors.answer_tokens if self.max_new_tokens is None else min(self.max_new_tokens, priors.answer_tokens)
        return self.num_tokens + answer

    def may_go_to(self, card: worker_pb2.ModelCard) -> bool:
        """Whether workers with this card have the weights and the tokenizer with which the answer began."""
        return not self.model_identity or self.model_identity == model_identity(card, self.adapter_sha256)

    @property
    def least_context(self) -> int:
        """The context that the prompt, the tokens so far and one more need. Encoders generate none."""
        return self.num_tokens + (1 if self.max_new_tokens is None else min(self.max_new_tokens, 1))

    def context_at(self, card: worker_pb2.ModelCard) -> int:
        """The longest context of the request at workers with this card; 0 if they do not evict KV blocks as
        requested."""
        if self.has_eviction_rule:
            try:
                rule_for(card, self._sampling)
            except StatusError:
                return 0
        return longest_context_of(card, self._sampling)

    def fits(self, card: worker_pb2.ModelCard) -> bool:
        """Whether workers with this card evict KV blocks as requested, and can generate one more token."""
        return self.least_context <= self.context_at(card)

    async def prepare(self, cards: Iterable[worker_pb2.ModelCard]) -> None:
        """Copy and hash a long prompt for workers with these cards, without blocking the event loop for long."""
        if self._prompt.is_long:
            await self._prompt.prepare({(self._root(card), card.block_size) for card in cards})

    def image_places(self, card: worker_pb2.ModelCard) -> Places | None:
        """The places of image tokens in the prompt; None if it has none, or if the card's model takes none."""
        if not card.HasField("images") or not len(self._prompt.image_places):
            return None
        return self._prompt.image_places

    def hashes(self, card: worker_pb2.ModelCard) -> list[int]:
        """Hashes of the full blocks, as workers with this card compute them."""
        key = (card.fingerprint, card.block_size, self.adapter_sha256)
        if key not in self._hashes:
            self._hashes[key] = self._prompt.hashes(self._root(card), card.block_size, self._generated)
        return self._hashes[key]

    def _root(self, card: worker_pb2.ModelCard) -> int:
        return root_hash(card.fingerprint, self.adapter_sha256, self._cache_salt)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request at the worker where it was placed. The decision took `decision_s`. The owner must release the booking
    exactly once."""

    request: RoutedRequest
    link: WorkerLink
    card: worker_pb2.ModelCard
    booking: Booking
    placement: Placement
    decision_s: float
    prediction: Run | None
    """The prediction that the request's blocks will be cached at the worker."""

    def belief(self, *, may_be_given_back: bool) -> inference_pb2.Belief:
        """The router's belief about the worker's load, as a message. It allows the worker to return the request only if
        other routers use the worker, too, because a single router already knows the whole load."""
        placement = self.placement
        believed = placement.belief if may_be_given_back and self.link.num_routers > 1 else None
        return belief_message(self.link.watcher_id, self.booking, placement.predicted_cached_tokens, believed)

    def describe(self, span: Span) -> None:
        """Add the decision to a span: the chosen worker, the reason, and the cost of each described candidate."""
        if not span.is_recording:
            return
        placement = self.placement
        span.set(
            {
                "headrace.placement.worker": self.link.worker_id,
                "headrace.placement.reason": placement.reason.value,
                "headrace.placement.predicted_cached_tokens": placement.predicted_cached_tokens,
                "headrace.placement.num_candidates": placement.num_candidates,
                "headrace.placement.decision_us": 1e6 * self.decision_s,
                **({} if placement.cost is None else _terms(placement.cost)),
            }
        )
        for weighed in placement.weighed:
            cached = weighed.num_cached_tokens
            attributes: dict[str, str | float] = {"server.address": weighed.worker_id, "headrace.cached_tokens": cached}
            span.event("candidate", {**attributes, **_terms(weighed.cost)})


def _terms(cost: CostTerms[float]) -> dict[str, float]:
    terms = {**cost._asdict(), "total_ms": cost.total_ms}
    return {f"headrace.cost.{name}": milliseconds for name, milliseconds in terms.items()}
