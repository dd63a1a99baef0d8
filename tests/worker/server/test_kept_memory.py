"""The KV cache that a worker leaves in memory, when the next worker cannot start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.kv.host_memory import open_memory
from headrace.worker.serving import serve
from tests.worker.configs import worker_config


@pytest.mark.parametrize(("was_kept", "keeps"), [(True, True), (True, False), (False, True), (False, False)])
async def test_a_start_that_fails_keeps_what_was_kept_only(tmp_path: Path, *, was_kept: bool, keeps: bool) -> None:
    before = open_memory(str(tmp_path), "w")
    if was_kept:
        before.resize(1 << 21)
    os.close(before.descriptor)
    config = worker_config(tmp_path / "no-model", kv_memory=str(tmp_path), keep_kv_memory=keeps)
    with pytest.raises(ConfigurationError):
        await serve(config)
    assert any(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) == (was_kept and keeps)
