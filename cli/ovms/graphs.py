"""Reads graphs of OVMS: MediaPipe graphs in protobuf's text format, with one calculator that serves a model.

The messages are described here, from the tables of `options`. A field that no table has is an error that names it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import Message

from headrace.cli.ovms.options import EMBEDDINGS, RERANK, TEXT_GENERATION, Option, OptionError
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, Task

_PACKAGE = "mediapipe"
_GRAPH = "CalculatorGraphConfig"
_BASE = "CalculatorOptions"
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
    "float": _FIELD.TYPE_FLOAT,
    "int": _FIELD.TYPE_INT64,
}
_ANY = ".google.protobuf.Any"
_EXTENSION_NUMBER = 20_000
_CALCULATOR = re.compile(r'\bcalculator\s*:\s*["\']([^"\']*)["\']')


@dataclass(frozen=True, slots=True)
class Calculator:
    """A kind of graph: the calculators that have it, the name of their options, and the task of their models."""

    names: tuple[str, ...]
    message: str
    options: Sequence[Option]
    task: Task


CALCULATORS = (
    Calculator(("HttpLLMCalculator", "LLMCalculator"), "LLMCalculatorOptions", TEXT_GENERATION, TASK_UNSPECIFIED),
    Calculator(("EmbeddingsCalculatorOV",), "EmbeddingsCalculatorOVOptions", EMBEDDINGS, TASK_EMBED),
    Calculator(("RerankCalculatorOV",), "RerankCalculatorOVOptions", RERANK, TASK_RANK),
)
_OLD = "export the model again with OVMS's export_model.py, as embeddings_ov or rerank_ov"
_WITHOUT = {
    "ImageGenCalculator": "headrace generates no images; use OVMS for it",
    "S2tCalculator": "headrace serves no speech; use OVMS for it",
    "T2sCalculator": "headrace serves no speech; use OVMS for it",
    "PythonExecutorCalculator": "headrace runs no Python nodes; use OVMS for it",
    "EmbeddingsCalculator": _OLD,
    "RerankCalculator": _OLD,
}

# Fields of MediaPipe's messages that graphs of OVMS have. They connect calculators, which a served model does not need.
_STRUCTURE: Mapping[str, Mapping[str, str]] = {
    _GRAPH: {
        "node": "*Node",
        "input_stream": "*string",
        "output_stream": "*string",
        "input_side_packet": "*string",
        "output_side_packet": "*string",
        "executor": "*Executor",
        "num_threads": "int",
        "max_queue_size": "int",
        "report_deadlock": "bool",
        "type": "string",
    },
    "Node": {
        "name": "string",
        "calculator": "string",
        "input_stream": "*string",
        "output_stream": "*string",
        "input_side_packet": "*string",
        "output_side_packet": "*string",
        "options": _BASE,
        "node_options": f"*{_ANY}",
        "input_stream_info": "*StreamInfo",
        "input_stream_handler": "StreamHandler",
        "output_stream_handler": "StreamHandler",
        "executor": "string",
        "buffer_size_hint": "int",
        "max_in_flight": "int",
        "source_layer": "int",
    },
    "Executor": {"name": "string", "type": "string", "options": "HandlerOptions"},
    "StreamInfo": {"tag_index": "string", "back_edge": "bool"},
    "StreamHandler": {
        "input_stream_handler": "string",
        "output_stream_handler": "string",
        "input_side_packet": "*string",
        "options": "HandlerOptions",
    },
    "HandlerOptions": {},
    _BASE: {"merge_fields": "bool"},
}


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph: its kind, and the values of the options that it has, messages as mappings."""

    calculator: Calculator
    values: Mapping[str, Any]


def read_graph(path: Path) -> Graph:
    """Read a graph. Raises OptionError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{path} is not a text in UTF-8") from None
    try:
        return parse_graph(text)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def parse_graph(text: str) -> Graph:
    """The graph that a text describes. Raises OptionError."""
    known = {name: calculator for calculator in CALCULATORS for name in calculator.names}
    named = _CALCULATOR.findall(re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    for name in named:
        if name not in known:
            valid = ", ".join(known)
            why = _WITHOUT.get(name, f"there are {valid}")
            raise OptionError(f"the calculator {name} is not supported: {why}")
    message: Any = message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{_GRAPH}"))()
    try:
        # An unknown extension is of a handler of streams.
        text_format.Parse(text, message, allow_unknown_extension=True, descriptor_pool=_pool())
    except text_format.ParseError as error:
        raise OptionError(_sentence(error)) from None
    nodes = list(message.node)
    if len(nodes) != 1:
        raise OptionError(f"it has {len(nodes)} nodes; one node, with a calculator of models, is supported")
    if nodes[0].calculator not in known:
        raise OptionError(f"its node has no calculator; there are {', '.join(known)}")
    calculator = known[nodes[0].calculator]
    found = list(_options_of(nodes[0], calculator))
    if len(found) != 1:
        raise OptionError(f"its node must have {calculator.message} once")
    values = _values(found[0])
    if missing := _missing(calculator.options, values):
        raise OptionError(f"{calculator.message} has no {missing}")
    return Graph(calculator, values)


def _sentence(error: text_format.ParseError) -> str:
    """A description of the error in a text, without the text itself."""
    at = f"line {error.GetLine()}, column {error.GetColumn()}"
    if (matched := re.search(r'Enum type "[^"]*\.(\w+)_values" has no value named (\S+)\.$', str(error))) is not None:
        return f"{at}: {matched[1]} has no value {matched[2]}"
    if (matched := re.search(r'Message type "[^"]*?(\w+)" has no field named "(\w+)"', str(error))) is not None:
        return f"{at}: {matched[1].removesuffix('_message')} has no option {matched[2]}"
    problem = re.sub(r"^\d+:\d+ : ", "", str(error))
    return f"{at}: it is not a graph in protobuf's text format: {problem[-200:]}"


def _options_of(node: Any, calculator: Calculator) -> Iterator[Any]:
    """The options of the node's calculator, in either way of writing them."""
    kind = _pool().FindMessageTypeByName(f"{_PACKAGE}.{calculator.message}")
    for packed in node.node_options:
        options = message_factory.GetMessageClass(kind)()
        if packed.type_url.rpartition("/")[2] == kind.full_name:
            options.ParseFromString(packed.value)
            yield options
    extension = kind.extensions_by_name["ext"]
    if node.HasField("options") and node.options.HasExtension(extension):
        yield node.options.Extensions[extension]


def _values(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            found[descriptor.name] = _values(value)
        elif descriptor.enum_type is not None:
            found[descriptor.name] = descriptor.enum_type.values_by_number[value].name
        else:
            found[descriptor.name] = value
    return found


def _missing(options: Sequence[Option], values: Mapping[str, Any]) -> str:
    """The first required option without a value; empty if there is none."""
    for option in options:
        if option.is_required and option.name not in values:
            return option.name
        inner = [one for one in option.kind if isinstance(one, Option)]
        if option.name in values and inner and (missing := _missing(inner, values[option.name])):
            return f"{option.name}.{missing}"
    return ""


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    known = descriptor_pb2.FileDescriptorProto()
    any_pb2.DESCRIPTOR.CopyToProto(known)
    pool.Add(known)
    file = descriptor_pb2.FileDescriptorProto(
        name="headrace/ovms.proto", package=_PACKAGE, syntax="proto2", dependency=[known.name]
    )
    for name, fields in _STRUCTURE.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), 1):
            _add_field(message, field, number, kind.removeprefix("*"), is_list=kind.startswith("*"))
        if not name.startswith((_GRAPH, "Node")):
            message.extension_range.add(start=_EXTENSION_NUMBER, end=1 << 29)
    for number, calculator in enumerate(CALCULATORS, _EXTENSION_NUMBER):
        message = _describe(file.message_type.add(name=calculator.message), calculator.message, calculator.options)
        message.extension.add(
            name="ext",
            number=number,
            label=_FIELD.LABEL_OPTIONAL,
            type=_FIELD.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.{calculator.message}",
            extendee=f".{_PACKAGE}.{_BASE}",
        )
    pool.Add(file)
    return pool


def _describe(
    message: descriptor_pb2.DescriptorProto, path: str, options: Sequence[Option]
) -> descriptor_pb2.DescriptorProto:
    """Give a message the fields of a table."""
    for number, option in enumerate(options, 1):
        kind = option.kind
        if isinstance(kind, str):
            _add_field(message, option.name, number, kind)
        elif isinstance(kind[0], str):
            # Values of an enum are unique in the message around it.
            name = f"{option.name}_values"
            values = message.nested_type.add(name=f"{name}_scope").enum_type.add(name=name)
            for place, value in enumerate(kind):
                values.value.add(name=str(value), number=place)
            _add_field(message, option.name, number, f".{_PACKAGE}.{path}.{name}_scope.{name}", is_enum=True)
        else:
            name = f"{option.name}_message"
            inner = [one for one in kind if isinstance(one, Option)]
            _describe(message.nested_type.add(name=name), f"{path}.{name}", inner)
            # Required fields are checked afterwards: protobuf's own error has no names of fields.
            _add_field(message, option.name, number, f".{_PACKAGE}.{path}.{name}")
    return message


def _add_field(
    message: descriptor_pb2.DescriptorProto,
    name: str,
    number: int,
    kind: str,
    *,
    is_list: bool = False,
    is_enum: bool = False,
) -> None:
    field = message.field.add(name=name, number=number)
    field.label = _FIELD.LABEL_REPEATED if is_list else _FIELD.LABEL_OPTIONAL
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = _FIELD.TYPE_ENUM if is_enum else _FIELD.TYPE_MESSAGE
        field.type_name = kind if kind.startswith(".") else f".{_PACKAGE}.{kind}"
