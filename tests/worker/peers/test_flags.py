"""Flags that need the exchange of blocks between workers."""

from __future__ import annotations

import pytest

from headrace.worker.__main__ import config_of
from headrace.worker.config import ConfigurationError


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_needs_other_workers(role: str) -> None:
    flags = {"keep_kv_memory": False, "kv_memory": None, "kv_disk_key": None, "kv_disk": None}
    with pytest.raises(ConfigurationError, match=f"^--role {role} moves cached prefixes .*; leave out --no-kv-peers$"):
        config_of("model", None, {**flags, "role": role, "kv_peers": False})
