"""Whether this process has its CPUs for itself, as a worker needs: what keeps it from that, with the remedy.

A container that is not pinned has the CPUs of the whole machine in its mask and a quota of time on them (cpu.max in
cgroups(7)). Its threads then move between nodes and caches, and all stop for the rest of a period when the quota is
used up. A kubelet with the static CPU policy gives a pod CPUs of its own instead: a mask of as many CPUs as the quota.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from headrace.common.kernel_files import ROOT, cpu_quota, format_list, parse_list, read_text
from headrace.worker.host.numa import memory_node_of, memory_nodes, usable_cpus

log = logging.getLogger(__name__)

_REMEDY = (
    "in Kubernetes give the kubelet the static CPU policy and the topology policy single-numa-node "
    "(deploy/kubernetes/kubelet.yaml), and the container whole CPUs with requests equal to limits; elsewhere set a "
    "cpuset"
)


def why_not_pinned(
    cpus: Collection[int], root: Path = ROOT, environment: Mapping[str, str] = os.environ, *, num_ranks: int = 1
) -> str | None:
    """Why a process with this affinity mask shares its CPUs or has them on several nodes, where a model that is divided
    among ranks may have them. None if it does not, or if it is in no container."""
    quota = cpu_quota(root)
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    if quota is None and not in_pod:
        return None
    if quota is None and len(cpus) == _num_cpus(root) and len(cpus) > 1:
        return f"its pod has no CPU limit, and all {len(cpus)} CPUs of the machine, which other pods use too"
    if quota is not None and quota < len(cpus):
        return f"it has a quota of {quota:g} CPUs on {len(cpus)} CPUs ({format_list(cpus)}), which others use too"
    if num_ranks == 1 and len(memory_nodes(root)) > 1 and memory_node_of(frozenset(cpus), root) is None:
        return f"its CPUs ({format_list(cpus)}) are on several NUMA nodes"
    shared = {cpu for cpu in cpus if not _siblings(cpu, root) <= set(cpus)}
    if shared:
        return f"the CPUs {format_list(shared)} share their cores with CPUs that are not its own"
    return None


def warn_if_not_pinned(num_ranks: int, root: Path = ROOT) -> None:
    """Log one warning if the process does not have its CPUs for itself. Its model is divided among `num_ranks`."""
    why = why_not_pinned(usable_cpus(), root, num_ranks=num_ranks)
    if why is not None:
        log.warning("this worker is not pinned, so it is slower and its times vary: %s; %s", why, _REMEDY)


def _num_cpus(root: Path) -> int:
    return len(parse_list(read_text(root / "sys/devices/system/cpu/online")))


def _siblings(cpu: int, root: Path) -> frozenset[int]:
    return parse_list(read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
