"""The settings of `/set`: the numbers of sampling, from their one table, and a few other fields of requests (pure)."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from headrace.common.commands import CommandError
from headrace.protos.sampling_fields import NUMBERS, Number, SamplingNumbers

_TYPES = get_type_hints(SamplingNumbers)
_LARGEST_COUNT = 2**31 - 1
# A word, or a text in JSON's form, which may have spaces and line feeds.
_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
OTHER_NAMES = {
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "temp": "temperature",
    "typ_p": "typical_p",
}
"""What Ollama and llama.cpp call some of these."""
_OF_THE_SERVER = {
    "num_ctx": "the context is that of the served model; set it with headrace serve --max-context-tokens",
    "num_thread": "the threads are those of the worker; set them with headrace serve --threads",
    "num_gpu": "headrace serves on CPUs",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that can be set. `read` converts a text to its value, or raises ValueError."""

    field: str
    """Its name in requests."""
    values: str
    meaning: str
    read: Callable[[str], Any]
    default: str = ""


def _number(name: str, number: Number) -> Setting:
    is_whole = _TYPES[name] == int | None

    def read(text: str) -> float:
        value = int(text) if is_whole else float(text)
        if not (number.least <= value <= number.greatest) or (number.open_below and value == number.least):
            raise ValueError
        return value

    default = "" if number.default is None else f"{number.default:g}"
    return Setting(name, number.values, number.meaning.replace("`", ""), read, default)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= _LARGEST_COUNT:
        raise ValueError
    return value


def _texts(text: str) -> list[str]:
    return [json.loads(word) if word.startswith('"') else word for word in _WORDS.findall(text)]


def _word(text: str) -> str:
    if len(text.split()) != 1:
        raise ValueError
    return text


SETTINGS: Mapping[str, Setting] = {
    **{name: _number(name, number) for name, number in NUMBERS.items()},
    "max_tokens": Setting("max_completion_tokens", "1 or more", "Longest answer in tokens", _count),
    "stop": Setting("stop", 'texts, such as: "\\n" END', "An answer ends before one of these", _texts),
    "reasoning_effort": Setting("reasoning_effort", "a word, such as low", "How much to reason", _word),
}
"""By the names for people."""
SWITCHES: Mapping[str, tuple[str, Any, str]] = {
    "think": ("enable_thinking", True, "Reason before the answer"),
    "nothink": ("enable_thinking", False, "Answer without reasoning"),
    "format json": ("response_format", {"type": "json_object"}, "Answer with a JSON object"),
    "noformat": ("response_format", None, "Answer in any form"),
}
"""Words of Ollama's `/set`: the field of requests, its value, None for none, and a meaning."""


class Settings:
    """The fields that were set. For all others, the server uses the model's own defaults."""

    def __init__(self, *, max_tokens: int | None = None) -> None:
        self._fields: dict[str, Any] = {}
        if max_tokens is not None:
            self._fields["max_completion_tokens"] = max_tokens

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of requests, by the API's names."""
        return self._fields

    def switch(self, words: str) -> bool:
        """Apply a word of `SWITCHES`. Returns False if it is none."""
        if words not in SWITCHES:
            return False
        field, value, _ = SWITCHES[words]
        if value is None:
            self._fields.pop(field, None)
        else:
            self._fields[field] = value
        return True

    def set(self, name: str, text: str) -> str:
        """Set a field to the value of a text. An empty text, or `default`, restores the model's default. Returns a
        sentence that states the result. Raises CommandError."""
        name = OTHER_NAMES.get(name, name)
        setting = _setting(name)
        if not text or text == "default":
            self._fields.pop(setting.field, None)
            return f"{name}: the model's default"
        try:
            value = setting.read(text)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError
        except ValueError:
            raise CommandError(f"{name} takes {setting.values}, and {text[:40]!r} is not that") from None
        self._fields[setting.field] = value
        return f"{name}: {_shown(value)}"

    def described(self) -> Sequence[tuple[str, str]]:
        """The settings, by their names for people."""
        names = {setting.field: name for name, setting in SETTINGS.items()}
        return [(names.get(field, field), _shown(value)) for field, value in self._fields.items()]

    def replace(self, fields: object) -> None:
        """Replace the settings by those in a file. Raises CommandError, and changes nothing, if they are not valid."""
        if not isinstance(fields, dict):
            raise CommandError("its settings are not valid")
        others = {field for field, _, _ in SWITCHES.values()}
        by_field = {setting.field: name for name, setting in SETTINGS.items()}
        checked = Settings()
        for field, value in fields.items():
            if field in by_field:
                checked.set(
                    by_field[field], " ".join(map(json.dumps, value)) if isinstance(value, list) else str(value)
                )
            elif field not in others or value not in [known for name, known, _ in SWITCHES.values() if name == field]:
                raise CommandError(f"its setting {field[:40]!r} is not valid")
        self._fields = dict(fields)


def _setting(name: str) -> Setting:
    if name in SETTINGS:
        return SETTINGS[name]
    if name in _OF_THE_SERVER:
        raise CommandError(f"{name} cannot be set here: {_OF_THE_SERVER[name]}")
    near = difflib.get_close_matches(name, [*SETTINGS, *SWITCHES, *OTHER_NAMES, "system"], 1)
    meant = f"did you mean {near[0]}?" if near else "/? set lists what there is"
    raise CommandError(f"there is nothing to set called {name[:40]!r}; {meant}")


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
