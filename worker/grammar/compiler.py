"""Compiles the constraints of callers into grammars for `constraint`. The only module that imports llguidance.

A grammar is compiled once for all requests that use it, in a thread, and cached by content. The vocabulary is read when
the first constraint arrives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from headrace.common.fair_queue import Entry, FairQueue
from headrace.common.threads import in_thread
from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar.constraint import Bits, CompiledGrammar, Constraint, ConstraintSource, reason_of
from headrace.worker.grammar.json_schema import (
    UnsupportedSchema,
    path_at_fault,
    prepared,
    prepared_within,
    schemas_within,
)

log = logging.getLogger(__name__)

CACHED_GRAMMARS = 64
MAX_PENDING = 64
NUM_THREADS = 2
# Compiled grammars take up to 50 MB of memory for each second of compilation. The maximum number of seconds for cached
# grammars, and for those that are cached or in use.
MAX_CACHED_S = 5.0
MAX_KEPT_S = 15.0
COMPILE_TIMEOUT_S = 10.0
# Of the path of a fault in a schema.
MAX_PATH_CHARS = 100
# A state of a lexer takes about 2 kB.
MAX_LEXER_STATES = 25_000
# llguidance follows rules and references recursively, and a stack that overflows ends the process. It was seen to take
# up to 1.3 kB for each byte of a constraint. A constraint that needs less than the stack of an ordinary thread runs in
# one.
_STACK_BYTES_PER_BYTE = 2048
_SMALL_BYTES = 2048
# At each step, llguidance asks for the tokens of all the text that must follow, which may be long. The tokens of its
# beginning give the same mask: the longest match depends only on the bytes of one token, and llguidance drops at most
# four tokens at the end. Drafts are short.
MIN_WINDOW_BYTES = 256
_WINDOW_TOKENS = 8


# Never freed, because nodes of the tokenizer extension must not outlive their core.
_cores: list[Any] = []


class VocabularyError(Exception):
    """The bytes of the model's tokens are unknown. The text says why."""


class Vocabulary(NamedTuple):
    """`token_bytes[id]` are the bytes of a token, not always whole UTF-8 sequences. Tokens in `special_ids` have no
    text."""

    token_bytes: list[bytes]
    special_ids: frozenset[int]


def read_vocabulary(model_dir: Path) -> Vocabulary:
    """The bytes of the tokens of the model in a directory, for grammars and for the stop texts of beam searches. The
    worker handles no other text. Raises VocabularyError."""
    # Imported late: this loads OpenVINO's tokenizers.
    import openvino

    from headrace.common.model_files import vocabulary

    if not _cores:
        _cores.append(openvino.Core())
    try:
        graph = _cores[0].read_model(model_dir / "openvino_detokenizer.xml")
        return Vocabulary(*vocabulary.read_vocabulary(_cores[0], graph))
    except vocabulary.DetokenizerError as error:
        raise VocabularyError(str(error)) from error
    except RuntimeError as error:
        raise VocabularyError(f"openvino_detokenizer.xml cannot be used: {error}") from error


class KeptVocabulary:
    """Reads a vocabulary when it is first needed, once. Any thread may call it."""

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def __call__(self) -> Vocabulary:
        """The vocabulary. Raises VocabularyError; the next call then tries again."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read()
            return self._vocabulary


class _Key(NamedTuple):
    """The inputs of a compilation."""

    source: ConstraintSource
    end_token_ids: tuple[int, ...]
    generated: tuple[int, ...]


class _Work:
    """A compilation for all requests that wait for it, and its `entry` in the queue until it begins."""

    __slots__ = ("entry", "future", "key", "num_waiting")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.future: Future[Constraint] = Future()
        self.num_waiting = 0
        self.entry: Entry[_Work] | None = None


class Grammars:
    """Compiles constraints for one model, in threads. At most `MAX_PENDING` different ones wait or are compiled at a
    time, in fair shares of the tenants, and one of each tenant is compiled at a time. Requests that ask for the same
    constraint at the same time share one compilation."""

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        """`read_vocabulary` is called once, in a thread, when the first constraint arrives."""
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: Any = None
        self._cache: OrderedDict[ConstraintSource, CompiledGrammar] = OrderedDict()
        self._kept: WeakSet[CompiledGrammar] = WeakSet()
        self._pending: dict[_Key, _Work] = {}
        self._queue: FairQueue[_Work] = FairQueue()
        self._tenants: list[str] = []
        """The tenants for whom constraints are being compiled."""

    async def constrain(
        self,
        source: ConstraintSource,
        *,
        end_token_ids: Iterable[int],
        generated: Sequence[int] = (),
        tenant: str = "",
        priority: int = 0,
    ) -> Constraint:
        """The compiled constraint of a request. The answer may end with `end_token_ids` where the grammar may end, and
        continues after `generated`. StatusError with the compiler's message if the constraint is not supported. An
        empty `tenant` stands for unknown callers."""
        if not self._eos_token_ids:
            message = "the model names no end-of-sequence token, so a constrained answer could not end"
            raise StatusError(Reason.UNSUPPORTED, message, field="sampling.constraint")
        work = self._work(_Key(source, tuple(sorted(end_token_ids)), tuple(generated)), tenant, priority)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await asyncio.shield(asyncio.wrap_future(work.future))
        except TimeoutError as error:
            if not work.future.running():
                raise _busy("others are being compiled") from error
            raise _refusal(source, f"it takes longer than {COMPILE_TIMEOUT_S:.0f} s; make it smaller") from error
        finally:
            self._leave(work)

    def _work(self, key: _Key, tenant: str, priority: int) -> _Work:
        """The compilation for this key, shared with other requests. It has the queue place of the request that goes
        first."""
        queue = self._queue
        with self._lock:
            work = self._pending.get(key)
            if work is None:
                if len(self._pending) >= MAX_PENDING:
                    self._displace_for(tenant, priority)
                work = self._pending[key] = _Work(key)
                work.entry = queue.push(work, tenant=tenant, priority=priority, charge=1.0)
            elif (old := work.entry) is not None and queue.num_ahead(tenant, priority) < _place(queue, old):
                queue.remove(old)
                work.entry = queue.push(work, tenant=tenant, priority=priority, charge=1.0)
            work.num_waiting += 1
            self._begin()
        return work

    def _displace_for(self, tenant: str, priority: int) -> None:
        """Refuse a waiting compilation in favour of a new one. StatusError to refuse the new one instead."""
        entry, error = self._queue.to_displace(tenant, priority), _busy("too many others are being compiled")
        if entry is None:
            raise error
        self._forget(entry.item)
        entry.item.future.set_exception(error)

    def _leave(self, work: _Work) -> None:
        """A request does not wait any more. If no request waits and the compilation has not begun, cancel it."""
        with self._lock:
            work.num_waiting -= 1
            if not work.num_waiting and work.entry is not None:
                self._forget(work)
                work.future.cancel()

    def _forget(self, work: _Work) -> None:
        assert work.entry is not None, "it has begun"
        self._queue.remove(work.entry)
        work.entry = None
        del self._pending[work.key]

    def _begin(self) -> None:
        """Compile the next constraint, if a thread is free; one at a time for each tenant."""
        while len(self._tenants) < NUM_THREADS:
            ready = (entry for entry in self._queue.in_order() if not entry.tenant or entry.tenant not in self._tenants)
            entry = next(ready, None)
            if entry is None:
                return
            self._queue.take(entry).entry = None
            self._tenants.append(entry.tenant)
            self._pool.submit(self._run, entry.item, entry.tenant)

    def _run(self, work: _Work, tenant: str) -> None:
        work.future.set_running_or_notify_cancel()
        try:
            constraint = self._constrain(*work.key)
        except BaseException as error:
            self._end(work, tenant)
            work.future.set_exception(error)
        else:
            self._end(work, tenant)
            work.future.set_result(constraint)

    def _end(self, work: _Work, tenant: str) -> None:
        with self._lock:
            del self._pending[work.key]
            self._tenants.remove(tenant)
            self._begin()

    def _constrain(self, source: ConstraintSource, ends: tuple[int, ...], generated: tuple[int, ...]) -> Constraint:
        try:
            grammar = self._grammar(source)
            end_bits, last_bits = (_bits_of(ids, self._vocab_size) for ids in (ends, self._eos_token_ids))
            constraint = Constraint(grammar, grammar.matcher, 0, None, end_bits, last_bits, self._vocab_size)
            return constraint.behind(generated)
        except StatusError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            log.error("a constraint could not be compiled", exc_info=error)
            message = "the grammar engine failed on this constraint; write it differently"
            raise StatusError(Reason.INTERNAL, message, field=source.field) from error

    def _grammar(self, source: ConstraintSource) -> CompiledGrammar:
        with self._lock:
            grammar = self._cache.get(source)
            if grammar is not None and not grammar.is_spoiled:
                self._cache.move_to_end(source)
                return grammar
            self._make_room()
        tokenizer, num_bytes = self._loaded_tokenizer(), sum(len(text.encode()) for text in source.texts)

        def compiled() -> CompiledGrammar:
            start_s = time.thread_time()
            matcher = _compiled(tokenizer, source)
            return CompiledGrammar(matcher, time.thread_time() - start_s)

        if num_bytes <= _SMALL_BYTES:
            grammar = compiled()
        else:
            grammar = in_thread("deep-stack", compiled, stack_bytes=_STACK_BYTES_PER_BYTE * num_bytes).result()
        with self._lock:
            self._kept.add(grammar)
            self._cache[source] = grammar
            self._cache.move_to_end(source)
            while len(self._cache) > CACHED_GRAMMARS or (
                len(self._cache) > 1 and _cost_s(self._cache.values()) > MAX_CACHED_S
            ):
                self._cache.popitem(last=False)
        return grammar

    def _make_room(self) -> None:
        """Remove cached grammars if all of them together take too much memory. StatusError if requests need all of
        them."""
        while _cost_s(self._kept) > MAX_KEPT_S:
            if not self._cache:
                raise _busy("those of running requests take too much memory")
            self._cache.popitem(last=False)

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
    """The vocabulary as llguidance needs it: `vocab_size` tokens, and a tokenizer. It always takes the longest token,
    because the text that a grammar requires must not depend on merges, which only the gateway knows."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        token_bytes = vocabulary.token_bytes[:vocab_size]
        # Rows of the model's last layer that are not in the tokenizer have no bytes, so they are never allowed.
        self.tokens = token_bytes + [b""] * (vocab_size - len(token_bytes))
        self.special_token_ids = sorted({*vocabulary.special_ids, *eos_token_ids} & set(range(vocab_size)))
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._window_bytes = max(MIN_WINDOW_BYTES, _WINDOW_TOKENS * max(map(len, token_bytes), default=0))
        self.tokenizer: Any = None

    def __call__(self, raw: bytes) -> list[int]:
        if self.tokenizer is None:
            return []
        beginning = raw[: self._window_bytes].decode(errors="ignore")  # it may end within a character
        return list(self.tokenizer.greedy_tokenize(beginning))


def _tokenizer_of(vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Tokens(vocabulary, vocab_size, eos_token_ids)
    tokens.tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=list(eos_token_ids))
    return tokens.tokenizer


def _compiled(tokenizer: Any, source: ConstraintSource) -> Any:
    """An LLMatcher at the beginning of the grammar. StatusError if the constraint is not supported; it names the schema
    at fault and its path."""
    matcher, problem = _tried(tokenizer, source)
    if problem:
        raise _refusal(source, f"{_place_at_fault(tokenizer, source)}{problem}")
    return matcher


def _tried(tokenizer: Any, source: ConstraintSource) -> tuple[Any, str]:
    """An LLMatcher at the beginning of the grammar, or the reason why the constraint is not supported."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, _grammar_text(source), log_level=0, limits=limits)
    except (ValueError, UnsupportedSchema) as error:
        return None, str(error)
    # A warning says which part of the constraint would be ignored.
    complaints = (reason_of(one) for one in (matcher.get_error(), *matcher.get_grammar_warnings()) if one)
    return matcher, next(complaints, "")


def _place_at_fault(tokenizer: Any, source: ConstraintSource) -> str:
    """Where in a schema the fault is, such as "args_0 at #/properties/a: "; empty if that is unknown."""

    def is_supported(schema: str) -> bool:
        return not _tried(tokenizer, ConstraintSource("json_schema", (schema,)))[1]

    if source.kind == "json_schema":
        try:
            root = json.loads(source.texts[0])
        except (ValueError, RecursionError):
            return ""
        named = [("", root)] if isinstance(root, dict) else []
    elif source.kind == "grammar":
        named = list(schemas_within(source.texts[0]))
    else:
        return ""
    for rule, schema in named:
        schema.pop("x-guidance", None)
        try:
            if not is_supported(json.dumps(schema)):
                path = path_at_fault(schema, is_supported)
                if len(path) > MAX_PATH_CHARS:
                    path = f"{path[:20]}...{path[-MAX_PATH_CHARS:]}"
                return f"{rule} at {path}: ".lstrip() if rule or path != "#" else ""
        except RecursionError:
            return ""
    return ""


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
    # The compiler would read a bare text that begins with { as grammars in JSON, with schemas that nothing has checked.
    return json.dumps({"grammars": [{"lark_grammar": prepared_within(source.texts[0])}]})


def _place(queue: FairQueue[_Work], entry: Entry[_Work]) -> int:
    """How many other entries go before an entry."""
    return list(queue.in_order()).index(entry)


def _cost_s(grammars: Iterable[CompiledGrammar]) -> float:
    return sum(grammar.cost_s for grammar in grammars)


def _busy(why: str) -> StatusError:
    return StatusError(Reason.QUEUE_FULL, f"the constraint cannot be compiled now: {why}; try again", retry_after_s=1.0)


def _refusal(source: ConstraintSource, reason: str) -> StatusError:
    name = source.kind.replace("_", " ").replace("json", "JSON")
    return StatusError(Reason.INVALID_FIELD, f"the {name} cannot be honoured: {reason}", field=source.field)


def _bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """A bit mask of these tokens, in whole 32-bit words."""
    bits = np.zeros(-(-vocab_size // 32) * 4, np.uint8)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bits
