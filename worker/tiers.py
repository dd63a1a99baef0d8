"""The tiers of the prefix cache beyond the pool: a disk, and other workers."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from headrace.common.host_memory import GIB
from headrace.common.transport.channels import Transport
from headrace.worker.config import WorkerConfig
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.chain import TOKEN_BYTES
from headrace.worker.kv.disk_store import DiskStore
from headrace.worker.kv.disk_tier import DiskTier, PartsOnDisk
from headrace.worker.kv.fetch import Bell
from headrace.worker.kv.kept_cache import KeptCache
from headrace.worker.kv.layers import LayerKind, group_of
from headrace.worker.kv.takeover import Takeover
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.numerics import kv_numerics
from headrace.worker.peers.handover import Handover
from headrace.worker.peers.source import MAX_BLOCK_BYTES, BlockFile, BlockSource
from headrace.worker.peers.tier import PeerTier

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

# On a disk, one block in so many has its part for layers with a window: a conversation continues only at its end and
# where others have branched off.
_BLOCKS_PER_PART = 4
log = logging.getLogger("headrace.worker")


class Tiers(NamedTuple):
    """The tiers that a worker has. `handover` serves its blocks to other workers, `takeover` takes those of workers
    that drain."""

    disk: DiskTier | None = None
    peers: PeerTier | None = None
    takeover: Takeover | None = None
    handover: Handover | None = None

    def start(self) -> None:
        """Start the disk's thread. Other tiers have threads only while they fetch."""
        if self.disk is not None:
            self.disk.start()

    def stop(self) -> None:
        """End the fetches from other workers, so that the process does not wait for them when it ends."""
        if self.peers is not None:
            self.peers.stop()


NO_TIERS = Tiers()


def kv_layout(runner: OpenVINOModelRunner, limits: StepLimits, fingerprint: str) -> str:
    """Identifies everything that the bytes of a block depend on. Only processes with the same layout can exchange
    blocks."""
    identity = f"{fingerprint} {kv_numerics(runner, limits)} {runner.block_size} {runner.block_shapes}"
    windows = group_of(runner.layer_groups, LayerKind.WINDOW)
    if windows is not None:
        identity += f" window {windows.window}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def open_disk(
    config: WorkerConfig, runner: OpenVINOModelRunner, layout: str, key: bytes | None, bell: Bell
) -> DiskTier | None:
    """The tier of --kv-disk, which rings `bell` when blocks have come; None without the flag. Parts of blocks for
    layers with a window have a store of their own, with room for those of one block in `_BLOCKS_PER_PART`.
    ConfigurationError if the disk cannot be used."""
    directory, contents = config.kv_disk, runner.block_bytes_of
    if directory is None:
        return None
    size_bytes, block_size = int(config.kv_disk_gb * GIB), contents.block_size
    if group_of(runner.layer_groups, LayerKind.WINDOW) is None:
        store = DiskStore(directory, layout, size_bytes, contents.num_bytes, block_size, key)
        log.info("%s has %d of at most %d KV blocks", directory, store.num_blocks, store.num_slots)
        return DiskTier(store, contents, contents.num_bytes, on_arrival=bell.ring)
    parts = runner.part_bytes_of
    # The records of both have the tokens of a block.
    record_bytes = 2 * TOKEN_BYTES * block_size
    per_block = contents.num_bytes + record_bytes + (parts.num_bytes + record_bytes) / _BLOCKS_PER_PART
    of_blocks = int(size_bytes * (contents.num_bytes + record_bytes) / per_block)
    store = DiskStore(directory, layout, of_blocks, contents.num_bytes, block_size, key)
    of_parts = hashlib.sha256(f"{layout} parts".encode()).hexdigest()[:16]
    part_store = DiskStore(directory, of_parts, size_bytes - of_blocks, parts.num_bytes, block_size, key)
    log.info(
        "%s has %d of at most %d KV blocks, and %d of at most %d parts of layers with a window",
        *(directory, store.num_blocks, store.num_slots, part_store.num_blocks, part_store.num_slots),
    )
    return DiskTier(store, contents, contents.num_bytes, PartsOnDisk(part_store, parts), bell.ring)


def tiers_for(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    layout: str,
    kv_cache: KVCache,
    disk: DiskTier | None,
    kept: KeptCache | None,
    transport: Transport,
    bell: Bell,
) -> Tiers:
    """The tiers that the flags describe, with the `disk` to which the cache spills. They ring `bell` when blocks have
    come. None for a model with recurrent layers, whose blocks are useless without states, and for a pipeline."""
    if not runner.has_whole_blocks:
        if config.kv_peers:
            why = "a block of a pipeline has parts on other hosts"
            log.info("cached prefixes are not exchanged with other workers: %s", why)
        return NO_TIERS
    if kv_cache.states is not None:
        return NO_TIERS
    block_bytes = runner.block_bytes + runner.part_bytes
    if not config.kv_peers or block_bytes > MAX_BLOCK_BYTES:
        return Tiers(disk)
    contents, parts = runner.block_bytes_of, None if kv_cache.windows is None else runner.part_bytes_of
    file = None
    if kept is not None and kept.format is not None and parts is None:
        # Otherwise parts lie between the blocks, and others are sent both.
        file = BlockFile(kept.memory.descriptor, kept.format.arena_offset, kept.format.num_blocks)
    peers = PeerTier(layout, contents, runner.block_bytes, transport, parts, bell.ring)
    source = BlockSource(layout, kv_cache, contents, runner.block_bytes, file, parts)
    takeover = Takeover(kv_cache, peers, bell.ring)
    most_bytes = int(config.kv_handover_gb * GIB)
    return Tiers(disk, peers, takeover, Handover(source, takeover, kv_cache, max(1, block_bytes), most_bytes))
