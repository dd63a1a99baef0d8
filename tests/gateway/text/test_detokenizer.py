"""The incremental detokenizer gives the same text for any split of the bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.text.detokenizer import Detokenizer, detokenize

BYTES = st.one_of(
    st.binary(max_size=6), st.text(max_size=3).map(str.encode), st.sampled_from("é€😀".encode()).map(bytes)
)
TABLES = st.lists(BYTES, min_size=1, max_size=20)


def streamed(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


@given(table=TABLES, data=st.data())
def test_the_pieces_together_are_the_decoding_of_all_bytes(table: list[bytes], data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, len(table) - 1)))
    whole = b"".join(table[i] for i in token_ids).decode(errors="replace")
    assert "".join(streamed(Detokenizer(table), token_ids)) == whole
    assert detokenize(token_ids, table) == whole


@given(text=st.text(), data=st.data())
def test_no_piece_of_valid_text_has_a_broken_character(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    table = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    pieces = streamed(Detokenizer(table), list(range(len(table))))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all("�" not in piece or "�" in text for piece in pieces)


def test_a_character_is_held_back_until_its_last_byte() -> None:
    smile = "😀".encode()
    detokenizer = Detokenizer([b"a", smile[:1], smile[1:3], smile[3:] + b"b"])
    assert streamed(detokenizer, [0, 1, 2, 3]) == ["a", "", "", "😀b", ""]


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    assert streamed(Detokenizer(["€".encode()[:2]]), [0]) == ["", "�"]


def test_skipped_and_unknown_tokens_have_no_text() -> None:
    table = [b"a", b"<|end|>"]
    assert streamed(Detokenizer(table, frozenset({1})), [0, 1, 7, 0]) == ["a", "", "", "a", ""]
    assert streamed(Detokenizer(table), [1]) == ["<|end|>", ""]
    assert detokenize([0, 1, 7, 0], table, frozenset({1})) == "aa"
