"""Measures how long one large request blocks the event loops:
`python -m benchmarks.gateway.fan_out [MODEL_DIR] [--rounds 5]`.

A chat with 128 choices, a prompt of 32,000 tokens and a JSON schema of 200 KB passes through gateway, router and
worker, each in a separate process (see fan_out_processes; the worker has no kernels). While a loop is blocked, all
other streams of its process wait. For each process, it prints the longest time in each round, and the CPU time of its
thread during the longest one. Prompt and schema are new in each round, so nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.gateway.fan_out_processes import LONGEST_PROMPT
from benchmarks.machine import describe
from headrace.cli.models.model_cache import model_directory
from headrace.common.ports import free_port

MODEL = "smollm2-135m"
ROLES = ("gateway", "router", "worker")
NUM_CHOICES = 128
# " water" is one token of the model.
PROMPT_TOKENS = 32_000
SCHEMA_BYTES = 200_000
_READY_BOUND_S = 60.0
_ANSWER_BOUND_S = 120.0
# Lines on the way when the answer is there.
_LINES_S = 0.2


class Hold(NamedTuple):
    """A time for which a loop was held."""

    at_s: float
    held_ms: float
    cpu_ms: float


class Process:
    """One of the three processes, with the times at which its loop was blocked."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.holds: list[Hold] = []
        self._child = child
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._child.stdout is not None
        async for line in self._child.stdout:
            if line.startswith(b"held "):
                self.holds.append(Hold(*map(float, line.split()[1:])))

    def longest(self, since_s: float) -> Hold:
        """The longest since then; of no length if there was none."""
        return max((hold for hold in self.holds if hold.at_s >= since_s), key=lambda hold: hold.held_ms, default=NONE)

    async def close(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            self._child.terminate()
        try:
            async with asyncio.timeout(10):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
        self._reading.cancel()


NONE = Hold(0.0, 0.0, 0.0)


@asynccontextmanager
async def serving(model_dir: Path) -> AsyncIterator[tuple[dict[str, Process], httpx.AsyncClient]]:
    """The three ready processes and a client of the gateway."""
    worker, router = (f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    port = free_port("127.0.0.1")
    flags = {
        "worker": ["--model", str(model_dir), "--listen", worker, "--max-context-tokens", str(LONGEST_PROMPT)],
        "router": ["--listen", router, "--worker", worker],
        "gateway": ["--port", str(port), "--router", router],
    }
    processes: dict[str, Process] = {}
    async with AsyncExitStack() as stack:
        for role in reversed(ROLES):
            command = [sys.executable, "-m", "benchmarks.gateway.fan_out_processes", role, *flags[role]]
            child = await asyncio.create_subprocess_exec(
                *command, "--log-level", "warning", stdout=asyncio.subprocess.PIPE
            )
            processes[role] = Process(child)
            stack.push_async_callback(processes[role].close)
        url = f"http://127.0.0.1:{port}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=_ANSWER_BOUND_S)
        )
        deadline_s = time.monotonic() + _READY_BOUND_S
        while not await is_ready(http):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the processes do not get ready")
            await asyncio.sleep(0.1)
        yield processes, http


async def is_ready(http: httpx.AsyncClient) -> bool:
    """Whether the gateway has a model to serve."""
    with suppress(httpx.TransportError):
        return (await http.get("/health/ready")).status_code == 200
    return False


async def ask(http: httpx.AsyncClient, number: int, num_choices: int, prompt_tokens: int, schema_bytes: int) -> None:
    """Send a request that differs for each `number`. RuntimeError unless every choice is answered."""
    text = f"{number}" + " water" * prompt_tokens
    schema = {"type": "object", "description": f"{number} " + "x" * schema_bytes, "additionalProperties": False}
    body = {
        "messages": [{"role": "user", "content": text}],
        "n": num_choices,
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise RuntimeError(f"the request was answered {response.status_code}: {response.text[:500]}")
    reasons = [choice["finish_reason"] for choice in response.json()["choices"]]
    if len(reasons) != num_choices or not set(reasons) <= {"stop", "length"}:
        raise RuntimeError(f"of {num_choices} choices ended {dict(Counter(reasons))}")


async def measure(arguments: argparse.Namespace) -> None:
    """Send the requests and print the results."""
    longest: dict[str, list[Hold]] = {role: [] for role in ROLES}
    async with serving(arguments.model_dir) as (processes, http):
        await ask(http, 0, 2, 100, 100)  # tokenizer and vocabulary are loaded for the first request
        for number in range(1, arguments.rounds + 1):
            await asyncio.sleep(_LINES_S)
            since_s = time.monotonic()
            await ask(http, number, arguments.choices, arguments.prompt_tokens, arguments.schema_bytes)
            await asyncio.sleep(_LINES_S)
            for role in ROLES:
                longest[role].append(processes[role].longest(since_s))
    for role in ROLES:
        rounds = ", ".join(f"{hold.held_ms:.1f}" for hold in longest[role])
        middle = statistics.median(hold.held_ms for hold in longest[role])
        most = max(longest[role], key=lambda hold: hold.held_ms)
        print(
            f"{role:8s} held for {middle:.1f} ms at the longest (median; rounds: {rounds}); "
            f"of the {most.held_ms:.1f} ms its thread computed {most.cpu_ms:.1f}",
            flush=True,
        )


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, nargs="?", default=model_directory(MODEL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--choices", type=int, default=NUM_CHOICES)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--schema-bytes", type=int, default=SCHEMA_BYTES)
    arguments = parser.parse_args()
    print(describe(), flush=True)
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
