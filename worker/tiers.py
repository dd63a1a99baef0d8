"""The tiers of the prefix cache beyond the pool: a disk, and other workers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from headrace.common.transport.channels import Transport
from headrace.worker.config import WorkerConfig
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.disk_store import DiskStore
from headrace.worker.kv.disk_tier import DiskTier
from headrace.worker.kv.kept_cache import KeptCache
from headrace.worker.kv.memory import GIB
from headrace.worker.kv.takeover import Takeover
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.numerics import kv_numerics
from headrace.worker.peers.handover import Handover
from headrace.worker.peers.source import MAX_BLOCK_BYTES, BlockFile, BlockSource
from headrace.worker.peers.tier import PeerTier

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

log = logging.getLogger("headrace.worker")


class Tiers(NamedTuple):
    """The tiers that a worker has. `handover` serves its blocks to other workers, `takeover` takes those of workers
    that drain."""

    disk: DiskTier | None = None
    peers: PeerTier | None = None
    takeover: Takeover | None = None
    handover: Handover | None = None

    def start(self, on_arrival: Callable[[], None]) -> None:
        """Begin to work. Calls `on_arrival` when blocks have come."""
        if self.peers is not None:
            self.peers.on_arrival = on_arrival
        if self.takeover is not None:
            self.takeover.wake = on_arrival
        if self.disk is not None:
            self.disk.on_arrival = on_arrival
            self.disk.start()

    def stop(self) -> None:
        """End fetches from other workers. Otherwise the process would wait for them when it ends."""
        if self.peers is not None:
            self.peers.stop()


NO_TIERS = Tiers()


def kv_layout(runner: OpenVINOModelRunner, limits: StepLimits, fingerprint: str) -> str:
    """Identifies everything that the bytes of a block depend on. Only processes with the same layout can exchange
    blocks."""
    identity = f"{fingerprint} {kv_numerics(runner, limits)} {runner.block_size} {runner.block_shapes}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def tiers_for(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    layout: str,
    pool: BlockPool,
    kept: KeptCache | None,
    disk_key: bytes | None,
    transport: Transport,
) -> Tiers:
    """The tiers that the flags describe. ConfigurationError if the disk cannot be used. None for a model with recurrent
    layers, whose blocks are useless without states, and for layers that keep only their windows."""
    if len(runner.layer_groups) > 1:
        return NO_TIERS
    contents, disk = runner.block_bytes_of, None
    if config.kv_disk is not None:
        size_bytes = int(config.kv_disk_gb * GIB)
        store = DiskStore(config.kv_disk, layout, size_bytes, runner.block_bytes, runner.block_size, disk_key)
        log.info("%s has %d of at most %d KV blocks", config.kv_disk, store.num_blocks, store.num_slots)
        disk = DiskTier(store, contents, runner.block_bytes)
        pool.on_eviction = disk.spill
    if not config.kv_peers or runner.block_bytes > MAX_BLOCK_BYTES:
        return Tiers(disk)
    file = None
    if kept is not None and kept.format is not None:
        file = BlockFile(kept.memory.descriptor, kept.format.arena_offset, kept.format.num_blocks)
    peers = PeerTier(layout, contents, runner.block_bytes, transport)
    source = BlockSource(layout, pool, contents, runner.block_bytes, file)
    takeover = Takeover(pool, peers)
    most_bytes = int(config.kv_handover_gb * GIB)
    return Tiers(disk, peers, takeover, Handover(source, takeover, pool, runner.block_bytes, most_bytes))
