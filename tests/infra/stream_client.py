"""Clients as a process of their own, for systems that are reached from another network namespace only.

    python -m tests.infra.stream_client BASE_URL streams COUNT MAX_TOKENS
    python -m tests.infra.stream_client BASE_URL load NUM_CLIENTS

The first runs so many streams at once, writes the line `begun` when all are in flight, and in the end one line of JSON:
the result of each. The second asks without end; for each line N on standard input it writes `done` when N more requests
have ended, and when standard input ends a line of JSON: how many ended well, and the errors of the others.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.e2e.streams import chat_body, load, run_streams

BEGUN_CHUNKS = 8


async def streams(base_url: str, count: int, max_tokens: int) -> None:
    """See the module."""

    async def tell() -> None:
        print("begun", flush=True)

    bodies = [chat_body(number, max_tokens, temperature=0) for number in range(count)]
    ended = await run_streams(base_url, bodies, disturb_behind=BEGUN_CHUNKS, disturb=tell)
    print(json.dumps([stream.result for stream in ended]), flush=True)


async def endless(base_url: str, num_clients: int) -> None:
    """See the module."""
    async with load(base_url, num_clients=num_clients) as requests:
        while line := await asyncio.to_thread(sys.stdin.readline):
            await requests.more(int(line))
            print("done", flush=True)
    print(json.dumps({"finished": len(requests.finished), "errors": [stream.error for stream in requests.failed]}))


def main() -> None:
    """Run the command in the arguments."""
    base_url, what, *numbers = sys.argv[1:]
    asyncio.run({"streams": streams, "load": endless}[what](base_url, *map(int, numbers)))


if __name__ == "__main__":
    main()
