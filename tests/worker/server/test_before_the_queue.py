"""What happens to a request between its admission and the engine: its grammar is compiled, and it gets its adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace.protos import worker_pb2
from headrace.protos.inference_pb2 import Belief, Constraint, GenerateRequest, SamplingParams
from headrace.protos.status import Reason, StatusError, error_of
from headrace.worker.grammar.compiler import Grammars, Vocabulary, VocabularyError
from headrace.worker.grammar.constraint import ConstraintSource
from headrace.worker.request import params
from headrace.worker.request.beam_search import Candidates
from headrace.worker.request.request import Request
from headrace.worker.server import adapters, service
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.admission import DecodedRequest
from headrace.worker.server.service import InferenceService
from headrace.worker.server.watch import WatchHub
from tests.worker.server.running import MAX_NUM_SEQS, RunningWorker, running_worker, small_engine
from tests.worker.vocabulary import SPECIAL, VOCABULARY

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
    inference = InferenceService(Any, hub, SimpleNamespace(model="m"), grammars, Any)  # type: ignore[arg-type]
    request = new(constraint_source=ConstraintSource("regex", ("a",)))
    slow.takes_s = 1.5
    await inference._constrain(request, DecodedRequest(GenerateRequest(token_ids=[1])))
    assert request.preparing_s == 1.5


async def test_beams_are_told_the_texts_of_tokens_or_the_request_is_refused(slow: Slow) -> None:
    hub: Any = WatchHub(epoch=1, max_num_seqs=1, block_size=4)

    def inference(vocabulary: Callable[[], Vocabulary]) -> InferenceService:
        limits: Any = SimpleNamespace(model="m")
        return InferenceService(Any, hub, limits, Any, vocabulary)  # type: ignore[arg-type]

    def unreadable() -> Vocabulary:
        raise VocabularyError("openvino_detokenizer.xml cannot be used")

    beams = params.BeamParams(2, stop=("bc",), shown_token_ids=frozenset({SPECIAL}))
    sampling = params.SamplingParams(max_tokens=9, seed=0, beam_search=beams)
    request = Request("r", [1], sampling, 0)
    await inference(lambda: VOCABULARY)._find_texts(request)
    assert request.beams is not None
    for token_ids in ([ord("a"), ord("x")], [ord("b"), ord("d")], [SPECIAL, ord("c")], [ord("c"), ord("x")]):
        candidates = Candidates([*token_ids, ord("y"), ord("z")], [-0.1, -2.0, -5.0, -6.0])
        request.advance_beams([candidates] * len(request.beams.beams))
    # The special token is text, so that what goes on behind it with c does not end.
    assert [list(one.token_ids) for one in request.beams.hypotheses] == [[ord("a"), ord("b"), ord("c")]]
    with pytest.raises(StatusError, match="use stop_token_ids") as raised:
        await inference(unreadable)._find_texts(Request("r", [1], sampling, 0))
    assert (raised.value.reason, raised.value.field) == (Reason.UNSUPPORTED, "sampling.beam_search.stop")
    plain = params.SamplingParams(max_tokens=9, seed=0, beam_search=params.BeamParams(2))
    await inference(unreadable)._find_texts(Request("r", [1], plain, 0))


@pytest.mark.parametrize(("own_s", "workers_s"), [(2.0, 60.0), (60.0, 2.0)])
async def test_the_wait_for_an_adapter_counts_once_and_within_both_bounds(
    slow: Slow, own_s: float, workers_s: float
) -> None:
    desk = AdapterDesk(None, "m", max_wait_s=workers_s)
    desk._library = slow  # type: ignore[assignment]
    adapter: Any = object()
    request = new(max_wait_s=own_s)
    slow.takes_s = 0.5
    await desk.hold(adapter, request)
    assert (request.adapter_slot, slow.timeout_s) == (1, 2.0)
    assert request.max_wait_s == 1.5, "what is left for others"
    assert request.preparing_s == 0.5, "and so it is not counted again"


async def test_an_answer_that_has_begun_waits_for_its_adapter_beyond_both_bounds(slow: Slow) -> None:
    desk = AdapterDesk(None, "m", max_wait_s=2.0)
    desk._library = slow  # type: ignore[assignment]
    adapter: Any = object()
    await desk.hold(adapter, new(max_wait_s=1.0, resume_token_ids=[5]))
    assert slow.timeout_s == 600.0


class Compiling:
    """Grammars that are compiled until `done` is set. Then requests are answered without one, or `error` is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = asyncio.Event()
        self.num_waiting = 0
        self.error: StatusError | None = None

        async def constrain(*_: object, **__: object) -> None:
            self.num_waiting += 1
            await self.done.wait()
            if self.error is not None:
                raise self.error

        monkeypatch.setattr(Grammars, "constrain", constrain)

    async def begin(self, worker: RunningWorker, **fields: Any) -> asyncio.Task[Any]:
        """A request whose grammar is being compiled."""
        before = self.num_waiting
        sampling = SamplingParams(max_tokens=2, constraint=Constraint(regex="a"), **GREEDY)
        call = asyncio.create_task(worker.generate(token_ids=range(12), sampling=sampling, **fields))
        await worker.until(lambda: self.num_waiting > before)
        return call


@pytest.fixture
async def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    return Compiling(monkeypatch)


async def test_a_drain_waits_for_a_request_whose_grammar_is_compiled(compiling: Compiling) -> None:
    async with running_worker(small_engine()) as worker:
        call = await compiling.begin(worker)
        assert not await worker.mailbox.wait_until_empty(0.0), "what a worker that stops waits for"
        early = await worker.worker.Drain(worker_pb2.DrainRequest(), timeout=0.3)
        assert early.num_running == 1
        compiling.done.set()
        assert (await worker.worker.Drain(worker_pb2.DrainRequest())).num_running == 0
        assert (await call)[-1].HasField("finish"), "it was admitted before the drain"


async def test_requests_whose_grammars_are_compiled_count_for_the_bound(compiling: Compiling) -> None:
    async with running_worker(small_engine()) as worker:
        calls = [await compiling.begin(worker) for _ in range(MAX_NUM_SEQS + 2)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.generate(token_ids=[1])
        assert error_of(caught.value).reason is Reason.QUEUE_FULL
        compiling.done.set()
        for call in calls:
            assert (await call)[-1].HasField("finish")


@pytest.mark.parametrize("is_refused", [False, True])
async def test_routers_see_a_request_whose_grammar_is_compiled(compiling: Compiling, is_refused: bool) -> None:
    async with running_worker(small_engine()) as worker:
        watch = worker.worker.Watch(worker_pb2.WatchRequest(watcher_id=5))
        assert (await watch.read()).load.num_arrived == 0
        call = await compiling.begin(worker, belief=Belief(watcher_id=5, placement_id=77, num_cached_tokens=4))
        seen = await watch.read()
        assert (list(seen.placement_ids), seen.load.num_arrived, seen.load.arrived_tokens) == ([77], 1, 8)
        plain = await worker.generate(token_ids=[1], sampling=SamplingParams(max_tokens=1, **GREEDY))
        assert plain[-1].HasField("finish"), "which overtakes it"
        await worker.until(lambda: worker.hub.report.num_taken == 1)
        assert worker.hub.load().num_arrived == 1
        compiling.error = StatusError(Reason.INVALID_FIELD, "no grammar") if is_refused else None
        compiling.done.set()
        if is_refused:
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        else:
            await call
        await worker.until(lambda: worker.hub.load().num_arrived == worker.hub.load().arrived_tokens == 0)
        watch.cancel()
