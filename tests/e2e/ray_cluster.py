"""A Ray cluster on this machine: a head and nodes, each with its own raylet, which tests add, remove and kill.

Ray's own `cluster_utils.Cluster` runs it, in a process of its own, so that nothing of Ray is in the tests' process.
`python -m tests.e2e.ray_cluster` is that process: a command a line on its standard input, an answer a line.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.ray.processes import NICENESS
from tests.e2e.serving import BOUND_S, headrace
from tests.patience import patience, until
from tests.ports import free_port

_START_S = 60.0
_MARK = "HEADRACE_TEST_CLUSTER"


class RayProcesses:
    """A command whose processes, Ray's and ours, are known by a mark in their environment, and end with the tests."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], command: Sequence[str], stdout: int = subprocess.STDOUT
    ) -> None:
        """What the command writes is in `log`, unless its standard output goes to `stdout`."""
        self.mark = uuid.uuid4().hex
        (directory / "run").mkdir(mode=0o700)
        (directory / "ray").mkdir()
        self.environment = {
            **os.environ,
            **environment,
            _MARK: self.mark,
            "XDG_RUNTIME_DIR": str(directory / "run"),
            "RAY_USAGE_STATS_ENABLED": "0",
            NICENESS: "0",
            "RAY_TMPDIR": str(directory),
        }
        self.log = directory / "cluster.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log if stdout == subprocess.STDOUT else stdout,
                stderr=log,
                text=True,
                env=self.environment,
                start_new_session=True,
            )

    def processes(self, role: str = "") -> list[int]:
        """The ids of headrace's processes of this cluster. With a role those alone, without their ranks."""
        return self._marked(rf"headrace\.{role}" if role else r"headrace\..*")

    def _marked(self, module: str = "") -> list[int]:
        """The ids of all processes of this cluster, or of those that run a module whose name is of this pattern."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                command = (place / "cmdline").read_bytes().split(b"\0")
                is_ours = f"{_MARK}={self.mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_ours and (not module or any(re.fullmatch(module.encode(), part) for part in command[1:4])):
                found.append(int(place.name))
        return sorted(found)

    def logs(self) -> str:
        """The end of what replicas of Ray Serve have logged."""
        files = sorted(self.log.parent.glob("ray/session_*/logs/serve/*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files[-8:])

    def end(self) -> None:
        """End all processes, by force."""
        try:
            self._ask_to_end()
            self._process.wait(patience(BOUND_S))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        until(lambda: not self.processes(), "no process of headrace outlives its cluster", BOUND_S)
        for pid in self._marked():  # of Ray, if the command has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _ask_to_end(self) -> None:
        """Tell the command to end its processes and itself."""
        self._process.terminate()


class RayCluster(RayProcesses):
    """A cluster of several nodes. Each is a host of its own to headrace: it has its own name."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.e2e.ray_cluster"]
        super().__init__(directory, environment, command, subprocess.PIPE)
        self.address = self.url = self.dashboard = ""

    def tell(self, command: str, **arguments: Any) -> Any:
        """Run a command of `_Commands` and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{command} has failed:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def start(self, **head: Any) -> None:
        """Start the head; `head` are arguments of Cluster.add_node."""
        self.address = self.tell("add", name="head", **head)

    def headrace(self, *args: str, timeout_s: float = 3 * BOUND_S) -> str:
        """Run `headrace ray ARGS` to its end, and return its output."""
        os.environ.update({"RAY_ADDRESS": self.address, "XDG_RUNTIME_DIR": self.environment["XDG_RUNTIME_DIR"]})
        try:
            done = headrace("ray", *args, timeout_s=timeout_s)
        finally:
            del os.environ["RAY_ADDRESS"], os.environ["XDG_RUNTIME_DIR"]
        assert done.returncode == 0, f"{' '.join(args)}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        """`headrace ray status --json`."""
        found: dict[str, Any] = json.loads(self.headrace("status", "--json"))
        return found

    def _ask_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextmanager
def ray_cluster(environment: Mapping[str, str] | None = None) -> Iterator[RayCluster]:
    """A cluster without nodes, ended with the block. Prints the end of its logs, which pytest shows after a failure."""
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))  # sockets need a short path
    cluster = RayCluster(directory, environment or {})
    try:
        yield cluster
    finally:
        print(cluster.logs())
        cluster.end()
        shutil.rmtree(directory, ignore_errors=True)


class _Commands:
    """What the process of the cluster does."""

    def __init__(self) -> None:
        from ray._private import services
        from ray.cluster_utils import Cluster

        services.get_node = _patient(services.get_node)
        services.start_raylet = _knowing(services.start_raylet)
        self.cluster = Cluster()
        self.nodes: dict[str, Any] = {}
        self.head: dict[str, Any] = {}

    def add(self, name: str, **arguments: Any) -> str:
        """Add a node; the first one is the head. Returns the cluster's address."""
        if not self.nodes:
            self.head = arguments
        self.nodes[name] = self.cluster.add_node(node_name=name, **_ports(), **arguments)
        return str(self.cluster.address)

    def remove(self, name: str) -> None:
        """Kill all of Ray's processes of a node, as when its host is lost."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def kill_raylet(self, name: str) -> None:
        """Kill the raylet alone."""
        self.nodes[name].kill_raylet(check_alive=False)

    def placement_groups(self) -> list[dict[str, Any]]:
        """The strategy, the bundles and the nodes of each placement group that has its resources."""
        import ray

        ray.init(self.cluster.address, logging_level="warning", log_to_driver=False)
        try:
            groups = ray.util.placement_group_table().values()
        finally:
            ray.shutdown()
        return [
            {
                "strategy": group["strategy"],
                "bundles": list(group["bundles"].values()),
                "nodes": sorted(set(group["bundles_to_node_id"].values())),
            }
            for group in groups
            if group["state"] == "CREATED"
        ]

    def restart_head(self) -> str:
        """Kill all of Ray's processes on the head, and start it anew at its address."""
        port = int(self.cluster.address.rpartition(":")[2])
        self.cluster.remove_node(self.nodes.pop("head"), allow_graceful=False)
        self.nodes["head"] = self.cluster.add_node(
            node_name="head", **_ports(), **{**self.head, "gcs_server_port": port}
        )
        return str(self.cluster.address)


_LISTEN_PORT = "dashboard_agent_listen_port"


def _ports() -> dict[str, int]:
    """Ports of a node's agents. A raylet that does not know them waits for the agents, but only for 15 s."""
    names = ("metrics_agent_port", "metrics_export_port", _LISTEN_PORT, "runtime_env_agent_port")
    return {name: free_port() for name in names}


def _knowing(start_raylet: Callable[..., Any]) -> Callable[..., Any]:
    """Ray tells its raylet all these ports except one, which the raylet reads from a file of the agent's: it is there
    before the agent, so that a crowded machine may take longer than 15 s to start this."""
    from ray._raylet import persist_port

    parameters = inspect.signature(start_raylet)

    def started(*args: Any, **named: Any) -> Any:
        given = parameters.bind(*args, **named).arguments
        persist_port(given["session_dir"], given["node_id"], _LISTEN_PORT, given[_LISTEN_PORT])
        return start_raylet(*args, **named)

    return started


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Ray gives a node 30 s to start, which are not enough on a crowded machine: its caller asks until then."""

    def found(*args: Any, **named: Any) -> Any:
        until_s = time.monotonic() + patience(_START_S)
        while True:
            try:
                return get_node(*args, **named)
            except RuntimeError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)

    return found


def main() -> None:
    """Run commands until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    commands = _Commands()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answer = getattr(commands, name)(**arguments)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for name in [name for name in commands.nodes if name != "head"]:
        commands.remove(name)
    commands.cluster.shutdown()


if __name__ == "__main__":
    main()
