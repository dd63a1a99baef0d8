"""Reports to watchers of a worker: the findable blocks, first as a snapshot and then as changes, and the load.

Findable blocks are closed under prefixes (see block_pool), and so are the blocks that a watcher knows at any time: the
beginning of a chain is reported first when blocks are added, and last when they are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from headrace.common.kernel_files import format_list
from headrace.common.observers import Observers
from headrace.protos import worker_pb2
from headrace.protos.inference_pb2 import Belief
from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.mailbox import EngineReport, LearnedCost
from headrace.worker.host.binding import Binding, RankReport, StageReport, rank_message
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.arrivals import Arrivals, is_contradicted

# The shortest time between two messages, so that a busy worker does not send one for each step.
MIN_INTERVAL_S = 0.02
# Hashes in one message. At 8 bytes each this is well below the limit of a message.
MAX_HASHES = 65536
# Additional hashes of the disk, and of states.
MAX_DISK_HASHES = 16384
# Placements that are kept for a slow watcher. Routers learn of older ones by their first tokens.
MAX_PLACEMENTS = 65536


class _Changes:
    """The unsent changes of a watcher: hash -> whether the block is on the disk, or the state is saved."""

    def __init__(self, present: dict[int, None]) -> None:
        self._is_new = True
        self._changes = dict.fromkeys(present, True)

    def __len__(self) -> int:
        return len(self._changes)

    def note(self, changes: dict[int, bool]) -> None:
        self._changes.update(changes)

    def take(self) -> worker_pb2.KvEvents | None:
        """The next at most MAX_DISK_HASHES changes; None if there are none."""
        if not self._changes:
            return None
        hashes = list(self._changes)[:MAX_DISK_HASHES]
        events = worker_pb2.KvEvents(reset=self._is_new)
        self._is_new = False
        for block_hash in hashes:
            (events.stored if self._changes.pop(block_hash) else events.evicted).append(block_hash)
        return events


class _Watcher:
    """The unsent changes of one watcher, in order. A hash that was stored and then evicted is in neither set."""

    def __init__(
        self,
        findable: dict[int, None],
        heartbeat_s: float = 0.5,
        interval_s: float = 0.0,
        watcher_id: int = 0,
        *,
        on_disk: dict[int, None] = {},  # noqa: B006  it is only read
        states: dict[int, None] = {},  # noqa: B006  it is only read
    ) -> None:
        self.watcher_id = watcher_id
        self.heartbeat_s = heartbeat_s
        self.adjust(interval_s)
        self.reset = True
        self.stored = findable.copy()
        self.evicted: dict[int, None] = {}
        self.disk = _Changes(on_disk)
        self.states = _Changes(states)
        self.placement_ids: deque[int] = deque(maxlen=MAX_PLACEMENTS)
        self.adapters = self.adapters_in_memory = True
        """Whether to send it all adapters, and the adapters in memory."""
        self.changed_adapters: dict[str, None] = {}
        """Names of other adapters to send to it."""
        self.changed = asyncio.Event()

    def adjust(self, interval_s: float) -> None:
        """Send messages at least `interval_s` apart, between MIN_INTERVAL_S and half a heartbeat."""
        self.interval_s = min(max(interval_s, MIN_INTERVAL_S), max(self.heartbeat_s / 2, MIN_INTERVAL_S))

    def note(self, report: EngineReport) -> None:
        for block_hash in report.evicted:
            if block_hash in self.stored:
                del self.stored[block_hash]
            else:
                self.evicted[block_hash] = None
        for block_hash in report.stored:
            if block_hash in self.evicted:
                del self.evicted[block_hash]
            else:
                self.stored[block_hash] = None
        self.disk.note(report.disk_changes)
        self.states.note(report.state_changes)
        self.changed.set()

    def take_events(self) -> worker_pb2.KvEvents | None:
        """The next at most MAX_HASHES changes, evictions first; None if there are none."""
        if not (self.reset or self.stored or self.evicted):
            return None
        evicted = list(self.evicted)[:MAX_HASHES]
        stored = list(self.stored)[: MAX_HASHES - len(evicted)]
        events = worker_pb2.KvEvents(reset=self.reset, stored=stored, evicted=evicted)
        self.reset = False
        for block_hash in evicted:
            del self.evicted[block_hash]
        for block_hash in stored:
            del self.stored[block_hash]
        return events

    def note_adapters(self, name: str) -> None:
        """The adapter of this name has changed. With an empty name, only the adapters in memory have changed."""
        self.adapters_in_memory = True
        if name:
            self.changed_adapters[name] = None
        self.changed.set()

    def take_placements(self) -> list[int]:
        """The placements that arrived since the last message."""
        placement_ids = list(self.placement_ids)
        self.placement_ids.clear()
        return placement_ids


class WatchHub:
    """Keeps the latest load and the findable hashes, and reports them to any number of watchers. Used by the event loop
    only."""

    def __init__(
        self,
        epoch: int,
        max_num_seqs: int,
        block_size: int,
        adapters: AdapterDesk | None = None,
        ranks: Callable[[], Sequence[RankReport]] = tuple,
        stages: Callable[[], Sequence[StageReport]] = tuple,
    ) -> None:
        """`epoch` tells this process from others with the same address. Without `adapters`, none are reported. `ranks`
        and `stages` read those of a divided model, from any thread."""
        self.epoch = epoch
        self.ranks = ranks
        self.stages = stages
        self._adapters = adapters
        if adapters is not None:
            adapters.listen(self._adapters_changed)
        self._arrivals = Arrivals(block_size)
        self._reported_s = time.monotonic()
        self._version = 1
        self.report = EngineReport()
        self.draining = False
        self.is_stopping = False
        """Whether the process is ending, so that draining cannot be undone."""
        self.binding: Binding | None = None
        self.is_published: bool | None = None
        """Whether the lease in Redis is renewed; None without Redis."""
        self._max_num_seqs = max_num_seqs
        self.block_size = block_size
        """Tokens of a KV block."""
        self.findable: dict[int, None] = {}
        """The findable hashes, in the order in which they became findable."""
        self.on_disk: dict[int, None] = {}
        """The hashes that are known to be on the disk."""
        self.states: dict[int, None] = {}
        """The hashes of blocks behind which a state is saved."""
        self.reports: Observers[EngineReport] = Observers()
        """Told of each report of the engine."""
        self._watchers: set[_Watcher] = set()
        self.silent_because: str | None = None
        """Why nothing is sent to watchers at the moment; None if it is."""
        self._may_speak = asyncio.Event()
        self._may_speak.set()

    @property
    def num_routers(self) -> int:
        """How many routers watch this worker. Watchers that name no id are not counted."""
        return len({watcher.watcher_id for watcher in self._watchers if watcher.watcher_id})

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start: those of the latest report, and those of adapters."""
        return self.report.counters | ({} if self._adapters is None else self._adapters.counters())

    def adapters_in_memory(self) -> tuple[list[str], int]:
        """Names of the LoRA adapters in memory, and how many fit; none and 0 without adapters."""
        if self._adapters is None:
            return [], 0
        return list(self._adapters.in_memory().names), self._adapters.list().max_in_memory

    def publish(self, report: EngineReport) -> None:
        """Take the engine's report of a step, and queue its changes for each watcher."""
        self.report = report
        self._arrivals.shown(report.num_taken)
        self._reported_s = time.monotonic()
        self._version += 1
        for block_hash in report.evicted:
            self.findable.pop(block_hash, None)
        self.findable.update(dict.fromkeys(report.stored))
        for present, changes in ((self.on_disk, report.disk_changes), (self.states, report.state_changes)):
            for block_hash, is_there in changes.items():
                if is_there:
                    present[block_hash] = None
                else:
                    present.pop(block_hash, None)
        for watcher in self._watchers:
            watcher.note(report)
        self.reports.tell(report)

    @contextlib.contextmanager
    def expecting(self, num_tokens: int, belief: Belief) -> Iterator[None]:
        """Context manager: a request has arrived, and is handed to the engine inside the block, unless the block
        raises. It counts as an arrival until a report of the engine includes it."""
        arrival = self._arrivals.expect(num_tokens, belief.num_cached_tokens)
        for watcher in self._watchers:
            if belief.watcher_id and watcher.watcher_id == belief.watcher_id:
                watcher.placement_ids.append(belief.placement_id)
        self._note_change()
        try:
            yield
        except BaseException:
            self._arrivals.drop(arrival)
            self._note_change()
            raise
        self._arrivals.hand_over(arrival)

    def _note_change(self) -> None:
        """Wake all watchers, because the load has changed."""
        self._version += 1
        for watcher in self._watchers:
            watcher.changed.set()

    def contradiction(self, belief: Belief) -> StatusError | None:
        """The error that returns a request to its router, if there is more work here than the router believed."""
        load, arrivals = self.report.load, self._arrivals
        num_requests = load.num_running + load.num_waiting + arrivals.num_requests
        if not is_contradicted(belief, num_requests, load.num_uncached_tokens + arrivals.num_tokens):
            return None
        detail = worker_pb2.GivenBack(epoch=self.epoch, load=self.load())
        for watcher in self._watchers:
            if watcher.watcher_id == belief.watcher_id:
                detail.placement_ids.extend(watcher.placement_ids)
        problem = f"the worker has {num_requests} requests, {belief.num_requests} were believed; place it again"
        return StatusError(Reason.GIVEN_BACK, problem, detail=detail)

    def bind(self, binding: Binding) -> None:
        """Store the placement of threads and memory. Watchers get it with the next report."""
        self.binding = binding

    def note_lease(self, is_published: bool) -> None:
        """Store whether the lease in Redis was renewed. Exported as a metric."""
        self.is_published = is_published

    def _adapters_changed(self, name: str) -> None:
        """The adapter of this name is new, replaced or unknown now. With an empty name, the adapters in memory have
        changed."""
        self._version += 1
        for watcher in self._watchers:
            watcher.note_adapters(name)

    def _take_adapters(self, watcher: _Watcher) -> dict[str, Any]:
        """The adapter fields of the next message."""
        is_whole = watcher.adapters
        in_memory = watcher.adapters_in_memory
        changed = watcher.changed_adapters
        watcher.adapters = False
        watcher.adapters_in_memory = False
        watcher.changed_adapters = {}
        if is_whole:
            return {"adapters": worker_pb2.AdapterList() if self._adapters is None else self._adapters.list()}
        fields: dict[str, Any] = {}
        if self._adapters is None:
            return fields
        if changed:
            found = {name: self._adapters.describe(name) for name in changed}
            fields["adapter_changes"] = worker_pb2.AdapterChanges(
                known=[adapter for adapter in found.values() if adapter is not None],
                unloaded=[name for name, adapter in found.items() if adapter is None],
            )
        if in_memory:
            fields["adapters_in_memory"] = self._adapters.in_memory()
        return fields

    def drain(self, draining: bool = True) -> None:
        """Tell all watchers whether new requests are accepted. Once the hub is stopped, none are any more."""
        self.draining = draining or self.is_stopping
        self._note_change()

    def fall_silent(self, why: str) -> None:
        """Send nothing to watchers until `speak`, not even heartbeats."""
        self.silent_because = why
        self._may_speak.clear()

    def speak(self) -> None:
        """Send to watchers again."""
        self.silent_because = None
        self._may_speak.set()

    def stop(self) -> None:
        """Drain for good: `drain` can no longer undo it."""
        self.is_stopping = True
        self.drain()

    async def watch(
        self,
        heartbeat_s: float,
        interval_s: float = MIN_INTERVAL_S,
        watcher_id: int = 0,
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        """Messages for one watcher: the first at once, then after each change and every heartbeat, at least
        `interval_s` apart (between MIN_INTERVAL_S and half a heartbeat). None while the hub is silent."""
        watcher = _Watcher(
            self.findable,
            heartbeat_s,
            interval_s,
            watcher_id,
            on_disk=self.on_disk,
            states=self.states,
        )
        self._watchers.add(watcher)
        try:
            sequence = 0
            while True:
                watcher.changed.clear()
                await self._may_speak.wait()
                others = {other.watcher_id for other in self._watchers if other.watcher_id} - {watcher_id}
                yield worker_pb2.WatchResponse(
                    epoch=self.epoch,
                    sequence=sequence,
                    kv_events=watcher.take_events(),
                    disk_events=watcher.disk.take(),
                    state_events=watcher.states.take(),
                    load=self.load(),
                    placement_ids=watcher.take_placements(),
                    num_watchers=len(others) + 1,
                    **self._take_adapters(watcher),
                )
                sequence += 1
                if watcher.stored or watcher.evicted or watcher.disk or watcher.states:
                    continue
                await asyncio.sleep(watcher.interval_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(heartbeat_s - watcher.interval_s):
                        await watcher.changed.wait()
        finally:
            self._watchers.discard(watcher)

    def adjust(self, watcher_id: int, interval_s: float) -> bool:
        """Change the interval of a running watch, as in `watch`. Returns whether there is one."""
        found = [watcher for watcher in self._watchers if watcher.watcher_id == watcher_id]
        for watcher in found:
            watcher.adjust(interval_s)
        return bool(found)

    def load(self) -> worker_pb2.Load:
        """The latest report of the engine as a message, with what only the service knows: arrivals, counters of
        adapters, the binding, and the report's age."""
        # The engine does not know these.
        more = {
            "max_num_seqs": self._max_num_seqs,
            "num_arrived": self._arrivals.num_requests,
            "arrived_tokens": self._arrivals.num_tokens,
            "arrived_blocks": self._arrivals.num_blocks,
        }
        costs = self.report.step_costs
        return worker_pb2.Load(
            **{**self.report.load.numbers(), **more},
            draining=self.draining,
            counters=worker_pb2.Counters(**self.counters),
            numa_node=self.binding.numa_node if self.binding is not None else None,
            binding=binding_message(self.binding) if self.binding is not None else None,
            age_ms=round(1000 * (time.monotonic() - self._reported_s)),
            version=self._version,
            prompt_steps=_cost_message(costs.get("prompts")),
            decode_steps=_cost_message(costs.get("decode")),
            ranks=map(rank_message, self.ranks()),
            stages=map(stage_message, self.stages()),
        )


def _cost_message(cost: LearnedCost | None) -> worker_pb2.StepCost | None:
    if cost is None:
        return None
    step, token, attended, read, sequence, change = cost.terms_ms
    return worker_pb2.StepCost(
        step_ms=step,
        token_ms=token,
        attended_ms=attended,
        read_ms=read,
        sequence_ms=sequence,
        change_ms=change,
        num_steps=cost.num_steps,
    )


def stage_message(stage: StageReport) -> worker_pb2.PipelineStage:
    """The message that tells routers of a stage of a pipeline."""
    return worker_pb2.PipelineStage(
        address=stage.address,
        first_layer=stage.first_layer,
        num_layers=stage.num_layers,
        compute_seconds=stage.computed_s,
        wait_seconds=stage.waited_s,
        ranks=map(rank_message, stage.ranks),
    )


def binding_message(binding: Binding) -> worker_pb2.Binding:
    """The message that tells routers where a worker's threads and memory are."""
    return worker_pb2.Binding(
        cpus_allowed=format_list(binding.cpus),
        memory_policy=binding.memory_policy,
        memory=[
            worker_pb2.NodeMemory(
                node=node,
                resident_bytes=num_bytes,
                anonymous_bytes=binding.anonymous_bytes.get(node, 0),
                kv_bytes=binding.kv_bytes.get(node, 0),
            )
            for node, num_bytes in sorted(binding.resident_bytes.items())
        ],
        kv_huge_bytes=binding.kv_huge_bytes,
    )
