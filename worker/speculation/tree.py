"""Trees of proposals: which of their tokens a step verifies, and the paths that these form.

                  a1 --- a2 --- a3        draft      a1 a2 a3
    the answer <       \\                  branch     a1 b2         shares a1 with the draft
                  b1     b2               branch     b1

The tokens of a branch lie in blocks of its own. Tokens of the step that it shares with others and that lie in these
blocks are computed again. So the first token of a branch costs more than one that continues a path. Pure.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.worker.request.request import TokenPath
from headrace.worker.speculation.proposer import TreeToken

# Levels of greedy tokens, by the confidence that the heads have in them, and the acceptance before anything is known.
_BOUNDS = (0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.95)
_BY_CONFIDENCE = (0.015, 0.05, 0.13, 0.3, 0.5, 0.7, 0.87, 0.97)
# The same for drawn tokens, by their number among those that follow the same token. The heads draw with the model's
# random numbers, so a first token is right more often than its probability says.
_BY_NUMBER = (0.6, 0.12, 0.04)
_FIRST_LEVEL = 1
LEVEL_PRIORS = (*_BY_CONFIDENCE, *_BY_NUMBER)
"""The share of accepted tokens of each level from the first level of trees on, before anything is known."""


class TreeShape(NamedTuple):
    """Trees have at most `num_tokens` tokens on paths of up to `depth`. After each of the `top_k` best tokens of a
    depth, `top_k` tokens are proposed."""

    num_tokens: int
    depth: int
    top_k: int


class Candidate(NamedTuple):
    """How likely a proposed token is, and its level."""

    confidence: float
    level: int


def greedy_candidate(probability: float) -> Candidate:
    """The candidate for a token to which the heads give this probability."""
    return Candidate(probability, _FIRST_LEVEL + bisect(_BOUNDS, probability))


def drawn_candidate(number: int) -> Candidate:
    """The candidate for the token that was drawn after `number` other tokens were excluded."""
    number = min(number, len(_BY_NUMBER) - 1)
    return Candidate(_BY_NUMBER[number], _FIRST_LEVEL + len(_BY_CONFIDENCE) + number)


def paths_of(tree: Sequence[TreeToken]) -> list[TokenPath]:
    """The paths of a tree whose tokens come after their parents. A token continues the path that ends with its parent,
    or begins another one. The first path is the draft."""
    paths: list[tuple[list[int], int]] = []
    path_to: list[list[int]] = []
    tails: dict[int, list[int]] = {}
    for number, (parent, token_id, _) in enumerate(tree):
        path = tails.pop(parent, None)
        if path is None:
            before = [] if parent < 0 else path_to[parent]
            path = before.copy()
            paths.append((path, len(before)))
        path.append(token_id)
        path_to.append(path.copy())
        tails[number] = path
    return [TokenPath(path, num_shared) for path, num_shared in paths]


def part_of(tree: Sequence[TreeToken], numbers: Sequence[int]) -> list[TreeToken]:
    """Some tokens of a tree, in this order, each after its parent."""
    places = {number: place for place, number in enumerate(numbers)}
    return [tree[number]._replace(parent=places.get(tree[number].parent, -1)) for number in numbers]


class TreeGain(NamedTuple):
    """A token of a stream's tree that a step may verify: it is accepted with probability `expected`, and counts
    `num_tokens` tokens of the step. Tokens are taken in the order of `rank`."""

    rank: float
    expected: float
    num_tokens: int
    stream: int
    number: int


def tree_gains(
    stream: int, tree: Sequence[TreeToken], chances: Sequence[float], num_repeated: Callable[[int, int], int]
) -> list[TreeGain]:
    """The tokens of a tree, the most worthwhile first, and each after its parent. `chances` are those that a token is
    accepted if its parent is. `num_repeated` says how many tokens are computed again for a branch that shares this many
    tokens with others, and this many of them with the draft."""
    reach: list[float] = []
    for (parent, *_), chance in zip(tree, chances, strict=True):
        reach.append(chance * (reach[parent] if parent >= 0 else 1.0))
    gains: list[TreeGain] = []
    ranks, depths, of_draft, tails = {-1: 1.0}, {-1: 0}, {-1: 0}, {-1}
    end_of_draft = -1
    for number in sorted(range(len(tree)), key=lambda number: -reach[number]):
        parent = tree[number].parent
        depths[number], of_draft[number] = depths[parent] + 1, of_draft[parent]
        if parent in tails:
            tails.remove(parent)
            num_tokens = 1
        else:
            num_tokens = 1 + num_repeated(depths[parent], of_draft[parent])
        if parent == end_of_draft:
            end_of_draft, of_draft[number] = number, depths[number]
        tails.add(number)
        ranks[number] = min(ranks[parent], reach[number] / num_tokens)
        gains.append(TreeGain(ranks[number], reach[number], num_tokens, stream, number))
    gains.sort(key=lambda gain: -gain.rank)
    return gains
