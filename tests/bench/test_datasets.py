"""What is asked: lengths that are exact, shared prefixes, and the rules by which entries of files are taken."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.bench import datasets
from headrace.bench.datasets import Custom, DatasetError, ManyTurns, Trace
from headrace.bench.lengths import Lengths
from headrace.bench.options import dataset
from headrace.bench.serve import serve
from headrace.bench.texts import Writer, writer_for
from headrace.bench.tokens import WordCounter

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 9]},
    {"timestamp": 4500, "input_length": 40_000, "output_length": 9, "hash_ids": list(range(100, 179))},
    {"timestamp": 6000, "input_length": 512, "output_length": 3, "hash_ids": [0]},
]


class Syllables:
    """One token before the text, one a word, and one more for a long word."""

    name = "syllables"
    is_exact = True

    async def count(self, texts: Sequence[str]) -> list[int]:
        return [1 + sum(1 + (len(word) > 7) for word in text.split()) for text in texts]


class Letters:
    """One token before the text, and one for each letter and each space."""

    name = "letters"
    is_exact = True

    async def count(self, texts: Sequence[str]) -> list[int]:
        return [1 + len(text) for text in texts]


async def writer() -> Writer:
    return await writer_for(Syllables())


def fixed(length: int) -> Lengths:
    return Lengths("fixed", length)


async def test_a_writer_knows_only_words_that_are_one_token() -> None:
    made = await writer()
    assert made.around == 1
    assert max(map(len, made.words)) == 7
    assert len(made.words) > 200
    (count,) = await Syllables().count([made.prompt(random.Random(0), 100)])
    assert count == 100


async def test_texts_are_made_to_fit() -> None:
    made = await writer()
    texts = ["development development", "a", "one two three four five six"]
    fitted = await made.fitted(texts, [8, 6, 4], random.Random(0))
    assert await Syllables().count(fitted) == [8, 6, 4]
    assert fitted[2] == "one two three"


async def test_a_vocabulary_that_splits_all_words_gets_texts_of_the_right_length() -> None:
    made, rng = await writer_for(Letters()), random.Random(0)
    assert await Letters().count([made.prompt(rng, n) for n in (2, 100, 1000)]) == [2, 100, 1000]
    assert len(made.words_of(rng, 50)) == 49  # a space precedes it
    (fitted,) = await made.fitted(["a b c"], [40], rng)
    assert await Letters().count([fitted]) == [40]
    (fitted,) = await made.fitted([fitted], [11], rng)
    assert abs((await Letters().count([fitted]))[0] - 11) <= 1


async def test_without_a_tokenizer_words_count_as_tokens() -> None:
    made = await writer_for(WordCounter())
    assert len(made.prompt(random.Random(0), 50).split()) == 50


async def test_random_prompts_have_their_lengths_and_share_only_what_they_should() -> None:
    made, rng = await writer(), random.Random(1)
    lengths = Lengths("uniform", 60, 0.5)
    found = await datasets.random_prompts(made, rng, 40, lengths, Lengths("exponential", 20), 30)
    turns = [conversation.turns[0] for conversation in found]
    assert await Syllables().count([turn.text for turn in turns]) == [turn.prompt_tokens for turn in turns]
    assert {turn.prompt_tokens for turn in turns} <= set(range(60, 121))
    begins = {tuple(turn.text.split()[:29]) for turn in turns}
    assert len(begins) == 1
    assert len({tuple(turn.text.split()[:35]) for turn in turns}) == 40


async def test_prefixes_repeat_as_often_as_they_should() -> None:
    found = await datasets.prefix_repetition(await writer(), random.Random(2), 30, 3, 50, fixed(10), fixed(4))
    begins = [" ".join(conversation.turns[0].text.split()[:49]) for conversation in found]
    assert sorted(begins.count(begin) for begin in set(begins)) == [10, 10, 10]
    assert begins != sorted(begins)
    assert {c.turns[0].prompt_tokens for c in found} == {60}
    with pytest.raises(DatasetError, match="--prefix-repetition-num-prefixes 3"):
        await datasets.prefix_repetition(await writer(), random.Random(2), 2, 3, 50, fixed(10), fixed(4))


async def test_conversations_have_turns_and_times_of_thinking() -> None:
    many = ManyTurns(4.0, 10.0, 40, 2, Lengths("lognormal", 20, 1.0, 200), Lengths("exponential", 30), 4000)
    found = await many.draw(await writer(), random.Random(4), 2000)
    assert sum(len(conversation.turns) for conversation in found) == 2000
    assert statistics.fmean(len(conversation.turns) for conversation in found) == pytest.approx(4, rel=0.15)
    thinks = [turn.think_s for conversation in found for turn in conversation.turns[1:]]
    assert statistics.fmean(thinks) == pytest.approx(10.0, rel=0.1)
    assert len({conversation.system for conversation in found}) == 2
    assert all(conversation.turns[0].think_s == 0 for conversation in found)
    for conversation in found:
        total = 40 + sum(turn.prompt_tokens + turn.output_tokens for turn in conversation.turns)
        assert total <= 4000 or len(conversation.turns) == 1


@pytest.mark.parametrize(
    ("prompt", "answer", "taken"),
    [
        (4, 4, True),
        (3, 100, False),
        (100, 3, False),
        (1024, 1024, True),
        (1025, 10, False),
        (1024, 1025, False),
        (24, 2024, True),
    ],
)
def test_sharegpts_rules_of_lengths(prompt: int, answer: int, taken: bool) -> None:
    assert datasets.is_sharegpt_pair(prompt, answer) is taken
    assert datasets.is_sharegpt_pair(10, 1, has_own_length=True)


def words(count: int) -> str:
    return " ".join(["word"] * count)


async def test_sharegpt_takes_first_turns_of_conversations_with_two(tmp_path: Path) -> None:
    def talk(*lengths: int) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": "human", "value": words(n)} for n in lengths]}

    entries = [talk(10), talk(20, 30, 5), talk(2, 30), talk(30, 2), talk(1024, 4), talk(40, 50), {"id": "none"}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(entries))
    found = await datasets.sharegpt(await writer(), random.Random(0), path, 2, None, False)
    assert [(c.turns[0].prompt_tokens, c.turns[0].output_tokens) for c in found] == [(21, 31), (41, 51)]
    more = await datasets.sharegpt(await writer(), random.Random(0), path, 5, 7, True)
    assert len(more) == 3  # a short answer counts if its length is another
    assert {c.turns[0].output_tokens for c in more} == {7}


async def test_custom_prompts_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two"}\n\n{"prompt": "three", "output_tokens": 9}\n')
    found = await Custom(path, fixed(5), False, False).read(await writer(), random.Random(0), 2, False)
    assert [(c.turns[0].text, c.turns[0].prompt_tokens, c.turns[0].output_tokens) for c in found] == [
        ("one two", 3, 5),
        ("three", 2, 9),
    ]
    found = await Custom(path, fixed(5), True, False).read(await writer(), random.Random(0), 9, False)
    assert [c.turns[0].output_tokens for c in found] == [5, 5]
    with pytest.raises(DatasetError, match='line 1: there is no "output_tokens"'):
        await Custom(path, fixed(5), False, True).read(await writer(), random.Random(0), 2, False)
    path.write_text('{"prompt": "one"}\n{"text": "x"}\n')
    with pytest.raises(DatasetError, match=r'line 2: there is no text "prompt"'):
        await Custom(path, fixed(5), False, False).read(await writer(), random.Random(0), 2, False)


async def test_spec_bench_asks_the_first_turns_of_a_category(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [("qa", ["one", "two"]), ("math", ["three"]), ("qa", ["four"])]
    path.write_text("".join(json.dumps({"category": name, "turns": turns}) + "\n" for name, turns in rows))
    found = await datasets.spec_bench(await writer(), random.Random(0), path, 9, "qa", fixed(5), False)
    assert [(c.turns[0].text, c.turns[0].output_tokens) for c in found] == [("one", 5), ("four", 5)]
    with pytest.raises(DatasetError, match="has only math, qa"):
        await datasets.spec_bench(await writer(), random.Random(0), path, 9, "poems", fixed(5), False)


async def test_burstgpt_gives_the_lengths_of_answered_requests(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    lines = ["5,GPT-4,12,30,42,API log", "6,ChatGPT,99,9,108,API log", "7,GPT-4,50,0,50,API log", "8,GPT-4,7,2,9,x"]
    path.write_text("\n".join((head, *lines)) + "\n")
    found = await datasets.burstgpt(await writer(), random.Random(0), path, 9, False)
    assert [(c.turns[0].prompt_tokens, c.turns[0].output_tokens) for c in found] == [(12, 30), (7, 2)]
    assert await Syllables().count([c.turns[0].text for c in found]) == [12, 7]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DatasetError, match='not BurstGPT\'s CSV with the columns "Model"'):
        await datasets.burstgpt(await writer(), random.Random(0), path, 9, False)


@pytest.mark.parametrize(("repeats", "count"), [(True, 5), (False, 2)])
async def test_a_short_file_is_asked_again_unless_that_is_turned_off(tmp_path: Path, repeats: bool, count: int) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    args = [
        "http://a",
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(path),
        *([] if repeats else ["--no-oversample"]),
    ]
    drawn = await dataset.workload(serve.make_context("serve", args).params).draw(await writer(), 5, 0)
    assert len(drawn.conversations) == count
    assert ("2 prompts; some are asked again" in drawn.note) is repeats
    everything = serve.make_context("serve", [*args, "--num-prompts", "-1"]).params
    drawn = await dataset.workload(everything).draw(await writer(), dataset.count(everything), 0)
    assert len(drawn.conversations) == 2


async def test_sonnets_begin_alike_and_stay_within_their_length(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("".join(f"line {i} of the poem\n" for i in range(50)))
    found = await datasets.sonnet(await writer(), random.Random(0), path, 10, 100, 50, fixed(6))
    assert all(c.turns[0].prompt_tokens <= 100 for c in found)
    assert len({c.turns[0].text[:150] for c in found}) == 1
    assert len({c.turns[0].text for c in found}) == 10
    with pytest.raises(DatasetError, match="--sonnet-input-len 5 is not more"):
        await datasets.sonnet(await writer(), random.Random(0), path, 10, 5, 2, fixed(6))


async def test_a_trace_keeps_its_times_and_its_equal_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    found, dropped = Trace(path, 0.001, None, 8192).read(await writer(), 10, 0)
    assert dropped == 1
    assert [conversation.at_s for conversation in found] == [0.0, 3.0, 6.0]
    first, second, third = (conversation.turns[0] for conversation in found)
    assert [first.prompt_tokens, second.prompt_tokens, third.prompt_tokens] == [1200, 1536, 512]
    assert await Syllables().count([first.text, second.text, third.text]) == [1200, 1536, 512]
    assert first.text.split()[:1024] == second.text.split()[:1024]
    assert first.text.split()[1024:] != second.text.split()[1024 : 1024 + 175]
    assert second.text.startswith(third.text)
    again, _ = Trace(path, 0.001, 512, 8192).read(await writer(), 2, 0)
    assert again == found[:2]
    renamed = [{"ts" if key == "timestamp" else key: value for key, value in row.items()} for row in MOONCAKE]
    path.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    named, _ = Trace(path, 0.001, None, 8192, {"timestamp": "ts"}).read(await writer(), 10, 0)
    assert named == found
    with pytest.raises(DatasetError, match="line 1: Object missing required field `timestamp`"):
        Trace(path, 0.001, None, 8192).read(await writer(), 10, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "lengths are at least 1"),
        ('{"timestamp": 0, "input_length": 90000, "output_length": 1}', "see --max-total-len"),
    ],
)
async def test_a_trace_that_cannot_be_used_is_refused(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DatasetError, match=re.escape(said)):
        Trace(path, 0.001, None, 8192).read(await writer(), 10, 0)
