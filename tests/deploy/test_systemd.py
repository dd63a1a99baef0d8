"""The units: what systemd says of them, commands, and time to drain."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.command_lines import refuse_what_is_unknown

SYSTEMD = Path(__file__).parent.parent.parent / "deploy" / "systemd"
UNITS = sorted(path.name for path in SYSTEMD.glob("*.service"))
HEADRACE = "/opt/headrace/bin/headrace"
# Longest that `headrace serve` takes to stop (README of operations: 5 s).
SERVE_STOPS_S = 5.0

units = pytest.mark.parametrize("unit", UNITS)


def settings(unit: str) -> dict[str, list[str]]:
    """The settings of a unit by name, in order, with continued lines joined and specifiers expanded for instance 0."""
    found: dict[str, list[str]] = {}
    text = (SYSTEMD / unit).read_text().replace("\\\n", " ")
    for specifier, value in (("%i", "0"), ("%H", "host"), ("%S", "/var/lib"), ("%t", "/run")):
        text = text.replace(specifier, value)
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment(unit: str) -> dict[str, str]:
    pairs = [pair for line in settings(unit).get("Environment", []) for pair in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def argv_of(unit: str, name: str) -> list[str]:
    (line,) = settings(unit)[name]
    line = re.sub(r"\$\{?(\w+)\}?", lambda found: environment(unit)[found[1]], line)
    program, *argv = shlex.split(line)
    assert program == HEADRACE
    return argv


def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed, and make test could not fetch it")
    shutil.copytree(SYSTEMD, tmp_path, dirs_exist_ok=True)
    paths = []
    for unit in UNITS:
        path = tmp_path / unit
        path.write_text(path.read_text().replace(HEADRACE, "/bin/true"))
        paths.append(str(path).replace("@.service", "@0.service"))
    done = subprocess.run([analyze, "verify", "--man=no", *paths], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


@units
def test_commands_are_those_of_the_real_commands(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStart"), environment(unit))
    if "ExecStartPre" in settings(unit):
        refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStartPre"), environment(unit))


@units
def test_a_unit_that_cannot_do_what_was_asked_is_not_started_again(unit: str) -> None:
    found = settings(unit)
    assert found["Restart"] == ["on-failure"]
    assert found["RestartPreventExitStatus"] == ["2"]


@units
def test_stops_leave_the_time_to_drain(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStart"), environment(unit))
    drain_s = params.get("drain_timeout", params.get("drain_timeout_s", SERVE_STOPS_S))
    assert isinstance(drain_s, float)
    assert drain_s + 5 <= float(settings(unit)["TimeoutStopSec"][0])


@units
def test_a_unit_runs_without_privileges(unit: str) -> None:
    found = settings(unit)
    assert found["User"] == ["headrace"]
    assert found["CapabilityBoundingSet"] == [""]
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert found[name] == ["yes"], name
    assert found["ProtectSystem"] == ["strict"]


def test_units_of_one_host_do_not_take_each_others_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[str] = []
    for unit in UNITS:
        params = refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStart"), environment(unit))
        if unit != "headrace.service":  # instead of the others, not beside them
            ports += [str(params[name]).rpartition(":")[2] for name in ("listen", "metrics") if name in params]
            ports += [str(params[name]) for name in ("port", "grpc_port") if name in params]
    assert len(ports) == len(set(ports)), ports


@pytest.mark.parametrize("unit", ["headrace.service", "headrace-gateway.service"])
def test_clients_of_other_hosts_get_in_where_asked_only(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStart"), environment(unit))
    assert params["host"] == "127.0.0.1"
    variable = "HEADRACE_SERVE_HOST" if unit == "headrace.service" else "HEADRACE_GATEWAY_HOST"
    opened = {**environment(unit), variable: "0.0.0.0"}
    assert refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStart"), opened)["host"] == "0.0.0.0"


def test_the_unit_of_a_host_is_a_stage_of_another_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings are those of docs/how-to/large-models.md."""
    guide = (SYSTEMD.parent.parent / "docs" / "how-to" / "large-models.md").read_text()
    blocks = re.findall(r"```ini\n(.*?)```", guide, re.DOTALL)
    files = [dict(re.findall(r"^(\w+)=(\S+)$", block, re.MULTILINE)) for block in blocks]
    unit = "headrace.service"
    first, stage = (
        refuse_what_is_unknown(monkeypatch, argv_of(unit, "ExecStart"), {**environment(unit), **settings_of_host})
        for settings_of_host in files
    )
    assert (first["pipeline"], first["workers"], first["await_stages"], first["join"]) == (2, None, None, None)
    assert stage["join"] == "10.0.0.5:50070"
    assert first["tls_dir"] == stage["tls_dir"] is not None
    assert files[0]["MODEL"] == files[1]["MODEL"]


def test_each_instance_of_the_worker_has_its_own_node() -> None:
    for node in (0, 1):
        text = (SYSTEMD / f"headrace-worker@{node}.service.d" / "numa-node.conf").read_text()
        assert f"NUMAMask={node}\n" in text
        assert "CPUAffinity=numa\n" in text
        assert "NUMAPolicy=preferred\n" in text
