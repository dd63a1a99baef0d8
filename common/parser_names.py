"""Names of the formats in which models write tool calls and reasoning, and the names that other servers give them.
Pure.

Gateways parse answers in these formats. Commands check the names before they start a gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

AUTO = "auto"
NONE = "none"

TOOL_FORMAT_NAMES = ("gpt-oss", "deepseek", "mistral", "phi4", "pythonic", "llama3", "qwen3-coder", "glm", "hermes")
REASONING_FORMAT_NAMES = ("gpt-oss", "mistral", "think")

# Names of OpenVINO Model Server and vLLM.
TOOL_ALIASES: Mapping[str, str] = {
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "devstral": "mistral",
    "glm45": "glm",
    "glm47": "glm",
    "gpt_oss": "gpt-oss",
    "gptoss": "gpt-oss",
    "harmony": "gpt-oss",
    "hermes3": "hermes",
    "lfm2": "pythonic",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "openai": "gpt-oss",
    "phi4_mini_json": "phi4",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3-coder",
    "qwen3_xml": "qwen3-coder",
    "qwen3coder": "qwen3-coder",
}
REASONING_ALIASES: Mapping[str, str] = {
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "gpt_oss": "gpt-oss",
    "gptoss": "gpt-oss",
    "harmony": "gpt-oss",
    "lfm2": "think",
    "olmo3": "think",
    "openai": "gpt-oss",
    "openai_gptoss": "gpt-oss",
    "qwen3": "think",
}


def tool_parser_named(name: str) -> str:
    """The value of --tool-parser that a name means. Raises ValueError with the valid names."""
    return _named(name, TOOL_FORMAT_NAMES, TOOL_ALIASES)


def reasoning_parser_named(name: str) -> str:
    """The value of --reasoning-parser that a name means. Raises ValueError with the valid names."""
    return _named(name, REASONING_FORMAT_NAMES, REASONING_ALIASES)


def _named(name: str, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    name = aliases.get(name, name)
    if name not in (AUTO, NONE, *known):
        valid = ", ".join((AUTO, NONE, *known))
        raise ValueError(
            f"'{name[:100]}' is no parser; there are {valid}, and under other servers' names {', '.join(aliases)}"
        )
    return name
