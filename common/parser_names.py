"""Names of the formats in which models write tool calls and reasoning, and the names that other servers give them.
Pure.

Gateways parse answers in these formats. Commands check the names before they start a gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

AUTO = "auto"
NONE = "none"

TOOL_FORMAT_NAMES = (
    "gpt-oss",
    "deepseek",
    "deepseek-v3.2",
    "deepseek-v4",
    "kimi-k2",
    "step3",
    "mistral",
    "gemma4",
    "functiongemma",
    "cohere",
    "granite",
    "phi4",
    "nemotron",
    "seed-oss",
    "minimax-m2",
    "minicpm5",
    "olmo3",
    "pythonic",
    "llama3",
    "qwen3-coder",
    "glm",
    "minimax-m1",
    "jamba",
    "hermes",
)
REASONING_FORMAT_NAMES = (
    "gpt-oss",
    "mistral",
    "gemma4",
    "cohere",
    "seed-oss",
    "granite",
    "minicpm3",
    "kimi",
    "think-answer",
    "think",
    "think-open",
)

# Names of OpenVINO Model Server, vLLM and SGLang.
TOOL_ALIASES: Mapping[str, str] = {
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "deepseekv32": "deepseek-v3.2",
    "devstral": "mistral",
    "ernie45": "hermes",
    "glm45": "glm",
    "glm47": "glm",
    "gpt_oss": "gpt-oss",
    "gptoss": "gpt-oss",
    "granite4": "hermes",
    "harmony": "gpt-oss",
    "hermes3": "hermes",
    "hunyuan_a13b": "jamba",
    "kimi_k2": "kimi-k2",
    "lfm2": "pythonic",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3-coder",
    "minimax": "minimax-m1",
    "minimax_m2": "minimax-m2",
    "openai": "gpt-oss",
    "phi4_mini_json": "phi4",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "seed_oss": "seed-oss",
    "step3p5": "qwen3-coder",
    "qwen3_coder": "qwen3-coder",
    "qwen3_xml": "qwen3-coder",
    "qwen3coder": "qwen3-coder",
}
REASONING_ALIASES: Mapping[str, str] = {
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "deepseek_r1": "think-open",
    "deepseek-r1": "think-open",
    "deepseek_v3": "think",
    "deepseek-v3": "think",
    "deepseek_v4": "think",
    "ernie45": "think-answer",
    "glm45": "think",
    "glm47": "think",
    "gpt_oss": "gpt-oss",
    "gptoss": "gpt-oss",
    "harmony": "gpt-oss",
    "hunyuan_a13b": "think-answer",
    "kimi_k2": "think",
    "lfm2": "think",
    "mimo": "think",
    "minimax_m2": "think",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai": "gpt-oss",
    "openai_gptoss": "gpt-oss",
    "qwen3": "think",
    "seed_oss": "seed-oss",
    "step3": "think-open",
    "step3p5": "think",
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
