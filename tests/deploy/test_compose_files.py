"""The compose files: schema, commands, ports, security settings and graceful stops."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.command_lines import refuse_what_is_unknown

ROOT = Path(__file__).parent.parent.parent
FILES = {
    "compose.yaml": ["compose.yaml"],
    "two-socket": ["compose.yaml", "deploy/compose/two-socket.yaml"],
    "host": ["deploy/compose/host.yaml"],
    "pipeline": ["deploy/compose/pipeline.yaml"],
}
VARIABLES = {
    "HOST_ADDRESS": "10.0.0.7",
    "FIRST_ADDRESS": "10.0.0.5",
    "REDIS_URL": "rediss://10.0.0.5:6379/0",
    "WORKER_1_CPUS": "4-5",
    "TLS_DIR": "/tls",
}
PROFILES = ("front", "redis", "two-socket", "first", "stage")
ALL_PROFILES = [word for profile in PROFILES for word in ("--profile", profile)]
PIPELINE = "deploy/compose/pipeline.yaml"

_INNERMOST = re.compile(r"\$\{(\w+)(?::([-?+])([^${}]*))?\}")


def interpolated(text: str) -> str:
    """Replace variables as Compose does, innermost first. Fails if a required one is not set."""
    while found := _INNERMOST.search(text):
        name, operator, otherwise = found.groups()
        value = VARIABLES.get(name) or (otherwise if operator == "-" else None)
        if operator == "+":
            value = otherwise if name in VARIABLES else ""
        assert value is not None, f"{name} has no value"
        text = text[: found.start()] + value + text[found.end() :]
    return text


def parsed(file: str) -> dict[str, Any]:
    text = "\n".join(line for line in (ROOT / file).read_text().splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, Any] = yaml.safe_load(interpolated(text))
    return found


def services(file: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = parsed(file)["services"]
    return found


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration[:-1])


whole_files = pytest.mark.parametrize("file", ["compose.yaml", "deploy/compose/host.yaml"])
with_pipeline = pytest.mark.parametrize("file", ["compose.yaml", "deploy/compose/host.yaml", PIPELINE])


@pytest.mark.parametrize("file", sorted({file for files in FILES.values() for file in files}))
def test_every_file_follows_the_compose_specification(file: str) -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed; make check does that")
    import jsonschema
    from check_jsonschema.builtin_schemas import get_builtin_schema

    # Strings with variables are allowed wherever values are, as the specification has it.
    jsonschema.validate(yaml.safe_load((ROOT / file).read_text()), get_builtin_schema("vendor.compose-spec"))


@pytest.mark.parametrize("name", FILES)
def test_compose_itself_accepts_the_files(name: str) -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], check=False).returncode:
        pytest.skip("there is no docker compose here")
    command = ["docker", "compose", *ALL_PROFILES]
    for file in FILES[name]:
        command += ["--file", file]
    done = subprocess.run(
        [*command, "config", "--format", "json"],
        cwd=ROOT,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    parts = {"first", "stage"} if name == "pipeline" else {"gateway", "router", "worker"}
    assert parts <= set(config["services"])
    # The build context is the repository, from wherever the file is.
    assert Path(config["services"]["pull"]["build"]["context"]) == ROOT
    if name in ("two-socket", "host"):
        assert config["services"]["worker-1"]["cpuset"] == VARIABLES["WORKER_1_CPUS"]
        assert config["services"]["worker-1"]["cap_add"] == ["SYS_NICE"]


@with_pipeline
def test_commands_are_those_of_the_real_commands(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, service in services(file).items():
        if "redis" not in name and "entrypoint" not in service:
            refuse_what_is_unknown(monkeypatch, service["command"], service.get("environment"))
            check = service.get("healthcheck", {}).get("test", ["CMD", "headrace", "health", "x"])
            assert check[:2] == ["CMD", "headrace"]
            refuse_what_is_unknown(monkeypatch, check[2:])


@whole_files
def test_health_is_asked_where_a_process_listens(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gateway", "router", "worker"):
        service = services(file)[name]
        params = refuse_what_is_unknown(monkeypatch, service["command"], service.get("environment"))
        asked = service["healthcheck"]["test"][3].rpartition(":")[2]
        listening = str(params["port"] if name == "gateway" else params["listen"])
        assert asked == listening.rpartition(":")[2]
        if "ports" in service:
            inside = {mapping.rpartition(":")[2] for mapping in service["ports"]}
            assert all(mapping.startswith("127.0.0.1:") for mapping in service["ports"]), "published where asked only"
            assert inside == {str(params["port"]), str(params["grpc_port"])}


@whole_files
def test_clients_of_other_hosts_are_let_in_only_where_asked(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = services(file)["gateway"]
    params = refuse_what_is_unknown(monkeypatch, gateway["command"], gateway.get("environment"))
    assert "ports" in gateway or params["host"] == "127.0.0.1"
    monkeypatch.setitem(VARIABLES, "PUBLISH", "0.0.0.0")
    gateway = services(file)["gateway"]
    opened = refuse_what_is_unknown(monkeypatch, gateway["command"], gateway.get("environment"))
    assert opened["host"] == "0.0.0.0"
    assert all(mapping.startswith("0.0.0.0:") for mapping in gateway.get("ports", []))


@whole_files
def test_every_redis_has_a_password_and_the_policy_that_fits_what_it_keeps(file: str) -> None:
    found = services(file)
    policies = {}
    for name, service in found.items():
        if name.startswith("redis"):
            command = service["command"]
            assert command[1].endswith("/redis.conf"), "it has the password"
            assert "--requirepass" not in command, "everybody reads command lines"
            policies[name] = command[command.index("--maxmemory-policy") + 1]
            assert command[command.index("--maxmemory") + 1]
            if file != "compose.yaml":
                assert command[command.index("--port") + 1] == "0", "only with TLS"
    assert policies["redis"] == "noeviction"
    assert policies.get("redis-responses", "allkeys-lru") == "allkeys-lru"


@whole_files
def test_routers_and_workers_ask_for_the_join_token(file: str) -> None:
    for name in ("gateway", "router", "worker"):
        environment = services(file)[name]["environment"]
        token = environment["HEADRACE_JOIN_TOKEN_FILE"]
        mounts = [volume.split(":")[1] for volume in services(file)[name]["volumes"]]
        assert str(Path(token).parent) in mounts
        assert Path(environment["HEADRACE_REDIS_PASSWORD_FILE"]).parent == Path(token).parent


@whole_files
def test_stops_leave_the_time_to_drain(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gateway", "router", "worker"):
        service = services(file)[name]
        params = refuse_what_is_unknown(monkeypatch, service["command"], service.get("environment"))
        drain_s = params.get("drain_timeout", params.get("drain_timeout_s"))
        assert isinstance(drain_s, float)
        assert drain_s + 5 <= seconds(service["stop_grace_period"])


@with_pipeline
def test_every_container_is_confined(file: str) -> None:
    for service in services(file).values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


@whole_files
def test_the_kv_cache_of_a_worker_outlives_its_container(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = services(file)
    workers = [service for name, service in found.items() if name.startswith("worker")]
    assert workers
    for worker in workers:
        params = refuse_what_is_unknown(monkeypatch, worker["command"], worker.get("environment"))
        (volume,) = [mount.split(":")[0] for mount in worker["volumes"] if mount.endswith(f":{params['kv_memory']}")]
        assert parsed(file)["volumes"][volume]["driver_opts"]["type"] == "tmpfs"
        # Docker frees a tmpfs volume with its last container. This one runs as long as the workers may come back.
        holders = [name for name, service in found.items() if f"{volume}:" in str(service.get("volumes"))]
        (holder,) = [name for name in holders if not name.startswith("worker")]
        assert worker["depends_on"][holder] == {"condition": "service_started"}
        assert found[holder]["restart"] == "unless-stopped"
        assert found[holder]["network_mode"] == "none"
        assert "profiles" not in found[holder]


@whole_files
def test_the_memory_of_kv_caches_belongs_to_the_user_of_the_image(file: str) -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    options = parsed(file)["volumes"]["kv"]["driver_opts"]["o"].split(",")
    assert {f"uid={user}", "mode=0700"} <= set(options)


def test_hosts_of_a_pipeline_meet_with_the_token_of_their_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    found = services(PIPELINE)
    first, stage = (
        refuse_what_is_unknown(monkeypatch, found[name]["command"], found[name]["environment"])
        for name in ("first", "stage")
    )
    assert (first["pipeline"], first["host"], stage["workers"]) == (2, "127.0.0.1", 1)
    # Of two hosts, as 10.0.0.5 and 10.0.0.7 would have it.
    assert str(first["await_stages"]).replace("10.0.0.7", "10.0.0.5") == stage["join"] == "10.0.0.5:50070"
    assert found["stage"]["healthcheck"]["test"][3] == stage["stage_listen"] == "10.0.0.7:50071"
    assert found["first"]["healthcheck"]["test"][3] == f"http://{first['host']}:{first['port']}"
    for name in ("first", "stage"):
        assert seconds(found[name]["stop_grace_period"]) >= 10, "it takes 5 s to stop"
        mounts = [volume.split(":")[1] for volume in found[name]["volumes"]]
        assert str(Path(found[name]["environment"]["HEADRACE_JOIN_TOKEN_FILE"]).parent) in mounts
        assert found[name]["depends_on"] == {"pull": {"condition": "service_completed_successfully"}}
        assert found[name]["profiles"] == [name]


def test_every_variable_is_explained_at_the_head_of_its_file() -> None:
    for file in ("compose.yaml", "deploy/compose/host.yaml", "deploy/compose/two-socket.yaml", PIPELINE):
        lines = (ROOT / file).read_text().splitlines()
        head = "\n".join(line for line in lines if line.startswith("#"))
        body = "\n".join(line for line in lines if not line.startswith("#"))
        for name in re.findall(r"\$\{(\w+)", body):
            assert re.search(rf"\b{name}\b", head), f"{file}: {name}"
