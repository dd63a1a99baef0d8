r"""The text of a call of a custom tool, read from its arguments as they come in (pure).

    {"input": "a \"text\""}   ->   a "text"

The arguments are valid JSON or its beginning, as the parsers of all families make them.
"""

from __future__ import annotations

import json
import re

from headrace.gateway.chat.output_parsers.output import CUSTOM_INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_UNIT_CHARS = 6  # \uXXXX


class CustomInput:
    """Push all arguments of one call, then `finish`. Arguments of another form are given whole, at the end."""

    def __init__(self) -> None:
        self._text = ""
        """What was not read yet."""
        self._in_text = False
        self._is_whole = False

    def push(self, arguments: str) -> str:
        """More of the text."""
        if self._is_whole:
            return ""
        self._text += arguments
        if not self._in_text:
            found = _HEAD.match(self._text)
            if found is None:
                return ""
            self._in_text = True
            self._text = self._text[found.end() :]
        return self._decoded()

    def finish(self) -> str:
        """The rest of the text. An escape that was cut off is dropped."""
        if self._in_text:
            return ""
        return _text_of(self._text)

    def _decoded(self) -> str:
        parts: list[str] = []
        text, pos = self._text, 0
        while pos < len(text):
            found = _PLAIN.match(text, pos)
            if found is not None:
                parts.append(found[0])
                pos = found.end()
                continue
            if text[pos] == '"':
                self._is_whole = True
                break
            end = _end_of_escape(text, pos)
            if end is None:
                break
            # Half of a surrogate pair has no encoding.
            unit = str(json.loads(f'"{text[pos:end]}"'))
            parts.append(unit.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            pos = end
        self._text = text[pos:]
        return "".join(parts)


def _end_of_escape(text: str, pos: int) -> int | None:
    """The index at which the escape at this position ends, with the second half of its pair; None if more text may
    follow."""
    if len(text) < pos + 2:
        return None
    if text[pos + 1] != "u":
        return pos + 2
    end = pos + _UNIT_CHARS
    if len(text) < end:
        return None
    if not 0xD800 <= int(text[pos + 2 : end], 16) < 0xDC00:
        return end
    if len(text) >= end + _UNIT_CHARS:
        is_pair = text.startswith("\\u", end) and 0xDC00 <= int(text[end + 2 : end + _UNIT_CHARS], 16) < 0xE000
        return end + _UNIT_CHARS if is_pair else end
    return None if "\\u".startswith(text[end : end + 2]) or text.startswith("\\u", end) else end


def _text_of(arguments: str) -> str:
    """The only text in other arguments than the tool has; the arguments as they are if there is none."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(values, dict):
        if isinstance(values.get(CUSTOM_INPUT), str):
            return str(values[CUSTOM_INPUT])
        if len(values) == 1 and isinstance(text := next(iter(values.values())), str):
            return text
        if not values:
            return ""
    return arguments
