"""Recordings of what agents ask: the fields of their requests, the order and the sizes, and none of their texts.

    tests/e2e/agent_recordings/NAME.json      the requests of one agent's task, in order

A text is kept as its length and two digits of its hash, so that equal texts stay equal, and is filled with words of our
own when the request is sent again. What stands for something in the protocol is kept: names of fields, roles, types,
names of tools and of their parameters. Ids are counted. A value that an earlier request has too is kept once.

The tests that run an agent compare its requests with the recording, and write it anew with HEADRACE_RECORD_AGENTS=1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.e2e.recorder import Exchange

FOLDER = Path(__file__).with_name("agent_recordings")
WRITES = bool(os.environ.get("HEADRACE_RECORD_AGENTS"))
_MODEL = "model"
# Members whose text means something to the protocol, wherever they stand.
_KEPT = frozenset(
    [
        *(
            "role",
            "type",
            "name",
            "tool_name",
            "namespace",
            "tool_choice",
            "effort",
            "reasoning_effort",
            "verbosity",
            "summary",
            "format",
            "syntax",
        ),
        *("phase", "status", "ttl", "detail", "encoding", "execution", "context", "keep", "display"),
    ]
)
_LISTS_OF_NAMES = frozenset(("required", "include", "enum", "type", "modalities"))
_IDS = frozenset(("id", "call_id", "tool_call_id", "tool_use_id", "item_id"))
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,63}")
_TEXT = re.compile(r"<(\d+) ([0-9a-f]{2})>")
_HEADERS = frozenset(("anthropic-beta", "anthropic-version"))
_SENTENCE = "The river is by the house on the hill and the number is in the file that you read before you answer. "
_GRAMMAR = "start: TEXT\nTEXT: /[ -~\\n]+/\n"
_PATTERN = "^.*$"
_BILLING = "x-anthropic-billing-header:"
"""A text of Claude Code's that is no text for the model, and that another one replaces in each request."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an agent, without its texts, and what the server left out of it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    ignored: str

    def filled(self, model: str) -> Any:
        """The body with texts of ours."""
        return _filled(self.body, model)


def recorded(name: str) -> Sequence[Asked]:
    """The recording of an agent."""
    asked: list[Asked] = []
    for one in json.loads((FOLDER / f"{name}.json").read_text()):
        body = _unfolded(one.pop("body"), [earlier.body for earlier in asked])
        asked.append(Asked(**one, body=body))
    return asked


def names() -> Sequence[str]:
    """The agents that are recorded."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def of_exchanges(exchanges: Sequence[Exchange], model: str) -> Sequence[Asked]:
    """What an agent asked, without its texts."""
    ids: dict[str, str] = {}
    return [
        Asked(
            one.method,
            one.path,
            {name: value for name, value in one.headers.items() if name in _HEADERS},
            _emptied(json.loads(one.body), ids, model) if one.body else None,
            re.sub(r">\d+", ">", one.ignored),
        )
        for one in exchanges
    ]


def check(name: str, exchanges: Sequence[Exchange], model: str) -> None:
    """Fail if an agent asks what its recording does not have: another path, or another field. Writes the recording
    instead with HEADRACE_RECORD_AGENTS=1."""
    asked = of_exchanges(exchanges, model)
    if WRITES:
        _write(name, asked)
        return
    new = _all_fields(asked) - _all_fields(recorded(name))
    assert not new, f"HEADRACE_RECORD_AGENTS=1 writes the recording of {name} anew, which lacks {sorted(new)}"


def _all_fields(asked: Sequence[Asked]) -> set[str]:
    """The paths that are asked, and their fields."""
    return {
        f"{one.method} {one.path} {field}" for one in asked for field in ("", *sorted(one.headers), *_fields(one.body))
    }


def _write(name: str, asked: Sequence[Asked]) -> None:
    FOLDER.mkdir(exist_ok=True)
    lines = []
    for position, one in enumerate(asked):
        body = _folded(one.body, [earlier.body for earlier in asked[:position]])
        kept = {"method": one.method, "path": one.path, "headers": one.headers, "ignored": one.ignored, "body": body}
        lines.append(json.dumps(kept, separators=(",", ":")))
    (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _fields(value: Any, place: str = "") -> Iterator[str]:
    """The places of all members outside of schemas and arguments, whose members are the tools' affair."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{place}.{key}"
            if key not in ("parameters", "input_schema", "schema", "arguments", "input"):
                yield from _fields(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{place}[]")


# --- without texts, and with texts of ours ----------------------------------------------------------------------------


def _emptied(value: Any, ids: dict[str, str], model: str, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _emptied(inner, ids, model, name) for name, inner in value.items()}
    if isinstance(value, list):
        inside = key if key in _LISTS_OF_NAMES else f"{key}[]"
        return [_emptied(inner, ids, model, inside) for inner in value]
    if not isinstance(value, str):
        return value
    if key in _IDS:
        return ids.setdefault(value, f"id-{len(ids) + 1}")
    if key == _MODEL:
        return _MODEL if value == model else _size(value)
    if key == "$ref":
        return value
    if key == "definition":
        return "<grammar>"
    if key == "pattern":
        return "<pattern>"
    if key in ("arguments", "partial_json") and (members := _object_of(value)) is not None:
        return {"<json>": _emptied(members, ids, model)}
    if (key in _KEPT or key in _LISTS_OF_NAMES) and _PLAIN.fullmatch(value):
        return value
    return _size(value)


def _object_of(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _size(text: str) -> str:
    if text.startswith(_BILLING):
        return f"{_BILLING}{_size(text.removeprefix(_BILLING))}"
    return f"<{len(text)} {sha256(text.encode()).hexdigest()[:2]}>"


def _filled(value: Any, model: str, key: str = "") -> Any:
    if isinstance(value, dict):
        if value.keys() == {"<json>"}:
            return json.dumps(_filled(value["<json>"], model))
        return {name: _filled(inner, model, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, model) for inner in value]
    if value == "<grammar>":
        return _GRAMMAR
    if value == "<pattern>":
        return _PATTERN
    if key == _MODEL and value == _MODEL:
        return model
    if isinstance(value, str) and (found := _TEXT.fullmatch(value.removeprefix(_BILLING))) is not None:
        length, digest = int(found[1]), found[2]
        return f"{_BILLING} a={digest:0<{length}};" if value.startswith(_BILLING) else _words(length, digest)
    return value


def _words(length: int, digest: str) -> str:
    """A text of so many characters, which ends with its digits. Texts have the same beginning, as the versions of a
    text have that an agent changes from turn to turn."""
    text = _SENTENCE * (length // len(_SENTENCE) + 1)
    return f"{text[: length - len(digest)]}{digest}"[:length]


# --- a value that an earlier request has is kept once -----------------------------------------------------------------


def _folded(body: Any, earlier: Sequence[Any]) -> Any:
    """The body, in which a member that an earlier one has is a reference to that, and a list that goes on where the
    last one ended has only the rest."""
    if not isinstance(body, dict):
        return body
    found = dict(body)
    for name, value in body.items():
        if not isinstance(value, dict | list):
            continue
        for position, other in reversed(list(enumerate(earlier))):
            there = other.get(name) if isinstance(other, dict) else None
            if there == value:
                found[name] = {"<as>": position}
                break
            if isinstance(value, list) and isinstance(there, list) and there and value[: len(there)] == there:
                found[name] = {"<as>": position, "<and>": value[len(there) :]}
                break
    return found


def _unfolded(body: Any, earlier: Sequence[Any]) -> Any:
    if not isinstance(body, dict):
        return body
    found = dict(body)
    for name, value in body.items():
        if isinstance(value, dict) and "<as>" in value:
            there = earlier[value["<as>"]][name]
            found[name] = [*there, *value["<and>"]] if "<and>" in value else there
    return found
