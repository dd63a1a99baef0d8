"""What the simulator is told of a fleet: memory, tiers and windows."""

from __future__ import annotations

import msgspec
import pytest

from headrace.plan.fleet import GIB, Fleet, Kind, Memory
from headrace.plan.load import Load, Requests, lengths
from headrace.plan.objectives import Limit, Objectives
from headrace.plan.search import Search
from headrace.plan.start import kv_gb_of
from headrace.sim.tiers import ASSUMED_PEER_BYTES_PER_S
from tests.plan.calibrations import calibration


def fleet(memory: Memory = Memory(), **others: object) -> Fleet:  # noqa: B008  frozen
    return Fleet(Kind("small", calibration(**others)), 1, memory)  # type: ignore[arg-type]


def test_the_memory_is_that_of_the_calibration_or_the_given_one() -> None:
    assert fleet().kv_tokens_of_worker == 64_000
    assert fleet(Memory(kv_gb=0.5)).kv_tokens_of_worker == int(0.5 * GIB / 12_960) // 32 * 32
    assert fleet().settings(1).worker.kv_tokens == 64_000


def test_a_disk_belongs_to_the_workers_of_its_host() -> None:
    memory = Memory(disk_gb=4.0, disk_bytes_per_s=12_960_000.0, peer_bytes_per_s=25_920_000.0)
    alone, both = (fleet(memory, workers=workers) for workers in (1, 2))
    tiers = alone.settings(1).worker.tiers
    assert (tiers.disk_tokens, tiers.is_disk_shared) == (int(4 * GIB / 12_960), False)
    assert (tiers.disk_rate, tiers.peer_rate) == (1000, 2000)
    assert both.settings(1).worker.tiers.is_disk_shared
    several = both.with_hosts(3).settings(1).worker.tiers
    assert (several.disk_tokens, several.is_disk_shared) == (int(2 * GIB / 12_960), False)


def test_workers_fetch_prefixes_from_each_other_as_fast_as_they_did_or_as_routers_assume() -> None:
    unknown = fleet(workers=2)
    assert unknown.settings(1).worker.tiers.peer_rate == ASSUMED_PEER_BYTES_PER_S / 12_960.0
    measured = msgspec.structs.replace(unknown.kind.calibration, peer_bytes_per_s=12_960_000.0)
    assert Fleet(Kind("small", measured), 1).settings(1).worker.tiers.peer_rate == 1000
    given = Memory(peer_bytes_per_s=25_920_000.0)
    assert Fleet(Kind("small", measured), 1, given).settings(1).worker.tiers.peer_rate == 2000


def test_with_windows_the_same_memory_holds_more_tokens() -> None:
    memory = Memory(kv_gb=1.0)
    whole, trimmed = fleet(memory), fleet(memory, window=128)
    assert trimmed.settings(1).worker.window is not None
    assert trimmed.kv_tokens_of_worker > 1.8 * whole.kv_tokens_of_worker
    assert kv_gb_of(trimmed) == 1.0


def test_a_fleet_with_windows_serves_long_prompts_that_others_cannot_hold() -> None:
    asked = Requests(lengths("fixed", 2000, 8192), lengths("fixed", 8, 8192), 2000, 8, most=8192)
    search = Search(Load(asked, per_s=1.0), Objectives(Limit(95, 60.0), None), (1,), 12)
    memory = Memory(kv_gb=0.1)
    whole, trimmed = search.trial(fleet(memory)), search.trial(fleet(memory, window=128))
    assert trimmed.kv_used < 0.8 * whole.kv_used
    assert trimmed.num_requests == whole.num_requests
    assert trimmed.ttft.p50 == pytest.approx(whole.ttft.p50, rel=0.5)
