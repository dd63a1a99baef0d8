"""The data of a worker that its router knows, as columns of tables and fields of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.protos import router_pb2, worker_pb2

_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}
WORKER_STATES = {
    router_pb2.WORKER_STATE_READY: "ready",
    router_pb2.WORKER_STATE_DRAINING: "draining",
    router_pb2.WORKER_STATE_SUSPECT: "suspect",
}
LOST_STATES = {
    router_pb2.WORKER_STATE_UNREACHABLE: "unreachable",
    router_pb2.WORKER_STATE_NOT_ANSWERING: "not answering",
}
_PROPOSERS = ("ngram", "prediction", "grammar", "draft", "eagle3", "medusa", "mtp")


def worker_columns(info: router_pb2.WorkerInfo | None) -> dict[str, Any]:
    """What a worker reports, as `status.row_of` describes it; None for what is unknown. Pure."""
    is_known = info is not None and info.HasField("load")
    load = info.load if info is not None else worker_pb2.Load()
    of_load = {
        "kv_blocks": load.num_blocks,
        "kv_blocks_free": load.num_free_blocks,
        "kv_blocks_cached": load.num_cached_blocks,
        "state_slots": load.num_state_slots,
        "states_saved": load.num_saved_states,
        "window_slots": load.num_window_slots,
        "window_slots_held": load.num_held_window_slots,
        **_tier_columns(load),
        "requests_running": load.num_running,
        "requests_waiting": load.num_waiting,
        **_draft_columns(load.counters),
    }
    return {
        "silent_s": None,
        "model": info.model or None if info is not None else None,
        "serves": _ROLES.get(info.role, "both") if info is not None else None,
        **(of_load if is_known else dict.fromkeys(of_load)),
        **_binding_columns(load),
        "ranks": _ranks(load.ranks),
        "stages": _stages(load),
    }


def slowest_rank(ranks: Sequence[Mapping[str, Any]]) -> int | None:
    """The number of the rank that the others have waited for, if this took more than a tenth of its steps; None if
    there is none."""
    return _slowest([(rank["wait_s"], rank["step_s"]) for rank in ranks])


def slowest_stage(stages: Sequence[Mapping[str, Any]]) -> int | None:
    """As `slowest_rank`, for the stages of a pipeline."""
    return _slowest([(stage["wait_s"], stage["compute_s"] + stage["wait_s"]) for stage in stages])


def _slowest(times: Sequence[tuple[float, float]]) -> int | None:
    """The number of the process that has waited least, if another has waited longer by more than a tenth of its time.
    `times` are those waits, and the whole times."""
    if not times:
        return None
    slowest = min(range(len(times)), key=lambda number: times[number][0])
    least_s, whole_s = times[slowest]
    return slowest if max(wait_s for wait_s, _ in times) - least_s > 0.1 * whole_s else None


def _ranks(ranks: Iterable[worker_pb2.Rank]) -> list[dict[str, Any]]:
    """The ranks of a divided model or stage, rank 0 first, each with numa_node, cpus, step_s and wait_s."""
    return [
        {
            "numa_node": rank.numa_node if rank.HasField("numa_node") else None,
            "cpus": rank.cpus,
            "step_s": rank.step_seconds,
            "wait_s": rank.wait_seconds,
        }
        for rank in ranks
    ]


def _stages(load: worker_pb2.Load) -> list[dict[str, Any]]:
    """The stages of a pipeline, the worker's own first, each with address (None for that one), first_layer,
    num_layers, compute_s, wait_s, and its ranks."""
    return [
        {
            "address": stage.address or None,
            "first_layer": stage.first_layer,
            "num_layers": stage.num_layers,
            "compute_s": stage.compute_seconds,
            "wait_s": stage.wait_seconds,
            "ranks": _ranks(stage.ranks),
        }
        for stage in load.stages
    ]


def _tier_columns(load: worker_pb2.Load) -> dict[str, Any]:
    """The content and the counters of the tiers of the prefix cache. `cached_tokens` are those of prompts, by where
    they were found: in memory, on the disk, at other workers."""
    counters = load.counters
    elsewhere = counters.prompt_tokens_from_disk + counters.prompt_tokens_from_peers
    return {
        "kv_blocks_evicted": counters.blocks_evicted,
        "kv_blocks_given_up": counters.blocks_given_up,
        "kv_blocks_restored": counters.blocks_restored,
        "kv_blocks_read": counters.blocks_read,
        "kv_blocks_not_written": counters.blocks_not_written,
        "kv_blocks_received": counters.blocks_received,
        "kv_blocks_taken_over": counters.blocks_taken_over,
        "kv_disk_blocks": load.num_disk_blocks,
        "kv_disk_slots": load.num_disk_slots,
        "cached_tokens": {
            "memory": max(0, counters.prompt_tokens_cached - elsewhere),
            "disk": counters.prompt_tokens_from_disk,
            "peers": counters.prompt_tokens_from_peers,
        },
    }


def _draft_columns(counters: worker_pb2.Counters) -> dict[str, Any]:
    """Draft tokens of speculative decoding that were verified, and that became part of answers, since the start: in
    total, and for each proposer that had any."""
    found = {
        name: {
            "drafted": getattr(counters, f"{name}_tokens_drafted"),
            "accepted": getattr(counters, f"{name}_tokens_accepted"),
        }
        for name in _PROPOSERS
    }
    return {
        "draft_tokens": sum(each["drafted"] for each in found.values()),
        "draft_tokens_accepted": sum(each["accepted"] for each in found.values()),
        "draft_tokens_by_proposer": {name: each for name, each in found.items() if each["drafted"]},
    }


def _binding_columns(load: worker_pb2.Load) -> dict[str, Any]:
    """numa_node, cpus_allowed and memory_policy as the kernel reports them; resident_bytes, anonymous_bytes (without
    files) and kv_resident_bytes as objects from node to bytes; kv_huge_bytes. None while unknown."""
    binding = load.binding if load.HasField("binding") else None
    memory = load.binding.memory
    return {
        "numa_node": load.numa_node if load.HasField("numa_node") else None,
        "cpus_allowed": binding and binding.cpus_allowed,
        "memory_policy": binding and binding.memory_policy,
        "resident_bytes": binding and {str(node.node): node.resident_bytes for node in memory},
        "anonymous_bytes": binding and {str(node.node): node.anonymous_bytes for node in memory},
        "kv_resident_bytes": binding and {str(node.node): node.kv_bytes for node in memory},
        "kv_huge_bytes": binding and binding.kv_huge_bytes,
    }
