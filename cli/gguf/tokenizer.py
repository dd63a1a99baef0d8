"""Builds the tokenizer and the detokenizer of a GGUF file's vocabulary, as graphs of openvino-tokenizers.

    text -> special tokens split off -> pieces -> merges -> ids of pieces -> ids of the text, BOS and EOS around them

Pieces that are special tokens are looked up, and never pass through merges. So only the node that splits them off can
make a special token of a text.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from gguf import TokenType
from openvino import opset13
from openvino_tokenizers import _get_factory, _get_opset_factory
from openvino_tokenizers.tokenizer_pipeline import (
    FuseStep,
    PaddingStep,
    RegexNormalizationStep,
    RegexSplitStep,
    TokenizerPipeline,
    UTF8ValidateStep,
    VocabDecoderStep,
)
from openvino_tokenizers.utils import (
    change_inputs_type,
    change_outputs_type,
    create_string_constant_node,
    quote_meta,
)

from headrace.cli.gguf.vocabulary import BYTES, SPLIT_OFF, Vocabulary, VocabularyError, decoded_bytes

_SPACE = "\u2581"
_NO_ID = -1
# In no text, because text is UTF-8. It begins the names of tokens that merges cannot make.
_NEVER = b"\xff\xff"
_UNKNOWN = "\ue000 a byte that no token stands for \ue001"
_CACHED_PIECES = 20_000


def write_tokenizer(vocabulary: Vocabulary, directory: Path, pad_id: int | None, num_ids: int) -> None:
    """Write both graphs into the directory. `num_ids`: the number of ids of the model, which may be more than its
    tokens. Raises VocabularyError."""
    graphs = {"tokenizer": tokenizer_of(vocabulary, pad_id), "detokenizer": detokenizer_of(vocabulary, num_ids)}
    for name, graph in graphs.items():
        ov.save_model(graph, directory / f"openvino_{name}.xml", compress_to_fp16=False)


def tokenizer_of(vocabulary: Vocabulary, pad_id: int | None = None) -> ov.Model:
    """Text to `input_ids` and `attention_mask`, both [texts, tokens]. Raises VocabularyError."""
    text = opset13.parameter([-1], ov.Type.string)
    unpacked = list(_get_opset_factory("opset15").create("StringTensorUnpack", [text.output(0)]).outputs())
    rows = TokenizerPipeline.add_ragged_dimension(unpacked)
    pattern = create_string_constant_node(_special_tokens(vocabulary))
    parts = _get_factory().create("SpecialTokensSplit", [*rows, *pattern]).outputs()
    row_begins, row_ends, begins, ids = _encoded(vocabulary, _pieces(vocabulary, parts))
    # Bounds of rows in pieces become bounds in ids, which lie without gaps.
    bounds = opset13.concat([begins, _shape(ids)], 0)
    batch = _shape(parts[0])
    found = [
        opset13.broadcast(opset13.gather(bounds, at, _integer(0)), batch).output(0) for at in (row_begins, row_ends)
    ]
    joined = _with_special_tokens(vocabulary, _without_unknown(vocabulary, [*found, ids]))
    padded = PaddingStep(_token_id=pad_id or 0).get_ov_subgraph(joined)
    model = ov.Model(padded, [text], "tokenizer")
    change_outputs_type(model, ov.Type.i64)  # as openvino-genai expects it
    for name, token_id in (("bos", vocabulary.bos_id), ("eos", vocabulary.eos_id), ("pad", pad_id)):
        if token_id is not None:
            model.set_rt_info(token_id, f"{name}_token_id")
    return model


def detokenizer_of(vocabulary: Vocabulary, num_ids: int) -> ov.Model:
    """The graph that turns ids [texts, tokens] into text. Control tokens, and ids without a token, become no text."""
    token_bytes = vocabulary.token_bytes()
    token_bytes += [b""] * (num_ids - len(token_bytes))
    hidden = [
        token_id for token_id, kind in enumerate(vocabulary.kinds) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    ]
    pipeline = TokenizerPipeline()
    pipeline.add_steps([VocabDecoderStep(vocab=token_bytes, skip_tokens=hidden), FuseStep(), UTF8ValidateStep()])
    model = pipeline.get_detokenizer_ov_subgraph()
    change_inputs_type(model, ov.Type.i64)
    return model


def _pieces(vocabulary: Vocabulary, parts: list[Any]) -> list[Any]:
    """Split parts of texts into the pieces in which tokens are merged. Parts and pieces are ragged tensors: where rows
    begin and end, where strings begin and end, their bytes, and whether each is a special token."""
    if vocabulary.pre_tokenizer is None:
        ragged = parts[:2]
        strings = list(parts[2:])
        strings = RegexNormalizationStep(" ", _SPACE).get_ov_subgraph(strings)
        if vocabulary.adds_space:
            strings = RegexNormalizationStep(r"\A", _SPACE, global_replace=False).get_ov_subgraph(list(strings))
        return [*ragged, *strings]
    for pattern in vocabulary.pre_tokenizer.patterns:
        parts = RegexSplitStep(pattern, behaviour="isolate").get_ov_subgraph(list(parts))
    return list(parts)


def _special_tokens(vocabulary: Vocabulary) -> str:
    """The expression for tokens that are split off.

    Longer tokens come first, wherever they are in the text; the expression finds the leftmost one, and of several there
    the longest. That is the same unless the end of a token begins a longer one. Then the shorter one is not found where
    the longer one is.
    """
    kinds = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    tokens = sorted(
        {token for token, kind in kinds if kind in SPLIT_OFF and token}, key=lambda token: (-len(token), token)
    )
    beginnings = defaultdict(list)
    for token in tokens:
        for at in range(1, len(token)):
            beginnings[token[:at]].append(token)
    found = []
    for token in tokens:
        ends = {
            longer[len(token) - at :]
            for at in range(1, len(token))
            for longer in beginnings.get(token[at:], ())
            if len(longer) > len(token) and not (token[:at] + longer).startswith(longer)
        }
        found.append(quote_meta(token) + "".join(f"(?!{quote_meta(end)})" for end in sorted(ends)))
    return f"({'|'.join(found) or '(?!)'})"


def _encoded(vocabulary: Vocabulary, pieces: list[Any]) -> list[Any]:
    """Row begins and ends in pieces, begins of pieces in ids, ids."""
    row_begins, row_ends, begins, ends, chars, is_special = pieces
    first = opset13.range(_integer(0), opset13.squeeze(_shape(begins), _integer(0)), _integer(1), "i32").output(0)
    after = opset13.add(first, _integer(1)).output(0)
    strings = [begins, ends, chars]
    merged_begins, merged_ends, merged = _merged(vocabulary, [first, after, *strings])
    whole = opset13.constant(np.int32(_NO_ID)).output(0)
    if vocabulary.pre_tokenizer is not None and vocabulary.pre_tokenizer.takes_whole_pieces:
        plain = enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        known = {decoded_bytes(token): token_id for token_id, (token, kind) in plain if kind not in SPLIT_OFF}
        whole = _looked_up({token: token_id for token, token_id in known.items() if token}, strings)
    # In integers: OpenVINO's choice between them takes no boolean that one of these nodes has made.
    special = opset13.convert(is_special, "i32")
    found = opset13.add(
        opset13.multiply(special, _looked_up(_split_off(vocabulary), strings)),
        opset13.multiply(opset13.subtract(_integer(1), special), whole),
    ).output(0)
    is_merged = opset13.maximum(opset13.negative(found), _integer(0))
    lengths = opset13.multiply(opset13.subtract(merged_ends, merged_begins), is_merged)
    looked_up = [first, opset13.subtract(after, is_merged).output(0), found]
    others = [merged_begins, opset13.add(merged_begins, lengths).output(0), merged]
    segments = opset13.constant(np.zeros(2, np.int32)).output(0)
    joined = _get_factory().create("CombineSegments", [*looked_up, *others, segments]).outputs()
    return [row_begins, row_ends, joined[0], joined[2]]


def _lacks_bytes(vocabulary: Vocabulary) -> bool:
    """Whether some bytes have no token. Such a byte gets no id, but the text before it is not merged with that after
    it."""
    return vocabulary.pre_tokenizer is not None and not set(BYTES) <= set(vocabulary.tokens)


def _without_unknown(vocabulary: Vocabulary, ids: list[Any]) -> list[Any]:
    """The ids without those of bytes that have no token. Such a byte has the id after that of the last token."""
    if not _lacks_bytes(vocabulary):
        return ids
    begins, ends, flat = ids
    difference = opset13.subtract(_integer(len(vocabulary.tokens)), flat)
    known = opset13.convert(opset13.convert(difference, "boolean"), "i32")
    zeros = opset13.constant(np.zeros(1, np.int32))
    sums = opset13.concat([zeros, opset13.cum_sum(known, _integer(0))], 0)
    places = opset13.squeeze(opset13.non_zero(difference, "i32"), _integer(0))
    bounds = (opset13.gather(sums, at, _integer(0)).output(0) for at in (begins, ends))
    return [*bounds, opset13.gather(flat, places, _integer(0)).output(0)]


def _split_off(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the tokens that are found in a text before anything else."""
    kinds = enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    return {token: token_id for token_id, (token, kind) in kinds if kind in SPLIT_OFF and token}


def _merged(vocabulary: Vocabulary, pieces: list[Any]) -> list[Any]:
    """The ids of pieces by merges alone."""
    is_byte_level = vocabulary.pre_tokenizer is not None
    merges = [
        (left, right)
        for left, right in (map(vocabulary.merged_bytes, pair) for pair in vocabulary.merges)
        if left is not None and right is not None
    ]
    made = {left + right for left, right in merges}
    names = [_NEVER + str(token_id).encode() for token_id in range(len(vocabulary.tokens))]
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        name = vocabulary.merged_bytes(token)
        if kind not in (TokenType.CONTROL, TokenType.UNKNOWN) and (len(token) == 1 or name in made):
            names[token_id] = name or names[token_id]
    if not is_byte_level:
        taken = set(names)
        bytes_of = _byte_tokens(vocabulary)
        names = [byte if (byte := bytes_of.get(i)) and byte not in taken else name for i, name in enumerate(names)]
    unknown = _UNKNOWN if _lacks_bytes(vocabulary) else ""
    if unknown:
        names.append(unknown.encode())
    strings = [names, [left for left, _ in merges], [right for _, right in merges]]
    node = _get_factory().create(
        "BPETokenizer",
        [*pieces, *(output for string in strings for output in create_string_constant_node(string))],
        {
            "unk_token": unknown,
            "fuse_unk": False,
            "suffix_indicator": "",
            "end_suffix": "",
            "byte_fallback": False,
            # A piece of SentencePiece is a whole text.
            "cache_capacity": _CACHED_PIECES if is_byte_level else 0,
        },
    )
    return list(node.outputs())


def _byte_tokens(vocabulary: Vocabulary) -> dict[int, bytes]:
    """The byte that each byte token stands for, by id. Characters without a token are written with these tokens. Raises
    VocabularyError if one is missing."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if lacking := [name for name in names.values() if name not in ids]:
        raise VocabularyError(f"its vocabulary lacks the token {lacking[0]}, and so cannot express every text")
    return {ids[name]: bytes([byte]) for byte, name in names.items()}


def _looked_up(ids: dict[Any, int], strings: list[Any]) -> Any:
    """The id of each string; -1 for unknown ones."""
    values = opset13.constant(np.array(list(ids.values()), np.int32)).output(0)
    names = create_string_constant_node(list(ids))
    return _get_factory().create("VocabEncoder", [*strings, *names, values, _integer(_NO_ID)]).output(0)


def _with_special_tokens(vocabulary: Vocabulary, ids: list[Any]) -> list[Any]:
    """Ids of texts with the tokens around them that the model expects."""
    before = _single(vocabulary.bos_id) if vocabulary.adds_bos else []
    behind = _single(vocabulary.eos_id) if vocabulary.adds_eos else []
    inputs = [*before, *ids, *behind]
    segments = opset13.constant(np.zeros(len(inputs) // 3, np.int32)).output(0)
    return list(_get_factory().create("CombineSegments", [*inputs, segments]).outputs())[:3]


def _single(token_id: int | None) -> list[Any]:
    return [_integer(0), _integer(1), opset13.constant(np.array([token_id], np.int32)).output(0)]


def _integer(value: int) -> Any:
    return opset13.constant(np.int32(value)).output(0)


def _shape(of: Any) -> Any:
    return opset13.shape_of(of, "i32").output(0)
