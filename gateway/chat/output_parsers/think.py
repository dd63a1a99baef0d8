"""Reasoning between a pair of tags in front of the answer: <think>...</think>."""

from __future__ import annotations

from headrace.gateway.chat.output_parsers.output import Output
from headrace.gateway.chat.output_parsers.source import Source, Steps, literal, skip, text_until


def think(source: Source, output: Output, tags: tuple[str, str], inside: bool) -> Steps[None]:
    """Take the reasoning, if the text begins with one. `inside`: the prompt has opened it already."""
    opening, closing = tags
    source.mark()
    if not inside:
        yield from skip(source)
    # A model may repeat the tag that the prompt ends with.
    opened = yield from literal(source, opening)
    before = source.unmark()
    if not opened and not inside:
        output.content(before)
        return
    begin = end = source.position

    def take(text: str) -> None:
        nonlocal end
        output.reasoning(text)
        end += len(text)
        output.spans[-1] = (begin, end)

    output.spans.append((begin, begin))
    if (yield from text_until(source, take, closing)):
        source.pos += len(closing)
