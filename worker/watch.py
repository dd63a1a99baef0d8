"""What watchers of a worker are told: the findable blocks as a snapshot, then changes, and always the load.

What can be found is closed under prefixes (see block_pool), and so is what a watcher has been told at any moment: of
each chain the beginning is told first when blocks come, last when they go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.protos import worker_pb2
from headrace.worker.binding import Binding
from headrace.worker.mailbox import LoadReport
from headrace.worker.numa import format_list

# Changes are sent at most this often, so that a busy worker sends some tens of messages a second and not one a step.
MIN_INTERVAL_S = 0.02
# Hashes in one message: at 8 bytes each well under the message size limit.
MAX_HASHES = 65536


class _Watcher:
    """What one watcher has not been told yet, in order. A hash that came and went meanwhile is in neither set."""

    def __init__(self, findable: dict[int, None]) -> None:
        self.reset = True
        self.stored = findable.copy()
        self.evicted: dict[int, None] = {}
        self.changed = asyncio.Event()

    def note(self, report: LoadReport) -> None:
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


class WatchHub:
    """Keeps the latest load and the findable hashes, and tells any number of watchers. Lives on the event loop."""

    def __init__(self, epoch: int, max_num_seqs: int) -> None:
        self.epoch = epoch
        self.report = LoadReport()
        self.draining = False
        self.binding: Binding | None = None
        self._max_num_seqs = max_num_seqs
        self.findable: dict[int, None] = {}
        """What can be found, in the order in which it came."""
        self._watchers: set[_Watcher] = set()

    def publish(self, report: LoadReport) -> None:
        """Take in the state after a step."""
        self.report = report
        for block_hash in report.evicted:
            self.findable.pop(block_hash, None)
        self.findable.update(dict.fromkeys(report.stored))
        for watcher in self._watchers:
            watcher.note(report)

    def bind(self, binding: Binding) -> None:
        """Take in where threads and memory are; watchers are told with the next report."""
        self.binding = binding

    def drain(self) -> None:
        """Tell all watchers that no new requests are taken."""
        self.draining = True
        for watcher in self._watchers:
            watcher.changed.set()

    async def watch(self, heartbeat_s: float) -> AsyncIterator[worker_pb2.WatchResponse]:
        """Messages for one watcher: the first at once, then when something changed, and every heartbeat."""
        watcher = _Watcher(self.findable)
        self._watchers.add(watcher)
        try:
            sequence = 0
            while True:
                watcher.changed.clear()
                yield worker_pb2.WatchResponse(
                    epoch=self.epoch, sequence=sequence, kv_events=watcher.take_events(), load=self.load()
                )
                sequence += 1
                if watcher.stored or watcher.evicted:
                    continue
                await asyncio.sleep(MIN_INTERVAL_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(heartbeat_s - MIN_INTERVAL_S):
                        await watcher.changed.wait()
        finally:
            self._watchers.discard(watcher)

    def load(self) -> worker_pb2.Load:
        """The latest load as a message."""
        report = self.report
        return worker_pb2.Load(
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_uncached_tokens=report.num_uncached_tokens,
            num_blocks=report.num_blocks,
            num_free_blocks=report.num_free_blocks,
            num_cached_blocks=report.num_cached_blocks,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_ms=report.decode_step_ms,
            max_num_seqs=self._max_num_seqs,
            draining=self.draining,
            counters=worker_pb2.Counters(**report.counters),
            numa_node=self.binding.numa_node if self.binding is not None else None,
            binding=binding_message(self.binding) if self.binding is not None else None,
        )


def binding_message(binding: Binding) -> worker_pb2.Binding:
    """What was read from the kernel, as a message."""
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
