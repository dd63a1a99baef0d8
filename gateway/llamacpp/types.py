"""Requests of llama.cpp's server, and their translation to completions. Pure.

`fields` says what happens to every field. https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from headrace.gateway.chat.prompts import Gap
from headrace.gateway.chat.request import AnswerFields, Completion, Tokenization
from headrace.gateway.chat.sampling import MAX_LOGPROBS
from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.field_names import FieldNames
from headrace.gateway.hints import ignored

_REPEAT_LAST_N = 64  # llama.cpp's default
_BAN = -100.0
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


class LlamaRequest(AnswerFields, kw_only=True):
    """The fields of completions and infills."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    logit_bias: Any = None
    ignore_eos: bool | None = None
    n_probs: Count | None = None
    return_tokens: bool | None = None


class LlamaCompletion(LlamaRequest, kw_only=True):
    """Body of POST /completion: a text, tokens, or a list of both that is one prompt."""

    prompt: str | list[str | int]


class InfillFile(msgspec.Struct, kw_only=True):
    """A file that belongs to the text."""

    text: str
    filename: str = "tmp"


class LlamaInfill(LlamaRequest, kw_only=True):
    """Body of POST /infill. `prompt` is appended to the prefix."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None


class LlamaTemplate(Tokenization, kw_only=True):
    """Body of POST /apply-template: a conversation."""


NAMES = FieldNames(
    [
        ("max_tokens", "n_predict"),
        ("logprobs", "n_probs"),
        ("repetition_penalty", "repeat_penalty"),
    ]
)
"""The names of a completion's fields here."""


class _Continuation(Completion, kw_only=True):
    """A completion that ends where the context does."""

    shortens_max_tokens: ClassVar[bool] = True


def completion_of(request: LlamaRequest, prompt: str | list[int]) -> Completion:
    """The completion of a request with this prompt. Raises `StatusError`."""
    numbers = {name: getattr(request, name) for name in AnswerFields.__struct_fields__}
    if request.repeat_penalty is not None:
        if request.repetition_penalty not in (None, request.repeat_penalty):
            raise invalid("repeat_penalty", "repeat_penalty and repetition_penalty differ; leave out one of them")
        numbers["repetition_penalty"] = request.repeat_penalty
    if request.repeat_last_n == 0:  # no token counts as a repetition
        numbers |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif request.repeat_last_n == _REPEAT_LAST_N:
        ignored("repeat_last_n", "penalties consider the whole prompt and answer")
    elif request.repeat_last_n not in (None, -1):
        problem = "repeat_last_n must be -1 or 0: penalties consider the whole prompt and answer, or nothing"
        raise unsupported("repeat_last_n", problem)
    if request.seed is not None and request.seed in (-1, 2**32 - 1):
        numbers["seed"] = None  # a random one
    num_predict = request.n_predict
    if num_predict is not None and num_predict < -1:
        raise invalid("n_predict", "n_predict must be at least -1")
    return _Continuation(
        prompt=[*prompt] if isinstance(prompt, list) else prompt,
        model=request.model,
        stream=request.stream,
        max_tokens=None if num_predict == -1 else num_predict,
        # A worker computes a prompt only in order to sample a token, which is not shown.
        echo=True if num_predict == 0 else None,
        stop=request.stop,
        logit_bias=_biases(request.logit_bias),
        ignore_eos=request.ignore_eos,
        logprobs=request.n_probs or None,
        **numbers,
    )


def mixed(prompt: str | Sequence[str | int]) -> tuple[Sequence[str | int], bool]:
    """The parts of a prompt, texts and tokens, and whether it is only tokens. Raises `StatusError`."""
    if isinstance(prompt, str):
        return [prompt], False
    if not prompt:
        raise invalid("prompt", "prompt must not be empty")
    if len(prompt) > 1 and all(isinstance(part, str) for part in prompt):
        raise unsupported("prompt", "prompt: several texts are several prompts; send each of them in a request")
    return prompt, all(isinstance(part, int) for part in prompt)


def gap_of(request: LlamaInfill) -> tuple[str, Gap]:
    """The text before the gap, and the gap."""
    files = [(file.filename, file.text) for file in request.input_extra or ()]
    return request.input_prefix + (request.prompt or ""), Gap(request.input_suffix, files, "input_suffix", cuts=True)


def _biases(given: Any) -> dict[int, float] | None:
    """Pairs of a token and its bias; a bias of false forbids the token. Raises `StatusError`."""
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise invalid("logit_bias", "logit_bias must be an object, or a list of pairs of a token and its bias")
    found = {}
    for token, bias in pairs:
        if isinstance(token, str) and token.isdecimal():
            token = int(token[:10])
        if isinstance(token, bool) or not isinstance(token, int):
            raise unsupported("logit_bias", "logit_bias takes tokens by their ids; /tokenize gives those of a text")
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise invalid("logit_bias", "logit_bias: a bias must be a number, or false to forbid the token")
        found[token] = _BAN if bias is False else float(bias)
    return found
