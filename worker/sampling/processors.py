"""Logits processors: change a row's logits according to its request, before a token is chosen.

They run in this order: penalties, logit bias with DRY, allowed tokens, grammar, the end of reasoning, banned tokens
(bad words, and end of sequence before `min_tokens`). A row ends up in one of three forms:

- **single changes** of some logits, noted beside the model's values (`Changes`),
- **whole**: a copied row, if most tokens are forbidden or very many have a bias,
- **few**: a grammar allows only a few tokens, so only those are looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.worker.grammar.constraint import Allowed, Constraint, LookAhead, Matcher
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.dry import DryPenalty
from headrace.worker.sampling.logits import Changes, Logits, Places
from headrace.worker.sampling.penalties import Penalties
from headrace.worker.sampling.reduction import FloatArray, IndexArray
from headrace.worker.sampling.thinking import ThinkingEnd

# A row with more biases is copied as a whole, because sorting them in each step would take longer.
MOST_SINGLE = 4096


class BadWords:
    """Token sequences that an answer must not contain. A step looks only at those whose second to last token is the
    latest token of the answer, and compares all of one length at once."""

    __slots__ = ("_by_latest", "always")

    def __init__(self, words: Sequence[Sequence[int]], max_tokens: int) -> None:
        """The answer has at most `max_tokens` tokens, so longer words cannot occur."""
        self.always = {word[0] for word in words if len(word) == 1}
        """Words of one token."""
        # latest token -> number of tokens before the last -> these tokens -> last tokens
        self._by_latest: dict[int, dict[int, dict[bytes, set[int]]]] = {}
        for word in words:
            if 1 < len(word) <= max_tokens:
                lengths = self._by_latest.setdefault(word[-2], {})
                beginnings = lengths.setdefault(len(word) - 1, {})
                beginnings.setdefault(array("I", word[:-1]).tobytes(), set()).add(word[-1])

    def completing(self, request: Request) -> set[int]:
        """Tokens that would complete a word of several tokens. Only generated tokens can begin a word, not the end of
        the prompt."""
        found: set[int] = set()
        tokens, num_generated = request.token_ids, request.num_generated_tokens
        if num_generated and self._by_latest:
            for length, beginnings in self._by_latest.get(tokens[-1], {}).items():
                if length <= num_generated:
                    found |= beginnings.get(tokens[-length:].tobytes(), set())
        return found


class Edits:
    """The changes of one request. `biases` are added to the logits of `biased_ids`. If there are `allowed_ids`, only
    these may be chosen."""

    __slots__ = (
        "_always_banned",
        "_dry",
        "_min_tokens",
        "_stop_ids",
        "_thinking",
        "_words",
        "allowed_ids",
        "biased_ids",
        "biases",
    )

    def __init__(self, sampling: SamplingParams) -> None:
        self.biased_ids: IndexArray = np.array([token_id for token_id, _ in sampling.logit_bias], np.intp)
        self.biases: FloatArray = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._dry = DryPenalty(sampling) if sampling.has_dry else None
        budget = sampling.thinking_budget
        self._thinking = None if budget is None else ThinkingEnd(budget)
        self.allowed_ids: IndexArray = np.array(sampling.allowed_token_ids, np.intp)
        self._words = BadWords(sampling.bad_words, sampling.max_tokens)
        self._always_banned = _sorted(self._words.always)
        self._min_tokens = sampling.min_tokens
        self._stop_ids = sampling.stop_token_ids

    def added(self, request: Request) -> tuple[IndexArray, FloatArray]:
        """Tokens `[n]` without repeats, and what is added to their logits: their biases, less the penalties of
        repetitions."""
        if self._dry is None:
            return self.biased_ids, self.biases
        repeating, lost = self._dry.penalties(request)
        if not len(self.biased_ids):
            return repeating, -lost
        token_ids, which = np.unique(np.concatenate([self.biased_ids, repeating]), return_inverse=True)
        added = np.zeros(len(token_ids), np.float32)
        np.add.at(added, which, np.concatenate([self.biases, -lost]))
        return token_ids, added

    def forced_id(self, request: Request) -> int | None:
        """The token that ends the reasoning, if it has to end; else None."""
        return None if self._thinking is None else self._thinking.next_token(request)

    def banned_ids(self, request: Request) -> IndexArray:
        """Tokens that would complete a bad word, and stop tokens before `min_tokens`; sorted."""
        banned = self._words.completing(request)
        if request.num_generated_tokens < self._min_tokens:
            banned |= self._stop_ids
        return _sorted(banned | self._words.always) if banned else self._always_banned


def _sorted(token_ids: set[int]) -> IndexArray:
    return np.array(sorted(token_ids), np.intp)


@dataclass(frozen=True, slots=True)
class Processed:
    """Rows after the processors: `logits` with single changes, the `whole` rows `[vocab]` that replace some of them,
    and the `few` tokens to choose from in some rows."""

    logits: Logits
    few: dict[int, IndexArray]
    whole: dict[int, FloatArray]

    def at(self, row: int, token_ids: IndexArray) -> FloatArray:
        """The logits `[k]` of the tokens `token_ids` `[k]` in one row, as the processors left them."""
        if row in self.whole:
            return self.whole[row][token_ids]
        return self.logits.at(np.full(len(token_ids), row), token_ids)


# Rows, tokens and new values.
_Single = tuple[IndexArray, IndexArray, npt.NDArray[np.floating]]


class LogitsProcessors:
    """Runs the processors of a step. Keeps a matcher for each request with a grammar, for as long as the request
    lives."""

    def __init__(self) -> None:
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()
        self._edits: WeakKeyDictionary[Request, Edits] = WeakKeyDictionary()
        self._look_ahead = LookAhead()

    def process(self, requests: Sequence[Request], logits: Logits, penalties: Penalties | None) -> Processed:
        """Apply penalties, bias, lists of tokens and grammars to `logits`, a row `[vocab]` for each request.
        `penalties` are those of the requests; None if none has any. Returns the changed rows; `logits` stay as they
        are."""
        if penalties is not None:
            logits = penalties.apply(logits)
        processed = Processed(logits, {}, {})
        rows = [row for row, request in enumerate(requests) if request.sampling.has_edits]
        if not rows:
            return processed
        single: list[_Single] = []
        if logits.changes is not None:
            places = logits.changes.places
            single.append((places.rows, places.token_ids, logits.changes.values))
        for row in rows:
            single += self._process_row(requests[row], row, processed)
        return Processed(_with_single(logits, single), processed.few, processed.whole)

    def begin_look_ahead(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Let the matchers advance by the chosen tokens in another thread; -1 stands for no token."""
        if not self._matchers:
            return
        steps = []
        for request, token_id in zip(requests, token_ids, strict=True):
            matcher = self._matchers.get(request)
            if matcher is not None and token_id >= 0 and token_id not in request.sampling.stop_token_ids:
                steps.append((matcher, token_id))
        if steps:
            self._look_ahead.begin(steps)

    def begin_again(self, request: Request) -> None:
        """Restart the request's constraint, which may have changed, and everything that follows from its tokens, when
        it is next sampled."""
        self._matchers.pop(request, None)
        if request.sampling.has_dry or request.sampling.thinking_budget is not None:
            self._edits.pop(request, None)

    def forced_tokens(self, request: Request) -> Sequence[int]:
        """See BatchSampler."""
        matcher = self._matcher_behind(request)
        return () if matcher is None else matcher.forced_tokens()

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        """See BatchSampler."""
        matcher = self._matcher_behind(request)
        return len(token_ids) if matcher is None else matcher.num_valid(token_ids)

    def branch(self, request: Request) -> Constraint | None:
        """See BatchSampler."""
        matcher = self._matcher_behind(request)
        return None if matcher is None else matcher.branch()

    def _matcher_behind(self, request: Request) -> Matcher | None:
        """The request's matcher, if it has processed all of the request's tokens."""
        if request.sampling.constraint is None:
            return None
        self._look_ahead.finish()
        matcher = self._matchers.get(request)
        return matcher if matcher is not None and matcher.num_tokens == request.num_generated_tokens else None

    def _process_row(self, request: Request, row: int, processed: Processed) -> list[_Single]:
        """Single changes of the row, to be applied after those of `processed`. Or add the row to `processed`."""
        sampling = request.sampling
        single: list[_Single] = []
        edits = self._edits_of(request)
        biased_ids, biases = edits.added(request)
        num_biased = len(biased_ids)
        if num_biased:
            changed = processed.at(row, biased_ids) + biases
            single.append((np.full(num_biased, row), biased_ids, changed))
        few, mask = None, None
        if sampling.constraint is not None:
            few, mask = self._allowed(request)
        forced = edits.forced_id(request)
        if forced is not None and _allows(few, mask, forced):
            few = np.array([forced], np.intp)
        if few is not None:
            processed.few[row] = few
        banned = edits.banned_ids(request)
        # A grammar takes precedence over bans: if it allows only banned tokens, they stay.
        if few is not None and np.isin(few, banned).all():
            banned = banned[:0]
        if sampling.allowed_token_ids or mask is not None or num_biased > MOST_SINGLE:
            values = processed.logits.whole(np.array([row]))[0]
            for _, ids, changed in single:
                values[ids] = changed
            if sampling.allowed_token_ids:
                values = _only(values, edits.allowed_ids)
            if mask is not None:
                values += mask
            processed.whole[row] = _without(values, banned, sampling.constraint is not None)
            return []
        if len(banned):
            single.append((np.full(len(banned), row), banned, np.full(len(banned), -np.inf)))
        return single

    def _edits_of(self, request: Request) -> Edits:
        edits = self._edits.get(request)
        if edits is None:
            edits = self._edits[request] = Edits(request.sampling)
        return edits

    def _allowed(self, request: Request) -> Allowed:
        """The tokens that the request's grammar allows next."""
        assert request.sampling.constraint is not None
        self._look_ahead.finish()
        matcher = self._matchers.get(request)
        if matcher is None:
            matcher = self._matchers[request] = request.sampling.constraint.begin()
        return matcher.allowed(request.token_ids[request.num_prompt_tokens :])


def _with_single(logits: Logits, single: Sequence[_Single]) -> Logits:
    if not any(len(token_ids) for _, token_ids, _ in single):
        return logits
    rows, token_ids, values = map(np.concatenate, zip(*single, strict=True))
    places = Places(logits.shape, rows, token_ids)
    before = logits.with_changes(None).at(places.rows, places.token_ids)
    return logits.with_changes(Changes(places, before, values[places.order]))


def _allows(few: IndexArray | None, mask: FloatArray | None, token_id: int) -> bool:
    """Whether a grammar allows this token."""
    if few is not None:
        return bool((few == token_id).any())
    return mask is None or not np.isneginf(mask[token_id])


def _only(values: FloatArray, token_ids: IndexArray) -> FloatArray:
    kept = np.full(len(values), -np.inf, np.float32)
    kept[token_ids] = values[token_ids]
    return kept


def _without(values: FloatArray, banned: IndexArray, has_grammar: bool) -> FloatArray:
    """Ban tokens of a row, unless a grammar allows only banned ones."""
    kept = values[banned]
    values[banned] = -np.inf
    if has_grammar and np.all(np.isneginf(values)):
        values[banned] = kept
    return values
