"""The models that a router knows: those of live workers, those served recently, and those whose workers may come back.

Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set

from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.fleet.routed_request import RoutedRequest

# A model stays known for this long after its last worker is gone, so that requests wait for a restart.
REMEMBER_MODEL_S = 600.0
_MAX_REMEMBERED = 256
# An unknown model is reported only after each new member was reached or had this much time.
_SETTLE_S = 5.0


def _preference(card: worker_pb2.ModelCard) -> tuple[str | int, ...]:
    """Sort key for cards of one model: gateways get the card with the largest key. Equal fleets give equal cards."""
    evicts, images = card.max_evicting_context_tokens > 0, card.images
    return card.name, evicts, card.HasField("images"), card.max_context_tokens, images.max_view_pixels


class KnownModels:
    """Model cards by name. The argument `links` of its methods returns the links of all members, sorted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[str, worker_pb2.ModelCard] | None = None  # until a worker's state changes
        self._remembered: OrderedDict[str, tuple[worker_pb2.ModelCard, float]] = OrderedDict()

    def workers_changed(self) -> None:
        """Note that a worker's state or card has changed."""
        self._live = None

    def live(self, links: Callable[[], Sequence[WorkerLink]]) -> dict[str, worker_pb2.ModelCard]:
        """Model name -> card for all models of live workers, sorted by name. If the workers of a model differ, the card
        is that of a worker whose requests may evict KV blocks, of these one that takes images, and of these the one
        with the longest context."""
        if self._live is None:
            cards = [link.card for link in links() if link.card is not None and link.state is not LinkState.UNREACHABLE]
            cards.sort(key=_preference)
            self._live = {card.name: card for card in cards}
        return self._live

    def remember(self, card: worker_pb2.ModelCard) -> None:
        """Remember a model for which a worker takes requests now."""
        self._remembered[card.name] = (card, self._clock())
        self._remembered.move_to_end(card.name)
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def remembered(self) -> Collection[worker_pb2.ModelCard]:
        """Cards of all models served recently."""
        return [card for card, _ in self._remembered.values()]

    def resolve(self, model: str, links: Callable[[], Sequence[WorkerLink]]) -> worker_pb2.ModelCard | None:
        """The card of the model that a request names; "" names the only model. None while new members may still
        announce the model.

        Raises StatusError: MODEL_NOT_FOUND, or INVALID_FIELD if "" is ambiguous.
        """
        live = self.live(links)
        if model in live:
            return live[model]
        now_s = self._clock()
        known = {
            name: card for name, (card, seen_at_s) in self._remembered.items() if now_s - seen_at_s < REMEMBER_MODEL_S
        }
        known |= live
        if model:
            if model in known:
                return known[model]
        else:
            choice = live or known
            if len(choice) > 1:
                names = ", ".join(sorted(choice))
                raise StatusError(
                    Reason.INVALID_FIELD, f"model is empty and there are several: name one of {names}", field="model"
                )
            if choice:
                return next(iter(choice.values()))
        members = links()
        if not members or not known or any(_is_settling(link, now_s) for link in members):
            return None
        names = ", ".join(sorted(known))
        raise StatusError(Reason.MODEL_NOT_FOUND, f"no model {model!r} here; there is {names}", field="model")


def card_outgrown(
    request: RoutedRequest, model: str, links: Iterable[WorkerLink], now_s: float
) -> worker_pb2.ModelCard | None:
    """The card with the longest context, if the request fits no worker of its model, reachable or not. None if it may
    fit one, such as a new member that has not been reached yet."""
    cards = []
    for link in links:
        if link.card is None:
            if now_s - link.created_at_s < REMEMBER_MODEL_S:
                return None
        elif link.card.name == model and request.may_go_to(link.card):
            cards.append(link.card)
    longest = max(cards, key=request.context_at, default=None)
    is_outgrown = longest is not None and 0 < request.context_at(longest) < request.least_context
    return longest if is_outgrown else None


def _is_settling(link: WorkerLink, now_s: float) -> bool:
    return link.card is None and now_s - link.created_at_s < _SETTLE_S


class Departed:
    """Workers that no longer take requests, by name, each with the identities of its model, without and with each of
    its adapters. An answer that only such a worker can continue waits for its return.

    A worker is forgotten after `remember_s`, or as soon as it takes requests again, for any model. The oldest are
    forgotten if all together have more than `max_identities`.
    """

    def __init__(self, remember_s: float, max_identities: int) -> None:
        self._remember_s = remember_s
        self._max_identities = max_identities
        self._num_identities = 0
        self._workers: OrderedDict[str, tuple[Set[str], float]] = OrderedDict()  # in order of departure

    def went(self, worker_id: str, identities: Set[str], now_s: float) -> None:
        """Record that a worker with models of these identities stopped taking requests at `now_s`, on the monotonic
        clock."""
        self.came(worker_id)
        self._workers[worker_id] = (identities, now_s)
        self._num_identities += len(identities)
        while self._num_identities > self._max_identities and len(self._workers) > 1:
            self.came(next(iter(self._workers)))

    def came(self, worker_id: str) -> None:
        """Record that a worker takes requests again."""
        if worker_id in self._workers:
            self._num_identities -= len(self._workers.pop(worker_id)[0])

    def may_come_back(self, model_identity: str, now_s: float) -> bool:
        """Whether a worker of this model left recently and has not come back with another model."""
        return any(
            model_identity in identities and now_s - went_s < self._remember_s
            for identities, went_s in self._workers.values()
        )
