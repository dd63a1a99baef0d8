"""Validates responses against the types of the vendors' own packages. A script that runs in any environment with them.

Standard input is a JSON list of `[type, answer]`, such as `["openai.types.responses.Response", {...}]`. Standard output
is a JSON list of errors. Pydantic validates strictly here, unlike in the packages themselves.
"""

import importlib
import json
import sys
import typing

import pydantic


def members(kind: typing.Any) -> list[typing.Any]:
    """The classes of a union, or the class itself."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Union:
        return [one for part in typing.get_args(kind) for one in members(part)]
    return [kind]


def type_of(name: str, value: dict[str, typing.Any]) -> typing.Any:
    """The type with this name; for a union, only its members for the answer's `type`, to keep errors short."""
    module, _, attribute = name.rpartition(".")
    found = members(getattr(importlib.import_module(module), attribute))
    if len(found) == 1:
        return found[0]
    fitting = [one for one in found if value["type"] in typing.get_args(one.model_fields["type"].annotation)]
    if not fitting:
        raise LookupError(f"{name} has no member of type {value['type']}")
    return typing.Union[tuple(fitting)]  # noqa: UP007  # made at run time


def main() -> None:
    """Check what standard input has."""
    wrong = []
    for name, value in json.load(sys.stdin):
        try:
            pydantic.TypeAdapter(type_of(name, value)).validate_json(json.dumps(value), strict=True)
        except (pydantic.ValidationError, LookupError) as error:
            wrong.append(f"{name}: {error}")
    json.dump(wrong, sys.stdout)


if __name__ == "__main__":
    main()
