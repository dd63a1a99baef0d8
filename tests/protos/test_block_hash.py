"""Chained block hashes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.protos.block_hash import block_hashes, next_hash, root_hash, token_bytes_of

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def test_the_hash_is_the_documented_one() -> None:
    """Literal values: a fleet of different versions must agree on them."""
    root = root_hash("f" * 64, "adapter", "salt")
    assert root == 2579200313421673097
    assert block_hashes(root, [1, 2, 3, 4, 5], 2) == [11566888851523343846, 10525816978344908072]


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_two_prompts_share_hashes_exactly_as_far_as_they_share_full_blocks(
    left: list[int], right: list[int], block_size: int
) -> None:
    hashes = [block_hashes(root_hash("m"), tokens, block_size) for tokens in (left, right)]
    shared = 0
    while left[: (shared + 1) * block_size] == right[: (shared + 1) * block_size] and (shared + 1) * block_size <= min(
        len(left), len(right)
    ):
        shared += 1
    assert hashes[0][:shared] == hashes[1][:shared]
    assert set(hashes[0][shared:]).isdisjoint(hashes[1][shared:])


@given(TOKENS, st.integers(1, 8))
def test_hashing_block_by_block_equals_hashing_all_at_once(tokens: list[int], block_size: int) -> None:
    parent = root_hash("m")
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_hash(parent, token_bytes_of(tokens[start : start + block_size]))
        hashes.append(parent)
    assert hashes == block_hashes(root_hash("m"), tokens, block_size)


def test_fingerprint_adapter_and_salt_each_separate_the_chains() -> None:
    roots = {root_hash("a"), root_hash("b"), root_hash("a", "b"), root_hash("a", "", "b"), root_hash("ab")}
    assert len(roots) == 5
