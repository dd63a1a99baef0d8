"""Workers with roles: prompts are computed at one and answered at another, with the same tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.streams import http_client
from tests.e2e.test_kv_peers import drain
from tests.e2e.test_warm_restart import BLOCK, body, complete

pytestmark = pytest.mark.e2e

NUM_TOKENS = 48


def counted(system: Fleet, name: str) -> list[int]:
    """A counter of the prefill worker, and of the decode worker."""
    return [getattr(worker.load.counters, name) for worker in system.list_workers()]


@pytest.mark.timeout(400)
async def test_prompts_are_computed_here_and_answered_there(tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(100, 40_000) for _ in range(1000)] for _ in range(3)]
    flags = ["--execution-mode", "accuracy", "--kv-cache-gb", "0.05", "--max-context-tokens", "2048"]
    settings = {"worker_flags": flags, "router_flags": ["--long-prompt-ms", "20"]}
    with fleet(tmp_path, num_workers=2, roles=["prefill", "decode"], **settings) as made:
        prefill, decode = made.workers
        async with http_client() as client:

            async def ask(number: int, salt: str) -> list[int]:
                asked = body(prompts[number], NUM_TOKENS, cache_salt=salt)
                return (await complete(client, made.base_url, asked))[0]

            drain(made.list_workers()[0], undo=False)
            until(lambda: made.num_ready() == 1, "only the decode worker takes requests")
            expected = [await ask(number, "alone") for number in range(3)]
            drain(made.list_workers()[0], undo=True)
            until(lambda: made.num_ready() == 2, "both take requests")
            made.until_idle()
            assert counted(made, "prompt_tokens_computed")[0] == 0

            before = counted(made, "prompt_tokens_computed")[1], counted(made, "tokens_generated")[1]
            for number in range(3):
                assert await ask(number, "apart") == expected[number]
            made.until_idle()
            assert counted(made, "prompt_tokens_computed")[0] == 3000
            assert counted(made, "prompt_tokens_computed")[1] - before[0] <= 3 * (BLOCK + 1)
            assert counted(made, "prompt_tokens_from_peers") == [0, 3 * (1000 // BLOCK) * BLOCK]
            generated = counted(made, "tokens_generated")
            assert generated[1] - before[1] >= 3 * (NUM_TOKENS - 8)
            assert generated[0] <= 3 * 8

            for death, victim in enumerate((prefill, decode, prefill, decode)):
                tasks = [asyncio.create_task(ask(number, f"death {death}")) for number in range(3)]
                await asyncio.sleep(rng.uniform(0.1, 0.5))
                victim.kill()
                assert await asyncio.gather(*tasks) == expected
                victim.gone()
                victim.start()
                made.until_whole(120)
            made.until_idle()
