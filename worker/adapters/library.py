"""The adapters that a worker serves, and which of them are in memory.

    load    --> known, and in memory if there is room
    acquire --> in memory, for as long as the request runs; the least recently used one without requests gives way
    unload  --> unknown to new requests; its slot becomes free when its last request has ended

Files are read and copied in a thread of their own, while steps are computed. They are read again whenever an adapter
returns to memory, and refused if they have changed: the hash of their content is part of block hashes and of the
identity of answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.protos.status import Reason, StatusError
from headrace.worker.adapters.files import AdapterError, AdapterFiles
from headrace.worker.adapters.peft import read_peft
from headrace.worker.kv.memory import GIB, available_bytes
from headrace.worker.model.adapter_memory import AdapterMemory, Linear

log = logging.getLogger(__name__)

# The memory of adapters may grow by at most this share of the available memory.
_MOST_MEMORY = 0.8
_RETRY_S = 1.0
NO_SLOT = -1


class Runner(Protocol):
    """The part of the model runner that the library needs."""

    adapters: AdapterMemory | None

    @property
    def linears(self) -> Sequence[Linear]:
        """The layers that adapters may change."""
        ...


@dataclass(slots=True, eq=False)
class Adapter:
    """A known adapter. `num_requests` hold it in its slot."""

    name: str
    path: Path
    sha256: str
    rank: int
    num_bytes: int
    created_s: int
    slot: int = NO_SLOT
    num_requests: int = 0
    used_s: float = 0.0
    loading: asyncio.Task[None] | None = None
    is_unloaded: bool = False

    @property
    def is_in_memory(self) -> bool:
        """Whether the adapter is in memory, so that requests can begin at once."""
        return self.slot != NO_SLOT and self.loading is None


@dataclass(slots=True)
class AdapterCounters:
    """Totals since the start."""

    num_loads: int = 0
    num_evictions: int = 0
    load_s: float = 0.0


@dataclass(slots=True)
class _Slots:
    """The assignment of adapters to slots."""

    owners: list[Adapter | None]
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


class AdapterLibrary:
    """Adapters by name, at most as many in memory as `runner.adapters` has slots. For one event loop; `load_now` may
    be called before there is one. `on_change` is called when the list has changed, or, with True, what is in memory."""

    def __init__(self, runner: Runner, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert runner.adapters is not None, "the runner has memory for adapters"
        self.on_change: Callable[[bool], None] = lambda only_in_memory: None
        self.counters = AdapterCounters()
        self._runner = runner
        self._clock = clock
        self._adapters: dict[str, Adapter] = {}
        self._slots = _Slots([None] * runner.adapters.num_slots)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """The number of adapters that fit into memory."""
        return len(self._slots.owners)

    def adapters(self) -> list[Adapter]:
        """All known adapters, by name."""
        return [adapter for _, adapter in sorted(self._adapters.items())]

    def find(self, name: str) -> Adapter:
        """The adapter of this name. StatusError (MODEL_NOT_FOUND)."""
        adapter = self._adapters.get(name)
        if adapter is None:
            known = ", ".join(f"'{each}'" for each in sorted(self._adapters)[:20]) or "none"
            raise StatusError(
                Reason.MODEL_NOT_FOUND, f"no adapter '{name[:100]}' here; there is {known}", field="adapter"
            )
        return adapter

    # -- loading ----------------------------------------------------------------------------------------------------

    def load_now(self, name: str, path: Path) -> None:
        """Read and register an adapter before serving begins, and put it into memory if there is room. AdapterError."""
        files = read_peft(path, self._runner.linears)
        adapter = self._new(name, path, files)
        free = [slot for slot, owner in enumerate(self._slots.owners) if owner is None]
        if free:
            self._write(free[0], files)
            self._slots.owners[free[0]], adapter.slot = adapter, free[0]
        self._adapters[name] = adapter

    async def load(self, name: str, path: Path, *, in_place: bool = False) -> Adapter:
        """Register an adapter, and put it into memory unless all slots are in use. With `in_place` it replaces one of
        the same name. StatusError (INVALID_FIELD)."""
        standing = self._adapters.get(name)
        if standing is not None and not in_place:
            if standing.path == path:
                files = await self._read(path)
                if files.sha256 == standing.sha256:
                    return standing
            raise StatusError(
                Reason.INVALID_FIELD,
                f"there is an adapter '{name[:100]}' with other files already; unload it first, or set load_inplace",
                field="lora_name",
            )
        files = await self._read(path)
        if self._adapters.get(name) is not standing:
            raise StatusError(Reason.INVALID_FIELD, f"'{name[:100]}' is being loaded twice", field="lora_name")
        if standing is not None:
            self._retire(standing)
        adapter = self._adapters[name] = self._new(name, path, files)
        slot = self._take_slot(adapter)
        if slot is not None:
            adapter.loading = asyncio.create_task(self._put(adapter, slot, files))
            await self._loaded(adapter)
        self.on_change(False)
        log.info("adapter %s of rank %d is known, from %s", name, adapter.rank, path)
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Its running requests continue. StatusError (MODEL_NOT_FOUND)."""
        self._retire(self.find(name))
        self.on_change(False)
        log.info("adapter %s is unloaded", name)

    # -- use --------------------------------------------------------------------------------------------------------

    async def acquire(self, adapter: Adapter, timeout_s: float) -> int:
        """Hold an adapter in memory for a request, until `release`; its slot. It is read from its files if need be, and
        waits up to `timeout_s` for a slot. StatusError: QUEUE_FULL, INTERNAL if its files have changed."""
        adapter.num_requests += 1
        adapter.used_s = self._clock()
        try:
            if not adapter.is_in_memory:
                await self._bring(adapter, timeout_s)
        except BaseException:
            self.release(adapter)
            raise
        return adapter.slot

    def release(self, adapter: Adapter) -> None:
        """Release the adapter of a request that has ended."""
        assert adapter.num_requests > 0
        adapter.num_requests -= 1
        adapter.used_s = self._clock()
        if not adapter.num_requests and adapter.loading is None:
            if adapter.is_unloaded and adapter.slot != NO_SLOT:
                self._empty(adapter)
            self._wake()

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Assert the invariants. For tests."""
        for slot, owner in enumerate(self._slots.owners):
            assert owner is None or owner.slot == slot
        for adapter in self._adapters.values():
            assert adapter.slot == NO_SLOT or self._slots.owners[adapter.slot] is adapter
            assert not adapter.is_unloaded

    async def _bring(self, adapter: Adapter, timeout_s: float) -> None:
        """Read an adapter into memory, or wait for a task that already does."""
        try:
            async with asyncio.timeout(timeout_s):
                while not adapter.is_in_memory:
                    if adapter.loading is None:
                        slot = self._take_slot(adapter)
                        if slot is None:
                            await self._next_release()
                            continue
                        adapter.loading = asyncio.create_task(self._put(adapter, slot, None))
                    await self._loaded(adapter)
        except TimeoutError:
            raise StatusError(
                Reason.QUEUE_FULL,
                f"all {self.num_slots} adapters in memory are in use; try again later, or serve with a larger "
                "--max-adapters",
                retry_after_s=_RETRY_S,
            ) from None

    async def _loaded(self, adapter: Adapter) -> None:
        """Wait until an adapter is in memory. Raises what loading it raised."""
        if adapter.loading is not None:
            await asyncio.shield(adapter.loading)

    def _take_slot(self, adapter: Adapter) -> int | None:
        """A free slot, or that of the least recently used adapter without requests, for an adapter; None if all are in
        use."""
        owners = self._slots.owners
        slot = next((slot for slot, owner in enumerate(owners) if owner is None), NO_SLOT)
        if slot == NO_SLOT:
            idle = [owner for owner in owners if owner and not owner.num_requests and owner.loading is None]
            if not idle:
                return None
            slot = self._empty(min(idle, key=lambda owner: owner.used_s))
            self.counters.num_evictions += 1
        owners[slot], adapter.slot = adapter, slot
        return slot

    async def _put(self, adapter: Adapter, slot: int, files: AdapterFiles | None) -> None:
        """Write an adapter into its slot, in the thread, after reading it unless `files` are given."""
        start_s = time.monotonic()
        try:
            if files is None:
                files = await self._read(adapter.path, Reason.INTERNAL)
                if files.sha256 != adapter.sha256:
                    raise StatusError(
                        Reason.INTERNAL,
                        f"the files of adapter '{adapter.name}' have changed since it was loaded; unload it and load "
                        "it again",
                    )
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._executor, self._write, slot, files)
            except AdapterError as error:
                raise StatusError(Reason.NO_CAPACITY, str(error), retry_after_s=_RETRY_S) from None
            self.counters.num_loads += 1
            self.counters.load_s += time.monotonic() - start_s
        except BaseException:
            self._empty(adapter)
            raise
        finally:
            adapter.loading = None
            if adapter.is_unloaded and not adapter.num_requests and adapter.slot != NO_SLOT:
                self._empty(adapter)
            self._wake()
            self.on_change(True)

    async def _read(self, path: Path, reason: Reason = Reason.INVALID_FIELD) -> AdapterFiles:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, read_peft, path, self._runner.linears)
        except AdapterError as error:
            field = "lora_path" if reason is Reason.INVALID_FIELD else None
            raise StatusError(reason, f"the adapter cannot be loaded: {error}", field=field) from None

    def _write(self, slot: int, files: AdapterFiles) -> None:
        """Thread: write weights into a slot that no request uses. A higher rank needs new memory."""
        memory = self._runner.adapters
        assert memory is not None
        if files.rank > memory.rank:
            needed = memory.slot_bytes * memory.num_slots * files.rank // memory.rank
            if needed > _MOST_MEMORY * available_bytes():
                raise AdapterError(
                    f"{memory.num_slots} adapters of rank {files.rank} need {needed / GIB:.1f} GiB, and "
                    f"{available_bytes() / GIB:.1f} GiB are available; serve with a smaller --max-adapters"
                )
            used = [index for index, owner in enumerate(self._slots.owners) if owner is not None and index != slot]
            memory = memory.with_rank(files.rank, used)
        memory.write(slot, files.weights)
        self._runner.adapters = memory

    def _new(self, name: str, path: Path, files: AdapterFiles) -> Adapter:
        return Adapter(name, path, files.sha256, files.rank, files.num_bytes, int(time.time()), used_s=self._clock())

    def _retire(self, adapter: Adapter) -> None:
        del self._adapters[adapter.name]
        adapter.is_unloaded = True
        if not adapter.num_requests and adapter.loading is None and adapter.slot != NO_SLOT:
            self._empty(adapter)
            self._wake()

    def _empty(self, adapter: Adapter) -> int:
        """Remove an adapter from its slot."""
        slot, adapter.slot = adapter.slot, NO_SLOT
        self._slots.owners[slot] = None
        return slot

    async def _next_release(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slots.waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._slots.waiters:
                self._slots.waiters.remove(waiter)

    def _wake(self) -> None:
        """Wake the tasks that wait for a slot, in order."""
        waiters, self._slots.waiters = self._slots.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
