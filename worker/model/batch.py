"""Makes the inputs of OpenVINO's PagedAttention operator from a scheduled step. Pure.

For two sequences, the first with 40 cached tokens and 1 new one, the second with 0 and 3 (block size 32):

    input_ids             [ t40 | u0 u1 u2 ]      all new tokens of the step, flattened
    position_ids          [ 40  | 0  1  2  ]
    past_lens             [ 40, 0 ]               tokens already in the cache
    subsequence_begins    [ 0, 1, 4 ]
    block_indices         [ 7 3 | 12 ]            block tables as far as the step reaches
    block_indices_begins  [ 0, 2, 3 ]
    max_context_len       41                      largest past + new
    sampled_tokens_indices [ 0, 3 ]               rows whose logits are wanted

The tokens of a draft, and tokens of an answer that a request with eviction computes again, are sequences of one token
each, over the blocks of their request. The operator stores the keys and values of a step before it computes any
attention, so each token also sees the draft before it. So it has the same bits as if it were computed alone
(docs/decisions/speculation.md). The tokens of branches come after those of the draft, each over a copy of the last
block (docs/decisions/speculation.md#branches).

Source of the layout: the operator's description in OpenVINO's paged_attention_extension.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.model.scored import Scored, merged_tables, padded_tables
from headrace.worker.model.step_images import ImageRows, StepImages
from headrace.worker.request.eviction import Eviction
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Branch, Request
from headrace.worker.request.step import PADDING_SLOT, ZERO_SLOT, BlockCopy, LayerMoves, Scheduled, StateStep, StepPlan

Ahead = npt.NDArray[np.intp]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
HiddenStates = FloatArray | npt.NDArray[np.uint16]
"""Hidden states between the stages of a pipeline: float32, or the bits of bfloat16."""
StatesType = np.dtype[np.float32] | np.dtype[np.uint16]
"""The type of their numbers."""
NO_PLAN = StepPlan()
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one step; names, shapes and types are the operator's.

    The first rows of logits belong to the `sampled` requests, in that order; then come those of `later`. After them,
    each of `prompts` has a row for each of its prompt tokens in the step, except the last token of the prompt. A
    request with a draft has more than one row: `ahead` says how many draft tokens are before each row of `sampled`; it
    is None if there are no drafts. The sampled token of a row of `later` also depends on whether the draft before it
    was accepted. `copies` of KV blocks are made before anything is computed. `adapter_slots` `[tokens]` is the slot of
    each token's adapter, -1 for none; None if no token has one. `sums` says which sums are computed besides the logits;
    none if there are `prompts`, which may have many rows.
    """

    input_ids: LongArray
    position_ids: LongArray
    past_lens: IntArray
    subsequence_begins: IntArray
    block_indices: IntArray
    block_indices_begins: IntArray
    max_context_len: IntArray
    sampled_tokens_indices: LongArray
    sampled: Sequence[Request]
    ahead: Ahead | None
    later: Sequence[Request]
    beams: Sequence[BeamRows]
    copies: Sequence[BlockCopy]
    prompts: Sequence[PromptRows]
    sums: Sums
    inverse_temperatures: FloatArray
    """The factor of the logits of each row of `sampled` and `later`."""
    adapter_slots: IntArray | None = None
    block_tables: IntArray | None = None
    """The block indices of each layer, `[layers, blocks]`, if a request has evicted blocks; they then replace the
    common ones."""
    scored: Sequence[Scored] = ()
    """Sequences whose attention decides which blocks are evicted."""
    part_copies: Sequence[BlockCopy] = ()
    """Copies between slots of parts of blocks, made before anything is computed."""
    moves: Sequence[LayerMoves] = ()
    """Made after `copies`."""
    states: StateInputs | None = None
    """The slots that recurrent layers read and write; None if the model has no such layers."""
    part_slots: IntArray | None = None
    """The slot of each block's part for layers with a window, `[blocks + 1]`; see `StepPlan`."""
    images: StepImages | None = None
    """The tokens of images; None if the step has none."""
    hidden: HiddenStates | None = None
    """Hidden states `[tokens or rows, numbers]` that a stage of a pipeline gets from another one; None where the step
    begins."""
    least_rows: int = 0
    """The fewest rows to compute if there are any; 0: as many as a step of its kind needs."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.input_ids) == len(self.past_lens)


class Sums(enum.Enum):
    """The sums of weights that are computed with the logits: none, if only the best token is needed; at each row's
    temperature, for draws; also at temperature 1, for log-probabilities."""

    NONE = enum.auto()
    DRAWN = enum.auto()
    DRAWN_AND_MODEL = enum.auto()


class Graph(enum.Enum):
    """The compiled graph that computes a step: the main graph, the graph for small decode steps, the graph with
    adapters, or the vocabulary's product in the first stage of a pipeline."""

    MAIN = enum.auto()
    SMALL_DECODE = enum.auto()
    ADAPTERS = enum.auto()
    HEAD = enum.auto()


class StateInputs(NamedTuple):
    """Inputs of OpenVINO's operators for recurrent layers. Each sequence has a row of slots: the one to read, then
    those to write; see `StateStep`. Here the tokens of a draft are in the sequence of their request, because each of
    them needs the state after the one before it."""

    subsequence_begins: IntArray
    block_indices: IntArray
    block_indices_begins: IntArray
    past_lens: IntArray
    cache_interval: IntArray


class BeamRows(NamedTuple):
    """The rows of a request that is a beam search: one for each of its beams, in their order."""

    request: Request
    num_rows: int


class PromptRows(NamedTuple):
    """Rows of a request that wants log-probabilities of its prompt: the position of the first, and their number."""

    request: Request
    position: int
    num_rows: int


def build_batch(
    scheduled: Sequence[Scheduled],
    block_size: int,
    plan: StepPlan = NO_PLAN,
) -> Batch:
    """The inputs of a step. Every request has blocks for its computed and scheduled tokens."""
    sequences = _Sequences(block_size)
    sampled = _SampledRows([], [], [], [], [])
    prompt_rows: list[int] = []
    prompts: list[PromptRows] = []
    beam_rows: list[int] = []
    beams: list[BeamRows] = []
    has_drafts = False
    for request, num_tokens in scheduled:
        past = request.num_computed_tokens
        end = past + num_tokens
        first = len(sequences.input_ids)
        if request.draft:
            has_drafts = True
            end = past + 1
        if request.is_searching:
            _add_beams(sequences, beam_rows, beams, request)
            continue
        if request.is_replaying:
            for position in range(past, end):
                sequences.add(request, position, request.token_ids[position : position + 1])
        else:
            sequences.add(request, past, request.token_ids[past:end])
        if request.wants_prompt_logprobs:
            num_rows = min(end, request.num_prompt_tokens - 1) - past
            prompt_rows.extend(range(first, first + num_rows))
            prompts.append(PromptRows(request, past, num_rows))
        if end == len(request.token_ids) and request.beams is not None:
            beam_rows.append(len(sequences.input_ids) - 1)
            beams.append(BeamRows(request, 1))
        elif end == len(request.token_ids):
            sampled.add(len(sequences.input_ids) - 1, request, 0)
        for number, token_id in enumerate(request.draft, 1):
            sequences.add(request, past + number, (token_id,))
            sampled.add(first + number, request, number)
        for branch in request.branches:
            _add_branch(sequences, sampled, request, branch)
    drawn = [*sampled.requests, *sampled.later, *(rows.request for rows in beams for _ in range(rows.num_rows))]
    return Batch(
        **sequences.inputs(),
        sampled_tokens_indices=np.array(sampled.rows + sampled.later_rows + beam_rows + prompt_rows, np.int64),
        sampled=sampled.requests,
        ahead=np.array(sampled.ahead, np.intp) if has_drafts else None,
        later=sampled.later,
        beams=beams,
        copies=plan.copies,
        prompts=prompts,
        sums=Sums.NONE if prompts else sums_for(drawn),
        inverse_temperatures=_inverse_temperatures(drawn),
        adapter_slots=_adapter_slots(scheduled),
        part_copies=plan.part_copies,
        moves=plan.moves,
        states=None if plan.states is None else _state_inputs(plan.states, scheduled),
        part_slots=plan.part_slots,
    )


def _add_beams(sequences: _Sequences, rows: list[int], beams: list[BeamRows], request: Request) -> None:
    """Add the last token of each beam of a search, over the beam's own blocks."""
    search = request.beams
    assert search is not None
    past = request.num_computed_tokens
    shared = request.block_table[: request.num_prompt_tokens // sequences.block_size]
    tables = [request.block_table, *(shared + tail for tail in request.beam_tails)]
    for beam, table in zip(search.beams, tables, strict=True):
        rows.append(len(sequences.input_ids))
        sequences.add(request, past, beam.token_ids[-1:], table)
    beams.append(BeamRows(request, len(search.beams)))


def _add_branch(sequences: _Sequences, sampled: _SampledRows, request: Request, branch: Branch) -> None:
    """Add the tokens of a branch, over its own blocks. Tokens of the same step that the branch shares with others are
    computed there too, if they lie in its blocks: the request's latest token, and the first ones of the path."""
    past, (path, num_shared) = request.num_tokens - 1, branch.path
    table = request.block_table[: branch.first_block] + array("i", branch.blocks)
    for number, token_id in enumerate((request.token_ids[past], *path)):
        if past + number < branch.first_block * sequences.block_size:
            continue
        if number > num_shared:
            sampled.add(len(sequences.input_ids), request, number)
        sequences.add(request, past + number, (token_id,), table)


class _SampledRows(NamedTuple):
    """The rows that are sampled together, with their requests and their distance ahead of these; and the rows that are
    sampled later, because they depend on the tokens before them."""

    rows: list[int]
    requests: list[Request]
    ahead: list[int]
    later_rows: list[int]
    later: list[Request]

    def add(self, row: int, request: Request, ahead: int) -> None:
        """Add a row that is `ahead` tokens beyond the request's own tokens."""
        if ahead and depends_on_tokens(request.sampling):
            self.later_rows.append(row)
            self.later.append(request)
        else:
            self.rows.append(row)
            self.requests.append(request)
            self.ahead.append(ahead)


def one_by_one(scheduled: Sequence[Scheduled], block_size: int) -> Batch:
    """The inputs of a step in which every token is a sequence of its own, and every request samples after its last
    token."""
    sequences = _Sequences(block_size)
    rows = []
    for request, num_tokens in scheduled:
        past = request.num_computed_tokens
        for position in range(past, past + num_tokens):
            sequences.add(request, position, request.token_ids[position : position + 1])
        rows.append(len(sequences.input_ids) - 1)
    sampled = [request for request, _ in scheduled]
    return Batch(
        **sequences.inputs(),
        sampled_tokens_indices=np.array(rows, np.int64),
        sampled=sampled,
        ahead=None,
        later=(),
        beams=(),
        copies=(),
        prompts=(),
        sums=sums_for(sampled),
        inverse_temperatures=_inverse_temperatures(sampled),
    )


def depends_on_tokens(sampling: SamplingParams) -> bool:
    """Whether sampling depends on the tokens of the answer in other ways than through the model's logits."""
    return sampling.has_penalties or sampling.has_edits or bool(sampling.mirostat)


class _Sequences:
    """The sequences of a step, one after the other."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.input_ids = array("I")
        self._block_indices = array("i")
        self._past_lens: list[int] = []
        self._begins = [0]
        self._block_begins = [0]
        self._max_context_len = 0
        self._scored: list[Scored] = []
        self._lost: dict[int, Eviction] = {}
        self._images = ImageRows()

    def add(self, request: Request, past: int, token_ids: Sequence[int], table: array[int] | None = None) -> None:
        """Add new tokens of a request, after `past` others. `table` has other blocks than the request's."""
        if request.images:
            self._images.add(request, len(self._past_lens), len(self.input_ids), past, len(token_ids))
        self.input_ids.extend(token_ids)
        table = request.block_table if table is None else table
        if request.eviction is not None:
            past = self._add_evicting(request, request.eviction, past, len(token_ids))
        end = past + len(token_ids)
        num_blocks = -(-end // self.block_size)
        self._block_indices.extend(table if len(table) == num_blocks else table[:num_blocks])
        self._past_lens.append(past)
        self._begins.append(len(self.input_ids))
        self._block_begins.append(len(self._block_indices))
        self._max_context_len = max(self._max_context_len, end)

    def _add_evicting(self, request: Request, eviction: Eviction, past: int, num_tokens: int) -> int:
        """Record the sequence whose attention is scored, and the tables of the layers. Returns how many of the earlier
        tokens remain."""
        number, num_prompt = len(self._past_lens), request.num_prompt_tokens
        num_queries = 1 if past >= num_prompt else eviction.num_scored(past, num_tokens, num_prompt)
        if num_queries:
            self._scored.append(Scored(number, eviction, num_queries, past + num_tokens >= num_prompt))
        if eviction.tables is not None:
            self._lost[number] = eviction
        return past - eviction.num_evicted_tokens

    def inputs(self) -> dict[str, Any]:
        """The operator's inputs by name."""
        past_lens, begins = np.array(self._past_lens, np.int32), np.array(self._begins, np.int32)
        block_indices = np.frombuffer(self._block_indices, np.int32)
        before = past_lens
        if self._lost:
            before = past_lens.copy()
            for number, eviction in self._lost.items():
                before[number] += eviction.num_evicted_tokens
        input_ids = np.frombuffer(self.input_ids, np.uint32).astype(np.int64)
        positions = _positions(self._images.shifted(before), begins)
        return {
            "input_ids": input_ids,
            "position_ids": positions,
            "past_lens": past_lens,
            "subsequence_begins": begins,
            "block_indices": block_indices,
            "block_indices_begins": np.array(self._block_begins, np.int32),
            "max_context_len": np.array(self._max_context_len, np.int32),
            "block_tables": merged_tables(block_indices, self._block_begins, self._lost) if self._lost else None,
            "scored": self._scored,
            "images": self._images.taken(input_ids, positions),
        }


def graph_of(batch: Batch, small_decode: int) -> Graph:
    """The graph that computes a step. Decode steps of up to `small_decode` sequences have their own; 0 for none."""
    if batch.adapter_slots is not None:
        return Graph.ADAPTERS
    return Graph.SMALL_DECODE if batch.is_decode and len(batch.past_lens) <= small_decode else Graph.MAIN


def padded(batch: Batch, num_tokens: int, block: int) -> Batch:
    """The batch with `num_tokens` more sequences of one token, which are not sampled. Their keys and values go to the
    beginning of `block`, which belongs to no request."""
    ones = np.arange(1, num_tokens + 1, dtype=np.int32)
    nothing = np.zeros(num_tokens, np.int32)
    return replace(
        batch,
        input_ids=np.concatenate([batch.input_ids, nothing]),
        position_ids=np.concatenate([batch.position_ids, nothing]),
        past_lens=np.concatenate([batch.past_lens, nothing]),
        subsequence_begins=np.concatenate([batch.subsequence_begins, batch.subsequence_begins[-1] + ones]),
        block_indices=np.concatenate([batch.block_indices, nothing + np.int32(block)]),
        block_indices_begins=np.concatenate([batch.block_indices_begins, batch.block_indices_begins[-1] + ones]),
        block_tables=padded_tables(batch.block_tables, num_tokens, block),
        adapter_slots=None if batch.adapter_slots is None else np.concatenate([batch.adapter_slots, nothing - 1]),
        states=None if batch.states is None else _padded_states(batch.states, num_tokens),
    )


def sums_for(sampled: Sequence[Request]) -> Sums:
    """The sums that are needed to sample the requests."""
    sums = Sums.NONE
    for request in sampled:
        sampling = request.sampling
        if sampling.num_logprobs is not None and sampling.inverse_temperature != 1.0:
            return Sums.DRAWN_AND_MODEL
        if not sampling.is_greedy or sampling.num_logprobs is not None or sampling.beam_search is not None:
            sums = Sums.DRAWN
    return sums


def _inverse_temperatures(sampled: Sequence[Request]) -> FloatArray:
    return np.array([request.sampling.inverse_temperature for request in sampled], np.float32)


def _state_inputs(steps: Sequence[StateStep], scheduled: Sequence[Scheduled]) -> StateInputs:
    rows = [(step.source, *step.destinations) for step in steps]
    return StateInputs(
        np.cumsum([0, *(num_tokens for _, num_tokens in scheduled)], dtype=np.int32),
        np.array([slot for row in rows for slot in row], np.int32),
        np.cumsum([0, *map(len, rows)], dtype=np.int32),
        np.array([step.past for step in steps], np.int32),
        np.array([step.interval for step in steps], np.int32),
    )


def _padded_states(states: StateInputs, num_tokens: int) -> StateInputs:
    nothing = np.zeros(num_tokens, np.int32)
    row = np.array([ZERO_SLOT, PADDING_SLOT], np.int32)
    ends = states.block_indices_begins[-1] + len(row) * np.arange(1, num_tokens + 1, dtype=np.int32)
    ones = np.arange(1, num_tokens + 1, dtype=np.int32)
    return StateInputs(
        np.concatenate([states.subsequence_begins, states.subsequence_begins[-1] + ones]),
        np.concatenate([states.block_indices, np.tile(row, num_tokens)]),
        np.concatenate([states.block_indices_begins, ends]),
        np.concatenate([states.past_lens, nothing]),
        np.concatenate([states.cache_interval, nothing]),
    )


def _adapter_slots(scheduled: Sequence[Scheduled]) -> IntArray | None:
    """The slot of each token's adapter; None if there is none."""
    if all(request.adapter_slot < 0 for request, _ in scheduled):
        return None
    slots = np.array([request.adapter_slot for request, _ in scheduled], np.int32)
    return np.repeat(slots, [num_tokens for _, num_tokens in scheduled])


def _positions(past_lens: IntArray, begins: IntArray) -> LongArray:
    """Position of each token in its sequence."""
    if begins[-1] == len(past_lens):
        return past_lens.astype(np.int64)
    offsets: LongArray = np.arange(begins[-1], dtype=np.int64)
    offsets += np.repeat(past_lens.astype(np.int64) - begins[:-1], np.diff(begins))
    return offsets
