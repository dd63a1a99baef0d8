"""A step of one request: the tokens it computes, the token it samples, and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.protos.status import Reason, StatusError
from headrace.worker.request.beam_search import Candidates, Hypothesis
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import FinishReason, Request

NOT_A_NUMBER = StatusError(Reason.INTERNAL, "the model's logits for this request are not numbers")


class Scheduled(NamedTuple):
    """A request, and the number of tokens that the step computes for it. Tokens beyond its last one are those of its
    draft and its branch, or of its other beams."""

    request: Request
    num_tokens: int


# Slots of states that belong to no request: one with zeros, from which sequences start, and one that padding tokens
# write.
ZERO_SLOT, PADDING_SLOT, FIRST_STATE_SLOT = range(3)
# Longer than any step. An interval of 0 would not do: OpenVINO then writes no state of a state space, but one of other
# layers.
AT_THE_END = 1 << 30


class BlockCopy(NamedTuple):
    """A block, or the part of a block in a slot, to be copied by the runner before it computes the next step."""

    source: int
    destination: int


class LayerMoves(NamedTuple):
    """Parts of KV blocks to be copied by the runner before it computes the next step: each layer's parts of `sources`
    `[layers, blocks]` to its parts of `destinations` `[blocks]`. All are read before any is written."""

    sources: npt.NDArray[np.int32]
    destinations: npt.NDArray[np.int32]


class StateStep(NamedTuple):
    """The states of a request's recurrent layers that a step reads and writes. It reads `source`. Each time that `past`
    plus the tokens computed is a multiple of `interval`, and at the end, it writes the next of `destinations`."""

    source: int
    destinations: Sequence[int]
    past: int = 0
    interval: int = AT_THE_END


class StepPlan(NamedTuple):
    """What a step does to the KV cache besides adding its tokens. First all `copies` of blocks are made, in order, and
    `part_copies` of slots; then the `moves`. `states` has an entry for each scheduled request; None if the model has no
    recurrent layers. `part_slots` `[blocks + 1]` is the slot of each block's part for layers with a window, and of the
    block for padding; None if these layers keep all tokens. It changes when the next step is planned."""

    copies: Sequence[BlockCopy] = ()
    part_copies: Sequence[BlockCopy] = ()
    moves: Sequence[LayerMoves] = ()
    states: Sequence[StateStep] | None = None
    part_slots: npt.NDArray[np.int32] | None = None


class Sampled(NamedTuple):
    """The token sampled for a request. `token_id` is -1 if there is none; `error` says why. `more` are the tokens after
    it, if a draft was accepted."""

    token_id: int
    error: StatusError = NOT_A_NUMBER
    more: tuple[int, ...] = ()


Searched: TypeAlias = Sequence[Candidates] | StatusError
"""The candidates of each beam of a request, or the error that ends it."""
NOTHING_SEARCHED: Mapping[Request, Searched] = {}


class RequestOutput(msgspec.Struct, frozen=True):
    """The output of one step for one request. It is the request's last output if `finish` or `error` is set.

    `start_pos` is the position of the first of `token_ids` among the generated tokens. `num_drafted` draft tokens were
    verified, and `num_accepted` of them are in `token_ids`. `vector` is the result of a request that was encoded, as
    little-endian float32. `hypotheses` are the answers of a beam search, best first.
    """

    request: Request
    start_pos: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: StatusError | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    vector: bytes = b""
    hypotheses: Sequence[Hypothesis] = ()

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.finish is not None or self.error is not None
