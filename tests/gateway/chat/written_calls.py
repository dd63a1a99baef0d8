"""Calls as the models of each family write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from headrace.gateway.chat.output_parsers.families import TOOL_FORMATS

# An argument of families that write each between tags.
PARAMETER = '<parameter name="{}">{}</parameter>\n'
PARAM = '<param name="{}">{}</param>'
STEPTML = '<steptml:parameter name="{}">{}</steptml:parameter>\n'
ON_LINES = "<parameter={}>\n{}\n</parameter>\n"
ON_A_LINE = "<parameter={}>{}</parameter>\n"


def as_text(value: Any) -> str:
    """A value as families without JSON write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_tags(tags: str, arguments: dict[str, Any]) -> str:
    return "".join(tags.format(key, as_text(value)) for key, value in arguments.items())


def in_gemma(value: Any, quote: str) -> str:
    """A value as Gemma's chat templates write it."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{in_gemma(one, quote)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(in_gemma(one, quote) for one in value) + "]"
    return json.dumps(value)


def call(family: str, *calls: tuple[str, dict[str, Any]], python: Callable[[Any], str] = repr) -> str:
    """Calls as a model of the family writes them. `python` writes the values of families that write Python."""
    dumped = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in dumped]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "granite":
            return f"<|tool_call|>[{', '.join(objects)}]"
        case "nemotron":
            return f"<TOOLCALL>[{', '.join(objects)}]</TOOLCALL>"
        case "jamba":
            return f"<tool_calls>[{', '.join(objects)}]</tool_calls>"
        case "minimax-m1":
            return "".join(["<tool_calls>\n", *(f"{one}\n" for one in objects), "</tool_calls>"])
        case "cohere":
            numbered = (
                f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {arguments}}}'
                for i, (name, arguments) in enumerate(dumped)
            )
            return "<|START_ACTION|>[\n" + ",\n".join(numbered) + "\n]<|END_ACTION|>"
        case "llama3":
            return "<|python_tag|>" + "; ".join(one.replace('"arguments"', '"parameters"') for one in objects)
        case "pythonic":
            listed = (
                f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"
                for name, arguments in calls
            )
            return f"[{', '.join(listed)}]"
        case "olmo3":
            lines = (
                f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})\n"
                for name, arguments in calls
            )
            return f"<function_calls>\n{''.join(lines)}</function_calls>"
        case "gemma4" | "functiongemma":
            tags = TOOL_FORMATS[family].markers
            return "".join(f"{tags[0]}call:{name}{in_gemma(value, tags[2])}{tags[1]}" for name, value in calls)
        case "phi4":
            return f"functools[{', '.join(objects)}]"
        case "qwen3-coder":
            return "\n".join(
                f"<tool_call>\n<function={name}>\n{in_tags(ON_LINES, arguments)}</function>\n</tool_call>"
                for name, arguments in calls
            )
        case "seed-oss":
            return "\n".join(
                f"<seed:tool_call>\n<function={name}>\n{in_tags(ON_A_LINE, arguments)}</function>\n</seed:tool_call>"
                for name, arguments in calls
            )
        case "minimax-m2":
            inner = (f'<invoke name="{name}">\n{in_tags(PARAMETER, arguments)}</invoke>\n' for name, arguments in calls)
            return f"<minimax:tool_call>\n{''.join(inner)}</minimax:tool_call>"
        case "deepseek-v3.2" | "deepseek-v4":
            around = "function_calls" if family == "deepseek-v3.2" else "tool_calls"
            inner = (
                f'<｜DSML｜invoke name="{name}">\n'
                + "".join(
                    f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                    f"{as_text(value)}</｜DSML｜parameter>\n"
                    for key, value in arguments.items()
                )
                + "</｜DSML｜invoke>\n"
                for name, arguments in calls
            )
            return f"<｜DSML｜{around}>\n{''.join(inner)}</｜DSML｜{around}>"
        case "step3":
            inner = (
                f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
                f"{in_tags(STEPTML, arguments)}"
                "</steptml:invoke><｜tool_call_end｜>\n"
                for name, arguments in calls
            )
            return f"<｜tool_calls_begin｜>\n{''.join(inner)}<｜tool_calls_end｜>"
        case "minicpm5":
            return "\n".join(
                f'<function name="{name}">{in_tags(PARAM, arguments)}</function>' for name, arguments in calls
            )
        case "glm":
            return "\n".join(
                f"<tool_call>{name}\n"
                + "".join(
                    f"<arg_key>{key}</arg_key>\n<arg_value>"
                    + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                    + "</arg_value>\n"
                    for key, value in arguments.items()
                )
                + "</tool_call>"
                for name, arguments in calls
            )
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "kimi-k2":
            inner = (
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                for i, (name, arguments) in enumerate(dumped)
            )
            return f"<|tool_calls_section_begin|>{''.join(inner)}<|tool_calls_section_end|>"
        case "deepseek":
            inner = (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                for name, arguments in dumped
            )
            return "<｜tool▁calls▁begin｜>" + "\n".join(inner) + "<｜tool▁calls▁end｜>"
        case "gpt-oss":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
                for name, arguments in dumped
            )
    raise AssertionError(family)
