"""Compares the ids of converted tokenizers with those of llama.cpp, or renews the record of the latter.

    python -m tests.cli.llama_cpp LIBRARY [--names NAME ...] [--lines 10000] [--write]

LIBRARY is a shared library that has llama.cpp's functions, such as xllamacpp.abi3.so of the package xllamacpp (the
record is of version 2026.10.11549). For each pre-tokenizer, and for SentencePiece, a small file is written and both
encode the same lines (tests/cli/tokenizer_lines.py): all of them once for each meaning, and the first 1,000 for other
names of the same meaning. `--write` stores hashes of llama.cpp's ids, which
tests/cli/test_gguf_tokenizer.py compares without the library.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from headrace.cli.gguf.pre_tokenizers import PRE_TOKENIZERS
from headrace.cli.gguf.tokenizer import write_tokenizer
from headrace.cli.gguf.vocabulary import read_vocabulary
from headrace.common.model_files.gguf_files import metadata_of, open_gguf
from headrace.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.cli.tokenizer_files import write_byte_level, write_sentencepiece
from tests.cli.tokenizer_lines import lines
from tests.llama_library import silent_llama

RECORD = Path(__file__).with_suffix(".json")
BLOCK_LINES = 1000
SENTENCEPIECE = ("sentencepiece", "sentencepiece without a space")


def write_named(path: Path, name: str) -> Path:
    """A small file with the tokenizer of that name."""
    if name in SENTENCEPIECE:
        return write_sentencepiece(path, add_space_prefix=name == SENTENCEPIECE[0])
    return write_byte_level(path, name)


def converted(path: Path) -> Tokenizer:
    """The tokenizer of a file, as a gateway has it."""
    reader = open_gguf(path)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(read_vocabulary(reader, metadata_of(reader)), Path(folder), None, 0)
        return load_tokenizer({file.name: file.read_bytes() for file in Path(folder).iterdir()})


def hashes(ids: Sequence[Sequence[int]]) -> list[str]:
    """A hash of each block of lines."""
    blocks = (ids[start : start + BLOCK_LINES] for start in range(0, len(ids), BLOCK_LINES))
    return [sha256(json.dumps(block).encode()).hexdigest()[:16] for block in blocks]


class LlamaCpp:
    """llama.cpp's tokenizer of a file."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self._library = library
        parameters = library.llama_model_default_params()
        parameters.read_only_vocabulary()
        model = library.llama_model_load_from_file(str(path).encode(), parameters)
        assert model, f"llama.cpp cannot read {path}"
        self._vocabulary = library.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        """The ids with special tokens, around the text and in it."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 4))()
        found = self._library.llama_tokenize(self._vocabulary, raw, len(raw), ids, len(ids), True, True)
        assert found >= 0
        return list(ids[:found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--names", nargs="+", default=[*PRE_TOKENIZERS, *SENTENCEPIECE])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    library = silent_llama(ctypes.PyDLL(str(arguments.library)))
    library.llama_backend_init()
    texts = list(lines(arguments.lines))
    record: dict[str, list[str]] = {}
    compared = set()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names:
            path = write_named(Path(folder) / "vocabulary.gguf", name)
            theirs = LlamaCpp(library, path)
            meaning = PRE_TOKENIZERS.get(name, name)
            some = texts[:BLOCK_LINES] if meaning in compared else texts
            compared.add(meaning)
            expected = [theirs.encode(text) for text in some]
            record[name] = hashes(expected)
            found = converted(path).encode_many(some, add_special_tokens=True)
            different = [at for at in range(len(some)) if found[at] != expected[at]]
            print(f"{name}: {len(different)} of {len(some)} lines differ", flush=True)
            for at in different[:2]:
                print(f"  {texts[at]!r}\n  {found[at]}\n  {expected[at]}")
    if arguments.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
