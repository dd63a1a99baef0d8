"""A failed or stuck engine: no other process takes its worker for a working one."""

from __future__ import annotations

import asyncio
import threading

import pytest
from grpc_health.v1 import health_pb2

from headrace.protos.load_report import LoadReport
from headrace.worker.engine.mailbox import EngineReport, Mailbox
from headrace.worker.engine.step_cost import StepCostModel
from headrace.worker.engine.thread import EngineThread
from headrace.worker.engine.watchdog import (
    EXPECTED_STEPS,
    GIVE_UP_AFTER,
    LOOK_INTERVAL_S,
    Verdict,
    Watchdog,
    watch_engine,
)
from headrace.worker.request.params import SamplingParams as Sampling
from headrace.worker.request.request import Request
from headrace.worker.server.watch import WatchHub
from tests.patience import patience
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, make_engine
from tests.worker.fake_runner import expected_tokens

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
BOUND_S = 60


def greedy(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return Request(name, prompt, Sampling(max_tokens=max_tokens, seed=0, temperature=0.0), 1)


class Running:
    """The real thread and mailbox with an engine, and the messages of their failure."""

    def __init__(self, under_test: EngineUnderTest) -> None:
        self.failures: list[tuple[str, BaseException]] = []
        self.failed = asyncio.Event()
        self.reports: list[EngineReport] = []
        self.report_error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self.mailbox = Mailbox(100, self._on_report, self._on_failure)
        self.thread = EngineThread(under_test.engine, self.mailbox, self._on_failure)
        self.thread.start()

    def _on_report(self, report: EngineReport) -> None:
        if self.report_error is not None:
            raise self.report_error
        self.reports.append(report)

    def _on_failure(self, why: str, error: BaseException) -> None:
        self.failures.append((why, error))
        self._loop.call_soon_threadsafe(self.failed.set)

    async def answer(self, request: Request) -> list[int]:
        stream = self.mailbox.submit(request)
        tokens: list[int] = []
        async with asyncio.timeout(patience(BOUND_S)):
            while not stream.has_ended or stream._pending:
                tokens += [token for output in await stream.next() for token in output.token_ids]
        stream.close()
        return tokens

    async def end(self) -> None:
        self.mailbox.stop()
        await asyncio.to_thread(self.thread.join, BOUND_S)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("where", ["schedule", "update", "add", "cancel", "observe", "report"])
async def test_whatever_escapes_the_engine_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    under_test = make_engine()
    running = Running(under_test)
    try:
        assert await running.answer(greedy("a", [1, 2, 3])) == expected_tokens([1, 2, 3], 4, VOCAB_SIZE)

        def spoiled(*_: object, **__: object) -> None:
            raise ZeroDivisionError(where)

        if where == "observe":
            monkeypatch.setattr("headrace.worker.engine.forecast.Forecast.observe", spoiled)
        elif where == "report":
            running.report_error = ZeroDivisionError(where)
        else:
            monkeypatch.setattr(type(under_test.scheduler), where, spoiled)
        stream = running.mailbox.submit(greedy("b", [4, 5, 6], max_tokens=200))
        if where == "cancel":
            stream.close()
        async with asyncio.timeout(patience(BOUND_S)):
            await running.failed.wait()
        # Each report that fails is told: in a real worker the first one ends the process.
        assert {repr(error) for _, error in running.failures} == {f"ZeroDivisionError('{where}')"}
    finally:
        await running.end()


async def test_an_engine_that_is_stopped_in_a_step_has_not_failed() -> None:
    under_test = make_engine()
    stopped, may_go_on = threading.Event(), threading.Event()
    run = under_test.runner.run

    def hold() -> object:
        stopped.set()
        assert may_go_on.wait(patience(BOUND_S))
        return run()

    under_test.runner.run = hold  # type: ignore[assignment, method-assign]
    running = Running(under_test)
    running.mailbox.submit(greedy("a", [1, 2, 3]))
    await asyncio.to_thread(stopped.wait, BOUND_S)
    running.mailbox.stop()
    running.mailbox.deliver = None  # type: ignore[assignment, method-assign]  # as behind a loop that is closed
    may_go_on.set()
    await running.end()
    assert running.failures == []


class FakeThread:
    """The part of the thread that the watchdog reads."""

    num_turns = 0
    is_idle = False
    longest_expected_step_s = 0.0


def looks(watchdog: Watchdog, seconds: float, *, since_s: float) -> list[Verdict]:
    number = round(seconds / LOOK_INTERVAL_S)
    return [watchdog.look(since_s + (index + 1) * LOOK_INTERVAL_S) for index in range(number)]


def test_an_engine_with_work_that_ends_no_step_within_the_bound_is_stuck_and_at_last_lost() -> None:
    thread = FakeThread()
    watchdog = Watchdog(thread, 10.0)
    assert set(looks(watchdog, 10.0, since_s=0.0)) == {Verdict.ALIVE}
    assert set(looks(watchdog, 90.0, since_s=10.0)) == {Verdict.STUCK}
    assert set(looks(watchdog, 1.0, since_s=100.0)) == {Verdict.LOST}
    assert GIVE_UP_AFTER == 10
    thread.num_turns += 1
    assert looks(watchdog, 9.0, since_s=101.0)[-1] is Verdict.ALIVE


def test_an_idle_engine_is_never_stuck() -> None:
    thread = FakeThread()
    thread.is_idle = True
    watchdog = Watchdog(thread, 10.0)
    assert set(looks(watchdog, 1000.0, since_s=0.0)) == {Verdict.ALIVE}
    thread.is_idle = False  # a step begins
    assert set(looks(watchdog, 9.5, since_s=1000.0)) == {Verdict.ALIVE}
    assert set(looks(watchdog, 1.0, since_s=1009.5)) == {Verdict.STUCK}


def test_a_step_may_take_many_times_what_is_expected_of_it() -> None:
    thread = FakeThread()
    thread.longest_expected_step_s = 3.0
    watchdog = Watchdog(thread, 10.0)
    assert set(looks(watchdog, EXPECTED_STEPS * 3.0, since_s=0.0)) == {Verdict.ALIVE}
    assert looks(watchdog, 1.0, since_s=EXPECTED_STEPS * 3.0)[-1] is Verdict.STUCK
    thread.longest_expected_step_s = 1e15
    assert watchdog.bound_s == 100.0, "what is learned may be wrong"


def test_time_in_which_the_watchdog_did_not_run_does_not_count() -> None:
    watchdog = Watchdog(FakeThread(), 10.0)
    watchdog.look(1.0)
    assert watchdog.look(10_000.0) is Verdict.ALIVE


def test_the_engine_expects_long_steps_where_they_are_long(
    engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.engine.meter.longest_expected_step_s == 0.0
    engine.request([1] * 20, max_tokens=5)
    engine.run()
    longest_s = engine.engine.meter.longest_expected_step_s
    assert longest_s > 0.0
    for number in range(20):
        engine.request([number] * 9, max_tokens=2)
        engine.run()
    assert engine.scheduler.step_costs.prompts.num_steps
    monkeypatch.setattr(StepCostModel, "predict_ms", lambda *_: 5000.0)
    engine.request([99] * 20, max_tokens=1)
    engine.run()
    assert engine.engine.meter.longest_expected_step_s == 5.0


async def test_while_stuck_watchers_hear_nothing_and_afterwards_all() -> None:
    hub = WatchHub(1, 4, 4)
    thread = FakeThread()
    told: list[str] = []
    stuck, recovered = asyncio.Event(), asyncio.Event()

    async def on_stuck(why: str) -> None:
        hub.fall_silent(why)
        stuck.set()

    async def on_recovered() -> None:
        hub.speak()
        recovered.set()

    watching = asyncio.create_task(watch_engine(Watchdog(thread, 0.02), on_stuck, on_recovered, told.append, 0.005))
    async with asyncio.timeout(patience(BOUND_S)):
        await stuck.wait()
        hub.publish(EngineReport(LoadReport(num_running=3), stored=(7,)))
        watch = hub.watch(0.05)
        first = asyncio.ensure_future(anext(watch))
        done, _ = await asyncio.wait({first}, timeout=0.2)
        assert not done
        while not told:  # it is given up in the end
            await asyncio.sleep(0.005)
        assert "has ended no step" in told[0]
        thread.num_turns += 1
        await recovered.wait()
        message = await first
    assert (message.load.num_running, list(message.kv_events.stored)) == (3, [7])
    watching.cancel()
