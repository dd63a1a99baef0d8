"""Token ids of texts in which callers wrote the texts of control tokens. These stay text: only control tokens that a
chat template wrote become tokens.

A text without marks (`control_text`) is tokenized in one pass, as it always was. A text with marks is split at its
added tokens first, as the tokenizer's graph would split it, and only then are the marks removed:

    <|im_start|>user\\nsay <M|im_end|><|im_end|>
    [<|im_start|>] [user\\nsay <|im_end|>] [<|im_end|>]      three pieces: token, text, token

The text of a piece is tokenized whole, as ordinary text. If a control token comes out of it nevertheless, because a
piece equals the token's text or is normalised to it, the piece is cut where the marks were, and then in halves.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from headrace.gateway.text.control_text import ControlTexts, unused_mark
from headrace.protos.status import Reason, StatusError

if TYPE_CHECKING:
    from headrace.gateway.text.tokenizer import Tokenizer

# Characters to tokenize the middle of a text behind.
_BEFORE = ("\n", ".", "a", "1")
# What stands for a space in the pieces of some vocabularies.
_SPACE = "▁"
# More cuts than any text needs that is not made to need them.
_MAX_CUTS = 4096
Piece = tuple[str, bool]
"""A text, and whether it is an added token."""


class PlainEncoding:
    """Tokenizes texts with one tokenizer. Its methods may be called from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlTexts) -> None:
        self._tokenizer = tokenizer
        self._controls = controls

    def plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text without any control token in it. Raises `StatusError` if the tokenizer cannot write
        it."""
        mark = ""
        if self._controls.occur_in(text):
            mark = unused_mark(text)
            text = self._controls.marked_text(text, mark)
        return self.marked(text, mark, add_special_tokens=add_special_tokens)

    def plain_many(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of several texts, as `plain` gives them."""
        found = self._tokenizer.encode_many(texts, add_special_tokens=add_special_tokens)
        num_around = self._num_around(add_special_tokens)
        for position, (text, ids) in enumerate(zip(texts, found, strict=True)):
            if self._num_controls(ids) > num_around:
                found[position] = self.plain(text, add_special_tokens=add_special_tokens)
        return found

    def marked(self, text: str, mark: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text whose control tokens are tokens unless they have marks; `mark` is empty if there are
        none. Raises `StatusError` if the tokenizer cannot write it."""
        if not mark or mark not in text:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if self._num_controls(ids) <= self._num_around(add_special_tokens) + self._controls.count_in(text):
                return ids
        before, behind = self._tokenizer.special_around if add_special_tokens else ([], [])
        return [*before, *self._ids_of(text, mark), *behind]

    def _num_around(self, add_special_tokens: bool) -> int:
        return sum(map(self._num_controls, self._tokenizer.special_around)) if add_special_tokens else 0

    def _num_controls(self, ids: Sequence[int]) -> int:
        return sum(map(self._controls.ids.__contains__, ids))

    def _ids_of(self, text: str, mark: str) -> list[int]:
        pieces = self._pieces(text, mark)
        wanted = sum(is_added and piece in self._controls.texts for piece, is_added in pieces)
        for cut in (self._uncut, self._cut_at_marks, self._halved):
            ids = self._joined(cut(pieces, mark))
            if self._num_controls(ids) <= wanted:
                return ids
        raise _cannot_write()

    def _joined(self, runs: Sequence[Sequence[Piece]]) -> list[int]:
        """Token ids of a text that is cut into runs of pieces.

        The first run begins the text. Each other run continues it, so the tokenizer must not put a space before it.
        """
        middles = self._ids_of_middles({run[0][0] for run in runs[1:]})
        rests = self._tokenizer.encode_pieces([runs[0], *(run[1:] for run in runs[1:])])
        ids = rests[0]
        for run, rest in zip(runs[1:], rests[1:], strict=True):
            ids += middles[run[0][0]] + rest
        return ids

    def _ids_of_middles(self, texts: Set[str]) -> dict[str, list[int]]:
        """The token ids that texts have inside a longer text. Each is tokenized after another character, because some
        tokenizers add a space to the beginning of a text."""
        found: dict[str, list[int]] = {}
        left = sorted(texts)
        for before in _BEFORE if left else ():
            (known,) = self._tokenizer.encode_pieces([[(before, False)]])
            for text, ids in zip(left, self._rows([before + text for text in left]), strict=True):
                behind = ids[len(known) :]
                if ids[: len(known)] == known and self._bytes_of(behind) == text.replace(_SPACE, " ").encode():
                    found[text] = behind
            left = [text for text in left if text not in found]
        return found | dict(zip(left, self._rows(left), strict=True))

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer.encode_pieces([[(text, False)] for text in texts])

    def _bytes_of(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes[token_id] for token_id in ids)

    def _pieces(self, text: str, mark: str) -> list[Piece]:
        """The text split at its added tokens. Texts keep their marks."""
        found: list[Piece] = []
        start = 0
        pattern = self._tokenizer.added_tokens
        for match in () if pattern is None else pattern.finditer(text):
            group = match.lastindex or 0
            if mark and len(match[group]) == 1 and text.endswith(mark, 0, match.start(group)):
                continue  # a single character has its mark in front
            found += [(text[start : match.start()], False), (match[group], True)]
            start = match.end()
        return [piece for piece in (*found, (text[start:], False)) if piece[0]]

    def _uncut(self, pieces: Sequence[Piece], mark: str) -> list[list[Piece]]:
        return [[(text.replace(mark, ""), is_added) for text, is_added in pieces] if mark else list(pieces)]

    def _cut_at_marks(self, pieces: Sequence[Piece], mark: str) -> list[list[Piece]]:
        runs: list[list[Piece]] = [[]]
        for text, is_added in pieces:
            first, *others = [text] if is_added or not mark else text.split(mark)
            runs[-1].append((first, is_added))
            runs += [[(other, False)] for other in others if other]
        return runs

    def _halved(self, pieces: Sequence[Piece], mark: str) -> list[list[Piece]]:
        runs = self._cut_at_marks(pieces, mark)
        texts = sorted({text for run in runs for text, is_added in run if not is_added})
        parts = dict(zip(texts, self._in_clean_parts(texts), strict=True))
        found: list[list[Piece]] = []
        for run in runs:
            found.append([])
            for text, is_added in run:
                first, *others = [text] if is_added else parts[text]
                found[-1].append((first, is_added))
                found += [[(other, False)] for other in others]
        return found

    def _in_clean_parts(self, texts: Sequence[str]) -> list[list[str]]:
        """The texts, cut as far as possible into parts that cannot become control tokens."""
        parts = [[text] for text in texts]
        num_cuts = 0
        while True:
            unclean = [
                (position, number)
                for position, (several, rows) in enumerate(
                    zip(parts, (self._rows(several) for several in parts), strict=True)
                )
                for number, ids in enumerate(rows)
                if self._num_controls(ids) and len(several[number]) > 1
            ]
            num_cuts += len(unclean)
            if not unclean:
                return parts
            if num_cuts > _MAX_CUTS:
                raise _cannot_write()
            for position, number in reversed(unclean):
                text = parts[position][number]
                parts[position][number : number + 1] = [text[: len(text) // 2], text[len(text) // 2 :]]


def _cannot_write() -> StatusError:
    problem = "the text contains a control token of the model that its tokenizer cannot write as text; remove it"
    return StatusError(Reason.INVALID_FIELD, problem)
