"""Flags that need other flags: the exchange of blocks between workers, or a disk."""

from __future__ import annotations

import pytest

from headrace.worker.__main__ import config_of
from headrace.worker.config import ConfigurationError


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_needs_other_workers(role: str) -> None:
    flags = dict.fromkeys(("kv_memory", "kv_disk_key", "kv_disk", "kv_disk_gb", "kv_events", "kv_events_replay"))
    flags |= {"keep_kv_memory": False, "kv_events_topic": None, "vllm_metrics": False}
    with pytest.raises(ConfigurationError, match=f"^--role {role} moves cached prefixes .*; leave out --no-kv-peers$"):
        config_of({**flags, "role": role, "kv_peers": False})


@pytest.mark.parametrize(("flag", "value"), [("kv_disk_gb", 16.0), ("kv_disk_key", "key")])
def test_a_size_or_key_needs_a_disk(flag: str, value: object) -> None:
    flags = dict.fromkeys(("kv_memory", "kv_disk_key", "kv_disk", "kv_disk_gb", "kv_events", "kv_events_replay"))
    flags |= {"keep_kv_memory": False, "kv_events_topic": None, "vllm_metrics": False}
    name = flag.replace("_", "-")
    with pytest.raises(ConfigurationError, match=rf"^--{name} .* directory; name it with --kv-disk$"):
        config_of({**flags, flag: value})
