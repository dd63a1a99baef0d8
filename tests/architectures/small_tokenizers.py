"""Makes the small tokenizers of `tests/gateway/text/small_tokenizers.tar.xz`: one of each kind that models have.

    python tests/architectures/small_tokenizers.py ARCHIVE

Needs tokenizers, transformers and openvino-tokenizers, as in `requirements.txt` beside this file. The vocabularies are
trained on a few lines, so that they are small; regular expressions, normalisation, added tokens and the way to write
bytes are those of the models that they are named for.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import openvino as ov
from openvino_tokenizers import convert_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_LINES = [
    *[
        "Hello world, the quick brown fox <b>jumps</b> over 12 lazy dogs [x] <|y|> def f(x): return x\n\n  user "
        "assistant system im_start end_of_turn INST s bos eos <s> </s> ok "
    ]
    * 50,
    *["\u00fcn\u00efcode \u4e16\u754c \u00e9 \u2581 <unused0> begin of text header id"] * 20,
]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = rf"{_WORDS}|\p{{N}}|{_REST}"
_LLAMA_3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|\p{{N}}|{_REST}"
_SENTENCES = ["<unk>", "<s>", "</s>"]


def main(archive: Path) -> None:
    """Write the archive: a directory for each tokenizer."""
    with tarfile.open(archive, "w:xz") as out, tempfile.TemporaryDirectory() as folder:
        for name, (made, names) in _kinds().items():
            text_to_ids, ids_to_text = convert_tokenizer(
                PreTrainedTokenizerFast(tokenizer_object=made, **names), with_detokenizer=True
            )
            ov.save_model(text_to_ids, f"{folder}/openvino_tokenizer.xml")
            ov.save_model(ids_to_text, f"{folder}/openvino_detokenizer.xml")
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
            files["tokenizer_config.json"] = json.dumps(names).encode()
            for file, content in sorted(files.items()):
                member = tarfile.TarInfo(f"{name}/{file}")
                member.size = len(content)
                out.addfile(member, io.BytesIO(content))


def _kinds() -> dict[str, tuple[Tokenizer, dict[str, str]]]:
    llama_2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    thinking = ["<think>", "</think>", "<tool_call>"]
    phi = _sentence_pieces(["<unk>", "<s>", "<|endoftext|>"], prefix=True)
    phi.add_special_tokens([_added(text, rstrip=True) for text in ("<|user|>", "<|assistant|>", "<|end|>")])
    phi.add_special_tokens([_added("<|mask|>", lstrip=True)])
    return {
        "qwen2": (_bytes(_QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], nfc=True, others=thinking), {}),
        "llama3": (_bytes(_LLAMA_3, _llama_3()), {"bos_token": "<|begin_of_text|>"}),
        "llama2": (_sentence_pieces(_SENTENCES, prefix=True), llama_2),
        "gemma": (
            _sentence_pieces(["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<unused0>"]),
            {"bos_token": "<bos>", "unk_token": "<unk>"},
        ),
        "tekken": (_bytes(_TEKKEN, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[THINK]"]), {}),
        "phi3": (phi, {"unk_token": "<unk>"}),
        "gpt2": (_bytes(None, ["<|endoftext|>"]), {}),
        "deepseek": (
            _bytes(
                _QWEN,
                [f"<\uff5c{text}\uff5c>" for text in ("begin\u2581of\u2581sentence", "User", "Assistant")],
                others=thinking,
            ),
            {},
        ),
        "granite": (
            _bytes(None, ["<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>"], digits=True),
            {},
        ),
        "smollm": (_bytes(None, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"], digits=True), {}),
        "unigram": (_unigram([*_SENTENCES, "[SEP]"]), {"unk_token": "<unk>"}),
    }


def _llama_3() -> list[str]:
    named = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    return [*named, *(f"<|reserved_special_token_{number}|>" for number in range(30))]


def _added(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **options)


def _bytes(
    words: str | None, special: list[str], *, nfc: bool = False, digits: bool = False, others: list[str] | None = None
) -> Tokenizer:
    made = Tokenizer(models.BPE())
    if nfc:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _LINES, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([_added(text) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in others or ()])
    return made


def _sentence_pieces(special: list[str], *, prefix: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *steps] if prefix else steps)
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        _LINES, trainers.BpeTrainer(vocab_size=620, special_tokens=[*special, *every_byte], show_progress=False)
    )
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    made = Tokenizer.from_str(json.dumps(content))
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return made


def _unigram(special: list[str]) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC()])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        _LINES,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
