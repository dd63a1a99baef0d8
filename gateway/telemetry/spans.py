"""Spans of generations (see `edge.spans` for the conventions)."""

from __future__ import annotations

from headrace.common.telemetry.span import Span, SpanKind
from headrace.common.telemetry.tracing import current_span
from headrace.protos.inference_pb2 import GenerateRequest

ATTEMPT_SPAN = "headrace.v1.Inference/Generate"
# Fields of SamplingParams, and their names in the conventions.
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


def begin_attempt(request: GenerateRequest, address: str) -> Span:
    """The span of a call upstream."""
    span = current_span().child(ATTEMPT_SPAN, kind=SpanKind.CLIENT)
    if span.is_recording:
        span.set(
            {
                "rpc.system": "grpc",
                "server.address": address,
                "headrace.attempt": request.attempt,
                "headrace.num_resumed_tokens": len(request.resume_token_ids),
            }
        )
    return span


def describe_generation(request: GenerateRequest, num_choices: int, num_prompt_tokens: int) -> None:
    """Add the request's parameters to the current span. `request` is one of several with different prompts."""
    span = current_span()
    if not span.is_recording:
        return
    sampling = request.sampling
    given = {name: getattr(sampling, field) for field, name in _SAMPLING.items() if sampling.HasField(field)}
    span.set(
        {
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
            "gen_ai.request.choice.count": num_choices,
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            **given,
        }
    )
