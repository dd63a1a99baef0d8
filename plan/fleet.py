"""The fleet of a plan: hosts of one calibration, and what the simulator needs to know of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.bench.calibration import Calibration
from headrace.sim.simulation import FleetSettings
from headrace.sim.tiers import ASSUMED_PEER_BYTES_PER_S, TierSettings
from headrace.sim.windows import WindowBudget, divided
from headrace.sim.worker import WorkerSettings

GIB = 1 << 30
# The reports of a worker reach a router on another host after about this time.
_REPORT_DELAY_S = 0.02
# A gateway or router may use this share of a core, so that it has room for bursts.
FRONT_SHARE = 0.7
# Requests are refused if they would wait longer for others; the default of --max-ttft.
MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of host: its calibration, the file's name, and the cost of one host in any unit; None if that is not
    given."""

    name: str
    calibration: Calibration
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of each worker for blocks: GiB of KV cache (None: as in the calibration), GiB of its host's disk (0:
    no disk) with its reading speed in bytes per second, and the speed of fetches from other workers in bytes per second
    (None: that of the calibration, or what routers assume of workers that have not fetched yet)."""

    kv_gb: float | None = None
    disk_gb: float = 0.0
    disk_bytes_per_s: float = 1.5e9
    peer_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts of one kind. None means as in the calibration."""

    kind: Kind
    hosts: int
    memory: Memory = Memory()
    kv_bytes: int | None = None
    """Of the KV cache of each worker."""
    max_num_seqs: int | None = None

    @property
    def workers(self) -> int:
        """The number of workers on all hosts."""
        return self.hosts * self.kind.calibration.layout.workers

    @property
    def kv_bytes_of_worker(self) -> int:
        """Bytes of a worker's KV cache."""
        if self.kv_bytes is not None:
            return self.kv_bytes
        gb = self.memory.kv_gb
        return int(self.kind.calibration.kv_bytes if gb is None else gb * GIB)

    @property
    def batch(self) -> int:
        """The maximum number of sequences in a batch of a worker."""
        return self.max_num_seqs or self.kind.calibration.layout.max_num_seqs

    def blocks(self) -> tuple[int, WindowBudget | None]:
        """The number of blocks of a worker's KV cache, and the budget for layers with a window."""
        model, layout = self.kind.calibration.model, self.kind.calibration.layout
        size = model.block_tokens
        if not model.window_tokens:
            return int(self.kv_bytes_of_worker / model.kv_token_bytes) // size, None
        part = round(model.window_token_bytes * size)
        block = round(model.kv_token_bytes * size) - part
        return divided(
            self.kv_bytes_of_worker, block, part, size, model.window_tokens, self.batch, layout.max_num_batched_tokens
        )

    @property
    def kv_tokens_of_worker(self) -> int:
        """Tokens that a worker's KV cache holds."""
        return self.blocks()[0] * self.kind.calibration.model.block_tokens

    def with_hosts(self, hosts: int) -> Fleet:
        """The same fleet with this number of hosts."""
        return replace(self, hosts=hosts)

    def settings(self, seed: int) -> FleetSettings:
        """The settings for the simulator."""
        found, memory = self.kind.calibration, self.memory
        layout, token_bytes = found.layout, found.model.kv_token_bytes
        # The simulator has one disk for all workers or one for each.
        is_shared = bool(memory.disk_gb) and self.hosts == 1 and layout.workers > 1
        of_disk = memory.disk_gb * GIB / token_bytes
        tiers = TierSettings(
            disk_tokens=int(of_disk if is_shared else of_disk / layout.workers),
            disk_rate=memory.disk_bytes_per_s / token_bytes,
            peer_rate=(memory.peer_bytes_per_s or found.peer_bytes_per_s or ASSUMED_PEER_BYTES_PER_S) / token_bytes,
            is_disk_shared=is_shared,
        )
        num_blocks, window = self.blocks()
        worker = WorkerSettings(
            cost=found.steps,
            kv_tokens=num_blocks * found.model.block_tokens,
            block_size=found.model.block_tokens,
            window=window,
            max_num_seqs=self.batch,
            max_num_batched_tokens=layout.max_num_batched_tokens,
            max_num_mixed_tokens=layout.max_num_mixed_tokens,
            least_decode=layout.least_decode,
            tiers=tiers,
            max_wait_s=MAX_WAIT_S,
            skips_steps=not found.slowdown or layout.workers == 1,
        )
        front = found.front
        return FleetSettings(
            worker,
            self.workers,
            report_delay_s=_REPORT_DELAY_S,
            hop_s=(front.inward_s + front.outward_s) / 4,
            seed=seed,
            workers_per_host=layout.workers,
            slowdown=found.slowdown,
        )
