"""How true the client's times are, and what they cost: `python -m tests.bench.fidelity`.

A scripted server writes into each piece when its request came and when it was written, by the clock that the client
reads too. So the differences are the client's own, with those of the loopback, and a server that is late itself does
not count. CPU time counts on a busy machine; the errors are upper bounds there.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise

import click
import numpy as np
import uvloop

from headrace.bench.apis import Options, api_of
from headrace.bench.arrivals import Arrivals
from headrace.bench.connection import Client
from headrace.bench.datasets import Conversation, Turn
from headrace.bench.load import Load, Run
from headrace.bench.sender import HttpSender
from headrace.bench.target import target_of
from tests.bench.scripted_server import scripted_server

_WORDS = "word " * 100
_RATES = {128: 8, 64: 16, 32: 32, 16: 64, 5: 200}
"""Requests per second, by the tokens of an answer."""


async def _loaded(url: str, rate: float, count: int, num_tokens: int, script: str) -> tuple[Run, float]:
    client = Client(target_of(url, {}, None, False), 60.0)
    load = Load(HttpSender(client, api_of("openai", None), Options(script)), time.perf_counter, None)
    turns = (Turn((_WORDS,), 100, num_tokens),)
    cpu_s = time.process_time()
    run = await load.open_loop([Conversation(turns)] * count, Arrivals(rate).times(count, random.Random(0)))
    return run, time.process_time() - cpu_s


def _report(title: str, run: Run, cpu_s: float) -> None:
    assert all(record.succeeded for record in run.records)
    tokens = sum(len(record.times) for record in run.records)
    stamps = [[float(part) for part in record.text.split()] for record in run.records]
    writes = [each[1::2] for each in stamps]
    true_ttft = np.array([write[0] - each[0] for each, write in zip(stamps, writes, strict=True)])
    ttft = np.array([record.ttft_s for record in run.records])
    late = np.array(
        [t - w for r, ws in zip(run.records, writes, strict=True) for t, w in zip(r.times, ws, strict=True)]
    )
    true_gap = np.mean([later - earlier for write in writes for earlier, later in pairwise(write)])
    gap = np.mean([gap for record in run.records for gap in record.gaps_s])
    share = cpu_s / run.duration_s
    off = ttft.mean() / true_ttft.mean() - 1
    median_us, p99_us = 1e6 * np.percentile(late, (50, 99))
    print(f"{title}: {tokens / run.duration_s:.0f} tokens/s, {len(run.records) / run.duration_s:.0f} requests/s")
    each_us = 1e6 * cpu_s / tokens
    print(f"  CPU {each_us:.1f} us a token, {share:.1%} of a core; at 1,000 tokens/s {each_us / 1000:.1%}")
    print(f"  TTFT {1000 * ttft.mean():.2f} ms, true {1000 * true_ttft.mean():.2f} ({off:+.2%})")
    print(f"  gaps {1000 * gap:.3f} ms, true {1000 * true_gap:.3f} ({gap / true_gap - 1:+.2%})")
    print(f"  a piece is stamped {median_us:.0f} us after it is written (p99 {p99_us:.0f})")
    print(f"  sent late: {sum(record.late_s > 0.01 for record in run.records)} of {run.num_timed}")


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.IntRange(1), default=10, help="Time of each load.")
def main(seconds: int) -> None:
    """Measure the client at some 1,000 tokens per second, in answers of several lengths."""
    with scripted_server() as url:
        for num_tokens, rate in _RATES.items():
            count = round(rate * seconds)
            title = f"answers of {num_tokens} tokens"
            _report(title, *uvloop.run(_loaded(url, rate, count, num_tokens, "ttft=100,gap=20,stamp=1")))


if __name__ == "__main__":
    main()
