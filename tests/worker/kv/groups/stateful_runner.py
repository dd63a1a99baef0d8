"""A fake runner whose states remember all tokens of their sequence: the oracle of tests with recurrent layers.

It writes slots by the rules of OpenVINO's operators, and asserts that each sequence continues from the state of its own
tokens."""

from __future__ import annotations

import numpy as np

from headrace.worker.model.batch import Batch, StateInputs
from headrace.worker.request.step import FIRST_STATE_SLOT, PADDING_SLOT, ZERO_SLOT
from tests.worker.fake_runner import FakeRunner


class StatefulRunner(FakeRunner):
    """`num_slots` slots, each with the tokens that it has seen; None before it is written."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, num_slots: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.slots: list[list[int] | None] = [None] * (FIRST_STATE_SLOT + num_slots)
        self.slots[ZERO_SLOT] = []
        self.num_state_writes = 0

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Compute the states of a step, then its logits."""
        super().bind(batch, keeps_logits=keeps_logits)
        assert batch.states is not None
        self._check_slots(batch.states)
        begins = batch.states.subsequence_begins.tolist()
        assert begins[-1] == len(batch.input_ids)
        states = [self._run(batch, batch.states, sequence) for sequence in range(len(begins) - 1)]
        for sequence, state in enumerate(states):
            own_slots = batch.states.block_indices[batch.states.block_indices_begins[sequence] :]
            if own_slots[1] != PADDING_SLOT:
                # Attention has a sequence of its own for each token of a draft.
                last = int(np.searchsorted(batch.subsequence_begins, begins[sequence + 1] - 1, side="right")) - 1
                assert state == self._read(batch, last), "a sequence continued from another state"

    def _run(self, batch: Batch, states: StateInputs, sequence: int) -> list[int]:
        """The state after a sequence's tokens."""
        source, *slots = states.block_indices[slice(*states.block_indices_begins[sequence : sequence + 2])].tolist()
        interval = int(states.cache_interval[sequence])
        if not interval:
            assert slots == [PADDING_SLOT], "without an interval, states of state spaces are not written"
            return []
        begun = int(states.past_lens[sequence]) % interval
        tokens = batch.input_ids[slice(*states.subsequence_begins[sequence : sequence + 2])].tolist()
        before = self.slots[source]
        assert before is not None, "a slot is read that nobody wrote"
        state = list(before)
        for number, token_id in enumerate(tokens, 1):
            state.append(token_id)
            if (begun + number) % interval == 0 or number == len(tokens):
                slot = slots[(begun + number - 1) // interval]
                self.slots[slot] = list(state)
                self.num_state_writes += 1
        return state

    def _check_slots(self, states: StateInputs) -> None:
        """What the operators demand: each slot is written once, and read by nobody but the sequence that writes it
        first."""
        written: dict[int, int] = {}
        begins = states.block_indices_begins
        rows = [states.block_indices[begins[n] : begins[n + 1]].tolist() for n in range(len(begins) - 1)]
        assert begins[-1] == len(states.block_indices)
        assert len(rows) == len(states.past_lens) == len(states.cache_interval)
        for sequence, (_, *slots) in enumerate(rows):
            for slot in slots:
                assert slot == PADDING_SLOT or slot not in written, "a slot is written twice"
                assert slot != ZERO_SLOT, "the zeros are overwritten"
                written[slot] = sequence
        for sequence, (source, first, *_) in enumerate(rows):
            assert source not in written or (written[source] == sequence and source == first), "a race for a slot"
        assert np.all(states.cache_interval >= 0)
