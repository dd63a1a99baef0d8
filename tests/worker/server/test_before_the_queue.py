"""What happens to a request between its admission and the engine: its grammar is compiled, and it gets its adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.protos.inference_pb2 import Constraint, GenerateRequest, SamplingParams
from headrace.worker.request import params
from headrace.worker.request.request import Request
from headrace.worker.server import adapters, service
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.admission import DecodedRequest
from headrace.worker.server.service import InferenceService
from headrace.worker.server.watch import WatchHub
from tests.worker.server.running import running_worker, small_engine

GREEDY = {"temperature": 0.0}


class Slow:
    """Grammars and adapters that take time of a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.takes_s = 0.0
        self.timeout_s = -1.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        for module in (service, adapters):
            monkeypatch.setattr(module, "time", clock)

    async def constrain(self, *_: object, **__: object) -> None:
        self.now_s += self.takes_s

    async def acquire(self, _: object, timeout_s: float) -> int:
        self.timeout_s = timeout_s
        self.now_s += self.takes_s
        return 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def new(**fields: Any) -> Request:
    return Request("r", [1], params.SamplingParams(max_tokens=1, seed=0), 0, **fields)


async def test_an_idle_worker_refuses_no_request_however_short_its_bound() -> None:
    """A router sends 0 if the request has used its time up there."""
    async with running_worker(small_engine()) as worker:
        sampling = SamplingParams(max_tokens=2, **GREEDY)
        answer = await worker.generate(token_ids=[1, 2], sampling=sampling, max_wait_ms=0)
        assert answer[-1].HasField("finish")


async def test_the_time_in_which_a_grammar_is_compiled_is_no_wait_for_others(slow: Slow) -> None:
    hub: Any = WatchHub(epoch=1, max_num_seqs=1, block_size=4)
    grammars: Any = slow
    inference = InferenceService(Any, hub, SimpleNamespace(model="m"), grammars)  # type: ignore[arg-type]
    request = new()
    slow.takes_s = 1.5
    message = GenerateRequest(token_ids=[1], sampling=SamplingParams(constraint=Constraint(regex="a")))
    await inference._constrain(request, DecodedRequest(message))
    assert request.preparing_s == 1.5


@pytest.mark.parametrize(("own_s", "workers_s"), [(2.0, 60.0), (60.0, 2.0)])
async def test_the_wait_for_an_adapter_counts_once_and_within_both_bounds(
    slow: Slow, own_s: float, workers_s: float
) -> None:
    hub = WatchHub(epoch=1, max_num_seqs=1, block_size=4)
    desk = AdapterDesk(None, hub, "m", max_wait_s=workers_s)
    desk._library = slow  # type: ignore[assignment]
    adapter: Any = object()
    request = new(max_wait_s=own_s)
    slow.takes_s = 0.5
    await desk.hold(adapter, request)
    assert (request.adapter_slot, slow.timeout_s) == (1, 2.0)
    assert request.max_wait_s == 1.5, "what is left for others"
    assert request.preparing_s == 0.5, "and so it is not counted again"


async def test_an_answer_that_has_begun_waits_for_its_adapter_beyond_both_bounds(slow: Slow) -> None:
    desk = AdapterDesk(None, WatchHub(epoch=1, max_num_seqs=1, block_size=4), "m", max_wait_s=2.0)
    desk._library = slow  # type: ignore[assignment]
    adapter: Any = object()
    await desk.hold(adapter, new(max_wait_s=1.0, resume_token_ids=[5]))
    assert slow.timeout_s == 600.0
