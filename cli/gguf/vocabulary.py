"""The vocabulary of a GGUF file: tokens, their kinds, scores and merges, and which tokens come around a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gguf import TokenType

from headrace.cli.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer

BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
"""The kinds of tokenizers that can be converted, as `tokenizer.ggml.model` names them."""
SPLIT_OFF = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
"""Kinds of tokens that are found in a text before anything else."""
_KEY = "tokenizer.ggml."
# Texts of tokens that end an answer, whether or not the metadata names them. llama.cpp has the same rule.
_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
}
# With these tokens, <|end|> ends a message, and not the answer.
_ENDS_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
_SPACE = "\u2581"


class VocabularyError(Exception):
    """Why a vocabulary cannot be converted, in one sentence."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's vocabulary. `tokens`, `kinds` and `scores` are indexed by token id. `merges` are pairs of tokens,
    the most urgent first. `pre_tokenizer` is None for SentencePiece. `bos_id` and `eos_id` are None if the file names
    none; `adds_bos` and `adds_eos` say whether they are added to a text. With `adds_space`, a space is put in front of
    each text."""

    tokens: Sequence[str]
    kinds: Sequence[TokenType]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    pre_tokenizer: PreTokenizer | None
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    adds_eos: bool
    adds_space: bool

    @property
    def first_text(self) -> str:
        """The token that comes before every text; empty if there is none."""
        return self.tokens[self.bos_id] if self.adds_bos and self.bos_id is not None else ""

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer, known by their texts."""
        ends = set(ends_among(self.tokens))
        return [token_id for token_id, token in enumerate(self.tokens) if token in ends]

    def token_bytes(self) -> list[bytes]:
        """The bytes for which each token stands, by id: empty for tokens that are not used."""
        return [self._bytes_of(token, kind) for token, kind in zip(self.tokens, self.kinds, strict=True)]

    def merged_bytes(self, token: str) -> bytes | None:
        """The bytes that a merge to this token looks for in a text with replaced spaces; None if no text can have
        them."""
        return token.encode() if self.pre_tokenizer is None else decoded_bytes(token)

    def _bytes_of(self, token: str, kind: TokenType) -> bytes:
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE:
            return bytes([byte_of(token)])
        if kind in SPLIT_OFF:
            return token.encode()
        if self.pre_tokenizer is None:
            return token.replace(_SPACE, " ").encode()
        decoded = decoded_bytes(token)
        return token.encode() if decoded is None else decoded


def read_vocabulary(reader: Any, metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of the file of a GGUFReader. Raises VocabularyError."""
    check_tokenizer(metadata)
    pre_tokenizer = _pre_tokenizer(metadata) if metadata[f"{_KEY}model"] == BYTE_LEVEL else None
    tokens: list[str] = _array(reader, "tokens")
    if not tokens:
        raise VocabularyError("its metadata has no tokenizer.ggml.tokens")
    if repeated := _repeated(tokens):
        raise VocabularyError(f"its vocabulary has the token {repeated!r} twice")
    ends = {tokens.index(text) for text in ends_among(tokens)}
    kinds = [_kind(number) for number in _array(reader, "token_type") or [TokenType.NORMAL] * len(tokens)]
    kinds = [TokenType.CONTROL if token_id in ends else kind for token_id, kind in enumerate(kinds)]
    scores: list[float] = _array(reader, "scores") or [0.0] * len(tokens)
    if len(kinds) != len(tokens) or len(scores) < len(tokens):
        raise VocabularyError(f"it has {len(tokens)} tokens, {len(kinds)} kinds of tokens and {len(scores)} scores")
    bos, eos = (_token_id(metadata, name, len(tokens)) for name in ("bos", "eos"))
    adds_bos = metadata.get(f"{_KEY}add_bos_token", pre_tokenizer is None or pre_tokenizer.adds_bos)
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        merges=_byte_level_merges(tokens, kinds, _array(reader, "merges"))
        if pre_tokenizer
        else _scored_merges(tokens, kinds, scores),
        pre_tokenizer=pre_tokenizer,
        bos_id=bos,
        eos_id=eos,
        adds_bos=bool(adds_bos) and bos is not None,
        adds_eos=bool(metadata.get(f"{_KEY}add_eos_token", False)) and eos is not None,
        adds_space=pre_tokenizer is None and bool(metadata.get(f"{_KEY}add_space_prefix", True)),
    )


def ends_among(tokens: Sequence[str]) -> list[str]:
    """The tokens among these that end an answer."""
    known = _ENDS.intersection(tokens)
    if any(both <= known for both in _ENDS_OF_MESSAGES):
        known -= {"<|end|>"}
    return [token for token in tokens if token in known]


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Raise VocabularyError if the file's kind of tokenizer or its pre-tokenizer is unknown."""
    model = metadata.get(f"{_KEY}model")
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        raise VocabularyError(
            f"its tokenizer is of the kind {model}, and byte-level BPE ({BYTE_LEVEL}) and SentencePiece "
            f"({SENTENCEPIECE}) can be converted"
        )
    if model == BYTE_LEVEL:
        _pre_tokenizer(metadata)


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(f"{_KEY}pre", DEFAULT)
    if name not in PRE_TOKENIZERS:
        raise VocabularyError(f"its pre-tokenizer is {name}, which is none of {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _array(reader: Any, name: str) -> list[Any]:
    field = reader.fields.get(f"{_KEY}{name}")
    try:
        return [] if field is None else list(field.contents())
    except ValueError:  # text that is not UTF-8
        raise VocabularyError(f"its {_KEY}{name} is damaged") from None


def _kind(number: int) -> TokenType:
    try:
        return TokenType(number)
    except ValueError:
        return TokenType.UNUSED


def _repeated(tokens: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for token in tokens:
        if token and token in seen:
            return token
        seen.add(token)
    return None


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    token_id = metadata.get(f"{_KEY}{name}_token_id")
    return token_id if isinstance(token_id, int) and 0 <= token_id < num_tokens else None


def _byte_level_merges(
    tokens: Sequence[str], kinds: Sequence[TokenType], lines: Sequence[str]
) -> list[tuple[str, str]]:
    """The merges that can be applied: each part is one character, or the result of another merge. Raises
    VocabularyError if a part or the result of a merge is not a token."""
    plain = _merged_tokens(tokens, kinds)
    known = set(tokens)
    hidden = known - plain
    pairs: dict[tuple[str, str], None] = {}
    for line in lines:
        left, _, right = line[1:].partition(" ")
        pairs.setdefault((line[:1] + left, right), None)
    merges = _possible([pair for pair in pairs if "".join(pair) not in hidden], plain)
    parts = {part for pair in pairs for part in pair if len(part) == 1} | {left + right for left, right in merges}
    if lacking := sorted(parts - known):
        raise VocabularyError(f"its vocabulary lacks the token {lacking[0]!r}, which its merges name")
    return merges


def _merged_tokens(tokens: Sequence[str], kinds: Sequence[TokenType]) -> set[str]:
    """The tokens that merges may make."""
    never = (TokenType.CONTROL, TokenType.UNKNOWN)
    return {token for token, kind in zip(tokens, kinds, strict=True) if kind not in never}


def _possible(merges: list[tuple[str, str]], plain: Set[str]) -> list[tuple[str, str]]:
    """The merges whose parts are single characters or results of others."""
    characters = {token for token in plain if len(token) == 1}
    while True:
        made = characters | {left + right for left, right in merges}
        kept = [(left, right) for left, right in merges if left in made and right in made]
        if len(kept) == len(merges):
            return kept
        merges = kept


def _scored_merges(tokens: Sequence[str], kinds: Sequence[TokenType], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token with the highest score first."""
    plain = _merged_tokens(tokens, kinds)
    score_of = dict(zip(tokens, scores, strict=False))
    merges = [
        (token[:at], token[at:])
        for token in sorted((token for token in tokens if token in plain), key=lambda token: -score_of[token])
        for at in range(1, len(token))
        if token[:at] in plain and token[at:] in plain
    ]
    return _possible(merges, plain)


def _characters_of_bytes() -> dict[str, int]:
    """The character for which byte-level BPE writes each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


BYTES = _characters_of_bytes()
"""The byte for which each character of a byte-level token stands."""


def decoded_bytes(token: str) -> bytes | None:
    """The bytes of a byte-level token; None if it has a character that stands for none."""
    try:
        return bytes([BYTES[character] for character in token])
    except KeyError:
        return None


def byte_of(token: str) -> int:
    """The byte of a token <0xHH>. VocabularyError if it is written in another way."""
    try:
        return int(token.removeprefix("<0x").removesuffix(">"), 16) & 255
    except ValueError:
        raise VocabularyError(f"its vocabulary has the token {token!r}, which is to be a byte, as in <0x0A>") from None
