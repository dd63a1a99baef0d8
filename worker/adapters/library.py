"""The adapters that a worker serves, and which of them are in memory.

    load    --> known, and in memory if there is room
    acquire --> in memory, for as long as the request runs; the least recently used one without requests gives way
    unload  --> unknown to new requests; its slot becomes free when its last request has ended

A `Reader` reads the files and writes slots, while steps are computed. Files are read again whenever an adapter returns
to memory, and refused if they have changed: the hash of their content is part of block hashes and of the identity of
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from headrace.common.host_memory import GIB, available_bytes
from headrace.protos.status import Reason, StatusError
from headrace.worker.adapters.files import AdapterError
from headrace.worker.adapters.reader import FilesChangedError, Found, Reader
from headrace.worker.model.adapter_memory import RANK_STEP, AdapterMemory

log = logging.getLogger(__name__)

# The memory of adapters may grow by at most this share of the available memory.
_MOST_MEMORY = 0.8
# The memory shrinks if no adapter in it needs more than this share of its ranks.
_SHRINKS_AT = 0.5
_RETRY_S = 1.0
NO_SLOT = -1
P = ParamSpec("P")
T = TypeVar("T")


class Runner(Protocol):
    """The part of the model runner that the library needs."""

    adapters: AdapterMemory | None


class _NoRoomError(Exception):
    """There is not enough memory for an adapter. The text says what to do."""


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
    """Totals since the start: adapters that were loaded into memory, adapters that were evicted to make room for them,
    and the seconds that loading took."""

    num_loads: int = 0
    num_evictions: int = 0
    load_s: float = 0.0


@dataclass(slots=True)
class _Slots:
    """The assignment of adapters to slots."""

    owners: list[Adapter | None]
    waiters: list[asyncio.Future[None]] = field(default_factory=list)


class AdapterLibrary:
    """Adapters by name. The number in memory is at most the number of slots of `runner.adapters`. The reader writes to
    that memory. For one event loop; `load_now` may be called before there is one."""

    def __init__(self, runner: Runner, reader: Reader) -> None:
        assert runner.adapters is not None, "the runner has memory for adapters"
        self._listeners: list[Callable[[str], None]] = []
        self.counters = AdapterCounters()
        self._runner = runner
        self._reader = reader
        self._adapters: dict[str, Adapter] = {}
        self._slots = _Slots([None] * runner.adapters.num_slots)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    # -- what there is ----------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` from now on with an adapter's name when it was added, replaced or removed, and with an empty
        name when other adapters are in memory."""
        self._listeners.append(listener)

    def _tell(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)

    @property
    def num_slots(self) -> int:
        """The number of adapters that fit into memory."""
        return len(self._slots.owners)

    def adapters(self) -> list[Adapter]:
        """All known adapters, in memory or not, sorted by name."""
        return [adapter for _, adapter in sorted(self._adapters.items())]

    def in_memory(self) -> list[str]:
        """The names of the adapters in memory, sorted. Unloaded ones that requests still use are left out."""
        return sorted(
            owner.name for owner in self._slots.owners if owner and owner.is_in_memory and not owner.is_unloaded
        )

    def known(self, name: str) -> Adapter | None:
        """The adapter of this name; None if there is none."""
        return self._adapters.get(name)

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
        """Read and register an adapter before serving begins, and put it into memory if there is room.

        Raises AdapterError if its files cannot be used, or its weights do not fit into memory.
        """
        adapter = self._new(name, path, self._reader.read(path))
        free = [slot for slot, owner in enumerate(self._slots.owners) if owner is None]
        if free:
            try:
                self._write(free[0], adapter)
            except _NoRoomError as error:
                raise AdapterError(str(error)) from None
            self._slots.owners[free[0]], adapter.slot = adapter, free[0]
        self._adapters[name] = adapter

    async def load(self, name: str, path: Path, *, in_place: bool = False) -> Adapter:
        """Register an adapter, and put it into memory unless all slots are in use. With `in_place` it replaces one of
        the same name, unless it does not fit there. StatusError (INVALID_FIELD)."""
        standing = self._adapters.get(name)
        if standing is not None and not in_place:
            if standing.path == path:
                found = await self._read(path)
                if found.sha256 == standing.sha256:
                    return standing
            raise StatusError(
                Reason.INVALID_FIELD,
                f"there is an adapter '{name[:100]}' with other files already; unload it first, or set load_inplace",
                field="lora_name",
            )
        found = await self._read(path)
        if self._adapters.get(name) is not standing:
            raise StatusError(Reason.INVALID_FIELD, f"'{name[:100]}' is being loaded twice", field="lora_name")
        if standing is not None:
            self._retire(standing)
        adapter = self._adapters[name] = self._new(name, path, found)
        self._tell(name)  # now: the caller may leave while it is written; `_put` tells when it is in memory
        slot = self._take_slot(adapter)
        if slot is not None:
            adapter.loading = asyncio.create_task(self._put(adapter, slot))
            try:
                await self._loaded(adapter)
            except StatusError:
                if self._adapters.get(name) is adapter:
                    self._retire(adapter)
                    if standing is not None:
                        self._adapters[name], standing.is_unloaded = standing, False
                self._tell(name)
                raise
        log.info("adapter %s of rank %d is known, from %s", name, adapter.rank, path)
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Its running requests continue. StatusError (MODEL_NOT_FOUND)."""
        self._retire(self.find(name))
        self._tell(name)
        log.info("adapter %s is unloaded", name)

    # -- use --------------------------------------------------------------------------------------------------------

    async def acquire(self, adapter: Adapter, timeout_s: float) -> int:
        """Hold an adapter in memory for a request, until `release`. Returns its slot. Reads it from its files if
        necessary, and waits up to `timeout_s` for a slot. StatusError: QUEUE_FULL, INTERNAL if its files have
        changed."""
        adapter.num_requests += 1
        adapter.used_s = time.monotonic()
        try:
            if not adapter.is_in_memory:
                await self._bring(adapter, timeout_s)
        except BaseException:
            self.release(adapter)
            raise
        return adapter.slot

    def release(self, adapter: Adapter) -> None:
        """Give up the hold on an adapter that `acquire` gave to a request. It stays in memory until another needs its
        slot."""
        assert adapter.num_requests > 0
        adapter.num_requests -= 1
        adapter.used_s = time.monotonic()
        if not adapter.num_requests and adapter.loading is None:
            if adapter.is_unloaded and adapter.slot != NO_SLOT:
                self._empty(adapter)
            self._wake()

    def check(self) -> None:
        """Assert the invariants. For tests."""
        for slot, owner in enumerate(self._slots.owners):
            assert owner is None or owner.slot == slot
        for adapter in self._adapters.values():
            assert adapter.slot == NO_SLOT or self._slots.owners[adapter.slot] is adapter
            assert not adapter.is_unloaded

    async def _bring(self, adapter: Adapter, timeout_s: float) -> None:
        """Read an adapter into memory, or wait for a task that already does so."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while not adapter.is_in_memory:
            if adapter.loading is None:
                slot = self._take_slot(adapter)
                if slot is None:
                    await self._wait_for_slot(until_s)
                    continue
                adapter.loading = asyncio.create_task(self._put(adapter, slot))
            await self._loaded(adapter)

    async def _wait_for_slot(self, until_s: float) -> None:
        """Wait until a slot may be free, at most until this time of the event loop. StatusError (QUEUE_FULL)."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._next_release()
        except TimeoutError:
            raise StatusError(
                Reason.QUEUE_FULL,
                f"all {self.num_slots} adapters in memory are in use; try again later, or serve with a larger "
                "--max-adapters",
                retry_after_s=_RETRY_S,
            ) from None

    async def _loaded(self, adapter: Adapter) -> None:
        """Wait until an adapter is in memory. Re-raises the exception of loading it."""
        if adapter.loading is not None:
            await asyncio.shield(adapter.loading)

    def _take_slot(self, adapter: Adapter) -> int | None:
        """A slot for an adapter: a free one, or the slot of the least recently used adapter without requests. None if
        all slots are in use."""
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

    async def _put(self, adapter: Adapter, slot: int) -> None:
        """Write an adapter into its slot, in the thread."""
        start_s = time.monotonic()
        try:
            await self._in_thread(self._write, slot, adapter)
            self.counters.num_loads += 1
            self.counters.load_s += time.monotonic() - start_s
        except BaseException as error:
            self._empty(adapter)
            raise _status_of(error, adapter) from None
        finally:
            adapter.loading = None
            if adapter.is_unloaded and not adapter.num_requests and adapter.slot != NO_SLOT:
                self._empty(adapter)
            self._wake()
            self._tell("")

    async def _read(self, path: Path) -> Found:
        try:
            return await self._in_thread(self._reader.read, path)
        except AdapterError as error:
            raise StatusError(
                Reason.INVALID_FIELD, f"the adapter cannot be loaded: {error}", field="lora_path"
            ) from None

    async def _in_thread(self, function: Callable[P, T], *arguments: P.args, **fields: P.kwargs) -> T:
        call = partial(function, *arguments, **fields)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _write(self, slot: int, adapter: Adapter) -> None:
        """Thread: write an adapter into a slot that no request uses. A higher rank needs new memory. The memory shrinks
        if all adapters in it need at most half of its ranks. AdapterError, _NoRoomError."""
        memory = self._runner.adapters
        assert memory is not None
        others = {index: owner.rank for index, owner in enumerate(self._slots.owners) if owner and index != slot}
        needed = max(adapter.rank, *others.values(), RANK_STEP)
        if adapter.rank > memory.rank or needed <= _SHRINKS_AT * memory.rank:
            self._runner.adapters = self._moved(memory, needed, list(others))
        self._reader.write(slot, adapter.path, adapter.sha256)

    def _moved(self, memory: AdapterMemory, rank: int, used: Sequence[int]) -> AdapterMemory:
        """Thread: memory with room for `rank` ranks, with a copy of the slots in use. The reader writes to it from now
        on."""
        needed = memory.slot_bytes * memory.num_slots * rank // memory.rank
        if needed > _MOST_MEMORY * available_bytes():
            raise _NoRoomError(
                f"{memory.num_slots} adapters of rank {rank} need {needed / GIB:.1f} GiB, and "
                f"{available_bytes() / GIB:.1f} GiB are available; serve with a smaller --max-adapters"
            )
        moved = memory.with_rank(rank, [])
        self._reader.move(moved, used)
        return moved

    def _new(self, name: str, path: Path, found: Found) -> Adapter:
        return Adapter(name, path, found.sha256, found.rank, found.num_bytes, int(time.time()), used_s=time.monotonic())

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


def _status_of(error: BaseException, adapter: Adapter) -> BaseException:
    """The error for callers of an adapter that could not be written."""
    if isinstance(error, FilesChangedError):
        text = f"the files of adapter '{adapter.name}' have changed since it was loaded; unload it and load it again"
        return StatusError(Reason.INTERNAL, text)
    if isinstance(error, AdapterError):
        return StatusError(Reason.INTERNAL, f"the adapter cannot be loaded: {error}")
    if isinstance(error, (_NoRoomError, MemoryError)):
        return StatusError(Reason.NO_CAPACITY, str(error), retry_after_s=_RETRY_S)
    return error
