"""Spans of a request in the engine: queue, prefill and decode, with the engine's steps as events.

They are made when the request has ended, from the times that the engine recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.common.telemetry.span import Span
from headrace.worker.request.request import Request, StepNote


def trace_request(span: Span, request: Request, now_s: float) -> None:
    """Add to the span of a request how long it waited, was computed and answered, up to `now_s` on the monotonic
    clock."""
    if not span.is_recording:
        return
    ended_s = request.ended_s or now_s
    span.set(
        {
            "headrace.num_prompt_tokens": request.num_prompt_tokens,
            "headrace.num_cached_tokens": request.num_cached_tokens,
            "headrace.num_generated_tokens": request.num_generated_tokens,
            "headrace.num_resumed_tokens": len(request.resume_token_ids),
            "headrace.num_preemptions": request.num_preemptions,
        }
    )
    queue = span.child("queue", start_s=request.arrival_s)
    queue.end(end_s=request.scheduled_s or ended_s)
    if request.images:
        span.set({"headrace.num_images": len(request.images), "headrace.image_wait_s": request.image_wait_s})
    if not request.scheduled_s:
        return
    first_token_s = request.first_token_s or ended_s
    # The step that gave the first token began in the prefill phase.
    steps = request.steps or []
    _phase(span, "prefill", request.scheduled_s, first_token_s, [s for s in steps if s.start_s < first_token_s])
    if request.first_token_s:
        _phase(span, "decode", first_token_s, ended_s, [s for s in steps if s.start_s >= first_token_s])


def _phase(span: Span, name: str, start_s: float, end_s: float, steps: Sequence[StepNote]) -> None:
    phase = span.child(name, {"headrace.num_noted_steps": len(steps)}, start_s=start_s)
    for step in steps:
        phase.event(
            "engine.step",
            {
                "headrace.step.duration_ms": 1000 * step.duration_s,
                "headrace.step.num_tokens": step.num_tokens,
                "headrace.step.num_batch_tokens": step.num_batch_tokens,
                "headrace.step.num_batch_requests": step.num_batch_requests,
            },
            at_s=step.start_s,
        )
    phase.end(end_s=end_s)
