"""How the memory of a model with recurrent layers is divided, and which flags it cannot have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.worker.allocation import most_requests
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.exclusions import refuse_for_model
from headrace.worker.kv.groups.recurrent import StateSizes, divide
from headrace.worker.kv.layers import LayerGroup, LayerKind
from headrace.worker.request.step import FIRST_STATE_SLOT
from tests.worker.configs import worker_config

GIB = 1 << 30
CONFIG = worker_config()
GROUPS = [LayerGroup(LayerKind.FULL, 8), LayerGroup(LayerKind.RECURRENT, 8)]
# Of a model with 1.2B parameters and convolutions, and of one with 80B and sums.
SMALL = StateSizes(block_bytes=245_760, block_size=32, slot_bytes=245_760)
LARGE = StateSizes(block_bytes=430_000, block_size=32, slot_bytes=76_000_000)


@pytest.mark.parametrize(("sizes", "budget"), [(SMALL, GIB), (SMALL, 40 * GIB), (LARGE, 40 * GIB)])
def test_blocks_and_slots_fill_the_budget(sizes: StateSizes, budget: int) -> None:
    seqs = most_requests(CONFIG, budget, sizes, 64)
    num_blocks, states = divide(budget, sizes, seqs)
    taken = (num_blocks + 1) * sizes.block_bytes + (states.num_slots + FIRST_STATE_SLOT) * sizes.slot_bytes
    assert budget - sizes.block_bytes - 2 * sizes.slot_bytes < taken <= budget
    assert seqs == 64
    of_saved = (states.num_slots - 2 * seqs) * sizes.slot_bytes
    assert of_saved <= num_blocks * sizes.block_bytes / 8
    assert states.interval % sizes.block_size == 0
    assert states.interval >= 8 * sizes.block_size


def test_requests_are_as_many_as_half_of_the_memory_has_slots_for() -> None:
    assert most_requests(CONFIG, 2 * GIB, LARGE, 64) == 6
    assert divide(2 * GIB, LARGE, 6)[0] > 0
    with pytest.raises(ConfigurationError, match=r"room for 6 requests.*--max-num-seqs"):
        most_requests(replace(CONFIG, max_num_seqs=7), 2 * GIB, LARGE, 7)
    with pytest.raises(ConfigurationError, match=r"room for 0 requests.*--kv-cache-gb"):
        most_requests(CONFIG, GIB // 8, LARGE, 64)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"kv_disk": Path("disk")}, "--kv-disk"),
        ({"role": "prefill"}, "--role prefill"),
        ({"decode_graph": True}, "--decode-graph on"),
    ],
)
def test_flags_that_such_a_model_cannot_have_are_named(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named} .*; leave the flag out"):
        refuse_for_model(replace(CONFIG, **flags), GROUPS)  # type: ignore[arg-type]


@pytest.mark.parametrize("speculation", [None, "auto", "off", "ngram"])
def test_such_a_model_may_speculate(speculation: str | None) -> None:
    refuse_for_model(replace(CONFIG, speculation=speculation, decode_graph=False), GROUPS)
    refuse_for_model(replace(CONFIG, draft_model=Path("draft")), GROUPS)
