"""Follows a constraint: which tokens may come next in a request. The matching is llguidance's; see `compiler`.

    engine thread   Constraint.begin   a Matcher for each request
                    Matcher.allowed    the tokens that may come next; usually computed already by:
    second thread   Matcher.advance    the mask after a token, while the kernels compute the next logits

A compiled grammar is copied for each request (5 us).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.protos.status import Reason, StatusError

log = logging.getLogger(__name__)

# If at most this many tokens are allowed, sampling looks only at these.
FEW_TOKENS = 512
MAX_REASON_CHARS = 300

Bits = npt.NDArray[np.uint8]
_Guess = TypeVar("_Guess")

# For each value of a mask byte: the values to add to the logits of its eight tokens.
_BIAS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)


class ConstraintFailedError(Exception):
    """The grammar engine failed while following a constraint. `__cause__` is the original exception."""


class ConstraintSource(NamedTuple):
    """A constraint as the caller wrote it. `kind` is the name of the message field, `texts` its content."""

    kind: str
    texts: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """Name of the field in a request."""
        return f"sampling.constraint.{self.kind}"


class Allowed(NamedTuple):
    """The tokens that may come next: `token_ids`, ascending, if they are few; else `bias` `[vocab]` to be added to the
    logits, 0 for allowed tokens and -inf for the others."""

    token_ids: npt.NDArray[np.intp] | None
    bias: npt.NDArray[np.float32] | None = None


NOTHING = Allowed(np.zeros(0, np.intp))


class CompiledGrammar:
    """A compiled grammar at its beginning. `is_spoiled` if its lexer, which all copies share, has reached its limits.
    `cost_s` are the seconds of a core that it took to compile; its memory is about proportional."""

    __slots__ = ("__weakref__", "cost_s", "is_spoiled", "matcher")

    def __init__(self, matcher: Any, cost_s: float = 0.0) -> None:
        self.matcher = matcher
        self.cost_s = cost_s
        self.is_spoiled = False


@dataclass(frozen=True, slots=True, eq=False)
class Constraint:
    """A grammar for one request, positioned after the tokens that the request resumes with.

    `start` is the LLMatcher at this position, `first` the tokens that may come next. `end_bits` and `last_bits` are bit
    masks of tokens, least significant bit first. `end_bits` are allowed where the grammar may end. If it can only end
    there and `end_bits` is empty, `last_bits` are allowed.
    """

    grammar: CompiledGrammar
    start: Any
    num_start_tokens: int
    first: Allowed | None
    end_bits: Bits
    last_bits: Bits
    vocab_size: int

    def begin(self) -> Matcher:
        """A new matcher, which has followed no tokens."""
        return Matcher(self)

    def behind(self, generated: Sequence[int]) -> Constraint:
        """The same grammar after generated tokens. StatusError if they do not match it, or if nothing can follow."""
        matcher = Matcher(self)
        first = matcher.allowed(generated)
        if first.token_ids is None or len(first.token_ids):
            return replace(self, start=matcher.position, num_start_tokens=len(generated), first=first)
        if generated:
            message = "resume_token_ids do not follow the constraint; resume with the tokens that were delivered"
            raise StatusError(Reason.INVALID_FIELD, message, field="resume_token_ids")
        message = "the constraint is too complex, or no token of the model can begin it"
        raise StatusError(Reason.INVALID_FIELD, message, field="sampling.constraint")


class Matcher:
    """The position of one request in its grammar. Used by one thread at a time."""

    __slots__ = (
        "__weakref__",
        "_allowed",
        "_bias",
        "_bits",
        "_constraint",
        "_failure",
        "_num_tokens",
        "has_failed",
        "position",
    )

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._bits = np.zeros(len(constraint.end_bits), np.uint8)
        self._bias: npt.NDArray[np.float32] | None = None
        self._failure: BaseException | None = None
        self._restart()

    def _restart(self) -> None:
        constraint = self._constraint
        self.position = constraint.start.deep_copy()
        self._num_tokens = constraint.num_start_tokens
        self._allowed = constraint.first
        self.has_failed = False

    def allowed(self, generated: Sequence[int]) -> Allowed:
        """The tokens that may follow the generated ones; valid until the matcher advances.

        There are none, and `has_failed` is set, if the generated tokens do not match the grammar, or if the grammar
        exceeds its limits. ConstraintFailedError if the grammar engine raised, here or in `advance`.
        """
        if self._failure is None:
            try:
                return self._allowed_behind(generated)
            except BaseException as error:  # a panic in Rust is not an Exception
                self._fail(error)
        raise ConstraintFailedError("the grammar engine failed") from self._failure

    def advance(self, token_id: int) -> None:
        """Follow a chosen token, and compute the mask after it. Does not raise; if this fails, `allowed` raises."""
        try:
            self._consume((token_id,))
            self._allowed = self._compute()
            if self.has_failed:
                self._constraint.grammar.is_spoiled = True
                log.warning("a constraint cannot be followed further: %s", reason_of(self.position.get_error()))
        except BaseException as error:
            self._fail(error)

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens that it has followed."""
        return self._num_tokens

    def branch(self) -> Constraint | None:
        """The constraint from here on, for tokens that may be taken back; None if it has failed."""
        if self._failure is not None or self.has_failed:
            return None
        return replace(self._constraint, start=self.position, num_start_tokens=self._num_tokens, first=None)

    def forced_tokens(self) -> Sequence[int]:
        """The tokens of the text that must follow, as far as only one text is possible. A sampled token may differ,
        because a text has several tokenisations."""
        return self._guess(lambda: self.position.compute_ff_tokens(), ())

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """The number of the tokens, in order, that the grammar allows."""
        return self._guess(lambda: self.position.validate_tokens(list(token_ids)), 0)

    def _guess(self, ask: Callable[[], _Guess], otherwise: _Guess) -> _Guess:
        if self._failure is not None or self.has_failed:
            return otherwise
        try:
            return ask()
        except BaseException as error:
            self._fail(error)
            return otherwise

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._constraint.grammar.is_spoiled = True

    def _allowed_behind(self, generated: Sequence[int]) -> Allowed:
        if self._num_tokens > len(generated):
            self._restart()
        if self._num_tokens < len(generated):
            self._consume(generated[self._num_tokens :])
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def _consume(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)
        self._allowed = None
        if not self.position.consume_tokens(list(token_ids)):
            self.has_failed = True

    def _compute(self) -> Allowed:
        if self.has_failed:
            return NOTHING
        bits, constraint = self._bits, self._constraint
        self.position.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        # llguidance allows end-of-sequence tokens where the grammar may end, and also where it has failed.
        may_end = bool((bits & constraint.last_bits).any())
        bits &= ~constraint.last_bits
        if may_end:
            if self.position.is_error():
                self.has_failed = True
                return NOTHING
            if self.position.is_accepting():
                bits |= constraint.end_bits
                if not bits.any():
                    bits |= constraint.last_bits
        words = bits.view(np.uint32)
        if int(np.bitwise_count(words).sum()) > FEW_TOKENS:
            return Allowed(None, self._bias_of(bits))
        used = np.flatnonzero(words)
        within = np.flatnonzero(np.unpackbits(words[used].view(np.uint8), bitorder="little"))
        return Allowed(used[within >> 5] * 32 + (within & 31))

    def _bias_of(self, bits: Bits) -> npt.NDArray[np.float32]:
        # The array is reused, because allocating one of this size costs more than filling it.
        if self._bias is None:
            self._bias = np.empty((len(bits), 8), np.float32)
        np.take(_BIAS_OF_BYTE, bits, axis=0, out=self._bias, mode="clip")
        return self._bias.reshape(-1)[: self._constraint.vocab_size]


class LookAhead:
    """Advances matchers in its own thread, a batch at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._batch: Future[None] | None = None

    def begin(self, steps: Sequence[tuple[Matcher, int]]) -> None:
        """Advance each matcher by its token. The matchers must not be used before `finish`."""
        assert self._batch is None, "the batch before was not finished"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._batch = self._thread.submit(_advance_all, steps)

    def finish(self) -> None:
        """Wait until the matchers of the batch that `begin` was given are advanced."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.result()


def _advance_all(steps: Sequence[tuple[Matcher, int]]) -> None:
    for matcher, token_id in steps:
        matcher.advance(token_id)


def reason_of(complaint: str) -> str:
    """The line of an error message that states the error."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()] or ["it failed"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines)[0][:MAX_REASON_CHARS]
