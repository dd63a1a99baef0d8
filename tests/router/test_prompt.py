"""Prompts are copied and hashed once, in slices."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protos.block_hash import block_hashes
from headrace.router.placement import prompt as prompt_module
from headrace.router.placement.prompt import Prompt

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 9))
def test_the_hashes_are_those_of_all_tokens_in_one_go(parts: list[list[int]], behind: list[int], size: int) -> None:
    whole = [token for part in parts for token in part]
    prompt = Prompt(*parts)
    assert prompt.num_tokens == len(whole)
    assert prompt.hashes(7, size, behind) == block_hashes(7, [*whole, *behind], size)
    assert prompt.hashes(7, size) == block_hashes(7, whole, size)
    assert list(prompt.tokens) == whole


@given(tokens=TOKENS, size=st.integers(1, 9))
async def test_slices_change_nothing(tokens: list[int], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_module, "_SLICE_TOKENS", 8)
        prompt = Prompt(tokens)
        await prompt.prepare([(7, size), (8, size)])
        assert prompt.hashes(7, size) == block_hashes(7, tokens, size)
        assert prompt.hashes(8, size) == block_hashes(8, tokens, size)


async def test_preparing_a_long_prompt_lets_the_event_loop_run_and_is_done_once_for_all_who_ask() -> None:
    prompt = Prompt(array("I", range(1_000_000)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(prompt.prepare([(7, 32)]) for _ in range(128)))
    counting.cancel()
    slices = -(-1_000_000 // prompt_module._SLICE_TOKENS)
    assert turns >= 2 * (slices - 1)
    assert prompt.num_copied_tokens == 1_000_000
    assert prompt.hashes(7, 32) is prompt.hashes(7, 32)
