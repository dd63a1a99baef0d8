"""Who has which heads and columns, and how that goes through a Reshape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.worker.ranks.owners import Share, has_one_owner, owners_of_heads, owners_of_parts, positions_of, reshaped


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks"),
    [(4, 4, 2), (4, 4, 3), (28, 4, 2), (28, 4, 3), (28, 4, 4), (12, 2, 4), (12, 2, 3), (6, 1, 4), (64, 8, 6)],
)
def test_each_rank_has_the_kv_heads_that_its_queries_read(heads: int, kv_heads: int, num_ranks: int) -> None:
    owners = owners_of_heads(heads, kv_heads, num_ranks)
    assert owners is not None
    assert has_one_owner(owners.queries)
    for rank in range(num_ranks):
        queries, keys = positions_of(owners.queries, rank).tolist(), positions_of(owners.keys, rank).tolist()
        # Query i of a rank reads its KV head i // (queries of each), as everywhere.
        assert len(queries) % len(keys) == 0
        shared = len(queries) // len(keys)
        assert [keys[place // shared] for place in range(len(queries))] == [
            query // (heads // kv_heads) for query in queries
        ]


@pytest.mark.parametrize(("heads", "kv_heads", "num_ranks"), [(4, 2, 5), (6, 1, 7), (2, 2, 3)])
def test_too_few_heads_are_not_divided(heads: int, kv_heads: int, num_ranks: int) -> None:
    assert owners_of_heads(heads, kv_heads, num_ranks) is None


def test_columns_are_divided_in_whole_units_and_the_last_rank_has_the_rest() -> None:
    owners = owners_of_parts(1000, 3, 64)
    sizes = [positions_of(owners, rank).size for rank in range(3)]
    assert sizes == [320, 320, 360]
    assert np.array_equal(np.concatenate([positions_of(owners, rank) for rank in range(3)]), np.arange(1000))


@pytest.mark.parametrize(
    ("axis", "owners", "source", "target", "expected"),
    [
        # Columns of heads, and heads.
        (2, [1, 1, 2, 2], [None, 1, 4], [None, 1, 2, 2], (2, [1, 2])),
        (2, [1, 2], [None, 1, 2, 2], [None, 4], (1, [1, 1, 2, 2])),
        # Query, key and value of each head beside one another, and behind one another.
        (2, [1] * 6 + [2] * 6, [None, 1, 12], [None, 1, 2, 3, 2], (2, [1, 2])),
        (2, [1, 2, 1, 2, 1, 2], [None, 1, 6], [None, 1, 3, 2], (3, [1, 2])),
        (3, [1, 2], [None, 1, 3, 2], [None, 6], (1, [1, 2, 1, 2, 1, 2])),
        # A length that is not known.
        (2, [1, 2], [None, 1, 2, 2], [None, 1, None], (2, [1, 1, 2, 2])),
        (2, [1, 1, 2, 2], [None, 1, None], [None, 1, None, 2], (2, [1, 2])),
        # An axis in front of others that are merged.
        (0, [1, 2], [2, None, 3], [2, None], (0, [1, 2])),
        # A head that would be split.
        (2, [1, 2, 2, 2], [None, 1, 4], [None, 1, 2, 2], None),
    ],
)
def test_a_reshape_keeps_owners(
    axis: int,
    owners: Sequence[int],
    source: Sequence[int | None],
    target: Sequence[int | None],
    expected: tuple[int, list[int]] | None,
) -> None:
    found = reshaped(Share(axis, np.array(owners)), source, target)
    assert (None if found is None else (found.axis, found.owners.tolist())) == expected
