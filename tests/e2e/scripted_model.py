"""A model whose answers are written in advance, served by a real worker with a real cache.

Agents need tool calls for certain, which no model of a test's size makes. Here each answer is one token of the
vocabulary. The chat template ends the prompt with a token that says how many results of tools the conversation has,
and the weights lead from that token to the answer, and from every answer to the end of the turn. Attention is computed
as in any model, but its output is multiplied by zero.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from headrace.cli.models.convert import convert
from tests.e2e.serving import Serve
from tests.gguf_models import byte_tokens

CONTEXT = 65536
HIDDEN = 64
MAX_STEPS = HIDDEN - 2
_WORDS = 2000
_STRENGTH = 50.0
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = Path(__file__).parents[2] / "docs"
# In the manner of Hermes.
_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou may call functions:' }}
{%- for tool in tools %}{{- '\\n' + tool.function | tojson }}{%- endfor %}
{{- '\\nCall like <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}
{{- '<|im_start|>assistant\\n<|step_' ~ ([results, LAST] | min if tools else LAST) ~ '|>' }}
{%- endif %}"""


def calls(*functions: tuple[str, dict[str, object]]) -> str:
    """The text of an answer that calls these functions."""
    values = [{"name": name, "arguments": arguments} for name, arguments in functions]
    return "\n".join(f"<tool_call>\n{json.dumps(value)}\n</tool_call>" for value in values)


@contextmanager
def scripted_system(directory: Path, name: str, answers: Sequence[str], context: int = CONTEXT) -> Iterator[Serve]:
    """A system that serves a model of this name with these answers, which it writes into the directory."""
    (directory / name).mkdir()
    write_scripted_model(directory / name, answers, context)
    serve = Serve(str(directory / name), "--port", "0", "--kv-cache-gb", "0.5")
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


def write_scripted_model(directory: Path, answers: Sequence[str], context: int = CONTEXT) -> None:
    """Write a model into the directory, with a context of so many tokens. Its answer to a conversation with as many
    results of tools is the one of that index; the last one is also that to all further ones, and to requests without
    tools."""
    assert 1 <= len(answers) <= MAX_STEPS
    words, merges = _words()
    steps = [f"<|step_{i}|>" for i in range(len(answers))]
    tokens = [*byte_tokens(), *words, *_CONTROLS, *steps, *map(_as_bytes, answers)]
    assert len(set(tokens)) == len(tokens)
    numbers = {token: number for number, token in enumerate(tokens)}
    path = directory / "scripted.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(HIDDEN)
    writer.add_value_length(HIDDEN)
    writer.add_rope_dimension_count(HIDDEN)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in (*_CONTROLS, *steps) else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(numbers["<|im_start|>"])
    writer.add_eos_token_id(numbers["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE.replace("LAST", str(len(answers) - 1)))
    for name, values in _weights(numbers, steps, [_as_bytes(answer) for answer in answers]).items():
        kind = GGMLQuantizationType.F32 if values.ndim < 2 else GGMLQuantizationType.F16
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(path, directory)
    path.unlink()


def _weights(numbers: dict[str, int], steps: Sequence[str], answers: Sequence[str]) -> dict[str, np.ndarray]:
    """One direction for each step, one that all answers share, and one for every other token."""
    embedding = np.zeros((len(numbers), HIDDEN), np.float32)
    head = np.zeros((len(numbers), HIDDEN), np.float32)
    embedding[:, HIDDEN - 1] = 1
    for i, (step, answer) in enumerate(zip(steps, answers, strict=True)):
        for token, direction in ((step, i), (answer, HIDDEN - 2)):
            embedding[numbers[token]] = np.eye(HIDDEN, dtype=np.float32)[direction]
        head[numbers[answer], i] = _STRENGTH
    head[numbers["<|im_end|>"], HIDDEN - 2 :] = _STRENGTH
    square = np.eye(HIDDEN, dtype=np.float32)
    block = dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"), square)
    block |= {name: np.zeros_like(square) for name in ("attn_output", "ffn_down")}
    block |= {name: np.ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
    return {
        "token_embd.weight": embedding,
        "output.weight": head,
        "output_norm.weight": np.ones(HIDDEN, np.float32),
        **{f"blk.0.{name}.weight": values for name, values in block.items()},
    }


def _as_bytes(text: str) -> str:
    """A text as byte-level BPE writes it."""
    names = _byte_names()
    return "".join(names[byte] for byte in text.encode())


def _byte_names() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return dict(zip([*printable, *rest], byte_tokens(), strict=True))


def _words() -> tuple[list[str], list[str]]:
    """Tokens for the most frequent words of English technical text, and the merges that lead to them, so that prompts
    are about as long as with a real tokenizer."""
    text = "".join(path.read_text() for path in sorted(_CORPUS.rglob("*.md")))
    found = Counter(re.findall(r" ?[A-Za-z]{2,}", text))
    words: dict[str, None] = {}
    merges: dict[str, None] = {}
    for word, _ in found.most_common(_WORDS):
        written = word.replace(" ", "Ġ")
        for end in range(2, len(written) + 1):
            words[written[:end]] = None
            merges[f"{written[: end - 1]} {written[end - 1]}"] = None
    return list(words), list(merges)
