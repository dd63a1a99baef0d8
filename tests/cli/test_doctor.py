"""`headrace doctor` over trees like /proc and /sys."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.cli.serving import doctor
from headrace.cli.serving.doctor import Finding, Verdict, examine

ROOT = Path(__file__).parents[2]
GIB = 1 << 20  # in kB
GOOD: dict[str, str] = {
    "proc/cpuinfo": "flags : avx2 avx512f\n",
    "proc/meminfo": f"MemTotal: {64 * GIB} kB\nMemAvailable: {60 * GIB} kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "CapEff:\t0000000000800000\n",
    "proc/stat": "cpu  100 0 100 800 0 0 0 0 0 0\n",
    "proc/sys/kernel/numa_balancing": "0",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/node/node0/cpulist": "0-1",
    "sys/devices/system/node/node0/distance": "10 20",
    "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: {32 * GIB} kB",
    "sys/devices/system/node/node1/cpulist": "2-3",
    "sys/devices/system/node/node1/distance": "20 10",
    "sys/devices/system/node/node1/meminfo": f"Node 1 MemTotal: {32 * GIB} kB",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
}

THP = "sys__kernel__mm__transparent_hugepage__enabled"
GOVERNOR = "sys__devices__system__cpu__cpu0__cpufreq__scaling_governor"


def tree(root: Path, **changes: str) -> Path:
    """The files of a good host, with changes; names have __ for /."""
    for name, text in {**GOOD, **{name.replace("__", "/"): text for name, text in changes.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def wrong(root: Path) -> list[Finding]:
    return [finding for finding in examine(root, {0, 1, 2, 3}) if finding.verdict is not Verdict.GOOD]


def test_a_good_host_has_nothing_to_change(tmp_path: Path) -> None:
    findings = examine(tree(tmp_path), {0, 1, 2, 3})
    assert {finding.verdict for finding in findings} == {Verdict.GOOD}
    assert [finding.check for finding in findings] == [
        *("CPU", "huge pages", "NUMA balancing", "CPU limit", "memory", "governor")
    ]
    assert not any(finding.remedy or finding.gain for finding in findings)


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "remedy"),
    [
        ({"proc__cpuinfo": "flags : sse4_2 hypervisor\n"}, "CPU", "problem", "host-passthrough"),
        ({"proc__cpuinfo": "flags : avx2\n"}, "CPU", "hint", "AVX-512 or AMX"),
        (
            {THP: "always madvise [never]"},
            "huge pages",
            "problem",
            "madvise",
        ),
        (
            {"proc__meminfo": GOOD["proc/meminfo"].replace("Free: 0", "Free: 1024")},
            "reserved huge pages",
            "hint",
            "vm.nr_hugepages=0",
        ),
        ({"proc__sys__kernel__numa_balancing": "1"}, "NUMA balancing", "hint", "kernel.numa_balancing=0"),
        (
            {"proc__sys__kernel__numa_balancing": "1", "proc__self__status": "CapEff:\t0"},
            "NUMA balancing",
            "problem",
            "CAP_SYS_NICE",
        ),
        ({"sys__devices__system__node__node1__meminfo": "Node 1 MemTotal: 0 kB"}, "NUMA memory", "hint", "slots"),
        ({"sys__fs__cgroup__cpu.max": "150000 100000"}, "CPU limit", "problem", "cpuset"),
        (
            {"sys__fs__cgroup__cpu.max": "400000 100000", "sys__fs__cgroup__cpu.stat": "nr_throttled 7\n"},
            "CPU limit",
            "problem",
            "cpuset",
        ),
        (
            {
                "sys__fs__cgroup__memory.max": str(4 << 30),
                "sys__fs__cgroup__memory.current": str(3 << 30),
                "sys__fs__cgroup__memory.stat": "inactive_file 0\n",
            },
            "memory",
            "problem",
            "memory.max",
        ),
        (
            {GOVERNOR: "powersave"},
            "governor",
            "hint",
            "performance",
        ),
        (
            {"proc__meminfo": f"{GOOD['proc/meminfo']}SwapTotal: {2 * GIB} kB\nSwapFree: {GIB} kB\n"},
            "swap",
            "hint",
            "swapoff",
        ),
        ({"proc__stat": "cpu  100 0 100 700 0 0 0 100 0 0\n"}, "steal", "hint", "neighbours"),
    ],
)
def test_what_costs_speed_is_found_with_its_remedy_and_gain(
    tmp_path: Path, changes: dict[str, str], check: str, verdict: str, remedy: str
) -> None:
    (finding,) = wrong(tree(tmp_path, **changes))
    assert (finding.check, finding.verdict) == (check, verdict)
    assert remedy in finding.remedy
    is_size = re.fullmatch(r"[\d.]+ GiB of memory to use", finding.gain) is not None
    assert finding.gain == "not measured" or is_size or finding.figures, "no gain is claimed that was not measured"


@pytest.mark.parametrize(
    ("changes", "figures"),
    [({"proc__cpuinfo": "flags : avx2\n"}, ["27.4", "21.0"]), ({THP: "always madvise [never]"}, ["0.86", "0.87"])],
)
def test_a_gain_that_was_measured_names_its_figures(
    tmp_path: Path, changes: dict[str, str], figures: list[str]
) -> None:
    (finding,) = wrong(tree(tmp_path, **changes))
    path, _, anchor = finding.figures.partition("#")
    text = (ROOT / path).read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [one for one in sections if one.partition("\n")[0].lower().replace(" ", "-") == anchor]
    assert all(figure in section for figure in figures)
    assert finding.gain != "not measured"


def test_a_quota_of_all_cpus_that_never_stopped_the_group_is_fine(tmp_path: Path) -> None:
    changes = {"sys__fs__cgroup__cpu.max": "400000 100000", "sys__fs__cgroup__cpu.stat": "nr_throttled 0\n"}
    assert wrong(tree(tmp_path, **changes)) == []


def test_what_the_kernel_does_not_say_is_no_finding(tmp_path: Path) -> None:
    assert examine(tmp_path, {0}) == [Finding("CPU limit", Verdict.GOOD, "none; 1 CPUs")]


@pytest.mark.parametrize(("verdict", "status"), [(Verdict.GOOD, 0), (Verdict.HINT, 0), (Verdict.PROBLEM, 1)])
def test_the_status_says_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict, status: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("memory", verdict, "as it is", "change it", "much", "F")])
    done = CliRunner().invoke(cli, ["doctor"])
    assert (done.exit_code, "change: change it" in done.stdout) == (status, True)
    assert "gain: much (F)\n" in done.stdout
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == status
    assert [found["verdict"] for found in json.loads(done.stdout)] == [verdict]


def test_this_host_can_be_examined() -> None:
    assert {"CPU", "memory"} <= {finding.check for finding in examine()}
