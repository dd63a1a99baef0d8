"""Reasoning between a pair of tags before the answer: <think>...</think>."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.chat.output_parsers.output import Output
from headrace.gateway.chat.output_parsers.source import Source, Steps, literal, next_of, skip, text_until


def think(source: Source, output: Output, tags: Sequence[tuple[str, str]], inside: bool) -> Steps[None]:
    """Take the reasoning, if the text begins with one. `inside`: the prompt has opened it already. `tags` are those of
    the format and its other spellings."""
    source.mark()
    if not inside:
        yield from skip(source)
    # A model may repeat the tag that the prompt ends with.
    opening = yield from next_of(source, *(opening for opening, _ in tags))
    opened = bool(opening) and (yield from literal(source, opening))
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
    if found := (yield from text_until(source, take, *(closing for _, closing in tags))):
        source.pos += len(found)
