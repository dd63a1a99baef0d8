"""Detects prompts that repeat much of a recent prompt after a difference, so that the prefix cache cannot help. The
cache finds the longest common prefix of two prompts. A date, a session's id or a checksum in the first line of a long
prompt makes all of it new in each request:

    [checksum 1] [2,500 tokens of instructions] [question]
    [checksum 2] [2,500 tokens of instructions] [another question]

The last few prompts of each model and cache scope are kept here, in bounded memory, and compared with the next one.
Nothing of their text leaves this module: only the position of the first difference, and how many tokens repeat.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

MAX_SCOPES = 32
PROMPTS_OF_SCOPE = 4
MAX_TOKENS = 16_384
"""Of a prompt that are kept; 4 bytes each."""
MIN_REPEATED_TOKENS = 256
"""Fewer are not worth a notice."""
_NUM_PROBES = 8
_PROBE_TOKENS = 16
_SLICE = 512
_LOG = logging.getLogger(__name__)


class Partings:
    """Compares each prompt with the recent ones of its model and cache scope."""

    def __init__(self, observe: Callable[[str, int, int], None]) -> None:
        """`observe` gets the model, the number of tokens before the first difference, and the approximate number of
        repeated tokens after it."""
        self._observe = observe
        self._recent: OrderedDict[tuple[str, str], deque[array[int]]] = OrderedDict()
        self._told: dict[tuple[str, str], None] = {}

    def prompt(self, model: str, scope: str, tenant: str, token_ids: Sequence[int]) -> None:
        """Take note of a prompt."""
        if len(token_ids) < MIN_REPEATED_TOKENS:
            return
        tokens = array("I", token_ids[:MAX_TOKENS])
        key = model, scope
        recent = self._recent.setdefault(key, deque(maxlen=PROMPTS_OF_SCOPE))
        self._recent.move_to_end(key)
        if len(self._recent) > MAX_SCOPES:
            forgotten, _ = self._recent.popitem(last=False)
            self._told.pop(forgotten, None)
        found = parting_of(tokens, recent)
        recent.append(tokens)
        if found is None:
            return
        position, num_repeated = found
        self._observe(model, position, num_repeated)
        if key not in self._told:
            self._told[key] = None
            _LOG.warning(
                "prompts for %s%s differ first at token %d, and about %d tokens behind it are the same: something at "
                "the head of the prompt changes in each request, and no cache helps behind it; compare two requests "
                "with `headrace explain --against`",
                model,
                f" of the tenant {tenant}" if tenant else "",
                position,
                num_repeated,
            )


def parting_of(tokens: array[int], recent: Sequence[array[int]]) -> tuple[int, int] | None:
    """The length of the longest common prefix with a recent prompt, in tokens, and the approximate number of further
    tokens that a recent prompt also has, after a difference. None if these are few, or fewer than those of the prefix.
    """
    common = max((num_common(tokens, other) for other in recent), default=0)
    num_left = len(tokens) - common
    if num_left < max(MIN_REPEATED_TOKENS, common):
        return None
    width = tokens.itemsize
    step = num_left / (_NUM_PROBES + 1)
    probes = [common + int(step * (number + 0.5)) for number in range(_NUM_PROBES)]
    wanted = [tokens[start : start + _PROBE_TOKENS].tobytes() for start in probes]
    most = 0
    for other in recent:
        raw = other.tobytes()
        most = max(most, sum(_has(raw, probe, width) for probe in wanted))
    num_repeated = num_left * most // _NUM_PROBES
    if num_repeated < max(MIN_REPEATED_TOKENS, common):
        return None
    return common, num_repeated


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning."""
    most = min(len(one), len(other))
    start = 0
    while start < most and one[start : start + _SLICE] == other[start : start + _SLICE]:
        start += _SLICE
    if start >= most:
        return most
    return next((i for i in range(start, most) if one[i] != other[i]), most)


def _has(raw: bytes, probe: bytes, width: int) -> bool:
    """Whether tokens are among others, not only their bytes."""
    position = raw.find(probe)
    while position >= 0 and position % width:
        position = raw.find(probe, position + 1)
    return position >= 0
