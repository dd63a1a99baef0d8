"""Memory limits enforced by the kernel: the memory that a worker uses of them, and the effect of exceeding one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Process
from tests.e2e.serving import pulled_model, serving, until
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, run_streams
from tests.infra.memory_cgroup import MemoryCgroup, memory_cgroup
from tests.ports import free_port

pytestmark = pytest.mark.e2e

MIB = 1 << 20
NUM_STREAMS = 16
MAX_TOKENS = 48


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    with memory_cgroup() as made:
        yield made


@pytest.mark.timeout(180)
async def test_a_worker_that_the_kernel_kills_for_its_memory_is_restarted_and_its_streams_go_on(
    cgroup: MemoryCgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Page by page, so that every block that comes into use counts against the limit.
    monkeypatch.setenv("HEADRACE_WORKER_HUGE_PAGES", "false")
    bodies = [chat_body(number, MAX_TOKENS, temperature=0) for number in range(NUM_STREAMS)]
    flags = ("--workers", "2", "--threads", "1", "--execution-mode", "accuracy")
    with serving(*flags, model=small_model()) as system:
        until(lambda: {row["state"] for row in system.status()} == {"ready"}, "all processes ready")
        victim = system.process_of("worker-0")

        async def exceed() -> None:
            cgroup.limit(MIB)
            cgroup.procs.write_text(str(victim["pid"]))

        # The first answers: their blocks were never used, and each that is taken counts.
        streams = await run_streams(system.base_url, bodies, disturb_behind=4, disturb=exceed)
        until(lambda: {row["state"] for row in system.status()} == {"ready"}, "the worker is there again")
        undisturbed = await run_streams(system.base_url, bodies)
        assert [stream.result for stream in streams] == [stream.result for stream in undisturbed]
        assert {stream.num_tokens for stream in streams} == {MAX_TOKENS}
        assert cgroup.num_oom_kills == 1
        until(lambda: system.process_of("worker-0")["state"] == "ready", "the worker is back")
        again = system.process_of("worker-0")
        assert again["pid"] != victim["pid"]
        assert (again["restarts"], system.process_of("worker-1")["restarts"]) == (1, 0)


@pytest.mark.timeout(120)
def test_the_kv_cache_is_sized_by_the_limit_and_more_is_refused(cgroup: MemoryCgroup) -> None:
    limit_bytes = 1024 * MIB
    cgroup.limit(limit_bytes)
    enter = ("/bin/sh", "-c", f'echo $$ > {cgroup.procs} && exec "$@"', "sh")
    argv = ["-m", "headrace.worker", "--model", str(pulled_model()), "--threads", "1"]
    listen = ["--listen", f"127.0.0.1:{free_port()}"]
    refused = Process("worker", [*argv, *listen, "--kv-cache-gb", "4"], before=enter)
    fitting = Process("worker", [*argv, *listen], before=enter)
    try:
        refused.start()
        assert refused.gone() == 2
        assert re.search(r"error: --kv-cache-gb asks for 4\.0 GiB, but only 0\.\d GiB", "\n".join(refused.logs))
        fitting.start()
        size = re.compile(r"KV cache (\d+\.\d+) GiB")
        until(lambda: not fitting.is_alive or any(map(size.search, fitting.logs)), "the cache is made")
        found = size.search("\n".join(fitting.logs))
        assert found is not None, fitting.tail()
        assert 0.1 < float(found[1]) < 0.4
    finally:
        refused.end()
        fitting.end()
