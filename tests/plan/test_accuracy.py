"""The comparison of plans with measurements (benchmarks/plan): the same requests, windows and rules on both sides."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from benchmarks.plan.accuracy import between, predicted
from benchmarks.plan.comparison import Sample, Side, Tokens, asked, counted, figures, measured
from benchmarks.plan.noted import Notes
from benchmarks.plan.steps import Ran, cores, kinds
from headrace.bench.apis import Api, Completions
from headrace.bench.datasets import Conversation, Turn
from headrace.bench.load import Run
from headrace.bench.record import Record
from headrace.bench.results import Result
from headrace.plan.fleet import Fleet, Kind
from headrace.sim.step_cost import shape_of
from headrace.sim.step_logs import LoggedStep
from tests.plan.calibrations import calibration

LIMITS = {"ttft": 1000.0, "tpot": 100.0}


def turn(name: str, answer: int = 4, think_s: float = 0.0) -> Turn:
    return Turn((name,), 6, answer, think_s)


def record(of: Turn, planned_s: float, **changes: Any) -> Record:
    """Sent when it was due, the first content after 0.5 s, one token each 0.1 s."""
    made = Record(0, 6, of.output_tokens, hash(of.parts), planned_s, planned_s)
    made.times = [planned_s + 0.5 + 0.1 * place for place in range(of.output_tokens)]
    made.ended_s, made.output_tokens, made.cached_tokens = made.times[-1], of.output_tokens, 2
    return dataclasses.replace(made, **changes)


def result(*records: Record) -> Result:
    run = Run(list(records), 100.0, max(one.ended_s for one in records), 0.0, len(records))
    return Result(None, run, None, {}, None, None, None, {}, {})  # type: ignore[arg-type]  # only the run is read


def test_a_simulated_prompt_has_what_the_server_could_find() -> None:
    first, second, third = turn("a"), turn("b", think_s=2.0), turn("c")
    chat, other = Conversation((first, second, third)), Conversation((turn("d"),))
    tokens = {
        hash(first.parts): Tokens([1, 2, 3, 3], [50, 51, 52, 53]),
        # Two tokens of the answer came back as they were, and the rest as others.
        hash(second.parts): Tokens([1, 2, 3, 3, 50, 51, 99, 4, 5], [60, 61, 62, 63]),
        hash(third.parts): Tokens([1, 2, 3, 3, 50, 51, 99, 4, 5, 60, 61, 62, 63, 6], [70]),
        hash(other.turns[0].parts): Tokens([1, 2, 3, 7], [80, 81, 82, 83]),
    }
    run = result(record(first, 101.0), record(second, 104.0), record(third, 105.0), record(other.turns[0], 102.0))
    found = asked(run, [chat, other], lambda one: tokens[one.prompt_id])
    one, two, three, four = found.jobs
    assert one.segments == ((1, 1), (2, 1), (3, 2))
    assert two.segments == (*one.segments, (one.answer_token_id, 2), (99, 1), (4, 1), (5, 1))
    assert three.segments == (*two.segments, (two.answer_token_id, 4), (6, 1))
    assert four.segments == ((1, 1), (2, 1), (3, 1), (7, 1))
    assert [(job.follows, job.think_s, job.arrival_s) for job in found.jobs] == [
        (None, 0.0, 1.0),
        (0, 2.0, 0.0),
        (1, 0.0, 0.0),
        (None, 0.0, 2.0),
    ]
    assert found.starts_s == [1.0, 2.0]
    assert found.reuse == pytest.approx(6 / 8)


def test_requests_that_failed_are_not_simulated_and_end_their_conversation() -> None:
    first, second = turn("a"), turn("b")
    run = result(record(first, 101.0, error_kind="HTTP 429"), record(second, 102.0))
    found = asked(run, [Conversation((first, second))], lambda one: Tokens([1], [2]))
    assert found.jobs == []
    (refused, _) = measured(run)
    assert refused.ttft_ms is None
    assert not refused.is_good(LIMITS)


def test_both_sides_count_the_same_time() -> None:
    samples = [Sample(float(second), 500.0, 50.0, 0, 10) for second in range(120)]
    side = counted(samples, [0.0, 50.0, 100.0], 0.0)
    assert (min(one.at_s for one in side.samples), max(one.at_s for one in side.samples)) == (15.0, 100.0)
    assert side.seconds == 85.0
    late = counted(samples, [0.0, 100.0], 40.0)
    assert (late.samples[0].at_s, late.seconds) == (40.0, 60.0)


def test_figures_are_those_of_all_rounds_and_a_refused_request_is_not_good() -> None:
    good, slow, refused = Sample(0, 500.0, 50.0, 5, 10), Sample(0, 500.0, 150.0, 5, 10), Sample(0, None, None, 0, 10)
    found = figures([Side([good, slow], 8.0), Side([good, refused], 12.0)], LIMITS)
    assert found.goodput == pytest.approx(2 / 20)
    assert (found.ttft_p95, found.num_refused, found.hit_share) == (500.0, 1, 0.5)
    assert found.tpot_mean == pytest.approx(250 / 3)


def test_requests_that_the_simulator_refuses_are_not_good() -> None:
    """Of more work than a minute's, which the real router refuses too."""
    conversations = [Conversation((turn(f"{number}", 100),)) for number in range(120)]
    run = result(*(record(one.turns[0], 100.0 + 0.01 * number) for number, one in enumerate(conversations)))
    found = asked(run, conversations, lambda one: Tokens([one.prompt_id % 9999] * 2000, [1] * 100))
    fleet = Fleet(Kind("small", calibration()), 1)
    side = predicted(fleet, found, 0.0)
    told = figures([side], LIMITS)
    assert told.num_refused > 0
    assert told.goodput * side.seconds <= len(side.samples) - told.num_refused


def step(start_s: float, factor: float, *sequences: tuple[int, int], worker: str = "a") -> LoggedStep:
    """A step that takes `factor` times what the calibration says of it, from its begin to that of the next."""
    shape = shape_of(sequences)
    ms = factor * calibration().steps.milliseconds(shape) - 1.0
    return LoggedStep(worker, start_s, ms, "main", **shape._asdict())


def ran(*log: LoggedStep) -> Ran:
    return Ran(10.0, 20.0, log, front_s=0.5, client_s=0.1, workers_s=4.0, num_requests=50, num_tokens=1500)


def in_turn(*steps: LoggedStep) -> list[LoggedStep]:
    """The steps, each of which begins 1 ms after the one before it."""
    found = [steps[0]]
    for one in steps[1:]:
        found.append(msgspec.structs.replace(one, start_s=found[-1].end_s + 0.001))
    return found


def test_steps_of_a_run_are_compared_with_the_calibration_by_kind() -> None:
    prompt, one, eight = ((1024, 64), (500, 1)), ((500, 1),), ((500, 1),) * 8
    before = in_turn(step(1.0, 9.0, *prompt), step(0, 9.0, *one), step(0, 9.0, *eight))
    own = in_turn(
        step(10.0, 1.1, *prompt), *(step(0, 1.2, *one),) * 3, *(step(0, 1.0, *eight),) * 3, step(0, 3.0, *eight)
    )
    late = in_turn(step(20.5, 9.0, *one))
    with_prompts, few, many = kinds([ran(*before, *own, *late)], calibration())
    assert (with_prompts.title, few.title, many.title) == ("with prompts", "1 to 3 streams", "8 to 15 streams")
    assert (with_prompts.count, few.count, many.count) == (1, 3, 4)
    steps = calibration().steps
    assert with_prompts.predicted_ms == pytest.approx(steps.milliseconds(shape_of(prompt)))
    assert with_prompts.measured_ms / with_prompts.predicted_ms == pytest.approx(1.1)
    assert few.measured_ms / few.predicted_ms == pytest.approx(1.2)
    assert (few.long_share, many.long_share) == (0.0, 0.25)
    assert many.measured_ms / many.predicted_ms == pytest.approx((1.0 + 1.0 + 1.0 + 3.0) / 4)


def test_other_workers_that_compute_make_predicted_steps_longer() -> None:
    slow = msgspec.structs.replace(calibration(workers=2), slowdown=0.5)
    one = ((500, 1),)
    own = [*in_turn(*(step(10.0, 1.5, *one),) * 4), *in_turn(*(step(10.0, 1.5, *one, worker="b"),) * 4)]
    before = [step(1.0, 1.0, *one), step(1.0, 1.0, *one, worker="b")]
    (few,) = kinds([ran(*before, *own)], slow)
    assert few.count == 8
    assert few.predicted_ms == pytest.approx(few.measured_ms, rel=0.05)


def test_the_cores_that_each_process_takes_are_those_of_all_rounds() -> None:
    own = in_turn(step(10.0, 1.0, (500, 1)), step(0, 1.0, (500, 1)))
    found = cores([ran(*own), ran(step(5.0, 1.0, (500, 1)))], calibration())
    assert (found.front, found.client, found.workers) == pytest.approx((0.05, 0.01, 0.4))
    assert found.predicted_front == pytest.approx((50 * 0.004 + 1500 * 0.0002) / 10)
    assert found.in_steps == pytest.approx(2 * sum(one.ms for one in own) / 1000 / 20)


def event(**fields: Any) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def test_tokens_are_read_from_the_answers_as_they_came() -> None:
    notes = Notes()
    api: Api = Completions("/v1/completions")
    one, two = Record(0, 3, 3), Record(0, 1, 1)
    raw = [
        event(choices=[{"index": 0, "text": "a", "prompt_token_ids": [7, 8], "token_ids": [1]}]),
        event(choices=[{"index": 0, "text": "b", "token_ids": [2, 3]}], usage={"prompt_tokens": 2}),
        b"data: [DONE]\n\n",
    ]
    stream = notes.stream(api, one, lambda: None)
    stream.began(200, "text/event-stream")
    for piece in (b"".join(raw)[:30], b"".join(raw)[30:]):
        stream.received(piece, 1.0)
    chat = notes.stream(api, two, lambda: None)
    chat.began(200, "text/event-stream")
    chat.received(event(choices=[{"delta": {}}], prompt_token_ids=[9]), 1.0)
    assert notes.tokens(one) == Tokens([7, 8], [1, 2, 3])
    assert notes.tokens(two) == Tokens([9], [])
    assert one.text == "ab"


@pytest.mark.parametrize(("knee", "low", "high"), [(3.0, 2.0, 4.0), (0.7, 2.0, 4.0), (9.0, 2.0, 4.0)])
def test_the_knee_is_found_between_rates_that_are_spread_until_it_is(knee: float, low: float, high: float) -> None:
    async def why_not(rate: float) -> str:
        return "" if rate <= knee else "too much"

    held, missed = asyncio.run(between(low, high, why_not))
    assert held <= knee < missed
    assert missed / held < 1.1
