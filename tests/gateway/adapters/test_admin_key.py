"""The operators' key, and its replacement while a gateway serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.gateway.adapters.admin_key import AdminKey
from headrace.protos.status import Reason, StatusError
from tests.common.transport.test_channels import Clock

OLD, NEW = "the old key of the operators", "the new key of the operators"


def bearing(key: str) -> Any:
    """A request with this key."""
    return SimpleNamespace(header=lambda name: f"Bearer {key}")


def test_a_new_key_in_the_file_counts_and_a_spoilt_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text(OLD + "\n")
    key = AdminKey(path, clock=Clock())
    assert (key.admits(bearing(OLD)), key.admits(bearing(NEW))) == (True, False)
    path.write_text(NEW + " \n")
    assert (key.admits(bearing(OLD)), key.admits(bearing(NEW))) == (False, True)
    path.write_text("short")
    assert key.admits(bearing(NEW))
    path.unlink()
    assert key.admits(bearing(NEW))
    with pytest.raises(StatusError) as raised:
        key.check(bearing(OLD))
    assert raised.value.reason is Reason.UNAUTHENTICATED


def test_without_a_file_nobody_is_an_operator() -> None:
    key = AdminKey(None)
    assert not key.admits(bearing(""))
    with pytest.raises(StatusError, match="--admin-key-file") as raised:
        key.check(bearing(OLD))
    assert raised.value.reason is Reason.PERMISSION_DENIED
