"""The thin server of openvino-genai: its streams say what the whole answer says."""

from __future__ import annotations

import pytest

from tests.e2e.serving import pulled_model

pytest.importorskip("openvino_genai")

TEXTS = (
    "The capital of France is Paris, and it has been so for a long time, as everybody knows who has been there once.",
    "Ein paar Wörter mit Umlauten: größer, süß, Fuß. 日本語のテキスト。 And emoji: 👩‍🚀🎉🎉 at the end 🎉",
    "    indented\n\n\tand\ttabs  and   spaces   ",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("at_once", [1, 3])
def test_pieces_of_a_stream_join_to_the_whole_text(text: str, at_once: int) -> None:
    from headrace.bench.study.genai_server import Text, genai

    tokenizer = genai.Tokenizer(str(pulled_model()))
    tokens = tokenizer.encode(text).input_ids.data[0].tolist()
    (whole,) = tokenizer.decode([tokens])
    said = Text()
    pieces = []
    for start in range(0, len(tokens), at_once):
        said.tail += tokens[start : start + at_once]
        (decoded,) = tokenizer.decode([said.tail])
        pieces.append(said.more(decoded, start + at_once >= len(tokens), tokenizer.decode))
    assert "".join(pieces) == whole
    assert len(said.tail) < 24  # not the whole answer again for each token
    assert not any("\ufffd" in piece for piece in pieces)
