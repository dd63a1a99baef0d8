"""Cached blocks of other workers: when fetching them pays, and which worker is named as their source."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from headrace.protos import inference_pb2, router_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.load_report import LoadReport
from headrace.router.fleet.links import LinkState
from headrace.router.placement.block_index import BlockIndex
from headrace.router.placement.candidates import Candidate, Candidates
from headrace.router.placement.policy import Placement, PlacementReason, RequestFacts, place
from headrace.router.placement.prefix_index import PrefixIndex
from headrace.router.placement.transfers import DEFAULT_BYTES_PER_S, SETUP_MS, Transfers
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, until

PROMPT = list(range(100, 100 + 50 * BLOCK_SIZE + 1))
IDLE = LoadReport(
    num_blocks=1000, num_free_blocks=1000, prefill_tokens_per_s=1000.0, decode_step_ms=20.0, max_num_seqs=8
)
BUSY = LoadReport(
    num_blocks=1000,
    num_free_blocks=1000,
    prefill_tokens_per_s=1000.0,
    decode_step_ms=20.0,
    max_num_seqs=8,
    num_running=4,
    num_uncached_tokens=900,
)


def placed(first: LoadReport, second: LoadReport, ms_per_token: float, on_disk: float = 0.0) -> Placement:
    """A prompt of 321 tokens, of which the first worker has 160, and the second one `on_disk` on its disk."""
    candidates = Candidates.of([Candidate("a", first, 16), Candidate("b", second, 16)])
    bytes_per_token = ms_per_token * DEFAULT_BYTES_PER_S / 1000
    each = np.array([bytes_per_token] * 2)
    transfers = Transfers(np.array([160.0, 160.0]), each, np.array([0, 0]), ["a"], np.array([0.0, on_disk]))
    facts = RequestFacts(num_prompt_tokens=321, max_new_tokens=16)
    found = place(facts, candidates, [10, 0], 0.0, random.Random(0), num_described=2, transfers=transfers)
    assert found is not None
    return found


def test_an_idle_worker_fetches_what_a_busy_one_has() -> None:
    found = placed(BUSY, IDLE, 0.1)
    assert (found.worker_id, found.source, found.num_moved_tokens) == ("b", "a", 160)
    assert found.predicted_cached_tokens == 160
    assert found.cost.transfer_ms == pytest.approx(SETUP_MS + 16.0)
    assert found.cost.prefill_ms == pytest.approx(161.0)
    terms = [*found.cost, found.cost.total_ms]
    assert sum(terms[:-1]) == pytest.approx(terms[-1])
    assert found.cost.ttft_ms == pytest.approx(found.cost.transfer_ms + found.cost.prefill_ms)
    assert found.reason is PlacementReason.LOAD


def test_who_has_the_prefix_gets_the_request_if_it_is_as_idle() -> None:
    found = placed(IDLE, IDLE, 0.1)
    assert (found.worker_id, found.source, found.num_moved_tokens) == ("a", "", 0)
    assert found.costs["a"].transfer_ms == 0.0


@pytest.mark.parametrize(
    ("num_full_blocks", "num_uncached_tokens", "worker_id"),
    [(0, 150, "b"), (1000, 150, "a"), (985, 150, "b"), (1000, 500, "b")],
)
def test_a_copy_drives_out_other_blocks_only_if_the_wait_is_longer_than_computing(
    num_full_blocks: int, num_uncached_tokens: int, worker_id: str
) -> None:
    holder = dataclasses.replace(BUSY, num_uncached_tokens=num_uncached_tokens)
    found = placed(holder, dataclasses.replace(IDLE, num_cached_blocks=num_full_blocks), 0.1)
    assert found.worker_id == worker_id
    assert found.source == ("a" if worker_id == "b" else "")
    # 22 blocks of 16 ms are taken, and 10 of them are copies.
    displaced = max(0, 22 - (1000 - num_full_blocks))
    assert found.costs["b"].eviction_ms == pytest.approx(1.6 * displaced + 16.0 * min(displaced, 10))


def test_what_takes_as_long_as_computing_is_computed() -> None:
    found = placed(BUSY, IDLE, 0.9)
    assert found.num_moved_tokens == 0
    assert found.source == ""
    assert found.costs["b"].prefill_ms == pytest.approx(321.0)


@pytest.mark.parametrize(("speed", "num_moved", "num_on_disk"), [(1.0, 0, 160), (0.5, 160, 0), (0.001, 160, 0)])
def test_of_disk_and_peer_the_faster_one_gives_the_blocks(speed: float, num_moved: int, num_on_disk: int) -> None:
    second = dataclasses.replace(IDLE, disk_bytes_per_s=speed * DEFAULT_BYTES_PER_S)
    found = placed(BUSY, second, 0.1, on_disk=160.0)
    (weighed,) = [weighed for weighed in found.weighed if weighed.worker_id == "b"]
    assert (weighed.num_moved_tokens, weighed.num_disk_tokens) == (num_moved, num_on_disk)
    assert found.source == ("" if num_on_disk else "a")
    assert weighed.num_cached_tokens == 160
    assert weighed.cost.transfer_ms == pytest.approx(16.0 if num_on_disk else SETUP_MS + 16.0)


def test_more_on_the_disk_is_better_than_less_at_a_peer() -> None:
    found = placed(BUSY, IDLE, 0.1, on_disk=320.0)
    assert (found.worker_id, found.predicted_cached_tokens, found.num_moved_tokens, found.source) == ("b", 320, 0, "")


def test_a_disk_continues_where_the_memory_ends() -> None:
    index = BlockIndex(100)
    hashes = list(range(10, 20))
    slots, depths = np.array([0, 1, 3]), np.array([2, 0, 4])
    assert index.extend(hashes, slots, depths) is None
    index.apply(0, [12, 13, 14, 16], [])
    index.apply(3, [11, 12], [])
    found = index.extend(hashes, slots, depths)
    assert found is not None
    assert found.tolist() == [5, 0, 4]
    index.apply(0, [15], [13])
    assert index.extend(hashes, slots, depths).tolist() == [3, 0, 4]  # type: ignore[union-attr]
    assert len(index) == 6
    index.reset(0)
    assert len(index) == 2
    assert index.extend(hashes, slots, depths) is None


def test_the_index_of_disks_is_bounded() -> None:
    index = BlockIndex(5)
    index.apply(0, range(3), [])
    index.apply(1, range(10), [])
    assert len(index) == 5
    index.apply(0, [], range(3))
    index.apply(1, range(20, 30), [])
    assert len(index) == 5


@pytest.mark.parametrize("seed", range(3))
def test_many_workers_are_looked_up_as_if_one_by_one(seed: int) -> None:
    rng, index = random.Random(seed), BlockIndex(400)
    hashes, there = list(range(100, 112)), {slot: set[int]() for slot in range(40)}
    for _ in range(300):
        slot, stored, evicted = rng.randrange(40), rng.sample(range(98, 116), 6), rng.sample(range(98, 116), 3)
        index.apply(slot, stored, evicted)
        there[slot] = there[slot] - set(evicted) | set(stored)
        if rng.random() < 0.1:
            index.reset(slot)
            there[slot] = set()
        index.check()
        if len(index) == 400:
            return
        slots = np.array(rng.sample(range(40), 30))
        depths = np.array([rng.randint(0, 12) for _ in slots])
        cut, extended = index.cut(hashes, slots, depths), index.extend(hashes, slots, depths)
        for number, (one, depth) in enumerate(zip(slots.tolist(), depths.tolist(), strict=True)):
            before = [end for end in range(1, depth + 1) if hashes[end - 1] in there[one]]
            assert cut[number] == max(before, default=0)
            behind = next((end for end in range(depth, 12) if hashes[end] not in there[one]), 12)
            assert behind == (depth if extended is None else extended[number])


def test_predicted_blocks_are_not_there_to_be_fetched_yet() -> None:
    index = PrefixIndex(1000, 1000, 10.0)
    slot = index.add_worker("a")
    index.store("a", [1, 2])
    index.predict("a", [1, 2, 3, 4], 2, 0.0)
    assert index.depths([1, 2, 3, 4])[slot] == 4
    assert index.confirmed_depths([1, 2, 3, 4])[slot] == 2
    assert index.confirmed_depths([])[slot] == 0
    assert index.depths([1, 2, 3, 4])[slot] == 4, "predictions are back"


def prompt_hashes(worker: FakeWorker, prompt: list[int]) -> list[int]:
    return block_hashes(root_hash(worker.card.fingerprint), prompt, BLOCK_SIZE)


async def two_workers(
    start_router: StartRouter, start_worker: StartWorker, **fields: Any
) -> tuple[Any, FakeWorker, FakeWorker]:
    """Two workers that exchange blocks. The first has the prompt."""
    workers = []
    for name in ("warm", "cold"):
        worker = await start_worker(name)
        worker.card.kv_layout, worker.card.kv_block_bytes = fields.get(name, "layout"), 1000
        workers.append(worker)
    router = await start_router(*workers)
    workers[0].store(PROMPT)
    await until(lambda: len(router.fleet.index) == 50 and router.fleet.num_ready == 2)
    return router, workers[0], workers[1]


def request_of(worker: FakeWorker) -> inference_pb2.GenerateRequest:
    (raw,) = worker.requests
    return inference_pb2.GenerateRequest.FromString(raw)


async def test_a_draining_worker_hands_its_blocks_over(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, warm, cold = await two_workers(start_router, start_worker)
    warm.report(draining=True)
    await until(lambda: router.fleet.num_ready == 1)
    told = await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT))
    assert told.workers[0].num_transferred_tokens == told.workers[0].num_cached_tokens == 50 * BLOCK_SIZE
    assert told.workers[0].cost.transfer_ms > 0
    await router.generate(PROMPT)
    request = request_of(cold)
    assert (request.kv_source, request.kv_source_tokens) == (warm.address, 50 * BLOCK_SIZE)
    assert request.belief.num_cached_tokens == 50 * BLOCK_SIZE


async def test_a_worker_that_is_gone_is_no_source(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, warm, cold = await two_workers(start_router, start_worker)
    warm.report(draining=True)
    await until(lambda: router.fleet.num_ready == 1)
    await warm.kill()
    await until(lambda: any(link.state is LinkState.UNREACHABLE for link in router.fleet.links()))
    await router.generate(PROMPT)
    assert request_of(cold).kv_source == ""


@pytest.mark.parametrize("layout", ["", "another"])
async def test_workers_with_other_layouts_exchange_nothing(
    start_router: StartRouter, start_worker: StartWorker, layout: str
) -> None:
    router, warm, cold = await two_workers(start_router, start_worker, cold=layout)
    warm.report(draining=True)
    await until(lambda: router.fleet.num_ready == 1)
    await router.generate(PROMPT)
    assert request_of(cold).kv_source == ""


async def test_callers_cannot_name_a_source(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await router.generate(PROMPT, kv_source="evil:1", kv_source_tokens=100)
    assert (request_of(worker).kv_source, request_of(worker).kv_source_tokens) == ("", 0)


async def test_what_is_on_a_disk_counts_at_its_worker(start_router: StartRouter, start_worker: StartWorker) -> None:
    with_disk, without = await start_worker("with"), await start_worker("without")
    for worker in (with_disk, without):
        worker.card.kv_block_bytes = 1000
        worker.load.disk_bytes_per_s = 1e9
    with_disk.on_disk = prompt_hashes(with_disk, PROMPT)[10:]
    router = await start_router(with_disk, without)
    with_disk.report(stored=prompt_hashes(with_disk, PROMPT)[:10])
    await until(lambda: len(router.fleet.index) == 10)
    assert len(router.fleet.index.disk) == 40
    told = await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT))
    assert told.worker_id == "with"
    assert (told.workers[0].num_cached_tokens, told.workers[0].num_disk_tokens) == (50 * BLOCK_SIZE, 40 * BLOCK_SIZE)
    assert told.workers[0].cost.transfer_ms > 0.0
    assert told.workers[0].num_transferred_tokens == told.workers[1].num_disk_tokens == 0
    await router.generate(PROMPT)
    assert request_of(with_disk).belief.num_cached_tokens == 50 * BLOCK_SIZE
    await with_disk.kill()
    with_disk.on_disk = []
    await with_disk.restart()
    await until(lambda: len(router.fleet.index.disk) == 0)


def test_a_prefix_is_used_up_to_the_last_state() -> None:
    index = BlockIndex(100)
    hashes, slots = list(range(10, 20)), np.array([0, 1, 2])
    index.apply(0, [13, 16, 19], [])
    index.apply(1, [15], [])
    assert index.cut(hashes, slots, np.array([10, 5, 7])).tolist() == [10, 0, 0]
    assert index.cut(hashes, slots, np.array([9, 6, 0])).tolist() == [7, 6, 0]
    index.apply(0, [], [16])
    assert index.cut(hashes, slots, np.array([9, 10, 0])).tolist() == [4, 6, 0]


async def test_blocks_without_a_state_do_not_count_at_a_model_with_recurrent_layers(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The first has more of the prompt in blocks, the second has a state further on."""
    blocks, state = await start_worker("blocks"), await start_worker("state")
    hashes = prompt_hashes(blocks, PROMPT)
    for worker, last in ((blocks, 5), (state, 20)):
        worker.card.state_interval_tokens = 4 * BLOCK_SIZE
        worker.states = [hashes[last - 1]]
    router = await start_router(blocks, state)
    blocks.report(stored=hashes[:30])
    state.report(stored=hashes[:25])
    await until(lambda: len(router.fleet.index) == 55)
    told = await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT))
    assert told.worker_id == "state"
    assert sorted(worker.num_cached_tokens for worker in told.workers) == [5 * BLOCK_SIZE, 20 * BLOCK_SIZE]
    await router.generate(PROMPT)
    assert request_of(state).belief.num_cached_tokens == 20 * BLOCK_SIZE
    await blocks.kill()
    await until(lambda: router.fleet.num_ready == 1)
    blocks.states = []
    await blocks.restart()
    await until(lambda: len(router.fleet.index.states) == 1)


async def test_a_worker_that_learned_to_be_slow_computes(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, warm, cold = await two_workers(start_router, start_worker)
    warm.report(draining=True)
    cold.report(transfer_bytes_per_s=100.0)
    await until(lambda: router.fleet.num_ready == 1)
    await until(lambda: any(link.reported.load.transfer_bytes_per_s for link in router.fleet.links()))
    await router.generate(PROMPT)
    assert request_of(cold).kv_source == ""
