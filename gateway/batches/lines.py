"""The lines of an input file: checked, and put in an order in which the prefix cache serves most of them (pure).

Lines whose prompts share a prefix should run one after another; otherwise their blocks are evicted in between. Sorting
needs all prompts at once, and a file may be larger than memory should be for it. So each line has a few hashes, of ever
longer prefixes of its prompt, and lines are grouped by the shortest, within these by the next, and so on. Groups, and
lines within a group, stay in the order of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from headrace.gateway.batches.records import LineError

MAX_SHOWN_ERRORS = 100
MAX_CUSTOM_ID_CHARS = 512
_LENGTHS = (128, 512, 2048, 8192, 32768)
"""Lengths of the prompt prefixes that are compared, in characters."""
_SHOWN_CHARS = 100
_NOT_HERE = {
    "stream": "stream does not go with a batch, whose answers are read from a file; leave it out",
    "background": "background does not go with a batch, which runs in the background anyway; leave it out",
}
# What comes before the messages in the prompts of chat templates, and what holds the text, by endpoint.
_PROMPT_FIELDS = ("tools", "instructions", "system", "messages", "prompt", "input", "query", "documents", "texts")


class PlannedLine(NamedTuple):
    """A line by its place in the file: the number, from 1, and the bytes."""

    number: int
    start: int
    length: int


class BatchLine(msgspec.Struct):
    """A request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(slots=True)
class Lines:
    """The result of a check: the lines in the order in which they should run, or what is wrong with them."""

    planned: list[PlannedLine] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)
    models: set[str] = field(default_factory=set)


def check_lines(pieces: Iterable[bytes], endpoint: str, max_lines: int, max_line_bytes: int) -> Lines:
    """Check the lines of an input file, which comes in pieces, for a batch of this endpoint."""
    found = Lines()
    seen: dict[bytes, int] = {}
    groups = _Groups()
    keyed: list[tuple[tuple[int, ...], PlannedLine]] = []
    for line, start in _split(pieces, max_line_bytes):
        number = line.number
        if len(found.errors) >= MAX_SHOWN_ERRORS:
            break
        if len(keyed) >= max_lines:
            problem = f"the file has more than {max_lines} requests, the maximum of a batch; divide it"
            found.errors.append(LineError(code="too_many_requests", line=number, message=problem))
            break
        if line.is_too_long:
            problem = f"the line has more than {max_line_bytes} bytes, the maximum of a request"
            found.errors.append(LineError(code="line_too_long", line=number, message=problem))
            continue
        if not line.content.strip():
            continue
        checked = _checked(line.content, number, endpoint)
        if isinstance(checked, LineError):
            found.errors.append(checked)
            continue
        request, body = checked
        custom = hashlib.sha256(request.custom_id.encode(errors="surrogatepass")).digest()[:16]
        if (first := seen.setdefault(custom, number)) != number:
            problem = f"custom_id {request.custom_id[:_SHOWN_CHARS]!r} is that of line {first}, too; make each unique"
            found.errors.append(LineError(code="duplicate_custom_id", line=number, message=problem, param="custom_id"))
            continue
        model = body.get("model")
        if isinstance(model, str):
            found.models.add(model)
        place = PlannedLine(number, start, len(line.content))
        keyed.append((groups.key_of(body, number), place))
    if not keyed and not found.errors:
        found.errors.append(LineError(code="empty_file", line=None, message="the file has no requests"))
    found.planned = [place for _, place in sorted(keyed)]
    return found


def parse_line(content: bytes) -> BatchLine:
    """Parse the content of a line that was already checked."""
    return msgspec.json.decode(content, type=BatchLine)


class _Groups:
    """Groups of lines by the prefixes of their prompts. Each group is named by the number of its first line."""

    def __init__(self) -> None:
        self._firsts: dict[bytes, int] = {}

    def key_of(self, body: dict[str, Any], number: int) -> tuple[int, ...]:
        """The group of the line at each length. Sorting by it keeps groups together, in order of their first lines."""
        text = prompt_text(body)
        hashed = hashlib.blake2b(str(body.get("model")).encode(), digest_size=12)
        key = [self._firsts.setdefault(hashed.digest(), number)]
        begun = 0
        for length in _LENGTHS:
            # A text that ends before is like no other at this length.
            hashed.update(text[begun:length].encode(errors="surrogatepass"))
            key.append(self._firsts.setdefault(hashed.digest(), number) if len(text) >= length else number)
            begun = length
        return tuple(key)


def prompt_text(body: dict[str, Any]) -> str:
    """A text that represents the prompt of a request body: equal beginnings of prompts give equal beginnings of
    texts."""
    parts = []
    left = _LENGTHS[-1]
    for name in _PROMPT_FIELDS:
        if left > 0 and body.get(name) is not None:
            parts.append(msgspec.json.encode(body[name]).decode()[:left])
            left -= len(parts[-1])
    return "".join(parts)


class _RawLine(NamedTuple):
    number: int
    content: bytes
    is_too_long: bool


def _split(pieces: Iterable[bytes], max_bytes: int) -> Iterator[tuple[_RawLine, int]]:
    """The lines, each with its offset in the file. For a line that is too long, the content is dropped."""
    rest = bytearray()
    start = number = 0
    num_dropped = 0
    for piece in pieces:
        begin = 0
        while (end := piece.find(b"\n", begin)) >= 0:
            rest += piece[begin:end]
            number += 1
            length = len(rest) + num_dropped
            yield _RawLine(number, bytes(rest), length > max_bytes), start
            start += length + 1
            rest.clear()
            num_dropped = 0
            begin = end + 1
        rest += piece[begin:]
        if len(rest) > max_bytes + 1:
            num_dropped += len(rest) - (max_bytes + 1)
            del rest[max_bytes + 1 :]
    if rest:
        yield _RawLine(number + 1, bytes(rest), len(rest) + num_dropped > max_bytes), start


def _checked(content: bytes, number: int, endpoint: str) -> tuple[BatchLine, dict[str, Any]] | LineError:
    def wrong(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(code=code, line=number, message=message, param=param)

    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        mark = "; it begins with a byte order mark" if content.startswith(b"\xef\xbb\xbf") else ""
        return wrong("invalid_json_line", f"the line is not JSON: {str(error)[:_SHOWN_CHARS]}{mark}")
    if not isinstance(value, dict):
        return wrong("invalid_json_line", "the line must be a JSON object with custom_id, method, url and body")
    custom_id = value.get("custom_id")
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            return wrong("missing_required_parameter", f"{name} is required", name)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        problem = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        return wrong("invalid_custom_id", problem, "custom_id")
    if value["method"] != "POST":
        return wrong("invalid_method", "method must be POST", "method")
    if value["url"] != endpoint:
        problem = f"url must be {endpoint}, the endpoint of the batch"
        return wrong("invalid_url", f"{problem}, not {str(value['url'])[:_SHOWN_CHARS]!r}", "url")
    body = value["body"]
    if not isinstance(body, dict):
        return wrong("invalid_type", "body must be an object, the body of the request", "body")
    for name, problem in _NOT_HERE.items():
        if body.get(name):
            return wrong("unsupported_parameter", problem, f"body.{name}")
    try:
        request = parse_line(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return wrong("invalid_json_line", f"the line is not a request: {str(error)[:_SHOWN_CHARS]}")
    return request, body
