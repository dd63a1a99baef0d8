"""Ports that servers can listen on."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.common import ports
from headrace.common.commands import CommandError
from headrace.common.ports import check_port, free_port, is_free


def test_a_free_port_is_not_one_that_an_outgoing_connection_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tmp_path / "ip_local_port_range"
    limits.write_text("20100\t60999\n")
    monkeypatch.setattr(ports, "_OUTGOING_PORTS", limits)
    found = {free_port("127.0.0.1") for _ in range(20)}
    assert all(20_000 <= port < port + 1 < 20_100 for port in found)
    limits.unlink()
    assert is_free("127.0.0.1", free_port("127.0.0.1"))


def test_a_port_above_the_last_one_is_not_free() -> None:
    assert not is_free("127.0.0.1", 65536)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CommandError, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_port("192.0.2.1", 8000, "--port")


def test_a_host_name_that_means_nothing_is_refused() -> None:
    with pytest.raises(CommandError, match="is not an address of this machine"):
        check_port("no host.invalid", 8000, "--port")
