"""`headrace serve --pipeline 2`: the last layers of a model are in another process, which dies under load."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.e2e.serving import HTTP, MODEL, Serve, alive, serving
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, run_streams
from tests.patience import until
from tests.worker.pipeline.stages import Stage, stages

pytestmark = pytest.mark.e2e

NUM_STREAMS, MAX_TOKENS = 4, 40


class Pipeline(NamedTuple):
    """The system with the first stage, and the second."""

    system: Serve
    stage: Stage


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with stages(small_model(), tmp_path_factory.mktemp("stages"), 1) as (stage,):
        flags = ("--workers", "1", "--pipeline", "2", "--stage", stage.address, "--execution-mode", "accuracy")
        with serving(*flags, "--threads", "1", "--kv-cache-gb", "0.01", model=small_model()) as system:
            yield Pipeline(system, stage)
            before = stage.num_starts
        # It serves the next worker.
        stage.until_listening(before + 1)


def test_cached_prefixes_are_found_and_change_nothing(pipeline: Pipeline) -> None:
    asked = {"model": MODEL, "prompt": [(11 * place) % 40_000 for place in range(200)], "max_tokens": 24}
    found = []
    for _ in range(2):
        response = HTTP.post(
            f"{pipeline.system.base_url}/v1/completions", json={**asked, "temperature": 0, "return_token_ids": True}
        )
        assert response.status_code == 200, response.text
        body = response.json()
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((cached, body["choices"][0]["token_ids"]))
    assert [cached for cached, _ in found] == [0, 192]
    assert found[0][1] == found[1][1]


async def test_streams_survive_the_death_of_a_stage(pipeline: Pipeline) -> None:
    """The worker ends, and waits for the stage when it has been restarted."""
    system, stage = pipeline
    asked: list[dict[str, Any]] = [
        chat_body(number, MAX_TOKENS, temperature=0.9, top_p=0.95, seed=7) for number in range(NUM_STREAMS)
    ]
    undisturbed = await run_streams(system.base_url, asked)
    assert all(stream.is_done for stream in undisturbed)
    worker = system.process_of("worker-0")["pid"]

    def kill() -> None:
        stage.process.signal(signal.SIGKILL)
        stage.process.gone()
        until(lambda: not alive(worker), "the worker ends")

    async def kill_and_start() -> None:
        await asyncio.to_thread(kill)
        stage.process.start()  # it would end with the thread that starts it

    streams = await run_streams(system.base_url, asked, disturb_behind=MAX_TOKENS // 2, disturb=kill_and_start)
    assert [stream.result for stream in streams] == [stream.result for stream in undisturbed]
    assert all(stream.is_done for stream in streams)
    assert system.process_of("worker-0")["restarts"] == 1
