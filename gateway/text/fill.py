"""Fill in the middle: the prompt that asks a model for the text between two others, in the tokens of its family (pure).

    <|fim_prefix|> before <|fim_suffix|> after <|fim_middle|>        -> the text between them

Other files come first, each after a token for files, if the model has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Family:
    prefix: str
    suffix: str
    middle: str
    """Empty: the suffix comes first, and the answer continues the prefix."""
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()
    """Tokens other than those with which the model ends its texts."""


_FAMILIES = (
    _Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|repo_name|>",
        "<|file_sep|>",
        ("<|fim_pad|>", "<|cursor|>", "<|file_separator|>"),
    ),
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", ("<fim_pad>",)),
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>", ("<fim_pad>",)),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "", "", ("<fim-pad>",)),
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _Family("<PRE>", "<SUF>", "<MID>", "", "", ("<EOT>",)),
    _Family("[PREFIX]", "[SUFFIX]", ""),
)


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The tokens of a model for texts with a gap."""

    prefix: int
    suffix: int
    middle: int | None
    """None: the suffix comes first, and the answer continues the prefix."""
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()
    """Tokens that end the text in the gap, in addition to those that end every text."""

    def prompt(
        self,
        before: Sequence[int],
        after: Sequence[int],
        files: Sequence[tuple[str, str]] = (),
        *,
        encode: _Encode,
        begin: Sequence[int] = (),
    ) -> list[int]:
        """The tokens of a prompt that asks for the text between two others. `files` are names and texts, which are
        tokenized by `encode`. `begin` comes before everything."""
        found = list(begin)
        if self.file is not None and files:
            if self.repository is not None:
                found += [self.repository, *encode("project\n")]
            for name, text in files:
                found += [self.file, *encode(f"{name}\n"), *encode(text)]
            found += [self.file, *encode("filename\n")]
        else:
            for _, text in files:
                found += encode(text)
        if self.middle is None:
            return [*found, self.suffix, *after, self.prefix, *before]
        return [*found, self.prefix, *before, self.suffix, *after, self.middle]

    @property
    def num_marks(self) -> int:
        """How many tokens a prompt has in addition to its texts and files."""
        return 2 if self.middle is None else 3


def fill_tokens(token_bytes: Sequence[bytes]) -> FillTokens | None:
    """The tokens of a vocabulary for texts with a gap; None if its model fills no gaps."""
    ids = _ids_of(token_bytes)
    families = [one for one in _FAMILIES if {one.prefix, one.suffix, one.middle or one.prefix} <= ids.keys()]
    if not families:
        return None
    # Of families with the same marks, the one whose files the vocabulary knows.
    family = next((one for one in families if one.file in ids), families[0])
    ends = [ids[text] for text in (*family.ends, family.repository, family.file) if text in ids]
    return FillTokens(
        ids[family.prefix],
        ids[family.suffix],
        ids[family.middle] if family.middle else None,
        ids.get(family.repository),
        ids.get(family.file),
        tuple(ends),
    )


def _ids_of(token_bytes: Sequence[bytes]) -> Mapping[str, int]:
    """The ids of the families' tokens by their texts. In a vocabulary, some texts begin with a space."""
    wanted = {text.encode(): text for text in _texts()}
    wanted |= {b" " + raw: text for raw, text in wanted.items()} | {
        "\u2581".encode() + raw: text for raw, text in wanted.items()
    }
    return {wanted[word]: token_id for token_id, word in enumerate(token_bytes) if word in wanted}


def _texts() -> Iterable[str]:
    for family in _FAMILIES:
        yield from filter(
            None, (family.prefix, family.suffix, family.middle, family.repository, family.file, *family.ends)
        )


def cut_to(room: int, before: Sequence[int], after: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The end of the text before the gap and the beginning of the text after it, together at most `room` tokens. The
    latter gets a quarter, or more if the former leaves room."""
    if len(before) + len(after) <= room:
        return before, after
    of_after = min(len(after), max(room // 4, room - len(before)))
    of_before = min(len(before), room - of_after)
    return before[len(before) - of_before :], after[:of_after]
