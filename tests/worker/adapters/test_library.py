"""Adapters that are loaded, evicted and unloaded, with the runner's real memory."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from headrace.protos.status import Reason, StatusError
from headrace.worker.adapters.files import AdapterError
from headrace.worker.adapters.library import NO_SLOT, Adapter, AdapterLibrary
from headrace.worker.adapters.peft import read_peft
from headrace.worker.adapters.reader import AdapterReader
from headrace.worker.model.adapter_memory import AdaptedGroup, AdapterMemory
from tests.worker.adapters.files import LAYERS, LINEARS, write_adapter

GROUPS = [AdaptedGroup([linear], f"a{i}", [f"b{i}"]) for i, linear in enumerate(LINEARS)]


class Runner:
    """Memory for adapters, and its contents."""

    def __init__(self, num_slots: int) -> None:
        self.adapters: AdapterMemory | None = AdapterMemory(GROUPS, num_slots, 4, is_bfloat16=False)

    def has(self, adapter: Adapter, path: Path) -> bool:
        """Whether an adapter's slot has the weights of its files."""
        assert self.adapters is not None
        tensors = self.adapters.tensors(adapter.slot + 1)
        weights = read_peft(path, LINEARS).weights
        for i, linear in enumerate(LINEARS):
            a, b = tensors[f"a{i}"].data[adapter.slot], tensors[f"b{i}"].data[adapter.slot]
            if not np.allclose(b @ a.T, weights[linear.name].b @ weights[linear.name].a, atol=1e-4):
                return False
        return True


def library_of(num_slots: int) -> tuple[AdapterLibrary, Runner]:
    runner = Runner(num_slots)
    assert runner.adapters is not None
    return AdapterLibrary(runner, AdapterReader(LAYERS, runner.adapters)), runner


async def test_the_least_recently_used_idle_adapter_gives_way(tmp_path: Path) -> None:
    library, runner = library_of(2)
    paths = [write_adapter(tmp_path / str(seed), seed=seed) for seed in range(3)]
    first, second = [await library.load(str(seed), path) for seed, path in enumerate(paths[:2])]
    await library.acquire(first, 1.0)
    library.release(first)
    third = await library.load("2", paths[2])
    assert (first.is_in_memory, second.is_in_memory, third.is_in_memory) == (True, False, True)
    assert runner.has(first, paths[0])
    assert runner.has(third, paths[2])
    assert await library.acquire(second, 1.0) == second.slot
    assert not first.is_in_memory
    assert runner.has(second, paths[1])
    assert library.counters.num_evictions == 2
    library.check()


async def test_an_adapter_in_use_keeps_its_slot_and_others_wait_their_turn(tmp_path: Path) -> None:
    library, _ = library_of(1)
    first = await library.load("first", write_adapter(tmp_path / "a"))
    second = await library.load("second", write_adapter(tmp_path / "b", seed=1))
    await library.acquire(first, 1.0)
    with pytest.raises(StatusError, match="all 1 adapters in memory are in use") as caught:
        await library.acquire(second, 0.05)
    assert caught.value.reason is Reason.QUEUE_FULL
    waiting = asyncio.create_task(library.acquire(second, 10.0))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    library.release(first)
    assert await waiting == 0
    assert first.slot == NO_SLOT
    library.release(second)
    library.check()


async def test_an_unloaded_adapter_is_unknown_at_once_and_leaves_when_its_requests_have_ended(tmp_path: Path) -> None:
    library, _ = library_of(2)
    adapter = await library.load("a", write_adapter(tmp_path / "a"))
    slot = await library.acquire(adapter, 1.0)
    library.unload("a")
    with pytest.raises(StatusError) as caught:
        library.find("a")
    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert adapter.slot == slot
    library.release(adapter)
    assert adapter.slot == NO_SLOT
    library.check()


async def test_a_name_is_taken_until_it_is_unloaded_or_replaced(tmp_path: Path) -> None:
    library, runner = library_of(3)
    old, new = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", seed=1)
    standing = await library.load("a", old)
    assert await library.load("a", old) is standing, "the same files again change nothing"
    with pytest.raises(StatusError, match="with other files already; unload it first") as caught:
        await library.load("a", new)
    assert caught.value.field == "lora_name"
    await library.acquire(standing, 1.0)
    replaced = await library.load("a", new, in_place=True)
    assert library.find("a") is replaced
    assert runner.has(standing, old), "its request goes on with the old weights"
    assert runner.has(replaced, new)
    library.release(standing)
    library.check()


async def test_files_that_changed_are_not_served_under_the_old_identity(tmp_path: Path) -> None:
    library, _ = library_of(1)
    changed = await library.load("changed", write_adapter(tmp_path / "a"))
    other = await library.load("other", write_adapter(tmp_path / "b", seed=1))
    await library.acquire(other, 1.0)
    library.release(other)
    write_adapter(tmp_path / "a", seed=2)
    with pytest.raises(StatusError, match="have changed since it was loaded; unload it and load it again"):
        await library.acquire(changed, 1.0)
    assert changed.num_requests == 0
    await library.acquire(other, 1.0)
    library.check()


async def test_a_higher_rank_keeps_what_is_in_memory(tmp_path: Path) -> None:
    library, runner = library_of(2)
    paths = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", rank=40, seed=1)
    low, high = await library.load("a", paths[0]), await library.load("b", paths[1])
    assert runner.adapters is not None
    assert runner.adapters.rank == 40
    assert runner.has(low, paths[0])
    assert runner.has(high, paths[1])


async def test_memory_shrinks_when_the_high_rank_has_left(tmp_path: Path) -> None:
    """So one adapter of a high rank makes steps dearer only while it is in memory."""
    library, runner = library_of(3)
    paths = [write_adapter(tmp_path / str(seed), rank=rank, seed=seed) for seed, rank in enumerate((6, 60, 12, 30))]
    low, high = await library.load("low", paths[0]), await library.load("high", paths[1])
    assert await library.acquire(low, 1.0) == low.slot
    assert runner.adapters is not None
    assert runner.adapters.rank == 64
    third = await library.load("third", paths[2])
    assert runner.adapters.rank == 64, "the high rank is in memory"
    library.unload("high")
    fourth = await library.load("fourth", paths[3])
    assert high.slot == NO_SLOT
    assert runner.adapters.rank == 32
    for adapter, path in ((low, paths[0]), (third, paths[2]), (fourth, paths[3])):
        assert runner.has(adapter, path)
    library.unload("fourth")
    again = await library.load("again", paths[0])
    assert runner.adapters.rank == 16
    assert all(runner.has(adapter, path) for adapter, path in ((low, paths[0]), (third, paths[2]), (again, paths[0])))
    library.release(low)
    library.check()


async def test_a_load_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    library, _ = library_of(1)
    with pytest.raises(StatusError, match="use_dora") as caught:
        await library.load("a", write_adapter(tmp_path / "a", use_dora=True))
    assert caught.value.field == "lora_path"
    assert library.adapters() == []
    assert (await library.load("a", write_adapter(tmp_path / "a"))).is_in_memory


async def test_many_adapters_churn_through_a_few_slots(tmp_path: Path) -> None:
    """With 200 adapters, 8 slots and 16 requests at a time, each request finds its own weights, and none starves."""
    library, runner = library_of(8)
    paths = {str(seed): write_adapter(tmp_path / str(seed), rank=1 + seed % 12, seed=seed) for seed in range(200)}
    for name, path in paths.items():
        library.load_now(name, path)
    random_number = random.Random(3)
    running = 0

    async def ask(name: str) -> None:
        nonlocal running
        adapter = library.find(name)
        slot = await library.acquire(adapter, 30.0)
        running += 1
        await asyncio.sleep(random_number.uniform(0, 0.003))
        assert adapter.slot == slot
        assert runner.has(adapter, paths[name])
        running -= 1
        library.release(adapter)

    for _ in range(10):
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(ask(str(int(random_number.paretovariate(0.6)) % 200)))
        library.check()
    assert running == 0
    assert library.counters.num_evictions > 20
    assert sum(adapter.slot != NO_SLOT for adapter in library.adapters()) == 8


class Vanishing(AdapterReader):
    """Reads files that nobody can read again."""

    def write(self, slot: int, path: Path, sha256: str) -> None:
        raise AdapterError("the file is gone")


@pytest.mark.parametrize("is_in_use", [False, True])
async def test_an_adapter_that_cannot_be_replaced_stays(tmp_path: Path, is_in_use: bool) -> None:
    library, runner = library_of(2)
    old, new = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", seed=1)
    standing = await library.load("a", old)
    if is_in_use:
        await library.acquire(standing, 1.0)
    reader = library._reader
    assert runner.adapters is not None
    library._reader = Vanishing(LAYERS, runner.adapters)
    with pytest.raises(StatusError, match="the file is gone"):
        await library.load("a", new, in_place=True)
    library._reader = reader
    if is_in_use:
        library.release(standing)
    assert library.find("a") is standing
    await library.acquire(standing, 1.0)
    assert runner.has(standing, old)
    library.release(standing)
    library.unload("a")
    assert standing.slot == NO_SLOT
    library.check()


async def test_routers_hear_of_an_adapter_whose_caller_left_while_it_was_written(tmp_path: Path) -> None:
    library, _ = library_of(1)
    told: list[tuple[str, bool]] = []
    library.listen(lambda name: told.append((name, library.known("a") is not None)))
    loading = asyncio.create_task(library.load("a", write_adapter(tmp_path / "a")))
    while library.known("a") is None:
        await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert ("a", True) in told
    adapter = library.find("a")
    assert await library.acquire(adapter, 5.0) == adapter.slot
    library.release(adapter)
    library.check()


async def test_routers_hear_of_a_new_adapter_once_and_then_that_it_is_in_memory(tmp_path: Path) -> None:
    library, _ = library_of(1)
    told: list[tuple[str, bool]] = []
    library.listen(lambda name: told.append((name, library.find("a").is_in_memory)))
    await library.load("a", write_adapter(tmp_path / "a"))
    assert told == [("a", False), ("", True)]


async def test_an_adapter_that_cannot_be_written_is_not_known(tmp_path: Path) -> None:
    library, runner = library_of(1)
    path = write_adapter(tmp_path / "a")
    found = library._reader.read(path)
    reader = library._reader
    assert runner.adapters is not None
    library._reader = Vanishing(LAYERS, runner.adapters)
    with pytest.raises(StatusError, match="the adapter cannot be loaded: the file is gone"):
        await library.load("a", path)
    assert library.adapters() == []
    library._reader = reader
    assert (await library.load("a", path)).sha256 == found.sha256
    assert library.in_memory() == ["a"]
    library.check()
