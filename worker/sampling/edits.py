"""What requests change in their rows of logits before a token is chosen: penalties, biases, bans, and what a constraint
forbids.

The logits themselves stay as they are, for log-probabilities are of them, and a copy of a batch costs as much as
reading it. Changed are single logits, noted beside the rows, and whole rows, which are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.worker.grammar.constraint import Allowed, LookAhead, Matcher
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Changes, FloatArray, IndexArray, Logits, Places


class SeenTokens:
    """Distinct tokens of a request, and what presence and frequency penalty take off each, as arrays that grow. With
    `prompt_token_ids` those are among them, without such a penalty until they are generated."""

    __slots__ = ("_counts", "_frequency", "_num_counted", "_penalties", "_presence", "_slots", "_token_ids")

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        prompt_ids = np.unique(np.asarray(prompt_token_ids, np.intp))
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt_ids.tolist())}
        self._counts = [0] * len(prompt_ids)
        self._token_ids = np.concatenate([prompt_ids, np.zeros(16, np.intp)])
        self._penalties = np.zeros(len(self._token_ids), np.float32)
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._num_counted = 0

    def count(self, request: Request) -> None:
        """Take in the request's generated tokens that were not counted yet."""
        tokens = request.token_ids
        for position in range(request.num_prompt_tokens + self._num_counted, len(tokens)):
            token_id = tokens[position]
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._add(token_id)
            self._counts[slot] += 1
            self._penalties[slot] = self._presence + self._frequency * self._counts[slot]
            self._num_counted += 1

    def _add(self, token_id: int) -> int:
        slot = self._slots[token_id] = len(self._counts)
        self._counts.append(0)
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._penalties = np.concatenate([self._penalties, np.zeros_like(self._penalties)])
        self._token_ids[slot] = token_id
        return slot

    @property
    def token_ids(self) -> IndexArray:
        """The tokens."""
        return self._token_ids[: len(self._counts)]

    @property
    def penalties(self) -> FloatArray:
        """What is taken off each."""
        return self._penalties[: len(self._counts)]


@dataclass(frozen=True, slots=True)
class Edits:
    """What requests change in a step's rows: `logits` with single changes; by row, `few` tokens to choose from where a
    constraint leaves few of them; and the `whole` rows `[vocab]` of which many logits are changed."""

    logits: Logits
    few: dict[int, IndexArray]
    whole: dict[int, FloatArray]

    def values(self, row: int, token_ids: IndexArray) -> FloatArray:
        """Logits of a row, as changed."""
        if row in self.whole:
            return self.whole[row][token_ids]
        return self.logits.at(np.full(len(token_ids), row), token_ids)


class Penalties(NamedTuple):
    """What penalties do to logits of a step's rows, known before there are logits: `places`, and for each of them the
    repetition penalty, which divides it or multiplies it, and what is subtracted."""

    places: Places
    repetition: FloatArray
    subtracted: FloatArray


# Rows, tokens and new values.
_Single = tuple[IndexArray, IndexArray, npt.NDArray[np.floating]]


class LogitEditor:
    """Keeps the tokens seen of requests with penalties, and matchers for those with a constraint, for as long as they
    live."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Request, SeenTokens] = WeakKeyDictionary()
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()
        self._look_ahead = LookAhead()

    def penalties(self, requests: Sequence[Request], vocab_size: int) -> Penalties | None:
        """What the requests' penalties take off the logits of their next tokens."""
        rows = [row for row, request in enumerate(requests) if request.sampling.has_penalties]
        if not rows:
            return None
        seen = [self._seen_by(requests[row]) for row in rows]
        lengths = [len(of_row.token_ids) for of_row in seen]
        if not any(lengths):
            return None
        places = Places(
            (len(requests), vocab_size),
            np.repeat(np.array(rows), lengths),
            np.concatenate([of_row.token_ids for of_row in seen]),
        )
        repetition = np.array([requests[row].sampling.repetition_penalty for row in rows], np.float32)
        subtracted = np.concatenate([of_row.penalties for of_row in seen])
        return Penalties(places, np.repeat(repetition, lengths)[places.order], subtracted[places.order])

    def edit(self, requests: Sequence[Request], logits: Logits, penalties: Penalties | None) -> Edits:
        """How the requests want their rows `[len(requests), vocab]` changed; `penalties` are theirs."""
        if penalties is not None:
            logits = _penalised(logits, penalties)
        edited = [row for row, request in enumerate(requests) if request.sampling.has_edits]
        edits = Edits(logits, {}, {})
        if not edited:
            return edits
        single: list[_Single] = []
        if logits.changes is not None:
            places = logits.changes.places
            single.append((places.rows, places.token_ids, logits.changes.values))
        for row in edited:
            single += self._edit_row(requests[row], row, edits)
        return Edits(_changed(logits, single), edits.few, edits.whole)

    def begin_look_ahead(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Let the matchers of requests that go on follow the tokens that were chosen for them."""
        if not self._matchers:
            return
        steps = []
        for request, token_id in zip(requests, token_ids, strict=True):
            matcher = self._matchers.get(request)
            if matcher is not None and token_id >= 0 and token_id not in request.sampling.stop_token_ids:
                steps.append((matcher, token_id))
        if steps:
            self._look_ahead.begin(steps)

    def _seen_by(self, request: Request) -> SeenTokens:
        seen = self._seen.get(request)
        if seen is None:
            repeats = request.sampling.repetition_penalty != 1.0
            seen = SeenTokens(request.sampling, request.prompt_token_ids if repeats else ())
            self._seen[request] = seen
        seen.count(request)
        return seen

    def _edit_row(self, request: Request, row: int, edits: Edits) -> list[_Single]:
        """Single changes of a row, which come after those that `edits` has; or note the row among the whole ones."""
        sampling = request.sampling
        single: list[_Single] = []
        if sampling.logit_bias:
            token_ids = np.array([token_id for token_id, _ in sampling.logit_bias])
            biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
            single.append((np.full(len(token_ids), row), token_ids, edits.values(row, token_ids) + biases))
        bias = None
        if sampling.constraint is not None:
            few, bias = self._allowed(request)
            if few is not None:
                edits.few[row] = few
        banned = _banned(request)
        if sampling.allowed_token_ids or bias is not None:
            values = edits.logits.whole(np.array([row]))[0]
            for _, ids, changed in single:
                values[ids] = changed
            if sampling.allowed_token_ids:
                values = _only(values, np.asarray(sampling.allowed_token_ids))
            if bias is not None:
                values += bias
            edits.whole[row] = _without(values, banned, sampling.constraint is not None)
            return []
        if len(banned) and not np.isin(edits.few.get(row, _NOTHING_LEFT_OUT), banned).all():
            single.append((np.full(len(banned), row), banned, np.full(len(banned), -np.inf)))
        return single

    def _allowed(self, request: Request) -> Allowed:
        """What the request's constraint allows next."""
        assert request.sampling.constraint is not None
        self._look_ahead.finish()
        matcher = self._matchers.get(request)
        if matcher is None:
            matcher = self._matchers[request] = request.sampling.constraint.begin()
        return matcher.allowed(request.token_ids[request.num_prompt_tokens :])


# Stands for the tokens of a row that no constraint cuts: not all of them are banned.
_NOTHING_LEFT_OUT = np.array([-1])


def _changed(logits: Logits, single: Sequence[_Single]) -> Logits:
    if not any(len(token_ids) for _, token_ids, _ in single):
        return logits
    rows, token_ids, values = map(np.concatenate, zip(*single, strict=True))
    places = Places(logits.shape, rows, token_ids)
    before = logits.unchanged.at(places.rows, places.token_ids)
    return logits.changed(Changes(places, before, values[places.order]))


def _penalised(logits: Logits, penalties: Penalties) -> Logits:
    places, repetition, subtracted = penalties
    before = logits.at(places.rows, places.token_ids)
    values = before
    if np.any(repetition != 1.0):
        values = np.where(values > 0, values / repetition, values * repetition)
    return logits.changed(Changes(places, before, values - subtracted))


def _only(values: FloatArray, token_ids: IndexArray) -> FloatArray:
    kept = np.full(len(values), -np.inf, np.float32)
    kept[token_ids] = values[token_ids]
    return kept


def _without(values: FloatArray, banned: IndexArray, is_constrained: bool) -> FloatArray:
    """The row less what is banned. A constraint goes before: where it allows only banned tokens, they stay."""
    kept = values[banned]
    values[banned] = -np.inf
    if is_constrained and np.all(np.isneginf(values)):
        values[banned] = kept
    return values


def _banned(request: Request) -> IndexArray:
    """Tokens that bad words and minimum length forbid."""
    sampling = request.sampling
    banned: set[int] = set()
    for word in sampling.bad_words:
        begun = len(word) - 1
        # Only what was generated counts: the end of a prompt is no beginning of a word.
        if begun == 0 or (request.num_generated_tokens >= begun and tuple(request.token_ids[-begun:]) == word[:-1]):
            banned.add(word[-1])
    if request.num_generated_tokens < sampling.min_tokens:
        banned.update(sampling.stop_token_ids)
    return np.array(sorted(banned), np.intp)
