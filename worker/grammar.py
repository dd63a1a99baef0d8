"""Grammars: from a constraint to the tokens that may come next. The only module that uses llguidance.

    event loop     Grammars.constrain    compile, cached by content, in a small pool of threads; first mask
    engine thread  Constraint.begin      a Matcher for each request
                   Matcher.allowed       which tokens may come next; usually it is known already:
    another        Matcher.advance       the mask behind a token, while the kernels compute that token's logits

A grammar is compiled once and copied for each request (5 us). The vocabulary is read when the first constraint comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.protos.status import Reason, StatusError
from headrace.worker.json_schema import UnsupportedSchema, prepared, prepared_within

log = logging.getLogger(__name__)

CACHED_GRAMMARS = 64
MAX_PENDING = 64
COMPILE_TIMEOUT_S = 10.0
# States of a lexer cost about 2 kB each.
MAX_LEXER_STATES = 25_000
# With at most so many tokens allowed, the others are not even looked at.
FEW_TOKENS = 512
MAX_REASON_CHARS = 300

Bits = npt.NDArray[np.uint8]

# For each value of a byte of a mask, what its eight tokens get added to their logits.
_BIAS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)


class VocabularyError(Exception):
    """The bytes of the model's tokens cannot be told. The text says why."""


class Vocabulary(NamedTuple):
    """`token_bytes[id]` are the bytes of a token, not always whole UTF-8 sequences; `special_ids` are no text."""

    token_bytes: list[bytes]
    special_ids: frozenset[int]


class ConstraintSource(NamedTuple):
    """A constraint as the caller wrote it: `kind` is the name of the field of the message, `texts` its content."""

    kind: str
    texts: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """Name of the field in a request."""
        return f"sampling.constraint.{self.kind}"


class Allowed(NamedTuple):
    """Tokens that may come next: `token_ids`, ascending, when they are few; else `bias` `[vocab]`, to be added to
    logits, 0 for those that may and minus infinity for the rest."""

    token_ids: npt.NDArray[np.intp] | None
    bias: npt.NDArray[np.float32] | None = None


NOTHING = Allowed(np.zeros(0, np.intp))


class _Grammar:
    """A compiled grammar at its beginning. `is_spoiled` when its lexer, which the copies share, is at its limits."""

    __slots__ = ("is_spoiled", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.is_spoiled = False


@dataclass(frozen=True, slots=True, eq=False)
class Constraint:
    """A grammar for one request, from behind the tokens that the request begins with.

    `start` is the LLMatcher there, `first` what may come next. Masks are of bits, least significant first: `end_bits`
    are the tokens that may be chosen where the grammar may end; where it can only end and there are none, `last_bits`.
    """

    grammar: _Grammar
    start: Any
    num_start_tokens: int
    first: Allowed | None
    end_bits: Bits
    last_bits: Bits
    vocab_size: int

    def begin(self) -> Matcher:
        """Follow the grammar from the start."""
        return Matcher(self)

    def behind(self, generated: Sequence[int]) -> Constraint:
        """The same grammar from behind generated tokens. StatusError if they do not follow it, or nothing can."""
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
    """Where one request is in its grammar. Used by one thread at a time."""

    __slots__ = ("__weakref__", "_allowed", "_bias", "_bits", "_constraint", "_num_tokens", "has_failed", "position")

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._bits = np.zeros(len(constraint.end_bits), np.uint8)
        self._bias: npt.NDArray[np.float32] | None = None
        self._restart()

    def _restart(self) -> None:
        constraint = self._constraint
        self.position = constraint.start.deep_copy()
        self._num_tokens = constraint.num_start_tokens
        self._allowed = constraint.first
        self.has_failed = False

    def allowed(self, generated: Sequence[int]) -> Allowed:
        """What may follow the generated tokens; valid until the matcher goes on. None may when they do not follow the
        grammar, or when it grew over its bounds: then `has_failed`."""
        if self._num_tokens > len(generated):
            self._restart()
        if self._num_tokens < len(generated):
            self._consume(generated[self._num_tokens :])
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def advance(self, token_id: int) -> None:
        """Follow a chosen token and compute what may come behind it."""
        self._consume((token_id,))
        self._allowed = self._compute()
        if self.has_failed:
            self._constraint.grammar.is_spoiled = True
            log.warning("a constraint cannot be followed further: %s", _reason(self.position.get_error()))

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
        # One array, used again for each token: making one of this size costs more than filling it.
        if self._bias is None:
            self._bias = np.empty((len(bits), 8), np.float32)
        np.take(_BIAS_OF_BYTE, bits, axis=0, out=self._bias, mode="clip")
        return self._bias.reshape(-1)[: self._constraint.vocab_size]


class LookAhead:
    """Advances matchers in a thread of its own, a batch at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._batch: Future[None] | None = None

    def begin(self, steps: Sequence[tuple[Matcher, int]]) -> None:
        """Advance each matcher by its token. They must not be used before `finish`."""
        assert self._batch is None, "the batch before was not finished"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._batch = self._thread.submit(_advance_all, steps)

    def finish(self) -> None:
        """Wait for what was begun."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.result()


def _advance_all(steps: Sequence[tuple[Matcher, int]]) -> None:
    for matcher, token_id in steps:
        matcher.advance(token_id)


class Grammars:
    """Compiles constraints for one model, off the event loop, at most `MAX_PENDING` at a time."""

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        """`read_vocabulary` is called once, in a thread, when the first constraint comes."""
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: Any = None
        self._cache: OrderedDict[ConstraintSource, _Grammar] = OrderedDict()
        self._num_pending = 0

    async def constrain(
        self, source: ConstraintSource, *, end_token_ids: Iterable[int], generated: Sequence[int] = ()
    ) -> Constraint:
        """The compiled constraint of a request that may end with `end_token_ids` where the grammar may end, and goes
        on behind `generated`. StatusError, with the reason of the compiler, if it cannot be kept."""
        if not self._eos_token_ids:
            message = "the model names no end-of-sequence token, so a constrained answer could not end"
            raise StatusError(Reason.UNSUPPORTED, message, field="sampling.constraint")
        with self._lock:
            if self._num_pending >= MAX_PENDING:
                message = "too many constraints are being compiled; try again"
                raise StatusError(Reason.QUEUE_FULL, message, retry_after_s=1.0)
            self._num_pending += 1
        work = self._pool.submit(self._constrain, source, tuple(end_token_ids), tuple(generated))
        work.add_done_callback(self._is_done)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            raise _refusal(source, f"it takes longer than {COMPILE_TIMEOUT_S:.0f} s; make it smaller") from error

    def _is_done(self, work: Future[Constraint]) -> None:
        with self._lock:
            self._num_pending -= 1

    def _constrain(self, source: ConstraintSource, ends: tuple[int, ...], generated: tuple[int, ...]) -> Constraint:
        grammar = self._grammar(source)
        end_bits, last_bits = (_bits_of(ids, self._vocab_size) for ids in (ends, self._eos_token_ids))
        constraint = Constraint(grammar, grammar.matcher, 0, None, end_bits, last_bits, self._vocab_size)
        return constraint.behind(generated)

    def _grammar(self, source: ConstraintSource) -> _Grammar:
        with self._lock:
            grammar = self._cache.get(source)
            if grammar is not None and not grammar.is_spoiled:
                self._cache.move_to_end(source)
                return grammar
        grammar = _Grammar(_compiled(self._loaded_tokenizer(), source))
        with self._lock:
            self._cache[source] = grammar
            self._cache.move_to_end(source)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar

    def _loaded_tokenizer(self) -> Any:
        with self._loading:
            if self._tokenizer is None:
                try:
                    vocabulary = self._read_vocabulary()
                except VocabularyError as error:
                    message = f"the model takes no constraints: {error}"
                    raise StatusError(Reason.UNSUPPORTED, message, field="sampling.constraint") from error
                self._tokenizer = _tokenizer_of(vocabulary, self._vocab_size, self._eos_token_ids)
            return self._tokenizer


class _Tokens:
    """The vocabulary as llguidance asks for it: `vocab_size` tokens, and a way to cut bytes into tokens. The longest
    token first: no grammar's forced text depends on merges that only the gateway knows."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        token_bytes = vocabulary.token_bytes[:vocab_size]
        # Rows of the model's last layer that are no token of the tokenizer: without bytes, never allowed.
        self.tokens = token_bytes + [b""] * (vocab_size - len(token_bytes))
        self.special_token_ids = sorted({*vocabulary.special_ids, *eos_token_ids} & set(range(vocab_size)))
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokenizer: Any = None

    def __call__(self, raw: bytes) -> list[int]:
        return [] if self.tokenizer is None else list(self.tokenizer.greedy_tokenize(raw.decode()))


def _tokenizer_of(vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Tokens(vocabulary, vocab_size, eos_token_ids)
    tokens.tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=list(eos_token_ids))
    return tokens.tokenizer


def _compiled(tokenizer: Any, source: ConstraintSource) -> Any:
    """An LLMatcher at the beginning of the grammar. StatusError if the constraint cannot be kept."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, _grammar_text(source), log_level=0, limits=limits)
    except (ValueError, UnsupportedSchema) as error:
        raise _refusal(source, str(error)) from error
    # A warning says what part of the constraint would not be kept.
    for complaint in (matcher.get_error(), *matcher.get_grammar_warnings()):
        if complaint:
            raise _refusal(source, _reason(complaint))
    return matcher


def _grammar_text(source: ConstraintSource) -> str:
    """The constraint in llguidance's own language."""
    from llguidance import LLMatcher

    if source.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(prepared(source.texts[0])))
    if source.kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema(prepared('{"type": "object"}')))
    if source.kind == "regex":
        return str(LLMatcher.grammar_from_regex(source.texts[0]))
    if source.kind == "choice":
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in source.texts)
    assert source.kind == "grammar", source.kind
    return prepared_within(source.texts[0])


def _refusal(source: ConstraintSource, reason: str) -> StatusError:
    name = source.kind.replace("_", " ").replace("json", "JSON")
    return StatusError(Reason.INVALID_FIELD, f"the {name} cannot be honoured: {reason}", field=source.field)


def _reason(complaint: str) -> str:
    """The line of a complaint that says what is wrong."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()] or ["it failed"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines)[0][:MAX_REASON_CHARS]


def _bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """A mask of whole 32-bit words with the bits of these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 4, np.uint8)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bits
