"""The worker's services on a real gRPC server, with the fake runner behind them."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2

from headrace.common.telemetry.tracing import start_tracing, stop_tracing
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.inference_pb2 import Belief, Constraint, GenerateRequest, GenerateResponse, SamplingParams
from headrace.protos.status import Reason, StatusError, detail_of, error_of
from headrace.worker.grammar.compiler import Grammars
from tests.otlp import grpc_receiver
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, KnownCosts
from tests.worker.fake_runner import expected_tokens
from tests.worker.server.running import MODEL, NUM_BLOCKS, RunningWorker, running_worker, small_engine
from tests.worker.vocabulary import EOS, text_of

BUNDLE = bytes(range(256)) * 10_000
GREEDY = {"temperature": 0.0}


class GatedRunner:
    """Lets the test hold the engine in the middle of a step."""

    def __init__(self, runner: object) -> None:
        self.runner = runner
        self.infer_s = 0.0
        self.small_decode = 0
        self.least_decode = 1
        self.vocab_size = VOCAB_SIZE
        self.gate = threading.Event()
        self.gate.set()

    def bind(self, batch: object, *, keeps_logits: bool) -> None:
        self.runner.bind(batch, keeps_logits=keeps_logits)  # type: ignore[attr-defined]

    def run(self) -> object:
        assert self.gate.wait(patience(30))
        return self.runner.run()  # type: ignore[attr-defined]


@dataclass
class GatedWorker(RunningWorker):
    """A worker whose steps wait for `gate`."""

    gate: threading.Event


@pytest.fixture
async def worker() -> AsyncIterator[GatedWorker]:
    under_test = small_engine()
    gated = GatedRunner(under_test.runner)
    under_test.engine.runner = gated  # type: ignore[assignment]
    digest = hashlib.sha256(BUNDLE).hexdigest()
    async with running_worker(under_test, bundle=BUNDLE, tokenizer_sha256=digest) as running:
        try:
            yield GatedWorker(**vars(running), gate=gated.gate)
        finally:
            gated.gate.set()


def tokens_of(responses: list[GenerateResponse]) -> list[int]:
    """All tokens, after a check of their positions."""
    tokens: list[int] = []
    for response in responses:
        assert response.start_pos == len(tokens)
        tokens += response.token_ids
    return tokens


async def error_from(call: object) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return error_of(caught.value)


async def test_generate_streams_the_tokens_and_one_finish_with_the_account(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=6, **GREEDY)
    responses = await worker.generate(model=MODEL, token_ids=[1, 2, 3], sampling=sampling)
    assert tokens_of(responses) == expected_tokens([1, 2, 3], 6, VOCAB_SIZE)
    assert [response.HasField("finish") for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[0].num_cached_tokens == 0
    assert not any(response.HasField("num_cached_tokens") for response in responses[1:])
    finish = responses[-1].finish
    assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert (finish.num_prompt_tokens, finish.num_cached_tokens, finish.num_generated_tokens) == (3, 0, 6)


async def test_many_streams_at_once_each_get_their_own_tokens(worker: GatedWorker) -> None:
    prompts = [[i, i + 1, 2 * i] for i in range(6)]
    sampling = [SamplingParams(max_tokens=3 + i, **GREEDY) for i in range(6)]
    answers = await asyncio.gather(
        *(worker.generate(token_ids=p, sampling=s) for p, s in zip(prompts, sampling, strict=True))
    )
    for prompt, answer, params in zip(prompts, answers, sampling, strict=True):
        assert tokens_of(answer) == expected_tokens(prompt, params.max_tokens, VOCAB_SIZE)


async def test_a_model_end_token_stops_unless_it_is_ignored(worker: GatedWorker) -> None:
    prompt = next([i] for i in range(10_000) if EOS in expected_tokens([i % VOCAB_SIZE], 20, VOCAB_SIZE))
    whole = expected_tokens(prompt, 20, VOCAB_SIZE)
    stopped = await worker.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=20, **GREEDY))
    assert tokens_of(stopped) == whole[: whole.index(EOS) + 1]
    assert stopped[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
    assert stopped[-1].finish.stop_token_id == EOS
    ignored = await worker.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY))
    assert tokens_of(ignored) == whole


async def test_a_resumed_stream_goes_on_behind_what_was_delivered(worker: GatedWorker) -> None:
    whole = expected_tokens([4, 5], 9, VOCAB_SIZE)
    sampling = SamplingParams(max_tokens=9, **GREEDY)
    responses = await worker.generate(token_ids=[4, 5], resume_token_ids=whole[:4], sampling=sampling, attempt=1)
    assert responses[0].start_pos == 4
    assert [token for response in responses for token in response.token_ids] == whole[4:]
    assert responses[-1].finish.num_generated_tokens == 9


async def test_an_answer_names_its_model_first_and_other_models_do_not_continue_it(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=6, **GREEDY)
    responses = await worker.generate(token_ids=[4, 5], sampling=sampling)
    assert [response.model_identity for response in responses] == ["identity"] + [""] * (len(responses) - 1)
    whole = [token for response in responses for token in response.token_ids]
    same = await worker.generate(
        token_ids=[4, 5], resume_token_ids=whole[:2], sampling=sampling, model_identity="identity"
    )
    assert [token for response in same for token in response.token_ids] == whole[2:]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.generate(token_ids=[4, 5], resume_token_ids=whole[:2], sampling=sampling, model_identity="other")
    assert error_of(caught.value).reason is Reason.MODEL_CHANGED


@pytest.mark.parametrize(("resumed", "reason"), [(9, "LENGTH"), (3, "STOP")])
async def test_a_resumption_that_needs_nothing_more_gets_its_finish_at_once(
    worker: GatedWorker, resumed: int, reason: str
) -> None:
    whole = expected_tokens([4, 5], 9, VOCAB_SIZE)
    stop = [whole[2]] if reason == "STOP" else []
    sampling = SamplingParams(max_tokens=9, stop_token_ids=stop, **GREEDY)
    responses = await worker.generate(token_ids=[4, 5], resume_token_ids=whole[:resumed], sampling=sampling)
    assert len(responses) == 1
    assert (responses[0].start_pos, list(responses[0].token_ids)) == (resumed, [])
    assert responses[0].finish.reason == inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")


async def test_logprobs_come_with_every_token(worker: GatedWorker) -> None:
    responses = await worker.generate(token_ids=[1], sampling=SamplingParams(max_tokens=3, logprobs=2, **GREEDY))
    entries = [entry for response in responses for entry in response.logprobs]
    assert len(entries) == 3
    for token_id, entry in zip(tokens_of(responses), entries, strict=True):
        assert (entry.rank, entry.top_token_ids[0], len(entry.top_token_ids)) == (1, token_id, 2)
        assert entry.top_logprobs[0] == entry.logprob > entry.top_logprobs[1]


async def test_logprobs_of_the_prompt_come_with_the_first_message(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=2, **GREEDY)
    responses = await worker.generate(token_ids=[1, 2, 3, 4], sampling=sampling)
    assert [len(response.prompt_logprobs) for response in responses] == [3] + [0] * (len(responses) - 1)
    assert all(len(entry.top_token_ids) == 2 for entry in responses[0].prompt_logprobs)


async def test_more_log_probabilities_of_a_prompt_than_are_kept_are_refused(
    worker: GatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.worker.server.admission.MAX_PROMPT_LOGPROBS", 60)
    for num_tokens, num_top in ((21, 2), (61, 0)):
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=num_top, **GREEDY)
        assert len((await worker.generate(token_ids=[1] * num_tokens, sampling=sampling))[0].prompt_logprobs) > 0
        error = await error_from(worker.generate(token_ids=[1] * (num_tokens + 1), sampling=sampling))
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "sampling.prompt_logprobs")
        assert f"allows prompts of up to {60 // (1 + num_top)} tokens, not {num_tokens + 1}" in error.message


async def test_log_probabilities_of_a_long_prompt_come_whole(
    worker: GatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.worker.server.responses.PROMPT_LOGPROBS_AT_ONCE", 7)
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=2, **GREEDY)
    prompt = [3, 5, 7, *expected_tokens([3, 5, 7], 97, VOCAB_SIZE)]
    entries = (await worker.generate(token_ids=prompt, sampling=sampling))[0].prompt_logprobs
    assert [entry.rank for entry in entries[2:]] == [1] * 97
    assert [entry.top_token_ids[0] for entry in entries[2:]] == prompt[3:]


async def test_a_cancelled_stream_frees_its_blocks_at_the_next_step(worker: GatedWorker) -> None:
    worker.gate.clear()
    call = worker.inference.Generate(GenerateRequest(token_ids=list(range(20)), sampling=SamplingParams(**GREEDY)))
    scheduler = worker.under_test.scheduler
    await worker.until(lambda: scheduler.stats.requests_admitted == 1)
    call.cancel()
    await worker.until(lambda: worker.mailbox.num_open == 0)
    worker.gate.set()
    await worker.until(lambda: worker.hub.report.counters.get("requests_cancelled") == 1)
    assert (worker.hub.report.load.num_free_blocks, worker.hub.report.load.num_running) == (NUM_BLOCKS, 0)
    assert worker.hub.report.counters["steps"] == 1


async def test_a_call_that_is_cancelled_while_its_constraint_compiles_ends_its_span(
    worker: GatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, given_up = asyncio.Event(), asyncio.Event()

    async def constrain(*_: object, **__: object) -> None:
        compiling.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(Grammars, "constrain", constrain)
    with grpc_receiver() as receiver:
        start_tracing("worker", receiver.url)
        sampling = SamplingParams(constraint=Constraint(regex="a"), **GREEDY)
        call = worker.inference.Generate(GenerateRequest(request_id="r", token_ids=[1, 2], sampling=sampling))
        await compiling.wait()
        call.cancel()
        await asyncio.wait_for(given_up.wait(), patience(20))
        await asyncio.to_thread(stop_tracing, 10.0)
        (span,) = receiver.spans
    assert span.attributes["headrace.cancelled"]
    assert span.attributes["headrace.request_id"] == "r"
    assert worker.mailbox.num_open == 0


async def test_a_deadline_ends_a_request_and_frees_it(worker: GatedWorker) -> None:
    worker.gate.clear()
    sampling = SamplingParams(max_tokens=200, ignore_eos=True, **GREEDY)
    call = worker.inference.Generate(GenerateRequest(token_ids=[1, 2], sampling=sampling), timeout=0.2)
    assert (await error_from(call.read())).reason is Reason.DEADLINE
    worker.gate.set()
    await worker.until(lambda: worker.hub.report.counters.get("requests_cancelled") == 1)
    assert worker.hub.report.load.num_free_blocks == NUM_BLOCKS


async def test_more_requests_than_the_bound_are_refused_with_a_time_to_come_back(worker: GatedWorker) -> None:
    worker.gate.clear()
    sampling = SamplingParams(max_tokens=2, **GREEDY)
    calls = [worker.inference.Generate(GenerateRequest(token_ids=[i], sampling=sampling)) for i in range(6)]
    await worker.until(lambda: worker.under_test.scheduler.stats.requests_admitted >= 1)
    errors = [await error_from(worker.generate(token_ids=[9], sampling=sampling))]
    assert errors[0].reason is Reason.QUEUE_FULL
    assert errors[0].retry_after_s is not None
    worker.gate.set()
    for call in calls:
        assert [response async for response in call][-1].HasField("finish")


async def test_a_resumed_request_is_taken_in_beyond_the_bound(worker: GatedWorker) -> None:
    worker.gate.clear()
    sampling = SamplingParams(max_tokens=4, **GREEDY)
    calls = [worker.inference.Generate(GenerateRequest(token_ids=[i], sampling=sampling)) for i in range(6)]
    await worker.until(lambda: worker.mailbox.num_open == 6)
    whole = expected_tokens([9], 4, VOCAB_SIZE)
    resumed = asyncio.create_task(worker.generate(token_ids=[9], resume_token_ids=whole[:2], sampling=sampling))
    await worker.until(lambda: worker.mailbox.num_open == 7)
    worker.gate.set()
    assert [token for response in await resumed for token in response.token_ids] == whole[2:]
    for call in calls:
        assert [response async for response in call][-1].HasField("finish")


async def test_a_request_that_would_wait_for_too_long_is_refused_before_it_is_queued(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=2, **GREEDY)
    refusals: list[Reason] = []
    worker.gate.clear()
    # At 10 tokens a second, 100 of them before its own.
    worker.under_test.scheduler.step_costs = KnownCosts(token_ms=100.0)
    ahead = worker.inference.Generate(GenerateRequest(token_ids=[5] * 100, sampling=sampling))
    await worker.until(lambda: worker.under_test.scheduler.stats.requests_admitted == 1)
    waits = [
        worker.inference.Generate(GenerateRequest(token_ids=[7] * 110, sampling=sampling, **bound), timeout=timeout)
        for bound, timeout in (({"max_wait_ms": 2000}, None), ({}, 15))
    ]
    short = worker.inference.Generate(GenerateRequest(token_ids=[1] * 5, sampling=sampling, max_wait_ms=2000))
    await worker.until(lambda: worker.mailbox.num_open == 4)
    worker.gate.set()
    error = await error_from(waits[0].read())
    refusals.append(error.reason)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 1
    assert "for others" in error.message
    # It would take 11 s by itself, so that the deadline could not be kept behind the other one.
    assert (await error_from(waits[1].read())).reason is Reason.QUEUE_FULL
    for call in (ahead, short):
        assert [response async for response in call][-1].HasField("finish")
    await worker.until(lambda: worker.hub.report.counters.get("requests_finished") == 2)
    assert worker.hub.report.counters["requests_admitted"] == 2
    assert worker.hub.report.counters["requests_failed"] == 0


async def test_a_failed_step_ends_its_streams_with_a_status_and_the_worker_goes_on(worker: GatedWorker) -> None:
    worker.under_test.runner.fail_next = RuntimeError("kernel")
    sampling = SamplingParams(max_tokens=4, **GREEDY)
    error = await error_from(worker.generate(token_ids=[1], sampling=sampling))
    assert error.reason is Reason.INTERNAL
    await worker.until(lambda: worker.hub.report.counters.get("requests_failed") == 1)
    assert (worker.hub.report.load.num_free_blocks, worker.hub.report.load.num_running) == (NUM_BLOCKS, 0)
    responses = await worker.generate(token_ids=[1], sampling=sampling)
    assert tokens_of(responses) == expected_tokens([1], 4, VOCAB_SIZE)


async def test_a_step_that_fails_in_the_middle_of_answers_is_reported_too(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=9, logprobs=1, **GREEDY)
    worker.gate.clear()
    call = worker.inference.Generate(GenerateRequest(token_ids=[1], sampling=sampling))
    await worker.until(lambda: len(worker.under_test.runner.batch_sizes) == 1)
    worker.under_test.runner.fail_next = RuntimeError("kernel")  # the second step, the first is held at the gate
    worker.gate.set()
    first = await call.read()
    assert list(first.token_ids) == expected_tokens([1], 1, VOCAB_SIZE)
    assert len(first.logprobs) == 1
    assert (await error_from(call.read())).reason is Reason.INTERNAL
    await worker.until(lambda: worker.hub.report.counters.get("requests_failed") == 1)
    assert (worker.hub.report.load.num_free_blocks, worker.hub.report.load.num_running) == (NUM_BLOCKS, 0)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"token_ids": []}, Reason.INVALID_FIELD, "token_ids"),
        ({"token_ids": [VOCAB_SIZE]}, Reason.INVALID_FIELD, "token_ids"),
        ({"token_ids": [1] * NUM_BLOCKS * BLOCK_SIZE}, Reason.CONTEXT_TOO_LONG, "token_ids"),
        ({"resume_token_ids": [VOCAB_SIZE]}, Reason.INVALID_FIELD, "resume_token_ids"),
        ({"model": "other"}, Reason.MODEL_NOT_FOUND, "model"),
        ({"tokenizer_sha256": "8" * 64}, Reason.MODEL_CHANGED, "tokenizer_sha256"),
        ({"adapter": "lora"}, Reason.MODEL_NOT_FOUND, "adapter"),
        ({"sampling": {"temperature": 2.1}}, Reason.INVALID_FIELD, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, Reason.INVALID_FIELD, "sampling.temperature"),
        ({"sampling": {"top_p": 0.0}}, Reason.INVALID_FIELD, "sampling.top_p"),
        ({"sampling": {"min_p": -0.1}}, Reason.INVALID_FIELD, "sampling.min_p"),
        ({"sampling": {"max_tokens": 0}}, Reason.INVALID_FIELD, "sampling.max_tokens"),
        ({"sampling": {"presence_penalty": 3}}, Reason.INVALID_FIELD, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": -3}}, Reason.INVALID_FIELD, "sampling.frequency_penalty"),
        ({"sampling": {"repetition_penalty": 0}}, Reason.INVALID_FIELD, "sampling.repetition_penalty"),
        ({"sampling": {"logprobs": 21}}, Reason.INVALID_FIELD, "sampling.logprobs"),
        ({"sampling": {"prompt_logprobs": 21}}, Reason.INVALID_FIELD, "sampling.prompt_logprobs"),
        ({"sampling": {"logit_bias": {1: 101}}}, Reason.INVALID_FIELD, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {VOCAB_SIZE: 1}}}, Reason.INVALID_FIELD, "sampling.logit_bias"),
        ({"sampling": {"stop_token_ids": range(65)}}, Reason.INVALID_FIELD, "sampling.stop_token_ids"),
        ({"sampling": {"allowed_token_ids": [VOCAB_SIZE]}}, Reason.INVALID_FIELD, "sampling.allowed_token_ids"),
        ({"sampling": {"bad_words": [{"token_ids": []}]}}, Reason.INVALID_FIELD, "sampling.bad_words"),
        ({"sampling": {"constraint": {}}}, Reason.INVALID_FIELD, "sampling.constraint"),
        (
            {"sampling": {"constraint": {"json_schema": '{"not": {}}'}}},
            Reason.INVALID_FIELD,
            "sampling.constraint.json_schema",
        ),
        ({"sampling": {"constraint": {"json_schema": ""}}}, Reason.INVALID_FIELD, "sampling.constraint.json_schema"),
        ({"sampling": {"constraint": {"regex": "("}}}, Reason.INVALID_FIELD, "sampling.constraint.regex"),
        ({"sampling": {"constraint": {"regex": "a" * 300_000}}}, Reason.INVALID_FIELD, "sampling.constraint.regex"),
        ({"sampling": {"constraint": {"choice": {}}}}, Reason.INVALID_FIELD, "sampling.constraint.choice"),
        ({"sampling": {"constraint": {"choice": {"texts": [""]}}}}, Reason.INVALID_FIELD, "sampling.constraint.choice"),
        (
            {"sampling": {"constraint": {"choice": {"texts": ["a"] * 4097}}}},
            Reason.INVALID_FIELD,
            "sampling.constraint.choice",
        ),
        ({"sampling": {"constraint": {"grammar": "start: x"}}}, Reason.INVALID_FIELD, "sampling.constraint.grammar"),
        (
            {
                "sampling": {
                    "constraint": {"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1}?\n" for i in range(2001))}
                }
            },
            Reason.INVALID_FIELD,
            "sampling.constraint.grammar",
        ),
        (
            {"sampling": {"constraint": {"regex": "a"}, "allowed_token_ids": [1]}},
            Reason.INVALID_FIELD,
            "sampling.allowed_token_ids",
        ),
        (
            {"sampling": {"constraint": {"regex": "a"}}, "resume_token_ids": [98]},
            Reason.INVALID_FIELD,
            "resume_token_ids",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(
    worker: GatedWorker, fields: dict[str, object], reason: Reason, field: str
) -> None:
    error = await error_from(worker.generate(**{"token_ids": [1], **fields}))
    assert (error.reason, error.field) == (reason, field)
    assert worker.under_test.scheduler.stats.requests_admitted == 0


WORDS = Constraint(regex="([a-z]{2,4} ){3}[a-z]{2,4}[.]")


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_constrained_answer_is_of_its_language_and_ends(worker: GatedWorker, ignore_eos: bool) -> None:
    sampling = SamplingParams(max_tokens=60, seed=3, constraint=WORDS, ignore_eos=ignore_eos)
    responses = await worker.generate(token_ids=[1, 2, 3], sampling=sampling)
    assert re.fullmatch(WORDS.regex, text_of(tokens_of(responses)).decode())
    assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
    assert responses[-1].finish.stop_token_id == EOS


async def test_a_constrained_answer_can_be_resumed_anywhere(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=60, seed=3, constraint=WORDS, min_tokens=50)
    whole = tokens_of(await worker.generate(token_ids=[1, 2, 3], sampling=sampling))
    for cut in range(1, len(whole) + 1):
        request = {"token_ids": [1, 2, 3], "resume_token_ids": whole[:cut], "sampling": sampling}
        responses = await worker.generate(**request)
        assert responses[0].start_pos == cut
        assert [token for response in responses for token in response.token_ids] == whole[cut:]
        assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_STOP


async def test_constrained_streams_and_others_share_steps(worker: GatedWorker) -> None:
    constrained = SamplingParams(max_tokens=60, seed=3, constraint=WORDS)
    plain = SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY)
    alone = tokens_of(await worker.generate(token_ids=[1, 2, 3], sampling=constrained))
    answers = await asyncio.gather(
        *(worker.generate(token_ids=[1, 2, 3], sampling=constrained if i % 2 else plain) for i in range(6))
    )
    for i, answer in enumerate(answers):
        assert tokens_of(answer) == (alone if i % 2 else expected_tokens([1, 2, 3], 20, VOCAB_SIZE))


async def test_max_tokens_is_capped_by_the_context(worker: GatedWorker) -> None:
    sampling = SamplingParams(ignore_eos=True, **GREEDY)
    responses = await worker.generate(token_ids=[1] * 250, sampling=sampling)
    assert len(tokens_of(responses)) == NUM_BLOCKS * BLOCK_SIZE - 250
    assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_the_tokenizer_bundle_comes_in_pieces_by_its_hash(worker: GatedWorker) -> None:
    card = (await worker.worker.GetModelCard(worker_pb2.GetModelCardRequest())).card
    request = worker_pb2.GetTokenizerRequest(sha256=card.tokenizer_sha256)
    chunks = [response.chunk async for response in worker.worker.GetTokenizer(request)]
    assert len(chunks) == 3
    assert b"".join(chunks) == BUNDLE
    call = worker.worker.GetTokenizer(worker_pb2.GetTokenizerRequest(sha256="0" * 64))
    assert (await error_from(call.read())).reason is Reason.NOT_FOUND


@pytest.mark.parametrize(("watcher_id", "reason"), [(0, Reason.INVALID_FIELD), (6, Reason.NOT_FOUND), (5, None)])
async def test_only_a_running_watch_can_be_adjusted(
    worker: GatedWorker, watcher_id: int, reason: Reason | None
) -> None:
    watch = worker.worker.Watch(worker_pb2.WatchRequest(watcher_id=5))
    await watch.read()
    call = worker.worker.AdjustWatch(worker_pb2.AdjustWatchRequest(watcher_id=watcher_id, min_interval_ms=100))
    if reason is None:
        await call
    else:
        error = await error_from(call)
        assert (error.reason, error.field) == (reason, "watcher_id")
    watch.cancel()


async def test_watch_starts_with_a_snapshot_and_goes_on_with_what_changes(worker: GatedWorker) -> None:
    prompt = list(range(12))
    sampling = SamplingParams(max_tokens=1, **GREEDY)
    await worker.generate(token_ids=prompt, sampling=sampling)
    call = worker.worker.Watch(worker_pb2.WatchRequest())
    first = await call.read()
    hashes = block_hashes(root_hash("f" * 64), prompt, BLOCK_SIZE)
    assert (first.epoch, first.sequence, first.kv_events.reset) == (7, 0, True)
    assert set(first.kv_events.stored) == set(hashes)
    assert (first.load.num_blocks, first.load.num_free_blocks, first.load.max_num_seqs) == (NUM_BLOCKS, NUM_BLOCKS, 4)
    await worker.generate(token_ids=[*prompt, *range(4)], sampling=sampling)
    stored: list[int] = []
    sequence = 0
    while not stored:
        message = await call.read()
        sequence += 1
        assert (message.sequence, message.kv_events.reset) == (sequence, False)
        stored += message.kv_events.stored
    assert stored == block_hashes(root_hash("f" * 64), [*prompt, *range(4)], BLOCK_SIZE)[3:]
    assert message.load.counters.requests_finished == 2
    call.cancel()


async def test_watchers_are_told_of_a_request_while_a_step_runs(worker: GatedWorker) -> None:
    mine = worker.worker.Watch(worker_pb2.WatchRequest(watcher_id=5))
    others = worker.worker.Watch(worker_pb2.WatchRequest(watcher_id=6))
    assert (await mine.read()).load.num_arrived == 0
    await others.read()
    worker.gate.clear()
    sampling = SamplingParams(max_tokens=2, **GREEDY)
    belief = Belief(watcher_id=5, placement_id=77, num_cached_tokens=4)
    call = worker.inference.Generate(GenerateRequest(token_ids=range(12), sampling=sampling, belief=belief))
    told, told_others = await mine.read(), await others.read()
    assert (list(told.placement_ids), list(told_others.placement_ids)) == ([77], [])
    for load in (told.load, told_others.load):
        assert (load.num_arrived, load.arrived_tokens, load.arrived_blocks) == (1, 8, -(-13 // BLOCK_SIZE) - 1)
        assert (load.num_running, load.num_waiting) == (0, 0), "as the engine has reported it"
    worker.gate.set()
    assert len(tokens_of([response async for response in call])) == 2
    version = told.load.version
    while told.load.num_arrived or told.load.num_running:
        told = await mine.read()
        assert not told.placement_ids, "it is told once"
        assert told.load.version >= version
        version = told.load.version
    assert told.load.counters.requests_finished == 1
    mine.cancel()
    others.cancel()


async def test_a_request_is_given_back_before_any_work_if_there_is_more_than_was_believed(
    worker: GatedWorker,
) -> None:
    watch = worker.worker.Watch(worker_pb2.WatchRequest(watcher_id=5))
    await watch.read()
    worker.gate.clear()
    sampling = SamplingParams(max_tokens=2, **GREEDY)
    ours = Belief(watcher_id=5, placement_id=1)
    first = worker.inference.Generate(GenerateRequest(token_ids=range(12), sampling=sampling, belief=ours))
    await worker.until(lambda: worker.mailbox.num_open == 1)
    belief = Belief(watcher_id=5, placement_id=2, slack_ms=10.0, ms_per_token=1.0, num_requests=1)
    request = GenerateRequest(token_ids=range(8), sampling=sampling, belief=belief)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.inference.Generate(request).read()
    assert error_of(caught.value).reason is Reason.GIVEN_BACK
    given_back = detail_of(caught.value, worker_pb2.GivenBack)
    assert given_back is not None
    assert (given_back.epoch, given_back.load.num_arrived, given_back.load.arrived_tokens) == (7, 1, 12)
    assert worker.mailbox.num_open == 1
    request.belief.num_uncached_tokens = 12
    second = worker.inference.Generate(request)
    await worker.until(lambda: worker.mailbox.num_open == 2)
    worker.gate.set()
    for call in (first, second):
        assert len(tokens_of([response async for response in call])) == 2
    watch.cancel()


async def test_watch_sends_heartbeats_and_refuses_too_fast_ones(worker: GatedWorker) -> None:
    call = worker.worker.Watch(worker_pb2.WatchRequest(heartbeat_ms=50))
    assert [(await call.read()).sequence for _ in range(4)] == [0, 1, 2, 3]
    call.cancel()
    error = await error_from(worker.worker.Watch(worker_pb2.WatchRequest(heartbeat_ms=5)).read())
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "heartbeat_ms")


async def test_drain_refuses_new_requests_and_waits_for_the_running_ones(worker: GatedWorker) -> None:
    worker.gate.clear()
    sampling = SamplingParams(max_tokens=3, **GREEDY)
    running = asyncio.create_task(worker.generate(token_ids=[1], sampling=sampling))
    await worker.until(lambda: worker.under_test.scheduler.stats.requests_admitted == 1)
    early = await worker.worker.Drain(worker_pb2.DrainRequest(), timeout=0.3)
    assert early.num_running == 1
    assert (await error_from(worker.generate(token_ids=[1]))).reason is Reason.DRAINING
    draining = asyncio.create_task(_drain(worker))
    worker.gate.set()
    assert (await draining).num_running == 0
    assert tokens_of(await running) == expected_tokens([1], 3, VOCAB_SIZE)


async def _drain(worker: GatedWorker) -> worker_pb2.DrainResponse:
    return await worker.worker.Drain(worker_pb2.DrainRequest())


async def test_a_drain_can_be_undone_and_shows_in_health_and_reports(worker: GatedWorker) -> None:
    sampling = SamplingParams(max_tokens=6, **GREEDY)
    worker.gate.clear()
    running = asyncio.create_task(worker.generate(token_ids=[4, 5], sampling=sampling))
    await worker.until(lambda: worker.mailbox.num_open == 1)
    draining = asyncio.ensure_future(worker.worker.Drain(worker_pb2.DrainRequest()))
    await worker.until(lambda: worker.hub.draining)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.generate(token_ids=[1], sampling=sampling)
    assert error_of(caught.value).reason is Reason.DRAINING

    async def health_of(service: str) -> int:
        answer = await worker.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    names = ("headrace.v1.Inference", "headrace.v1.Worker")
    assert [await health_of(name) for name in names] == [not_serving, serving]
    assert (await worker.worker.Drain(worker_pb2.DrainRequest(undo=True))).num_running == 1
    assert (await draining).num_running == 1, "whoever waited for the drain is told that it is off"
    assert [await health_of(name) for name in names] == [serving, serving]
    assert not worker.hub.load().draining
    worker.gate.set()
    assert await running
    assert await worker.generate(token_ids=[1], sampling=sampling)


async def test_a_worker_that_stops_takes_no_requests_again(worker: GatedWorker) -> None:
    worker.hub.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.worker.Drain(worker_pb2.DrainRequest(undo=True))
    assert error_of(caught.value).reason is Reason.DRAINING
    assert worker.hub.draining
