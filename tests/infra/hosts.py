"""Hosts of a small network as network namespaces: cables can be pulled and put back. Needs root."""

from __future__ import annotations

import itertools
import os
import shutil
import string
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_IP = shutil.which("ip") or "ip"


def _ip(*args: str, namespace: str | None = None) -> None:
    inside = [] if namespace is None else ["-n", namespace]
    done = subprocess.run([_IP, *inside, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(args)}: {done.stderr.strip()}")


class Host:
    """A namespace with one cable to the switch. Number 0 is the namespace of the tests themselves."""

    def __init__(self, network: Network, number: int) -> None:
        self.address = f"{network.prefix}.{number + 1}"
        self._network = network
        self._port = f"hr{network.tag}p{number}"  # the switch's end of the cable
        self._namespace = f"headrace-{network.tag}-{number}" if number else None
        end = f"hr{network.tag}e{number}"
        if self._namespace is not None:
            _ip("netns", "add", self._namespace)
            network.namespaces.append(self._namespace)
            _ip("link", "set", "lo", "up", namespace=self._namespace)
        _ip("link", "add", self._port, "type", "veth", "peer", "name", end, namespace=network.switch)
        # The tests' own namespace has no name, but that of their process.
        _ip("link", "set", end, "netns", self._namespace or str(os.getpid()), namespace=network.switch)
        _ip("link", "set", self._port, "master", "switch", "up", namespace=network.switch)
        _ip("address", "add", f"{self.address}/24", "dev", end, namespace=self._namespace)
        _ip("link", "set", end, "up", namespace=self._namespace)

    @property
    def enter(self) -> list[str]:
        """The command that runs what follows it on this host."""
        return [] if self._namespace is None else [_IP, "netns", "exec", self._namespace]

    def cut_off(self) -> None:
        """Lose all packets in both directions, without notice, as if the cable were pulled."""
        _ip("link", "set", self._port, "down", namespace=self._network.switch)

    def heal(self) -> None:
        """Reconnect the hosts."""
        _ip("link", "set", self._port, "up", namespace=self._network.switch)


_numbers = itertools.count()


class Network:
    """A switch and the hosts at it."""

    def __init__(self) -> None:
        # The kernel takes its time to remove a network, and the next one is not to meet it.
        number = next(_numbers)
        self.tag = f"{os.getpid() % 100_000}{string.ascii_lowercase[number % 26]}"
        self.prefix = f"10.{200 + os.getpid() % 50}.{(os.getpid() // 50 + number) % 250}"
        self.switch = f"headrace-{self.tag}-switch"
        self.namespaces = [self.switch]
        _ip("netns", "add", self.switch)
        _ip("link", "add", "switch", "type", "bridge", namespace=self.switch)
        _ip("link", "set", "switch", "up", namespace=self.switch)

    def hosts(self, count: int) -> list[Host]:
        """Connect the tests' host and this many new ones. Returns the new ones."""
        return [Host(self, number) for number in range(count + 1)][1:]

    def close(self) -> None:
        """Remove everything. The hosts' processes must have ended."""
        for namespace in reversed(self.namespaces):
            subprocess.run([_IP, "netns", "del", namespace], capture_output=True, check=False)


@contextmanager
def network_of(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts at one switch; skips the test where namespaces are not permitted."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command, which make test fetches")
    try:
        network = Network()
    except PermissionError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    try:
        yield network.hosts(num_hosts)
    finally:
        network.close()
