"""The messages of Generate: outputs of a request as they are on the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from headrace.protos import inference_pb2
from headrace.protos.answer_bounds import Ends
from headrace.worker.engine.mailbox import OutputStream
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import FinishReason, Request
from headrace.worker.request.step import RequestOutput

PROMPT_LOGPROBS_AT_ONCE = 256

_REASON_ON_WIRE = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ENCODED: inference_pb2.FINISH_REASON_ENCODED,
}


async def responses_of(stream: OutputStream) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Messages of one request: the first one has the model's identity, the last one has its finish. Raises the
    request's StatusError if it fails."""
    request = stream.request
    is_first = True
    while True:
        outputs = await stream.next()
        last = outputs[-1]
        if len(outputs) > 1 or last.error is None:
            if is_first and not request.first_token_s:  # the engine sets it if it computed more than one token
                request.first_token_s = time.monotonic()
            response = _response_of(request, outputs)
            if is_first:
                response.model_identity = request.model_identity
                response.num_cached_tokens = request.num_cached_tokens
                response.num_disk_tokens = min(request.num_disk_tokens, request.num_cached_tokens)
                response.num_peer_tokens = min(request.num_peer_tokens, request.num_cached_tokens)
                await _add_prompt_logprobs(request, response)
                is_first = False
            yield response
        if last.error is not None:
            raise last.error
        if last.finish is not None:
            return


async def _add_prompt_logprobs(request: Request, response: inference_pb2.GenerateResponse) -> None:
    """Add the log-probabilities of the prompt to `response`, and let other streams run after every
    `PROMPT_LOGPROBS_AT_ONCE` positions."""
    for position, entry in enumerate(request.prompt_logprobs):
        response.prompt_logprobs.append(_logprobs_of(entry))
        if position % PROMPT_LOGPROBS_AT_ONCE == PROMPT_LOGPROBS_AT_ONCE - 1:
            await asyncio.sleep(0)


def _response_of(request: Request, outputs: Sequence[RequestOutput]) -> inference_pb2.GenerateResponse:
    """One message for one or more successive outputs."""
    last = outputs[-1]
    if len(outputs) == 1:
        response = inference_pb2.GenerateResponse(start_pos=last.start_pos, token_ids=last.token_ids)
    else:
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        response = inference_pb2.GenerateResponse(start_pos=outputs[0].start_pos, token_ids=token_ids)
    if request.mirostat is not None and last.token_ids:
        response.mirostat_mu = request.mirostat.before(last.start_pos + len(last.token_ids))
    if request.num_drafted:
        response.num_drafted_tokens = sum(output.num_drafted for output in outputs)
        response.num_accepted_tokens = sum(output.num_accepted for output in outputs)
    if request.sampling.num_logprobs is not None:
        response.logprobs.extend(_logprobs_of(entry) for output in outputs for entry in output.logprobs)
    for hypothesis in last.hypotheses:
        response.hypotheses.add(
            token_ids=hypothesis.token_ids,
            logprobs=map(_logprobs_of, hypothesis.logprobs),
            score=hypothesis.score,
            stop_token_id=hypothesis.stop_token_id,
        )
    if last.finish is not None:
        response.vector = last.vector
        response.finish.CopyFrom(_finish_of(request, last.finish, last.stop_token_id))
        if last.hypotheses:
            response.finish.num_generated_tokens = max(len(one.token_ids) for one in last.hypotheses)
    return response


def _logprobs_of(entry: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprob=entry.logprob, rank=entry.rank, top_token_ids=entry.top_token_ids, top_logprobs=entry.top_logprobs
    )


def _finish_of(request: Request, reason: FinishReason, stop_token_id: int | None) -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=_REASON_ON_WIRE[reason],
        stop_token_id=stop_token_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_generated_tokens=request.num_generated_tokens,
        timings=_timings_of(request),
    )


def _timings_of(request: Request) -> inference_pb2.Timings | None:
    """The timings of a request; None if it needed no step."""
    if not request.scheduled_s:
        return None
    return inference_pb2.Timings(
        queue_us=_microseconds(request.scheduled_s - request.arrival_s),
        prefill_us=_microseconds(request.first_token_s - request.scheduled_s),
        decode_us=_microseconds(request.ended_s - request.first_token_s),
    )


def _microseconds(seconds: float) -> int:
    return max(0, round(1e6 * seconds))


def finished_already(request: Request) -> inference_pb2.GenerateResponse | None:
    """The only message of a resumed request that is complete already; None if the request is not."""
    sampling = request.sampling
    if not request.resume_token_ids:
        return None
    ends = Ends(sampling.stop_token_ids, sampling.max_tokens)
    found = ends.reason(request.num_generated_tokens, request.resume_token_ids[-1])
    if found is None:
        return None
    _, stop_token_id = found
    reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
    return inference_pb2.GenerateResponse(
        model_identity=request.model_identity,
        start_pos=request.num_generated_tokens,
        num_cached_tokens=0,
        finish=_finish_of(request, reason, stop_token_id),
    )
