"""`headrace doctor`: finds properties of this host that cost speed or stability, with remedies and their gains.

Each check is a function of the kernel's files below `root` and of the topology read from them. A gain is a figure of
benchmarks/RESULTS.md, whose section it names, or a size that the check has read on this host. Where nothing was
measured, the finding claims no gain and says so; what it has found may say why the kernel does harm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from headrace.cli.serving.topology import Topology, read_topology
from headrace.common.commands import EXIT_FAILED
from headrace.common.host_memory import GIB, available_bytes
from headrace.common.kernel_files import ROOT, cgroup_places, read_text

_UNMEASURED = "not measured"
_LITTLE_MEMORY = 2 * GIB
_MUCH_STEAL = 0.01
_CAP_SYS_NICE = 23
_THP = "sys/kernel/mm/transparent_hugepage/enabled"
_MUCH_SWAPPED = GIB // 4
_SLOW_GOVERNORS = frozenset({"powersave", "ondemand", "conservative", "schedutil", "userspace"})


class Verdict(StrEnum):
    """The severity of a finding."""

    GOOD = "good"
    HINT = "hint"
    """Something may be gained."""
    PROBLEM = "problem"
    """It costs speed or stability."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `remedy` and `gain` are empty if all is well; `figures` names the section with the
    measurement of the gain."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    gain: str = ""
    figures: str = ""


Check = Callable[[Path, Topology], Iterator[Finding]]


def _cpu(root: Path, machine: Topology) -> Iterator[Finding]:
    flags = machine.cpu_flags
    if not flags:
        return
    virtual = " Virtual machines: let the guest see the host's CPU (host-passthrough)." if "hypervisor" in flags else ""
    named = next((name for flag, name in _KERNELS.items() if flag in flags), "")
    if named in ("AMX", "AVX-512"):
        yield Finding("CPU", Verdict.GOOD, f"{named} kernels")
    elif named:
        remedy = f"a CPU with AVX-512 or AMX.{virtual}"
        gain = (
            "prompts exact in steps of any size instead of 80 tokens, beyond which a row takes up to 1.3 times as long"
        )
        figures = "benchmarks/RESULTS.md#products-at-the-limit-of-exact-steps"
        yield Finding("CPU", Verdict.HINT, f"{named} kernels", remedy, gain, figures)
    else:
        remedy = f"a CPU with AVX2 at least.{virtual}"
        yield Finding("CPU", Verdict.PROBLEM, "no AVX2: OpenVINO has only slow kernels", remedy, _UNMEASURED)


_KERNELS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx_vnni": "AVX2 with VNNI", "avx2": "AVX2"}
# The best comes first.


def _transparent_huge_pages(root: Path, machine: Topology) -> Iterator[Finding]:
    chosen = re.search(r"\[(\w+)\]", read_text(root / _THP))
    if chosen is None:
        return
    if chosen[1] in ("madvise", "always"):
        yield Finding("huge pages", Verdict.GOOD, f"transparent huge pages: {chosen[1]}")
        return
    gain = "decode steps in a cache of hours of use take 0.86 of the time, and prompts there 0.87"
    remedy = f"echo madvise > /{_THP}"
    figures = "benchmarks/RESULTS.md#huge-pages"
    yield Finding("huge pages", Verdict.PROBLEM, f"transparent huge pages: {chosen[1]}", remedy, gain, figures)


def _reserved_huge_pages(root: Path, machine: Topology) -> Iterator[Finding]:
    values = _meminfo(root)
    free = values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0)
    if free:
        found = f"{free / GIB:.1f} GiB are reserved as huge pages that nobody uses"
        remedy = "sysctl vm.nr_hugepages=0, unless other programs need them: headrace uses transparent ones"
        yield Finding("reserved huge pages", Verdict.HINT, found, remedy, f"{free / GIB:.1f} GiB of memory to use")


def _numa(root: Path, machine: Topology) -> Iterator[Finding]:
    if len(machine.nodes) < 2:
        return
    may_bind = int(_status(root).get("CapEff", "0"), 16) >> _CAP_SYS_NICE & 1
    balances = read_text(root / "proc/sys/kernel/numa_balancing") not in ("", "0")
    if balances and not may_bind:
        found = "the kernel moves pages between nodes, and workers may not set a memory policy against it"
        remedy = "sysctl kernel.numa_balancing=0, or grant CAP_SYS_NICE"
        yield Finding("NUMA balancing", Verdict.PROBLEM, found, remedy, _UNMEASURED)
    elif balances:
        found = "on; pages of workers have a memory policy and stay"
        remedy = "sysctl kernel.numa_balancing=0 spares its scans"
        yield Finding("NUMA balancing", Verdict.HINT, found, remedy, _UNMEASURED)
    else:
        yield Finding("NUMA balancing", Verdict.GOOD, "off")
    bare = [str(node.number) for node in machine.nodes if machine.cores_of(node.number) and not node.memory_bytes]
    if bare:
        found = f"node {', '.join(bare)} has cores and no memory"
        yield Finding("NUMA memory", Verdict.HINT, found, "memory in all sockets' slots", _UNMEASURED)


def _cpu_limits(root: Path, machine: Topology) -> Iterator[Finding]:
    num_cpus = sum(len(core.cpus) for core in machine.cores)
    quota = machine.quota_cpus
    if quota is None:
        yield Finding("CPU limit", Verdict.GOOD, f"none; {num_cpus} CPUs")
        return
    throttled = max((_number(place / "cpu.stat", "nr_throttled") for place in cgroup_places(root, "cpu")), default=0)
    found = f"a quota of {quota:g} of {num_cpus} CPUs" + (
        f"; the kernel has stopped the group {throttled} times until its next period" * bool(throttled)
    )
    if quota >= num_cpus and not throttled:
        yield Finding("CPU limit", Verdict.GOOD, found)
        return
    remedy = (
        "give whole CPUs by cpuset instead (docker --cpuset-cpus; Kubernetes: CPU manager static, requests = limits)"
    )
    yield Finding("CPU limit", Verdict.PROBLEM, found, remedy, _UNMEASURED)


def _memory(root: Path, machine: Topology) -> Iterator[Finding]:
    total = _meminfo(root).get("MemTotal", 0)
    try:
        available = available_bytes(root)
    except (OSError, ValueError):
        return
    found = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    if available >= _LITTLE_MEMORY:
        yield Finding("memory", Verdict.GOOD, found)
        return
    remedy = "end other programs, or raise the memory limit of the container (memory.max)"
    yield Finding("memory", Verdict.PROBLEM, f"{found}, for weights and KV cache", remedy, _UNMEASURED)


def _swap(root: Path, machine: Topology) -> Iterator[Finding]:
    values = _meminfo(root)
    swapped = values.get("SwapTotal", 0) - values.get("SwapFree", 0)
    if swapped >= _MUCH_SWAPPED:
        found = f"{swapped / GIB:.1f} GiB of programs' memory are on the disk, from which steps may have to wait for it"
        remedy = "more memory, a smaller KV cache (--kv-cache-gb), or swapoff -a if the memory has room for it"
        yield Finding("swap", Verdict.HINT, found, remedy, _UNMEASURED)


def _governor(root: Path, machine: Topology) -> Iterator[Finding]:
    paths = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    governors = sorted({text for path in paths if (text := read_text(path))})
    if not governors:
        return
    slow = sorted(_SLOW_GOVERNORS.intersection(governors))
    if not slow:
        yield Finding("governor", Verdict.GOOD, ", ".join(governors))
        return
    remedy = "cpupower frequency-set -g performance"
    yield Finding(
        "governor", Verdict.HINT, f"{', '.join(slow)}, which may keep the clock below the full one", remedy, _UNMEASURED
    )


def _steal(root: Path, machine: Topology) -> Iterator[Finding]:
    lines = read_text(root / "proc/stat").splitlines()
    fields = [int(text) for text in lines[0].split()[1:9]] if lines and lines[0].startswith("cpu ") else []
    if len(fields) < 8 or not sum(fields):
        return
    share = fields[7] / sum(fields)
    if share > _MUCH_STEAL:
        found = f"the hypervisor took {share:.0%} of the time of the CPUs since the start"
        remedy = "a machine with CPUs of its own, or fewer neighbours"
        yield Finding("steal", Verdict.HINT, found, remedy, _UNMEASURED)


CHECKS: Sequence[Check] = (
    _cpu,
    _transparent_huge_pages,
    _reserved_huge_pages,
    _numa,
    _cpu_limits,
    _memory,
    _swap,
    _governor,
    _steal,
)


def examine(root: Path = ROOT, affinity: Collection[int] | None = None) -> list[Finding]:
    """The findings of all checks. `affinity` defaults to this process's mask. `root` is "/" except in tests."""
    machine = read_topology(root, affinity)
    return [finding for check in CHECKS for finding in check(root, machine)]


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo: sizes in bytes, and numbers of huge pages."""
    found = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _status(root: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in read_text(root / "proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _number(path: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", read_text(path), re.MULTILINE)
    return int(found[1]) if found else 0


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON list of objects with check, verdict, found, remedy, gain, figures."
)
def doctor(as_json: bool) -> None:
    """Look at this host: CPU, huge pages, NUMA balancing, limits of the container, memory, governor.

    Says what to change, and what that brings where it was measured. Nothing is changed. The exit status is 1 if there
    is a problem; hints alone leave it 0.
    """
    findings = examine()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:<8} {finding.check}: {finding.found}")
            if finding.remedy:
                click.echo(f"{'':<9}change: {finding.remedy}")
                click.echo(f"{'':<9}gain: {finding.gain}" + (f" ({finding.figures})" if finding.figures else ""))
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        click.get_current_context().exit(EXIT_FAILED)
