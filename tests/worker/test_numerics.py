"""What else than the model the bytes of KV blocks depend on, and which blocks are therefore not taken back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.worker import numerics
from headrace.worker.allocation import allocate
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.kv.kept_cache import KeptCache
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.numerics import kv_numerics, vector_extensions
from headrace.worker.tiers import kv_layout
from tests.worker.configs import worker_config
from tests.worker.idle_runner import idle_runner

EXACT = StepLimits(4, 16, 16, is_exact=True)
INEXACT = replace(EXACT, max_num_batched_tokens=1024, is_exact=False)
CONFIG = worker_config(kv_cache_bytes=1 << 20)


def kept_after(memory: HostMemory, limits: StepLimits, adapters: object | None = None) -> bool:
    """Start a worker. Returns whether it keeps the cache that the memory has."""
    kept = KeptCache(memory, 1)
    before = kept.format
    kept.old_blocks()
    allocate(CONFIG, idle_runner(adapters=adapters), limits, kept, None)
    return kept.format is before


def test_blocks_of_steps_that_are_not_exact_are_not_taken_back_by_a_worker_whose_steps_are() -> None:
    memory = HostMemory(os.memfd_create("test"))
    assert not kept_after(memory, INEXACT), "the first start"
    assert kept_after(memory, INEXACT)
    assert not kept_after(memory, EXACT)
    assert kept_after(memory, replace(EXACT, max_num_batched_tokens=8)), "no exact size of steps changes a bit"
    assert not kept_after(memory, EXACT, adapters=object()), "steps with adapters round in other places"


def test_blocks_of_another_version_of_the_computation_are_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(os.memfd_create("test"))
    kept_after(memory, EXACT)
    monkeypatch.setattr(numerics, "KV_NUMERICS_VERSION", numerics.KV_NUMERICS_VERSION + 1)
    assert not kept_after(memory, EXACT)


def test_disks_and_peers_tell_apart_what_memory_tells_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [
        kv_layout(idle_runner(), EXACT, "fingerprint"),
        kv_layout(idle_runner(), INEXACT, "fingerprint"),
        kv_layout(idle_runner(adapters=object()), EXACT, "fingerprint"),
        kv_layout(idle_runner(), EXACT, "another"),
    ]
    monkeypatch.setattr(numerics, "vector_extensions", lambda: "another CPU of the same name")
    layouts.append(kv_layout(idle_runner(), EXACT, "fingerprint"))
    monkeypatch.setattr(numerics, "KV_NUMERICS_VERSION", numerics.KV_NUMERICS_VERSION + 1)
    layouts.append(kv_layout(idle_runner(), EXACT, "fingerprint"))
    assert len(set(layouts)) == len(layouts)
    assert kv_numerics(idle_runner(), EXACT) == kv_numerics(idle_runner(), replace(EXACT, max_num_seqs=2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model name : AMD EPYC\nflags\t\t: fpu avx2 avx avx512f new_flag avx512_bf16\nflags : fpu\n",
            "avx2 avx512_bf16 avx512f",
        ),
        ("Features\t: fp asimd evtstrm i8mm bf16\n", "asimd bf16 i8mm"),
        ("processor : 0\n", ""),
    ],
)
def test_extensions_are_those_by_which_kernels_are_chosen(tmp_path: Path, text: str, expected: str) -> None:
    assert vector_extensions(tmp_path) == ""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert vector_extensions(tmp_path) == expected
