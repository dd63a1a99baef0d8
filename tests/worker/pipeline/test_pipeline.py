"""Models whose layers are divided among processes."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.common.transport.channels import Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest, ComputeResponse
from headrace.protos.status import Reason, StatusError
from headrace.worker.__main__ import config_of_arguments
from headrace.worker.config import ConfigurationError
from headrace.worker.host.precision import computes_in_bfloat16, core_for
from headrace.worker.kv.exclusions import refuse_flags
from headrace.worker.model.batch import build_batch
from headrace.worker.model.fingerprint import fingerprint_of, outline_of
from headrace.worker.model.runner import Layers, OpenVINOModelRunner
from headrace.worker.pipeline import link, stage
from headrace.worker.pipeline.joining import StageOffers
from headrace.worker.pipeline.link import NamedStages, Others, StageLink, StageLostError
from headrace.worker.pipeline.runner import PipelineRunner, Times
from headrace.worker.pipeline.stage import StageCall
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled
from headrace.worker.sampling.logits import floats_of
from headrace.worker.stage_serving import compile_stage
from tests.certificates import make_certificates
from tests.gguf_models import TinyModel
from tests.patience import patience, until
from tests.worker.configs import worker_config
from tests.worker.pipeline.local import staged
from tests.worker.pipeline.stages import Stage, stages
from tests.worker.pipeline.test_joining import serving
from tests.worker.ranks.exactness import ASKED, FAST, NUM_BLOCKS, Computed, assert_exact, whole

MODEL = TinyModel("qwen2", Kind.Q4_1, layers=4, heads=6, kv_heads=3, spare_tokens=25)
# Silence of a connection after which it ends (`COMMON_OPTIONS`), and time for machines that are late.
SILENCE_S, LATE_S = 20.0, 20.0
Script = Callable[[AsyncIterator[ComputeRequest], Any], Awaitable[None]]
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def of_whole(directory: Path) -> Computed:
    return whole(directory)


def pipeline(
    directory: Path, others: Sequence[Stage], lost: list[str], *, transport: Transport | None = None
) -> PipelineRunner:
    """The first stage, in this process, with a cache."""
    named = NamedStages([other.address for other in others])
    return pipeline_with(directory, named, len(others), lost, transport=transport)


def pipeline_with(
    directory: Path,
    others: Others,
    num_others: int,
    lost: list[str],
    *,
    transport: Transport | None = None,
    precisions: Mapping[str, Any] = ASKED,
) -> PipelineRunner:
    """The same with others that may have joined, and with these precisions."""
    hashed: Future[str] = Future()
    hashed.set_result(fingerprint_of(directory, 1))
    runner = PipelineRunner(
        directory,
        1 + num_others,
        StageLink(others, transport or Transport(), lost.append, "w on here", hangs_after_s=60),
        threads=1,
        max_context_tokens=4096,
        speculates=False,
        fingerprint=hashed,
        on_lost=lost.append,
        **precisions,
    )
    runner.allocate(NUM_BLOCKS)
    return runner


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, 256, length).tolist() for length in lengths]


def step(runner: OpenVINOModelRunner, length: int = 3) -> npt.NDArray[np.float32]:
    """Compute a prompt, and return the logits of its last token."""
    (prompt,) = prompts(length)
    request = Request("r", prompt, SamplingParams(max_tokens=4, seed=1, temperature=0.0), 1)
    request.block_table.extend(range(-(-length // runner.block_size)))
    runner.bind(build_batch([Scheduled(request, length)], runner.block_size), keeps_logits=False)
    (row,) = floats_of(runner.run().values)
    return row.copy()


def step_of_whole(directory: Path, length: int) -> npt.NDArray[np.float32]:
    """The same of the undivided model in performance mode."""
    runner = OpenVINOModelRunner(directory, threads=1, **FAST)
    runner.allocate(NUM_BLOCKS)
    return step(runner, length)


class Started:
    """Stages in three processes, of which this is the first, and what was said of lost ones."""

    def __init__(self, directory: Path, others: list[Stage]) -> None:
        self.lost: list[str] = []
        self.others = others
        self.runner = pipeline(directory, others, self.lost)


@pytest.fixture(scope="module")
def of_three(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with stages(directory, tmp_path_factory.mktemp("stages"), 2) as others:
        started = Started(directory, others)
        yield started
        started.runner.close()
        assert not started.lost


def test_processes_have_the_log_probabilities_of_the_whole(of_whole: Computed, of_three: Started) -> None:
    runner = of_three.runner
    runner.end_warm_up()
    assert_exact(of_whole, Computed(runner, runner.exact_rows), prompts(20, 300))
    assert len(runner.first_layers) == 2
    reports = runner.stages()
    assert [stage.address for stage in reports] == ["", *(stage.address for stage in of_three.others)]
    assert [stage.first_layer for stage in reports] == [0, *runner.first_layers]
    assert sum(stage.num_layers for stage in reports) == MODEL.layers
    assert all(stage.computed_s > 0 for stage in reports)
    assert reports[0].waited_s > 0, "for the rows of the last stage"
    step(runner)
    later = runner.stages()
    assert all(now.computed_s > then.computed_s for now, then in zip(later, reports, strict=True))
    assert runner.stages() == later, "nothing is counted while there is nothing to compute"
    assert runner.block_bytes < of_whole.block_bytes
    # In parts, of which only the last has a row; and in steps, of which only the last has.
    in_parts = step(runner, 200)
    request = Request("r", prompts(200)[0], SamplingParams(max_tokens=4, seed=1, temperature=0.0), 1)
    request.block_table.extend(range(10, 20))
    for first in range(0, 200, 40):
        request.num_computed_tokens = first
        runner.bind(build_batch([Scheduled(request, 40)], runner.block_size), keeps_logits=False)
        logits = runner.run().values
        assert len(logits) == (1 if first == 160 else 0)
    np.testing.assert_array_equal(logits[0], in_parts)


def test_a_stage_says_what_it_computes_for_whom(of_three: Started) -> None:
    step(of_three.runner)
    found = []
    for other in of_three.others:
        with grpc.insecure_channel(other.address) as channel:
            stub = stage_pb2_grpc.StageStub(channel)
            found.append(stub.GetStageState(stage_pb2.GetStageStateRequest(), timeout=patience(10)))
    assert [state.state for state in found] == [stage_pb2.STAGE_STATE_READY] * 2
    assert [state.worker for state in found] == ["w on here"] * 2
    firsts = [*of_three.runner.first_layers, MODEL.layers]
    assert [state.first_layer for state in found] == firsts[:2]
    assert [state.first_layer + state.num_layers for state in found] == firsts[1:]
    assert all(state.compute_seconds > 0 for state in found)


def test_a_layer_for_each_stage_has_the_log_probabilities_of_the_whole(directory: Path, of_whole: Computed) -> None:
    of_stages, runner = staged(directory, 4)
    assert runner.first_layers == [1, 2, 3]
    assert_exact(of_whole, of_stages, prompts(20, 300))


def test_a_long_prompt_has_the_log_probabilities_of_the_whole(directory: Path, of_whole: Computed) -> None:
    """Of all architectures, tests/architectures/test_pipeline.py."""
    of_stages, _ = staged(directory, 3)
    assert_exact(of_whole, of_stages, prompts(2000))


def test_hidden_states_are_float32_unless_all_stages_compute_in_bfloat16(directory: Path) -> None:
    """Such as a stage of an earlier version, which does not say in what it computes."""
    _, runner = staged(directory, 2, precisions=FAST, of_last=stage_pb2.StageHost(speed=10e9))
    assert not runner.bfloat16_states
    assert runner.hidden_dtype == np.float32
    expected = step_of_whole(directory, 200)
    assert np.linalg.norm(step(runner, 200) - expected) < 0.05 * np.linalg.norm(expected)


def test_a_stage_waits_while_steps_are_on_their_way_and_it_does_not_compute() -> None:
    times = Times(10.0, (4.0, 9.5, 10.5))
    assert [times.waited_s(stage) for stage in range(3)] == [6.0, 0.5, 0.0]


def test_an_idle_stage_takes_no_time_of_the_cpu(of_three: Started) -> None:
    step(of_three.runner)
    stats = [Path(f"/proc/{other.process.pid}/stat") for other in of_three.others]

    def ticks() -> list[int]:
        """Hundredths of a second."""
        fields = [stat.read_text().rpartition(")")[2].split() for stat in stats]
        return [int(found[11]) + int(found[12]) for found in fields]

    before = ticks()
    for _ in range(100):
        time.sleep(0.01)
    assert all(now - then <= 2 for now, then in zip(ticks(), before, strict=True))


def test_a_stage_that_stands_still_is_given_up_and_computes_again_when_it_is_back(
    directory: Path, of_three: Started
) -> None:
    """The last of three, which the first does not call. The one between them tells, although no step comes."""
    expected = step(of_three.runner)
    last = of_three.others[-1]
    starts = [other.num_starts for other in of_three.others]
    begun_s = time.monotonic()
    last.process.signal(signal.SIGSTOP)
    try:
        until(lambda: bool(of_three.lost), "the stage is given up", SILENCE_S + LATE_S)
        assert time.monotonic() - begun_s < SILENCE_S + LATE_S
    finally:
        last.process.signal(signal.SIGCONT)
    assert f"the stage at {last.address} has ended or is silent" in of_three.lost[0]
    of_three.runner.close()
    for other, before in zip(of_three.others, starts, strict=True):
        other.until_listening(before + 1)
    of_three.lost = []
    of_three.runner = pipeline(directory, of_three.others, of_three.lost)
    np.testing.assert_allclose(step(of_three.runner), expected, atol=1e-4)


def test_a_stage_serves_members_of_the_fleet_one_after_the_other(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With certificates and a join token. When one has ended, the stage starts again; when it ends, that is told."""
    certificates = make_certificates(tmp_path / "tls")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("0123456789abcdef")
    wrong.write_text("fedcba9876543210")
    flags = ("--tls-dir", str(certificates), "--join-token-file", str(right))
    lost: list[str] = []
    with stages(directory, tmp_path, 1, *flags) as others, ThreadPoolExecutor(1) as executor:
        (only,) = others
        pid = only.process.pid
        with pytest.raises(ConfigurationError, match=r"--stage unix:.*join token"):
            pipeline(directory, others, [], transport=Transport(certificates, wrong))
        transport = Transport(certificates, right)
        with closing(pipeline(directory, others, lost, transport=transport)) as first:
            second = executor.submit(pipeline, directory, others, lost, transport=transport)
            until(lambda: "it is a stage of another worker" in caplog.text, "the second waits")
            step(first)
            assert not second.done()
        with closing(second.result()) as runner:
            step(runner)
            assert (only.process.pid, only.num_starts) == (pid, 2)
            assert not lost
            only.process.signal(signal.SIGKILL)
            until(lambda: bool(lost), "the end of a stage is told")
    assert f"the stage at {only.address} has ended" in lost[0]


async def until_said(stage: Stage, text: str) -> None:
    """Wait until the log of a stage has a text."""
    await asyncio.to_thread(until, lambda: text in "\n".join(stage.process.logs), text)


async def test_a_pipeline_of_three_goes_on_with_a_spare_that_has_joined_when_a_stage_is_killed(
    directory: Path, tmp_path: Path
) -> None:
    """The killed one is between the worker and the last stage, which serves the next worker too. In performance mode:
    each pipeline has the bits of the undivided model, although hidden states are sent as bfloat16 if CPUs compute in
    it."""
    offers, lost = StageOffers("w on here", 2, "m", outline_of(directory), "here"), list[str]()
    async with serving(offers, tmp_path) as joins:
        flags = [("--join", joins, "--worker-id", name) for name in "abc"]
        made = [Stage(directory, tmp_path, f[-1], *f) for f in flags]
        try:
            for one in made:
                await asyncio.to_thread(one.process.start)
                await asyncio.to_thread(one.until_listening)
                await until_said(one, "has its 3 stages already" if one is made[2] else "joined the pipeline of w on")
            middle, last, spare = made
            make = partial(pipeline_with, directory, offers, 2, lost, precisions=FAST)
            expected = await asyncio.to_thread(step_of_whole, directory, 200)
            runner = await asyncio.to_thread(make)
            with closing(runner):
                assert [stage.address for stage in runner.stages()] == ["", middle.address, last.address]
                assert runner.bfloat16_states == computes_in_bfloat16(core_for("performance"))
                np.testing.assert_array_equal(await asyncio.to_thread(step, runner, 200), expected)
                middle.process.signal(signal.SIGKILL)
                await asyncio.to_thread(until, lambda: bool(lost), "the end of a stage is told")
            assert f"the stage at {middle.address} has ended" in lost[0]
            runner = await asyncio.to_thread(make)
            with closing(runner):
                assert [stage.address for stage in runner.stages()] == ["", last.address, spare.address]
                np.testing.assert_array_equal(await asyncio.to_thread(step, runner, 200), expected)
        finally:
            for one in made:
                await asyncio.to_thread(one.process.end)
                print(one.process.tail())


class Scripted(stage_pb2_grpc.StageServicer):
    """A stage that does what a script says, one for each call."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = list(scripts)

    async def Compute(self, requests: AsyncIterator[ComputeRequest], context: Any) -> None:
        """See Compute in the proto."""
        await self._scripts.pop(0)(requests, context)


@asynccontextmanager
async def scripted(directory: Path, *scripts: Script) -> AsyncIterator[str]:
    """Serve a scripted stage. Yields its address."""
    address = f"unix:{directory}/scripted.sock"
    server = grpc.aio.server()
    stage_pb2_grpc.add_StageServicer_to_server(Scripted(scripts), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0.0)


def ending(code: grpc.StatusCode, details: str) -> Script:
    """A call that ends with this status before its first answer."""

    async def end(requests: AsyncIterator[ComputeRequest], context: Any) -> None:
        await anext(requests)
        await context.abort(code, details)

    return end


ANSWERS = (
    ComputeResponse(offer=stage_pb2.StageOffer(stages=[stage_pb2.StageHost(address="last", speed=1e9)])),
    ComputeResponse(compiled=stage_pb2.StageCompiled(exact_rows=64, most_blocks=NUM_BLOCKS, block_size=32)),
    ComputeResponse(allocated=stage_pb2.StageAllocated(fingerprints=["0" * 64])),
)


def loading(over: asyncio.Event, then: Script | None = None) -> Script:
    """A stage that loads a model, and when it is `over` ends the call, with `then` if that is given."""

    async def load(requests: AsyncIterator[ComputeRequest], context: Any) -> None:
        for answer in ANSWERS:
            if await anext(requests, None) is not None:
                await context.write(answer)
        await over.wait()
        if then is not None:
            await then(requests, context)

    return load


LOST = [
    (Code.UNAVAILABLE, "Socket closed"),
    (Code.UNAVAILABLE, "Stream removed (ping timeout)"),
    (Code.CANCELLED, "Cancelling all calls"),
    (Code.UNKNOWN, "Stream removed"),
    (Code.INTERNAL, "Received RST_STREAM with error code 2"),
    (Code.INTERNAL, "the stage failed: MemoryError"),
]


@pytest.mark.parametrize(("code", "details"), LOST)
async def test_a_stage_that_is_lost_as_it_is_called_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, details: str
) -> None:
    """Such as one that starts again at that moment. It is not taken for one that refuses, which ends the worker."""
    monkeypatch.setattr(link, "RETRY_S", 0.01)
    lost: list[str] = []
    async with scripted(tmp_path, ending(code, details), loading(asyncio.Event())) as address:
        with closing(StageLink(NamedStages([address]), Transport(), lost.append, hangs_after_s=60)) as called:
            offer = await asyncio.to_thread(called.open, stage_pb2.StageSetup())
            assert [host.address for host in offer.stages] == ["last"]
            assert not lost


async def test_what_a_stage_refuses_is_said_once(tmp_path: Path) -> None:
    async with scripted(tmp_path, ending(Code.INVALID_ARGUMENT, "it has no such layer")) as address:
        called = StageLink(NamedStages([address]), Transport(), pytest.fail, hangs_after_s=60)
        with closing(called), pytest.raises(ConfigurationError, match=f"--stage {address}: it has no such layer"):
            await asyncio.to_thread(called.open, stage_pb2.StageSetup())


@pytest.mark.parametrize("last_words", [None, (Code.UNAVAILABLE, "Stream removed (ping timeout)")])
async def test_a_stage_tells_that_the_one_after_it_is_lost_while_it_waits_for_steps(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: tuple[grpc.StatusCode, str] | None
) -> None:
    monkeypatch.setattr(stage, "RETRY_S", 0.01)
    over = asyncio.Event()

    async def abort(_: AsyncIterator[ComputeRequest], context: Any) -> None:
        assert last_words is not None
        await context.abort(*last_words)

    async with scripted(tmp_path, ending(*LOST[2]), loading(over, abort if last_words else None)) as address:
        asked: asyncio.Queue[ComputeRequest] = asyncio.Queue()
        answers: asyncio.Queue[ComputeResponse] = asyncio.Queue()

        async def requests() -> AsyncIterator[ComputeRequest]:
            while True:
                yield await asked.get()

        config = worker_config(directory)
        make_runner = partial(compile_stage, config, 1)
        call = StageCall(config, Transport(), 1, make_runner, requests(), answers.put, lambda _: None)
        running = asyncio.create_task(call.run())
        setup = stage_pb2.StageSetup(later_stages=[address], max_context_tokens=4096, **ASKED)
        async with asyncio.timeout(patience(60)):
            for request in (
                ComputeRequest(setup=setup),
                ComputeRequest(layers=stage_pb2.StageLayers(first_layers=[1, 2, 4])),
                ComputeRequest(allocate=stage_pb2.StageAllocate(num_blocks=NUM_BLOCKS)),
            ):
                await asked.put(request)
                answer = await answers.get()
            assert list(answer.allocated.fingerprints[1:]) == ["0" * 64]
            over.set()
            with pytest.raises(StatusError, match=f"the stage at {address} has ended or is silent: ") as raised:
                await running
    assert raised.value.reason is Reason.WORKER_LOST


async def test_a_stage_tells_that_one_of_its_ranks_is_lost_while_it_waits_for_it(directory: Path) -> None:
    lost: list[Callable[[str], None]] = []

    def make_runner(_setup: stage_pb2.StageSetup, _layers: Layers, on_lost: Callable[[str], None]) -> Any:
        """It waits for another rank."""
        lost.append(on_lost)
        ended.wait()
        raise ConfigurationError("it has ended")

    async def requests() -> AsyncIterator[ComputeRequest]:
        yield ComputeRequest(setup=stage_pb2.StageSetup(**ASKED))
        yield ComputeRequest(layers=stage_pb2.StageLayers(first_layers=[1, 2]))

    ended, answers = threading.Event(), asyncio.Queue[ComputeResponse]()
    call = StageCall(worker_config(directory), Transport(), 1, make_runner, requests(), answers.put, lambda _: None)
    running = asyncio.create_task(call.run())
    try:
        await asyncio.to_thread(until, lambda: bool(lost), "it waits")
        await asyncio.to_thread(lost[0], "rank 1 of the divided model has ended")
        with pytest.raises(StatusError, match="rank 1 of the divided model has ended") as raised:
            await asyncio.wait_for(running, patience(10))
    finally:
        ended.set()
    assert raised.value.reason is Reason.WORKER_LOST


OFFER, COMPILED, _ = ANSWERS
GETS_ON = ComputeResponse(progress=stage_pb2.StageProgress())


def saying(*answers: ComputeResponse) -> Script:
    """A stage that gives these answers to the first request, and then nothing."""

    async def say(requests: AsyncIterator[ComputeRequest], context: Any) -> None:
        await anext(requests)
        for answer in answers:
            await context.write(answer)
        await asyncio.Event().wait()

    return say


async def test_a_stage_that_says_nothing_while_it_loads_is_lost(tmp_path: Path) -> None:
    lost: list[str] = []
    async with scripted(tmp_path, saying(OFFER, GETS_ON)) as address:
        with closing(StageLink(NamedStages([address]), Transport(), lost.append, hangs_after_s=0.5)) as called:
            await asyncio.to_thread(called.open, stage_pb2.StageSetup())
            why = f"the stage at {address} has ended or is silent: it hangs while it loads: it has said nothing for"
            with pytest.raises(StageLostError, match=why):
                await asyncio.to_thread(called.receive)
            await asyncio.to_thread(until, lambda: bool(lost), "it is told")
    assert lost[0].startswith(why)


async def test_a_stage_that_says_nothing_as_it_is_called_is_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link, "RETRY_S", 0.01)
    async with scripted(tmp_path, saying(), saying(OFFER)) as address:
        with closing(StageLink(NamedStages([address]), Transport(), pytest.fail, hangs_after_s=0.5)) as called:
            offer = await asyncio.to_thread(called.open, stage_pb2.StageSetup())
            assert [host.address for host in offer.stages] == ["last"]
            called.close()
    assert f"waiting for the stage at {address}: it hangs while it loads: it has said nothing for 0.5 s" in caplog.text


async def test_what_a_stage_says_is_waited_for_anew_each_time_until_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []

    class Timer:
        """One whose time never comes."""

        daemon = False

        def __init__(self, seconds: float, *_: object) -> None:
            assert seconds == 60

        def start(self) -> None:
            waits.append("begun")

        def cancel(self) -> None:
            waits.append("over")

    monkeypatch.setattr(threading, "Timer", Timer)
    async with scripted(tmp_path, saying(OFFER, GETS_ON, GETS_ON, COMPILED, GETS_ON, COMPILED)) as address:
        with closing(StageLink(NamedStages([address]), Transport(), pytest.fail, hangs_after_s=60)) as called:
            await asyncio.to_thread(called.open, stage_pb2.StageSetup())
            assert await asyncio.to_thread(called.receive) == COMPILED
            assert waits == ["begun", "over"] * 4
            called.send(ComputeRequest(end_warm_up=stage_pb2.StageEndWarmUp()))
            assert await asyncio.to_thread(called.receive) == COMPILED
            assert len(waits) == 8, "the watchdog looks after steps"
            called.close()


class Stands:
    """The progress of a process of which none is seen, or some at every look."""

    every_s = 0.01

    def __init__(self, bound_s: float, *, is_seen: bool) -> None:
        self.bound_s, self._is_seen = bound_s, is_seen

    def begin(self) -> None:
        """Work begins."""

    def is_lost(self) -> bool:
        """See `Progress`."""
        return not self._is_seen

    def __str__(self) -> str:
        return "no progress"


async def test_a_stage_that_stands_still_while_it_loads_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it waits for others, it says that it does not hang."""
    monkeypatch.setattr(stage, "Progress", lambda _pid, bound_s: Stands(bound_s, is_seen=False))
    over = threading.Event()
    monkeypatch.setattr(stage, "bytes_per_s", lambda _: 1e9)
    asked: asyncio.Queue[ComputeRequest] = asyncio.Queue()
    answers: asyncio.Queue[ComputeResponse] = asyncio.Queue()

    async def requests() -> AsyncIterator[ComputeRequest]:
        yield ComputeRequest(setup=stage_pb2.StageSetup(hangs_after_seconds=60, **ASKED))
        yield await asked.get()
        yield await asked.get()

    def make_runner(*_: object) -> Any:
        over.wait()

    call = StageCall(worker_config(directory), Transport(), 1, make_runner, requests(), answers.put, lambda _: None)
    running = asyncio.create_task(call.run())
    try:
        async with asyncio.timeout(patience(60)):
            while not (await answers.get()).HasField("offer"):
                pass
            for _ in range(3):
                assert await answers.get() == GETS_ON
            await asked.put(ComputeRequest(layers=stage_pb2.StageLayers(first_layers=[1, 4])))
            with pytest.raises(StatusError, match="it hangs while it loads, compiling its layers: no progress") as lost:
                await running
    finally:
        over.set()
    assert lost.value.reason is Reason.WORKER_LOST


async def test_a_stage_tells_that_the_one_after_it_says_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "Progress", lambda _pid, bound_s: Stands(bound_s, is_seen=True))
    async with scripted(tmp_path, saying(OFFER)) as address:
        answers: asyncio.Queue[ComputeResponse] = asyncio.Queue()
        setup = stage_pb2.StageSetup(later_stages=[address], max_context_tokens=4096, hangs_after_seconds=0.5, **ASKED)

        async def requests() -> AsyncIterator[ComputeRequest]:
            yield ComputeRequest(setup=setup)
            yield ComputeRequest(layers=stage_pb2.StageLayers(first_layers=[1, 2, 4]))
            await asyncio.Event().wait()

        config = worker_config(directory)
        make_runner = partial(compile_stage, config, 1)
        call = StageCall(config, Transport(), 1, make_runner, requests(), answers.put, lambda _: None)
        why = f"the stage at {address} has ended or is silent: it hangs while it loads: it has said nothing for 0.5 s"
        with pytest.raises(StatusError, match=why) as lost:
            await asyncio.wait_for(call.run(), patience(60))
    assert lost.value.reason is Reason.WORKER_LOST


def test_other_files_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="has other files of the model than this worker; give both the same"):
        staged(directory, 2, fingerprint="1" * 64)


def test_a_process_that_is_no_stage_is_refused(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/other.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(address)
    server.start()
    called = StageLink(NamedStages([address]), Transport(), lambda _: None, hangs_after_s=60)
    with closing(called), pytest.raises(ConfigurationError, match=f"--stage {address}: "):
        called.open(stage_pb2.StageSetup())
    server.stop(None)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"kv_disk": Path("d")}, "--pipeline 2 is not possible with --kv-disk: a block has parts on other hosts"),
        ({"max_adapters": 1}, "--pipeline 2 is not possible with --max-adapters: "),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_sentence(other: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        refuse_flags(worker_config(pipeline=2, stages=("unix:s",), **other))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--pipeline", "3", "--stage", "a:1"], "for each of the 2 stages besides this worker, and 1 are given; name"),
        (["--stage", "a:1"], "needs a --stage for each of the 0 stages besides this worker, and 1 are given"),
        (["--pipeline", "2", "--stage", "a"], "--stage must be HOST:PORT or unix:/PATH, not 'a'"),
        (["--serve-stage", "--pipeline", "2"], "leave out --pipeline, --stage and --await-stages"),
        (["--await-stages", "a:1"], "--await-stages is for a pipeline; say with --pipeline how many stages it has"),
        (["--pipeline", "2", "--stage", "a:1", "--await-stages", "a:2"], "that --await-stages waits for; leave out"),
        (["--pipeline", "2", "--await-stages", "a"], "--await-stages must be HOST:PORT or unix:/PATH, not 'a'"),
        (["--join", "a:1"], "add --serve-stage, or use headrace serve --join"),
        (["--serve-stage", "--join", "a"], "--join must be HOST:PORT or unix:/PATH, not 'a'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        config_of_arguments(["--model", "m", "--name", "m", *flags])
