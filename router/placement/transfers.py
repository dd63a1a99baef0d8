"""Cached blocks that a worker could fetch instead of computing them: from its disk or from another worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.router.placement.candidates import Columns, Places, Values
from headrace.router.placement.prefix_index import PrefixIndex

# The time until the first block arrives.
SETUP_MS = 5.0
# The assumed speed of workers that have not fetched yet.
DEFAULT_BYTES_PER_S = 0.5e9
# Fewer blocks than this are not fetched from another worker.
LEAST_MOVED = 2
# Fetching has to be cheaper than computing by this factor, as at the workers.
_WORTH = 0.8


class Transfers(NamedTuple):
    """For each candidate, the prompt tokens that the best other worker has cached (0 if there is none), the bytes of
    one token, and that worker's index in `addresses`. `disk_tokens` counts the tokens in the candidate's own memory
    together with those that follow on its disk; 0 if none is on the disk."""

    tokens: Values
    bytes_per_token: Values
    sources: Places
    addresses: Sequence[str]
    disk_tokens: Values

    @classmethod
    def none(cls, num_candidates: int) -> Transfers:
        """Transfers without anything to fetch, for `add` and `offer` to fill."""
        nothing = np.zeros(num_candidates)
        return cls(nothing, nothing.copy(), np.zeros(num_candidates, np.intp), [], nothing.copy())

    def add(
        self,
        index: PrefixIndex,
        hashes: Sequence[int],
        cached_blocks: Places,
        numbers: Places,
        slots: Places,
        addresses: Sequence[str],
        block: BlockFacts,
    ) -> None:
        """Add what the candidates `numbers` could fetch of a prompt with these block hashes. The first of `slots` and
        `addresses` are theirs; the rest belong to other workers from which they could fetch. `cached_blocks` has an
        entry for each candidate."""
        self.bytes_per_token[numbers] = block.num_bytes / block.num_tokens
        ends = index.disk.extend(hashes, slots[: len(numbers)], cached_blocks[numbers])
        if ends is not None:
            self.disk_tokens[numbers] = np.where(ends > cached_blocks[numbers], ends * block.num_tokens, 0)
        if not block.is_exchanged or len(slots) < 2:
            return
        depths = index.confirmed_depths(hashes)[slots]
        best = int(depths.argmax())
        fetching = numbers[cached_blocks[numbers] + LEAST_MOVED <= depths[best]]
        self.tokens[fetching] = depths[best] * block.num_tokens
        self.sources[fetching] = len(self.addresses)
        assert isinstance(self.addresses, list), "of `none`"
        self.addresses.append(addresses[best])

    def offer(self, numbers: Places, num_tokens: int, address: str) -> None:
        """The candidates `numbers` could fetch this many tokens from this worker."""
        more = numbers[self.tokens[numbers] < num_tokens]
        self.tokens[more] = num_tokens
        self.sources[more] = len(self.addresses)
        assert isinstance(self.addresses, list), "of `none`"
        self.addresses.append(address)


class BlockFacts(NamedTuple):
    """The tokens and bytes of a block, and whether workers exchange blocks."""

    num_tokens: int
    num_bytes: int
    is_exchanged: bool


class Moved(NamedTuple):
    """For each candidate: the tokens that it should fetch, the time that this takes in milliseconds, and whether they
    come from its disk rather than from another worker. `copied_tokens` come from another worker, which keeps them."""

    tokens: Values
    ms: Values
    is_on_disk: npt.NDArray[np.bool_]
    copied_tokens: Values


def worth_moving(
    transfers: Transfers, columns: Columns[Values], cached_tokens: Values, ms_per_computed: Values, most_tokens: int
) -> Moved:
    """The tokens that each candidate should fetch. It has `cached_tokens` itself and computes a token in
    `ms_per_computed`. The prompt needs at most `most_tokens`. Between its disk and another worker, the source that
    saves more time is chosen."""
    from_peers, peers_ms, peers_saved_ms = _weighed(
        transfers.tokens, columns.transfer_bytes_per_s, SETUP_MS, transfers, cached_tokens, ms_per_computed, most_tokens
    )
    from_disk, disk_ms, disk_saved_ms = _weighed(
        transfers.disk_tokens, columns.disk_bytes_per_s, 0.0, transfers, cached_tokens, ms_per_computed, most_tokens
    )
    is_on_disk = (disk_saved_ms >= peers_saved_ms) & (from_disk > 0.0)
    tokens = np.where(is_on_disk, from_disk, from_peers)
    copied = np.where(is_on_disk, 0.0, from_peers)
    return Moved(tokens, np.where(is_on_disk, disk_ms, peers_ms), is_on_disk, copied)


def _weighed(
    found: Values,
    bytes_per_s: Values,
    setup_ms: float,
    transfers: Transfers,
    cached_tokens: Values,
    ms_per_computed: Values,
    most_tokens: int,
) -> tuple[Values, Values, Values]:
    """The tokens to fetch, the time that this takes and the time that it saves; zeros where it saves nothing."""
    tokens = np.maximum(np.minimum(found, most_tokens) - cached_tokens, 0.0)
    bytes_per_ms = np.where(bytes_per_s > 0.0, bytes_per_s, DEFAULT_BYTES_PER_S) / 1000.0
    took_ms = setup_ms + tokens * transfers.bytes_per_token / bytes_per_ms
    saved_ms = _WORTH * tokens * ms_per_computed - took_ms
    is_worth = (tokens > 0.0) & (saved_ms > 0.0)
    return np.where(is_worth, tokens, 0.0), np.where(is_worth, took_ms, 0.0), np.where(is_worth, saved_ms, 0.0)
