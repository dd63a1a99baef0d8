"""Which tokens of a tree a step verifies, and the paths that they form."""

from __future__ import annotations

import random
from array import array
from functools import partial

import pytest

from headrace.worker.kv.cache import KVCache
from headrace.worker.model.batch import build_batch
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, TokenPath, row_after
from headrace.worker.request.step import Scheduled
from headrace.worker.speculation.controller import Planned, SizeCorrections, StepLine, best_of_trees
from headrace.worker.speculation.proposer import TreeToken
from headrace.worker.speculation.tree import (
    LEVEL_PRIORS,
    drawn_candidate,
    greedy_candidate,
    part_of,
    paths_of,
    tree_gains,
)

BLOCK_SIZE = 4
#   1 - 2 - 3
#    \  5
#   4 - 6
TREE = [
    TreeToken(-1, 1, 0),
    TreeToken(0, 2, 0),
    TreeToken(-1, 4, 0),
    TreeToken(1, 3, 0),
    TreeToken(0, 5, 0),
    TreeToken(2, 6, 0),
]


def random_tree(rng: random.Random, count: int) -> list[TreeToken]:
    """A tree whose tokens are all different."""
    return [TreeToken(rng.randrange(-1, number), number, 0) for number in range(count)]


def test_a_token_continues_the_path_of_its_parent_or_begins_another() -> None:
    assert paths_of(TREE) == [TokenPath([1, 2, 3]), TokenPath([4, 6]), TokenPath([1, 5], 1)]
    assert paths_of(part_of(TREE, [0, 4, 2])) == [TokenPath([1, 5]), TokenPath([4])]
    assert paths_of([]) == []


def test_rows_are_found_by_the_tokens_before_them() -> None:
    paths = paths_of(TREE)
    assert [row_after(paths, tokens) for tokens in ([], [1], [1, 2], [1, 2, 3])] == [0, 1, 2, 3]
    assert [row_after(paths, tokens) for tokens in ([4], [4, 6], [1, 5])] == [4, 5, 6]
    assert [row_after(paths, tokens) for tokens in ([2], [1, 4], [4, 6, 7], [1, 2, 3, 4])] == [None] * 4


@pytest.mark.parametrize("seed", range(20))
def test_the_predicted_tokens_are_those_of_the_step(seed: int) -> None:
    """Whatever part of a tree is taken, and wherever blocks end."""
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randint(2, 14))
    num_tokens = rng.randint(2, 12)
    cache = KVCache(64, BLOCK_SIZE)
    request = Request("r", list(range(100, 100 + num_tokens)), SamplingParams(8, 0), 1)
    request.num_computed_tokens = num_tokens - 1
    gains = tree_gains(0, tree, [rng.choice([0.2, 0.5, 0.9]) for _ in tree], partial(cache.num_repeated, request))
    assert [gain.rank for gain in gains] == sorted((gain.rank for gain in gains), reverse=True)
    taken = gains[: rng.randint(1, len(gains))]
    draft, *branches = paths_of(part_of(tree, [gain.number for gain in taken]))
    request.draft = draft.token_ids
    assert cache.reserve(request, num_tokens + len(draft.token_ids))
    table = array("i", request.block_table)
    added = [cache.add_branch(request, path, 0) for path in branches]
    assert len(draft.token_ids) + sum(added) == sum(gain.num_tokens for gain in taken)
    batch = build_batch([Scheduled(request, 1 + len(draft.token_ids) + sum(added))], BLOCK_SIZE)
    assert len(batch.input_ids) == 1 + sum(gain.num_tokens for gain in taken)
    assert len(batch.sampled) == 1 + len(taken), "each proposed token is followed by one row"
    blocks = batch.block_indices[batch.block_indices_begins[1:] - 1]
    written = list(zip(batch.position_ids.tolist(), blocks.tolist(), strict=True))
    assert len(set(written)) == len(written), "two tokens have the same place"
    path = rng.choice([draft, *branches]).token_ids
    cache.end_branches(request, path)
    assert cache.num_free_blocks == 64 - len(request.block_table)
    first = next((branch for branch in (draft, *branches) if list(branch.token_ids[: len(path)]) == list(path)), None)
    assert (request.block_table == table) == (first is draft)


def test_levels_tell_likely_tokens_from_others() -> None:
    likely, unlikely = greedy_candidate(0.9), greedy_candidate(0.01)
    assert LEVEL_PRIORS[likely.level - 1] > 0.8 > 0.1 > LEVEL_PRIORS[unlikely.level - 1]
    drawn = [drawn_candidate(number) for number in range(4)]
    assert [LEVEL_PRIORS[each.level - 1] for each in drawn] == [each.confidence for each in drawn]
    assert drawn[0].confidence > drawn[1].confidence > drawn[2].confidence
    assert drawn[2] == drawn[3]


LINE = StepLine(base_ms=100.0, token_ms=2.0, change_ms=0.0)


def taken(chances: list[float], line: StepLine = LINE, most_tokens: int = 64, most_ms: float = 1e9) -> list[int]:
    """The tokens of `TREE`, beside the first, that a stream's step verifies."""
    first, *gains = tree_gains(0, TREE, chances, lambda num_shared, num_of_draft: 1 + num_shared)
    assert first.number in (0, 2)
    planned = Planned(1, 2, 1.0 + first.expected)
    count = best_of_trees(
        gains, planned, line, SizeCorrections().of, size_before=2, most_tokens=most_tokens, most_ms=most_ms
    )
    return sorted(gain.number for gain in gains[:count])


def test_what_is_worth_its_cost_is_taken() -> None:
    sure, split = [0.95, 0.95, 0.01, 0.95, 0.01, 0.5], [0.4, 0.3, 0.4, 0.3, 0.3, 0.8]
    assert {1, 3} <= set(taken(sure)) <= {1, 2, 3}, "a sure path has no branches but those that fill a size"
    assert {2, 5} <= set(taken(split)), "two likely first tokens are both taken"
    assert taken(split, LINE._replace(token_ms=60.0)) == []
    assert taken(sure, most_tokens=3) == [1] or taken(sure, most_tokens=3) == []
    assert taken(sure, most_ms=90.0) == []
