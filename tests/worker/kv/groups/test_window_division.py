"""The division of memory between blocks and slots."""

from __future__ import annotations

from headrace.worker.kv.groups.window import PartSizes, divide

# Gemma 3 4B in 8-bit blocks of 32 tokens: 5 of 34 layers see the whole context.
TOKEN_BYTES = 2 * (256 + 8) * 4
GEMMA = PartSizes(32 * 5 * TOKEN_BYTES, 32, 32 * 29 * TOKEN_BYTES, 1024)
GIB = 1 << 30


def taken(num_blocks: int, num_slots: int, sizes: PartSizes) -> int:
    return (num_blocks + 1) * sizes.block_bytes + (num_slots + 1) * sizes.part_bytes


def test_the_memory_is_used_and_holds_more() -> None:
    whole = 8 * GIB // (GEMMA.block_bytes + GEMMA.part_bytes)
    num_blocks, windows = divide(8 * GIB, GEMMA, 16, 1024)
    assert 0.999 * 8 * GIB < taken(num_blocks, windows.num_slots, GEMMA) <= 8 * GIB
    assert num_blocks > 3 * whole
    assert windows.num_slots - windows.num_of_step > 16 * 1024 // 32


def test_windows_of_many_requests_take_at_most_half() -> None:
    num_blocks, windows = divide(8 * GIB, GEMMA, 1000, 1024)
    assert taken(num_blocks, windows.num_slots, GEMMA) <= 8 * GIB
    assert windows.num_slots - num_blocks // 8 <= 4 * GIB // GEMMA.part_bytes


def test_every_block_has_a_slot_if_nothing_is_gained() -> None:
    budget = 50 * (GEMMA.block_bytes + GEMMA.part_bytes)
    num_blocks, windows = divide(budget, GEMMA, 128, 1024)
    assert num_blocks == windows.num_slots == 49
    assert divide(GEMMA.part_bytes, GEMMA, 1, 1024)[0] == 0


def test_layers_that_all_have_windows_have_blocks_without_bytes() -> None:
    sizes = PartSizes(0, 32, 32 * 32 * 2 * 136 * 8, 4096)
    num_blocks, windows = divide(8 * GIB, sizes, 8, 1024)
    assert num_blocks > 3 * windows.num_slots
    assert taken(num_blocks, windows.num_slots, sizes) <= 8 * GIB
