"""Processes die, hang or restart under load. Clients may see only a pause.

`make test` runs each case once. `python -m tests.soak survival` repeats them for minutes with twice the streams.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import Fleet, Process, fleet
from tests.e2e.serving import Serve, headrace, serving, until
from tests.e2e.small_model import small_model
from tests.e2e.streams import Stream, chat_body, hits, http_client, load, run_streams
from tests.worker.draft_heads.files import (
    TARGET_SIZE,
    VOCAB_SIZE,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    write_heads,
)

pytestmark = pytest.mark.e2e

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
ROUNDS = 20 if SOAK else 1
RESTARTS = 5 if SOAK else 1
NUM_STREAMS = 32 if SOAK else 16
NUM_CLIENTS = 12 if SOAK else 4
MAX_TOKENS = 64 if SOAK else 32
NOTICED_WITHIN_S = 3.0

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
TO_A_SCHEMA = {
    **SEEDED,
    "ignore_eos": False,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "story",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {
                    "title": {"type": "string", "minLength": 10, "maxLength": 40},
                    "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 12},
                },
                "required": ["title", "numbers"],
                "additionalProperties": False,
            },
        },
    },
}


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Serve]:
    """`headrace serve` with two workers of one thread, in the mode in which a resumed answer is the same bits."""
    flags = ("--workers", "2", "--threads", "1", "--execution-mode", "accuracy", "--speculation", "ngram")
    with serving(*flags, model=small_model()) as system:
        until(lambda: {row["state"] for row in system.status()} == {"ready"}, "all processes ready")
        yield system


def bodies(sampling: dict[str, Any]) -> list[dict[str, Any]]:
    return [chat_body(number, MAX_TOKENS, **sampling) for number in range(NUM_STREAMS)]


def tell(what: str, streams: list[Stream]) -> None:
    """Print the pauses, for pytest -s and for the report of a failure."""
    pauses = sorted(stream.longest_pause_s for stream in streams)
    print(f"{what}: longest pauses {pauses[0]:.2f} to {pauses[-1]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s")


def differences(streams: list[Stream], undisturbed: list[Stream]) -> list[str]:
    """The differences to the undisturbed run, one sentence per stream."""
    found = []
    for number, (stream, reference) in enumerate(zip(streams, undisturbed, strict=True)):
        if stream.result != reference.result:
            pairs = zip(stream.text, reference.text, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            found.append(
                f"stream {number}: {stream.num_tokens} tokens, {stream.finish_reason}, error {stream.error}; its text "
                f"goes {stream.text[common - 20 : common + 40]!r} where {reference.text[common - 20 : common + 40]!r} "
                f"was due"
            )
    return found


@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, TO_A_SCHEMA], ids=["greedy", "seeded", "schema"])
async def test_streams_survive_the_death_of_one_of_two_workers(two_workers: Serve, sampling: dict[str, Any]) -> None:
    undisturbed = await run_streams(two_workers.base_url, bodies(sampling))
    assert all(stream.is_done for stream in undisturbed)
    assert {stream.num_tokens for stream in undisturbed} == {MAX_TOKENS} or sampling is TO_A_SCHEMA
    tell("undisturbed", undisturbed)
    for number in range(ROUNDS):
        victim = two_workers.process_of(f"worker-{number % 2}")

        async def kill(pid: int = victim["pid"]) -> None:
            os.kill(pid, signal.SIGKILL)

        # Each round in another place.
        streams = await run_streams(
            two_workers.base_url, bodies(sampling), disturb_behind=2 + 7 * number % 30, disturb=kill
        )
        tell(f"round {number}", streams)
        assert differences(streams, undisturbed) == []
        until_whole_and_idle(two_workers)


@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_a_beam_search_survives_the_death_of_its_worker(two_workers: Serve) -> None:
    beams = {"stream": False, "stream_options": None, "temperature": 0, "use_beam_search": True, "n": 4}
    body = chat_body(1, 320, **beams)

    def workers_that_run() -> list[int]:
        return [row["pid"] for row in two_workers.status() if row.get("requests_running")]

    async with http_client() as client:

        async def answers() -> list[tuple[str, str]]:
            response = await client.post(f"{two_workers.base_url}/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return [(choice["message"]["content"], choice["finish_reason"]) for choice in response.json()["choices"]]

        undisturbed = await answers()
        assert len(set(undisturbed)) == 4
        for _ in range(ROUNDS):
            disturbed = asyncio.create_task(answers())
            await asyncio.to_thread(until, lambda: bool(workers_that_run()), "the search runs")
            assert not disturbed.done()
            for pid in workers_that_run():
                os.kill(pid, signal.SIGKILL)
            assert await disturbed == undisturbed
            until_whole_and_idle(two_workers)


@pytest.mark.timeout(120 + 60 * ROUNDS)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_streams_survive_a_worker_that_hangs(two_workers: Serve, sampling: dict[str, Any]) -> None:
    undisturbed = await run_streams(two_workers.base_url, bodies(sampling))
    for number in range(ROUNDS):
        name = f"worker-{number % 2}"
        pid = two_workers.process_of(name)["pid"]

        async def hang(name: str = name, pid: int = pid) -> None:
            os.kill(pid, signal.SIGSTOP)
            noticed = asyncio.to_thread(
                until, lambda: two_workers.process_of(name)["state"] != "ready", f"{name} is suspect", NOTICED_WITHIN_S
            )
            await noticed

        try:
            streams = await run_streams(
                two_workers.base_url, bodies(sampling), disturb_behind=2 + 7 * number % 30, disturb=hang
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        tell(f"round {number}", streams)
        assert differences(streams, undisturbed) == []
        # What the worker sends now that it goes on reaches nobody; it drops those requests and takes new ones.
        until_whole_and_idle(two_workers)
        assert two_workers.process_of(name)["pid"] == pid


@pytest.mark.timeout(240 + 60 * ROUNDS)
@pytest.mark.parametrize("proposer", ["draft", "eagle3", "medusa"])
async def test_streams_with_drafts_of_a_smaller_model_or_of_heads_survive(proposer: str, tmp_path: Path) -> None:
    flags = ("--workers", "2", "--threads", "1", "--execution-mode", "accuracy")
    flags += ("--draft-model", str(draft_directory(proposer, tmp_path)))
    # Longer answers: drafts begin when the costs of steps are known.
    asked = [chat_body(number, 3 * MAX_TOKENS, **SEEDED, **more) for number in range(2) for more in ({}, {"top_k": 5})]
    # A draft model is worth its time only beside a larger one.
    with serving(*flags, model=None if proposer == "draft" else small_model()) as system:
        until(lambda: {row["state"] for row in system.status()} == {"ready"}, "all processes ready")
        undisturbed = await run_streams(system.base_url, asked)

        def drafting() -> list[dict[str, Any]]:
            return [row for row in system.status() if proposer in (row.get("draft_tokens_by_proposer") or ())]

        for _ in range(ROUNDS):
            until(lambda: bool(drafting()), "a worker has drafted")
            victim = drafting()[0]

            async def kill(pid: int = victim["pid"]) -> None:
                os.kill(pid, signal.SIGKILL)

            streams = await run_streams(system.base_url, asked, disturb_behind=4, disturb=kill)
            tell("a drafting worker died", streams)
            assert differences(streams, undisturbed) == []
            until_whole_and_idle(system)


def draft_directory(proposer: str, directory: Path) -> Path:
    """The model itself as a smaller one, or random heads."""
    if proposer == "eagle3":
        config = eagle_config()
        return write_heads(directory, config, eagle_tensors(config))
    if proposer == "medusa":
        config = {"medusa_num_heads": 1, "medusa_num_layers": 1}
        return write_heads(directory, config, medusa_tensors(TARGET_SIZE, VOCAB_SIZE, 1, 1))
    return small_model()


def until_whole_and_idle(system: Serve) -> None:
    """Wait until both workers are ready and hold nothing."""

    def is_idle() -> bool:
        rows = [row for row in system.status() if row["role"] == "worker"]
        return all(
            row["state"] == "ready"
            and row["kv_blocks"] == row["kv_blocks_free"]
            and row["requests_running"] == row["requests_waiting"] == 0
            for row in rows
        )

    until(is_idle, "both workers are ready and idle")


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two workers, two routers and a gateway as separate processes, for one test."""
    flags = {"worker_flags": ["--execution-mode", "accuracy"], "gateway_flags": ["--drain-timeout", "60"]}
    with fleet(tmp_path, num_workers=2, num_routers=2, **flags) as made:
        yield made


@pytest.mark.timeout(120 + 30 * ROUNDS)
async def test_a_router_that_dies_cuts_no_stream_and_fails_no_request(own_fleet: Fleet) -> None:
    undisturbed = await run_streams(own_fleet.base_url, bodies(GREEDY))
    async with load(own_fleet.base_url, num_clients=NUM_CLIENTS) as requests:
        for number in range(ROUNDS):
            victim = own_fleet.routers[number % 2]

            async def kill(router: Process = victim) -> None:
                router.signal(signal.SIGKILL)

            streams = await run_streams(
                own_fleet.base_url, bodies(GREEDY), disturb_behind=2 + 7 * number % 30, disturb=kill
            )
            tell(f"round {number}", streams)
            assert differences(streams, undisturbed) == []
            victim.gone()
            victim.start()
            await asyncio.to_thread(own_fleet.until_whole)
    assert requests.failed == []
    own_fleet.until_idle()


def num_resumed(system: Fleet) -> int:
    """Generations that the gateway has taken from a silent router so far, as of its log."""
    return sum("silent for" in line for line in system.gateway.logs)


@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_a_router_that_hangs_cuts_no_stream_and_fails_no_request(own_fleet: Fleet) -> None:
    undisturbed = await run_streams(own_fleet.base_url, bodies(GREEDY))
    async with load(own_fleet.base_url, num_clients=NUM_CLIENTS) as requests:
        for number in range(ROUNDS):
            victim = own_fleet.routers[number % 2]

            async def hang(router: Process = victim, num_before: int = num_resumed(own_fleet)) -> None:
                router.signal(signal.SIGSTOP)
                await asyncio.to_thread(
                    until,
                    lambda: num_resumed(own_fleet) > num_before,
                    f"the gateway resumes what was with {router.name}",
                    NOTICED_WITHIN_S,
                )

            try:
                streams = await run_streams(
                    own_fleet.base_url, bodies(GREEDY), disturb_behind=2 + 7 * number % 30, disturb=hang
                )
                # Nobody asks it while it hangs.
                await requests.more(2 * NUM_CLIENTS)
            finally:
                victim.signal(signal.SIGCONT)
            tell(f"round {number}", streams)
            assert differences(streams, undisturbed) == []
            assert [stream.error for stream in requests.failed] == []
    assert requests.failed == []
    own_fleet.until_idle()


@pytest.mark.timeout(120 + 60 * RESTARTS)
async def test_a_rolling_restart_of_every_tier_fails_no_request(own_fleet: Fleet) -> None:
    async with load(own_fleet.base_url, num_clients=NUM_CLIENTS) as requests:
        for _ in range(RESTARTS):
            for process in own_fleet.processes:
                await requests.more(NUM_CLIENTS)
                process.terminate()
                assert await asyncio.to_thread(process.gone) == 0
                process.start()
                await asyncio.to_thread(own_fleet.until_whole)
                assert [stream.error for stream in requests.failed] == []
    assert [stream.error for stream in requests.failed] == []
    print(f"{len(requests.finished)} requests, none failed")
    own_fleet.until_idle()


@pytest.mark.skipif(not SOAK, reason="python -m tests.soak survival")
@pytest.mark.timeout(300)
async def test_a_host_is_replaced_under_load_and_its_hits_stay(own_fleet: Fleet) -> None:
    """As docs/how-to/day-2.md says: start the new worker, drain the old one, stop it."""
    prompts = [[7 + (start * 131 + number) % 5000 for number in range(512)] for start in range(12)]
    await hits(own_fleet.base_url, prompts)
    before = await hits(own_fleet.base_url, prompts)
    async with load(own_fleet.base_url, num_clients=NUM_CLIENTS) as requests:
        await requests.more(NUM_CLIENTS)
        own_fleet.add_worker().start()
        await asyncio.to_thread(own_fleet.until_whole)
        address = own_fleet.list_workers()[0].address
        old = next(one for one in own_fleet.workers if one.name in address)
        own_fleet.workers.remove(old)
        done = await asyncio.to_thread(headrace, "drain", address, timeout_s=120)
        assert done.returncode == 0, done.stderr
        old.terminate()
        assert await asyncio.to_thread(old.gone) == 0
        await asyncio.to_thread(own_fleet.until_whole)
        await asyncio.to_thread(until, lambda: len(own_fleet.list_workers()) == 2, "the old worker is forgotten")
        await requests.more(NUM_CLIENTS)
    after = await hits(own_fleet.base_url, prompts)
    print(f"{len(requests.finished)} requests; hits {before:.3f} before, {after:.3f} after")
    assert [stream.error for stream in requests.failed] == []
    assert before > 0.9
    assert after >= 0.9 * before
    own_fleet.until_idle()
