"""Turns a GenerateRequest into a Request for the engine, or raises a StatusError that names the field. Pure."""

from __future__ import annotations

import itertools
import math
import re
import secrets
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from headrace.common.transport.wire_request import WireRequest, without_images
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.protos import inference_pb2
from headrace.protos.answer_bounds import check_context, stop_tokens
from headrace.protos.block_hash import root_hash
from headrace.protos.cache_eviction import longest_context_of
from headrace.protos.model_identity import identity_of
from headrace.protos.sampling_fields import FILTERS, NUMBERS, Number
from headrace.protos.status import Reason, StatusError
from headrace.protos.tasks import check_task
from headrace.protos.worker_pb2 import ModelCard
from headrace.worker.grammar.constraint import ConstraintSource
from headrace.worker.kv.beams import BeamLimits
from headrace.worker.request.eviction_rules import eviction_for
from headrace.worker.request.images import PlacedImage
from headrace.worker.request.params import BeamParams, DryBreakers, EarlyStopping, SamplingParams, ThinkingBudget
from headrace.worker.request.request import Request

_Number = TypeVar("_Number", int, float)
Place: TypeAlias = Callable[[Sequence["SentImage"], Sequence[int]], Sequence[PlacedImage]]
"""Finds the places of images in the tokens of a prompt; see `headrace.worker.server.images.ImageDesk.place`."""

MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
# Log-probabilities of one prompt, its own and the most probable tokens': 8 MB in memory, and a message of 10 MB.
MAX_PROMPT_LOGPROBS = 1 << 20
# The log-probabilities of all answers of a beam search, which are one message of at most 10 MB.
MAX_BEAM_LOGPROBS = 1 << 20
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_TEXTS = 64
MAX_STOP_TEXT_BYTES = 4096
MAX_BAD_WORDS = 256
MAX_DRY_BREAKERS = 1 << 16
MAX_DRY_BREAKER_TOKENS = 32
MAX_OPENING_TOKENS = 16
MAX_THINKING_ENDS = 8
MAX_CONSTRAINT_BYTES = 256 << 10
MAX_CHOICES = 4096
# Terminals may contain one another, and compiling takes time and memory with the square of their number.
MAX_TERMINALS = 2000
_TERMINAL = re.compile(r"^[ \t]*[!?]*_*[A-Z][A-Z0-9_]*[ \t]*(?:\.[^:\n]*)?:", re.MULTILINE)
_OF_NO_BEAMS = "has no effect on a beam search, which compares the model's own log-probabilities; it must be"
_LONG_FIELDS = ("logit_bias", "allowed_token_ids", "bad_words", "dry_breaker_token_ids", "dry_breakers")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model. The whole KV cache holds at least `max_context_tokens`."""

    model: str
    fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    model_identity: str = ""
    tokenizer_sha256: str = ""
    task: inference_pb2.Task = inference_pb2.TASK_UNSPECIFIED
    card: ModelCard = field(default_factory=ModelCard)
    """Whether requests may evict their own KV blocks."""
    beams: BeamLimits | None = None
    """None if the model takes no beam search."""

    def identity(self, adapter_sha256: str) -> str:
        """The identity of answers: that of the model, or of the model with an adapter."""
        if not adapter_sha256:
            return self.model_identity
        return identity_of(self.fingerprint, self.tokenizer_sha256, adapter_sha256)


class SentImage(NamedTuple):
    """An image as it was sent: its file, and the detail, a value of ImageDetail."""

    data: bytes
    detail: int


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A decoded request. Large fields that it shares with other requests are in `prompt` and `sampling`, not in the
    message; its images are in neither."""

    message: inference_pb2.GenerateRequest
    prompt: ReadPart | None = None
    sampling: ReadPart | None = None
    images: Sequence[SentImage] = ()

    @classmethod
    def of(cls, message: inference_pb2.GenerateRequest) -> Self:
        """A request that shares nothing. Takes the images out of the message."""
        images = _images_of(message)
        return cls(without_images(message), images=images)

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt."""
        return self.message.token_ids if self.prompt is None else self.prompt.token_ids

    def placed(self, place: Place) -> Sequence[PlacedImage]:
        """The images at their places in the prompt: those of requests with the same prompt and images are placed once.
        StatusError if one is wrong. Any thread may call it."""
        if not self.images:
            return ()
        if self.prompt is not None and self.prompt.images is self.images:
            return [replace(image) for image in self.prompt.placed(place)]
        return place(self.images, self.token_ids)

    def constraint(self) -> ConstraintSource | None:
        """The requested constraint. Checks its form and size; the compiler checks its content."""
        return constraint_of(self.message.sampling) if self.sampling is None else self.sampling.constraint()


class _Lists(NamedTuple):
    """The long fields of SamplingParams."""

    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    dry_breakers: DryBreakers

    @classmethod
    def of(cls, message: inference_pb2.SamplingParams, limits: ModelLimits) -> Self:
        """Check and convert the fields of a message."""
        allowed = _listed(message.allowed_token_ids, "allowed_token_ids", limits.vocab_size, limits)
        return cls(_logit_bias(message, limits), allowed, _bad_words(message, limits), _dry_breakers(message, limits))


class ReadPart:
    """A part that several requests share, decoded once. `head` has its small fields. Its large fields are separate: the
    `token_ids` of a prompt, and, if it `has_sampling`, sampling fields."""

    __slots__ = (
        "_constraint",
        "_hashes",
        "_lists",
        "_lock",
        "_placed",
        "_sampling",
        "has_sampling",
        "head",
        "highest",
        "images",
        "token_ids",
    )

    def __init__(self, raw: bytes) -> None:
        """DecodeError if the bytes are not a message."""
        self.head = inference_pb2.GenerateRequest.FromString(raw)
        self.token_ids = array("I", self.head.token_ids[:])
        self.highest = max(self.token_ids, default=0)
        self.head.ClearField("token_ids")
        self.images = _images_of(self.head)
        self.head = without_images(self.head)
        self._placed: Sequence[PlacedImage] | None = None
        self._lock = threading.Lock()
        self.has_sampling = _has_large(self.head.sampling)
        self._sampling = inference_pb2.SamplingParams()
        if self.has_sampling:
            self._sampling.CopyFrom(self.head.sampling)
            for name in _LONG_FIELDS:
                self.head.sampling.ClearField(name)
            if self._sampling.HasField("constraint"):
                self.head.sampling.constraint.Clear()
                self.head.sampling.constraint.SetInParent()
        self._constraint: ConstraintSource | None = None
        self._lists: _Lists | None = None
        self._hashes: dict[int, list[int]] = {}

    def placed(self, place: Place) -> Sequence[PlacedImage]:
        """The images of this part at their places in its prompt, placed once."""
        with self._lock:
            if self._placed is None:
                self._placed = place(self.images, self.token_ids)
            return self._placed

    def constraint(self) -> ConstraintSource | None:
        """See `constraint_of`."""
        if self._constraint is None:
            self._constraint = constraint_of(self._sampling)
        return self._constraint

    def lists(self, limits: ModelLimits) -> _Lists:
        """The long sampling fields, checked."""
        if self._lists is None:
            self._lists = _Lists.of(self._sampling, limits)
        return self._lists

    def block_hashes(self, root: int) -> list[int]:
        """The shared list of hashes of the prompt's blocks after a root; see `Request.prompt_hashes`."""
        return self._hashes.setdefault(root, [])


def _images_of(message: inference_pb2.GenerateRequest) -> Sequence[SentImage]:
    """The images of a message. Their bytes are copies."""
    return tuple(SentImage(image.data, image.detail) for image in message.images)


def _has_large(sampling: inference_pb2.SamplingParams) -> bool:
    has_constraint = sampling.constraint.WhichOneof("kind") is not None
    return has_constraint or any(getattr(sampling, name) for name in _LONG_FIELDS)


def decode(wire: WireRequest) -> DecodedRequest:
    """Decode a request. DecodeError if it is not a message."""
    parts = [part.kept(ReadPart) for part in wire.shared]
    own = inference_pb2.GenerateRequest.FromString(wire.own)
    prompts = [part for part in parts if part.token_ids]
    samplings = [part for part in parts if part.has_sampling]
    if len(prompts) + bool(own.token_ids) > 1 or len(samplings) + _has_large(own.sampling) > 1:
        return DecodedRequest.of(inference_pb2.GenerateRequest.FromString(wire.joined()))
    message = inference_pb2.GenerateRequest()
    for part in parts:
        message.MergeFrom(part.head)
    with_images = [part.images for part in parts if part.images]
    own_images = _images_of(own)
    own = without_images(own)
    if len(with_images) == 1 and not own_images:
        (images,) = with_images
    else:
        images = (*itertools.chain(*with_images), *own_images)
    message.MergeFrom(own)
    return DecodedRequest(message, prompts[0] if prompts else None, samplings[0] if samplings else None, images)


def admit(
    decoded: DecodedRequest,
    limits: ModelLimits,
    *,
    request_id: str,
    arrival_s: float,
    adapter_sha256: str = "",
    images: Sequence[PlacedImage] = (),
) -> Request:
    """Check all fields and make the request, whose adapter has this hash, and whose prompt has these images.
    StatusError names the first wrong field."""
    message, shared = decoded.message, decoded.prompt
    identity = limits.identity(adapter_sha256)
    _check_model(message, limits, identity)
    num_prompt_tokens = len(decoded.token_ids)
    longest = max(limits.max_context_tokens, longest_context_of(limits.card, message.sampling))
    check_context(
        num_prompt_tokens,
        len(message.resume_token_ids),
        limits.max_context_tokens,
        encodes=bool(limits.task),
        longest=longest,
    )
    if shared is not None and shared.highest < limits.vocab_size:
        prompt = shared.token_ids
    else:
        prompt = _prompt(decoded.token_ids, images, limits)
    if not prompt:
        raise _invalid("token_ids", "must have at least one token")
    if limits.task:
        encoded = _text_to_encode(message, prompt, request_id=request_id, arrival_s=arrival_s)
        encoded.model_identity = identity
        return encoded
    prediction = _token_ids(message.prediction_token_ids, "prediction_token_ids", limits)
    resume = _token_ids(message.resume_token_ids, "resume_token_ids", limits)
    source, room = decoded.constraint(), longest - len(prompt)
    root = root_hash(limits.fingerprint, adapter_sha256, message.cache_salt)
    mirostat_mu = _mirostat_mu(message)
    admitted = Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=_sampling(decoded, limits, room),
        root_hash=root,
        model_identity=identity,
        constraint_source=source,
        images=images,
        prompt_hashes=[] if shared is None else shared.block_hashes(root),
        resume_token_ids=resume,
        prediction=prediction[:room],
        priority=message.priority,
        arrival_s=arrival_s,
        max_wait_s=message.max_wait_ms / 1000 if message.HasField("max_wait_ms") else math.inf,
        kv_source=message.kv_source,
        num_source_tokens=message.kv_source_tokens,
        eviction=None if message.sampling.HasField("beam_search") else eviction_for(limits.card, message.sampling),
        mirostat_mu=mirostat_mu,
    )
    if admitted.beams is not None:
        _check_beams(admitted, limits)
    if admitted.wants_prompt_logprobs and any(image.is_whole for image in images):
        raise _invalid(
            "sampling.prompt_logprobs",
            "are not available with images of this model, whose tokens are all computed in one step; leave them out",
        )
    if admitted.num_prompt_logprob_values > MAX_PROMPT_LOGPROBS:
        each = MAX_PROMPT_LOGPROBS // (1 + (admitted.sampling.num_prompt_logprobs or 0))
        raise _invalid(
            "sampling.prompt_logprobs",
            f"of {admitted.sampling.num_prompt_logprobs} allows prompts of up to {each} tokens, not {len(prompt)}; ask "
            "for fewer, or shorten the prompt",
        )
    return admitted


def _check_beams(request: Request, limits: ModelLimits) -> None:
    """StatusError unless the beam search fits the model, its cache and one message."""
    name, beams = "sampling.beam_search", limits.beams
    if beams is None:
        problem = "is not available for this model: its beams cannot share what its layers keep of earlier tokens"
        raise StatusError(Reason.UNSUPPORTED, f"{name} {problem}", field=name)
    if request.is_resumed:
        raise _invalid("resume_token_ids", "must be empty: a beam search begins at the prompt")
    width, sampling = request.num_sequences, request.sampling
    if not 1 <= width <= beams.max_width:
        raise _invalid(f"{name}.width", f"must be 1 to {beams.max_width}, not {width}")
    assert request.beams is not None
    if request.beams.num_candidates > limits.vocab_size:
        raise _invalid(f"{name}.width", "must be smaller: the vocabulary has too few tokens")
    most = beams.most_tokens(request.num_prompt_tokens, width)
    if sampling.max_tokens > most:
        raise _invalid(
            "sampling.max_tokens",
            f"must be at most {max(most, 0)} with {width} beams and this prompt, not {sampling.max_tokens}: the KV "
            "cache has no room for more",
        )
    num_values = width * sampling.max_tokens * (2 + (sampling.num_logprobs or 0))
    if sampling.num_logprobs is not None and num_values > MAX_BEAM_LOGPROBS:
        raise _invalid(
            "sampling.logprobs",
            f"of {sampling.num_logprobs} with {width} beams allow a max_tokens of up to "
            f"{MAX_BEAM_LOGPROBS // (num_values // sampling.max_tokens)}; ask for fewer",
        )


def _check_model(message: inference_pb2.GenerateRequest, limits: ModelLimits, identity: str) -> None:
    """Raise StatusError unless the request is for this model, its task, its weights, whose `identity` this is, and its
    tokenizer."""
    if message.model and message.model != limits.model:
        raise StatusError(
            Reason.MODEL_NOT_FOUND, f"this worker serves {limits.model!r}, not {message.model[:100]!r}", field="model"
        )
    check_task(message.task, limits.task, limits.model)
    if message.model_identity and message.model_identity != identity:
        problem = (
            "the answer was begun with other model files than this worker's and cannot be continued here; start again"
        )
        raise StatusError(Reason.MODEL_CHANGED, problem)
    if message.tokenizer_sha256 and message.tokenizer_sha256 != limits.tokenizer_sha256:
        problem = "the prompt was made with another tokenizer than this worker's; start again"
        raise StatusError(Reason.MODEL_CHANGED, problem, field="tokenizer_sha256")


def _text_to_encode(
    message: inference_pb2.GenerateRequest, prompt: Sequence[int], *, request_id: str, arrival_s: float
) -> Request:
    """The request, for a model that generates no text."""
    if message.resume_token_ids or message.sampling.max_tokens:
        raise _invalid("sampling.max_tokens", "must be 0, without resume_token_ids: the model generates no text")
    if message.num_first_text_tokens >= len(prompt):
        raise _invalid("num_first_text_tokens", f"must be below the {len(prompt)} tokens of both texts")
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=0, seed=0),
        root_hash=0,
        priority=message.priority,
        arrival_s=arrival_s,
        max_wait_s=message.max_wait_ms / 1000 if message.HasField("max_wait_ms") else math.inf,
        tenant=message.tenant,
        num_first_text_tokens=message.num_first_text_tokens,
    )


def constraint_of(message: inference_pb2.SamplingParams) -> ConstraintSource | None:
    """The requested constraint. Checks its form and size; the compiler checks its content."""
    if not message.HasField("constraint"):
        return None
    kind = message.constraint.WhichOneof("kind")
    if kind is None:
        raise _invalid("sampling.constraint", "must be one of json_schema, json_object, regex, choice and grammar")
    if kind == "json_object":
        return ConstraintSource(kind)
    source = ConstraintSource(kind, (getattr(message.constraint, kind),))
    if kind == "choice":
        source = ConstraintSource(kind, tuple(message.constraint.choice.texts))
        if len(source.texts) > MAX_CHOICES:
            raise _invalid(source.field, f"may have at most {MAX_CHOICES} texts")
    if not source.texts or not all(source.texts):
        raise _invalid(source.field, "must not be empty")
    if sum(len(text.encode()) for text in source.texts) > MAX_CONSTRAINT_BYTES:
        raise _invalid(source.field, f"may have at most {MAX_CONSTRAINT_BYTES} bytes")
    if kind == "grammar" and sum(1 for _ in _TERMINAL.finditer(source.texts[0])) > MAX_TERMINALS:
        raise _invalid(source.field, f"may define at most {MAX_TERMINALS} terminals; write some of them as rules")
    return source


def _token_ids(values: Sequence[int], field: str, limits: ModelLimits) -> array[int]:
    token_ids = array("I", values)
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise _invalid(field, f"has token {max(token_ids)}; the vocabulary has {limits.vocab_size}")
    return token_ids


def _prompt(values: Sequence[int], images: Sequence[PlacedImage], limits: ModelLimits) -> array[int]:
    """The prompt's tokens: those of its images, which are in their places, and tokens of the vocabulary."""
    token_ids = array("I", values)
    of_text = token_ids
    if images:
        known = np.frombuffer(token_ids, np.uint32)
        of_text = array("I", known[known < FIRST_PSEUDO_TOKEN].tobytes())
    highest = max(of_text, default=0)
    if highest >= FIRST_PSEUDO_TOKEN:
        raise _invalid("token_ids", "has tokens of images, and the request has no images; send them too")
    if highest >= limits.vocab_size:
        raise _invalid("token_ids", f"has token {highest}; the vocabulary has {limits.vocab_size}")
    return token_ids


def _sampling(decoded: DecodedRequest, limits: ModelLimits, room: int) -> SamplingParams:
    message = decoded.message.sampling
    stop = _listed(message.stop_token_ids, "stop_token_ids", MAX_STOP_TOKENS, limits)
    lists = _Lists.of(message, limits) if decoded.sampling is None else decoded.sampling.lists(limits)
    if message.HasField("constraint") and lists.allowed_token_ids:
        raise _invalid("sampling.allowed_token_ids", "cannot be combined with a constraint; write it into the grammar")
    beam_search = _beam_search(message, lists, limits)
    numbers = {name: _number(message, name, number) for name, number in NUMBERS.items() if name != "seed"}
    if beam_search is not None:
        numbers["temperature"] = 0.0
    return SamplingParams(
        max_tokens=min(_max_tokens(message, room), room),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        **numbers,
        beam_search=beam_search,
        min_tokens=message.min_tokens,
        stop_token_ids=stop_tokens(message, stop, limits.eos_token_ids),
        logit_bias=lists.logit_bias,
        num_logprobs=_num_top(message, "logprobs"),
        num_prompt_logprobs=_num_top(message, "prompt_logprobs"),
        allowed_token_ids=lists.allowed_token_ids,
        bad_words=lists.bad_words,
        dry_breakers=lists.dry_breakers,
        samplers=_samplers(message),
        thinking_budget=_thinking_budget(message, limits),
    )


def _beam_search(message: inference_pb2.SamplingParams, lists: _Lists, limits: ModelLimits) -> BeamParams | None:
    """The requested beam search; None without one. StatusError if a field is set that has no effect on beam
    searches."""
    if not message.HasField("beam_search"):
        return None
    for name, number in NUMBERS.items():
        value = getattr(message, name)
        is_greedy = name == "temperature" and value == 0.0
        if name != "seed" and message.HasField(name) and value != number.default and not is_greedy:
            raise _invalid(f"sampling.{name}", f"{_OF_NO_BEAMS} {number.default}")
    for name in ("constraint", "thinking_budget"):
        if message.HasField(name):
            raise _invalid(f"sampling.{name}", f"{_OF_NO_BEAMS} absent")
    for name in ("logit_bias", "allowed_token_ids", "bad_words"):
        if getattr(lists, name):
            raise _invalid(f"sampling.{name}", f"{_OF_NO_BEAMS} empty")
    if message.samplers:
        raise _invalid("sampling.samplers", f"{_OF_NO_BEAMS} empty")
    if message.cache_eviction.max_cache_size:
        raise _invalid("sampling.cache_eviction", f"{_OF_NO_BEAMS} absent")
    asked = message.beam_search
    penalty = asked.length_penalty if asked.HasField("length_penalty") else 1.0
    if not abs(penalty) <= MAX_LENGTH_PENALTY:
        most = f"{MAX_LENGTH_PENALTY:g}"
        raise _invalid("sampling.beam_search.length_penalty", f"must be -{most} to {most}, not {penalty:g}")
    try:
        stopping = EarlyStopping(asked.early_stopping)
    except ValueError:
        raise _invalid("sampling.beam_search.early_stopping", "must be one of the protocol's values") from None
    if len(asked.stop) > MAX_STOP_TEXTS:
        raise _invalid("sampling.beam_search.stop", f"may have at most {MAX_STOP_TEXTS} texts")
    if not all(0 < len(text.encode()) <= MAX_STOP_TEXT_BYTES for text in asked.stop):
        raise _invalid("sampling.beam_search.stop", f"has texts of 1 to {MAX_STOP_TEXT_BYTES} bytes")
    shown = _token_ids(asked.shown_token_ids, "sampling.beam_search.shown_token_ids", limits)
    return BeamParams(asked.width, penalty, stopping, tuple(asked.stop), frozenset(shown), asked.shows_special_tokens)


def _samplers(message: inference_pb2.SamplingParams) -> tuple[str, ...]:
    """The names of the filters in the order that the request wants; empty for the usual one."""
    places = [int(sampler) - 1 for sampler in message.samplers]
    if len(set(places)) < len(places) or not all(0 <= place < len(FILTERS) for place in places):
        raise _invalid("sampling.samplers", f"must name each of the samplers 1 to {len(FILTERS)} at most once")
    return tuple(FILTERS[place] for place in places)


def _thinking_budget(message: inference_pb2.SamplingParams, limits: ModelLimits) -> ThinkingBudget | None:
    if not message.HasField("thinking_budget"):
        return None
    budget, name = message.thinking_budget, "sampling.thinking_budget"
    opening = tuple(_token_ids(budget.opening, f"{name}.opening", limits))
    if len(opening) > MAX_OPENING_TOKENS:
        raise _invalid(f"{name}.opening", f"may have at most {MAX_OPENING_TOKENS} tokens")
    (closing,) = _token_ids([budget.closing], f"{name}.closing", limits)
    ends = tuple(tuple(_token_ids(end.token_ids, f"{name}.ends", limits)) for end in budget.ends)
    if not 1 <= len(ends) <= MAX_THINKING_ENDS:
        raise _invalid(f"{name}.ends", f"must be 1 to {MAX_THINKING_ENDS} sequences")
    if not all(closing in end and len(end) <= MAX_STOP_TOKENS for end in ends):
        raise _invalid(f"{name}.ends", f"must have at most {MAX_STOP_TOKENS} tokens each, with closing among them")
    return ThinkingBudget(budget.max_tokens, closing, ends, opening, budget.is_open)


def _mirostat_mu(message: inference_pb2.GenerateRequest) -> float | None:
    if not message.HasField("mirostat_mu"):
        return None
    if not math.isfinite(message.mirostat_mu):
        raise _invalid("mirostat_mu", "must be a finite number: that of the message with the last resumed token")
    return float(message.mirostat_mu)


def _max_tokens(message: inference_pb2.SamplingParams, room: int) -> int:
    if not message.HasField("max_tokens"):
        return room
    if not message.max_tokens:
        raise _invalid("sampling.max_tokens", "must be at least 1, not 0")
    return int(message.max_tokens)


def _number(message: inference_pb2.SamplingParams, name: str, number: Number) -> Any:
    if not message.HasField(name):
        return number.default
    value = getattr(message, name)
    is_least = number.open_below_on_wire and value == number.least
    if not number.least <= value <= number.greatest or is_least:
        bounds = f"over {number.least:g}" if number.open_below_on_wire else f"at least {number.least:g}"
        raise _invalid(f"sampling.{name}", f"must be {bounds} and at most {number.greatest:g}, not {value:g}")
    return value


def _num_top(message: inference_pb2.SamplingParams, name: str) -> int | None:
    if not message.HasField(name):
        return None
    value: int = getattr(message, name)
    if value > MAX_LOGPROBS:
        raise _invalid(f"sampling.{name}", f"must be 0 to {MAX_LOGPROBS}, not {value}")
    return value


def _listed(values: Sequence[int], name: str, most: int, limits: ModelLimits) -> tuple[int, ...]:
    if len(values) > most:
        raise _invalid(f"sampling.{name}", f"may have at most {most} tokens")
    return tuple(dict.fromkeys(_token_ids(values, f"sampling.{name}", limits)))


def _logit_bias(message: inference_pb2.SamplingParams, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    for token_id, bias in message.logit_bias.items():
        if token_id >= limits.vocab_size:
            raise _invalid("sampling.logit_bias", f"has token {token_id}; the vocabulary has {limits.vocab_size}")
        if not -100.0 <= bias <= 100.0:
            raise _invalid("sampling.logit_bias", f"must be -100 to 100, not {bias:g}")
    return tuple(message.logit_bias.items())


def _bad_words(message: inference_pb2.SamplingParams, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    if len(message.bad_words) > MAX_BAD_WORDS:
        raise _invalid("sampling.bad_words", f"may have at most {MAX_BAD_WORDS} sequences")
    words = [tuple(_token_ids(word.token_ids, "sampling.bad_words", limits)) for word in message.bad_words]
    if not all(words):
        raise _invalid("sampling.bad_words", "must not have an empty sequence")
    return tuple(words)


def _dry_breakers(message: inference_pb2.SamplingParams, limits: ModelLimits) -> DryBreakers:
    single = _listed(message.dry_breaker_token_ids, "dry_breaker_token_ids", limits.vocab_size, limits)
    if not message.dry_breakers:
        return DryBreakers(frozenset(single))
    if len(message.dry_breakers) > MAX_DRY_BREAKERS:
        raise _invalid("sampling.dry_breakers", f"may have at most {MAX_DRY_BREAKERS} sequences")
    found: dict[int, set[tuple[int, ...]]] = {}
    for sequence in message.dry_breakers:
        token_ids = tuple(_token_ids(sequence.token_ids, "sampling.dry_breakers", limits))
        if not 2 <= len(token_ids) <= MAX_DRY_BREAKER_TOKENS:
            raise _invalid("sampling.dry_breakers", f"must be sequences of 2 to {MAX_DRY_BREAKER_TOKENS} tokens")
        found.setdefault(len(token_ids), set()).add(token_ids)
    return DryBreakers(
        frozenset(single), tuple((length, frozenset(sequences)) for length, sequences in sorted(found.items()))
    )


def _invalid(field: str, problem: str) -> StatusError:
    return StatusError(Reason.INVALID_FIELD, f"{field} {problem}", field=field)
