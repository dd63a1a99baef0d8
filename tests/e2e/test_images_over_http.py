"""`headrace serve` with a vision-language model, as a client of OpenAI's API meets it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import HTTP, MODEL, Serve, headrace, serving, until
from tests.e2e.shapes import MODEL as SHAPES
from tests.e2e.shapes import TOKENS_PER_PICTURE, Question, questions, swapped
from tests.e2e.streams import http_client
from tests.patience import patience

pytestmark = pytest.mark.e2e
FLAGS = ["--threads", "1", "--execution-mode", "accuracy", "--kv-precision", "f32"]
WIDTH, BLOCK = 16, 32
NUM_SCREENSHOTS = 40
MIB = 1 << 20


@pytest.fixture(scope="module")
def served() -> Iterator[Serve]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_GATEWAY_MAX_BODY_MB", "48")  # for thirty MiB of images
        with serving("--workers", "1", *FLAGS, model=SHAPES) as system:
            yield system


def message(question: Question) -> dict[str, Any]:
    """A user's turn: the pictures, and then the words."""
    urls = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in question.pictures]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}


async def ask(client: httpx.AsyncClient, served: Serve, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The body of an answer."""
    response = await client.post(
        f"{served.base_url}/v1/chat/completions", json=body(*messages, **fields), timeout=patience(120)
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def words(served: Serve, asked: Sequence[Question]) -> list[str]:
    """The answers to many, so many at a time."""
    room = asyncio.Semaphore(WIDTH)
    async with http_client() as client:

        async def one(question: Question) -> str:
            async with room:
                answer = await ask(client, served, message(question))
            return str(answer["choices"][0]["message"]["content"]).strip()

        return list(await asyncio.gather(*map(one, asked)))


def long(question: Question) -> Question:
    """The question in so many words that the block with the last picture's end is full."""
    return Question(question.pictures, " ".join([question.text] * 5), "")


def encoded(served: Serve) -> float:
    """How many images the workers have encoded."""
    return served.metric("headrace_worker_images_encoded_total")


async def test_two_hundred_pictures_are_answered_as_by_the_reference_sixteen_at_a_time(served: Serve) -> None:
    assert await words(served, questions()) == [question.reference for question in questions()]
    assert await words(served, swapped()) == [question.reference for question in swapped()]


async def test_a_second_turn_hits_all_image_tokens_and_needs_no_encoding(served: Serve) -> None:
    question = long(questions()[3])
    async with http_client() as client:
        first = await ask(client, served, message(question))
        before = encoded(served)
        answered = first["choices"][0]["message"]
        second = await ask(client, served, message(question), answered, {"role": "user", "content": question.text})
    num_image_tokens = TOKENS_PER_PICTURE * len(question.pictures)
    assert first["usage"]["prompt_tokens_details"]["image_tokens"] == num_image_tokens
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= BLOCK + num_image_tokens // BLOCK * BLOCK
    assert encoded(served) == before


async def test_an_agent_that_sends_a_screenshot_a_turn_computes_only_the_new_one(served: Serve) -> None:
    """Each turn sends all earlier screenshots again. They are cached, up to the last full block of the last prompt."""
    before = encoded(served)
    told: list[dict[str, Any]] = []
    known = 0
    async with http_client() as client:
        for number in range(NUM_SCREENSHOTS):
            screenshot = questions()[0].pictures[0] + b"a tail that decoders ignore, of turn %d" % number
            told.append(message(Question((screenshot,), "what ?", "")))
            answer = await ask(client, served, *told, max_tokens=2)
            usage = answer["usage"]
            details = usage["prompt_tokens_details"]
            assert details["image_tokens"] == TOKENS_PER_PICTURE * (number + 1)
            assert details["cached_tokens"] >= known
            known = usage["prompt_tokens"] // BLOCK * BLOCK
            told.append(answer["choices"][0]["message"])
    until(lambda: encoded(served) == before + NUM_SCREENSHOTS, "each screenshot was encoded once")


async def test_thirty_mib_of_images_are_answered_as_the_few_kb_of_the_same_pictures(served: Serve) -> None:
    """As much as a request has room for, through gateway, router and worker."""
    question = questions()[5]
    pictures = [*question.pictures, *(questions()[0].pictures * 3)]
    heavy = [picture + os.urandom(30 * MIB // len(pictures) - len(picture)) for picture in pictures]
    assert sum(map(len, heavy)) > 29 * MIB
    async with http_client() as client:
        small, large = [
            await ask(client, served, message(Question(sent, question.text, ""))) for sent in (pictures, heavy)
        ]
    assert large["choices"] == small["choices"]
    assert large["usage"]["prompt_tokens_details"]["image_tokens"] == TOKENS_PER_PICTURE * len(pictures)


async def test_sixteen_chats_over_one_image_are_one_encoding(served: Serve) -> None:
    picture = questions()[0].pictures[0] + b"a tail that decoders ignore"
    before = encoded(served)
    asked = [Question((picture,), text, "") for text in (questions()[0].text, "a red circle ?", "what ?", "colour ?")]
    await words(served, asked * 4)
    until(lambda: encoded(served) == before + 1, "the one encoding is reported")


async def test_many_choices_of_one_prompt_are_alike(served: Serve) -> None:
    question = questions()[0]
    async with http_client() as client:
        answer = await ask(client, served, message(question), n=8)
    found = [str(choice["message"]["content"]).strip() for choice in answer["choices"]]
    assert found == [question.reference] * 8


async def test_a_killed_worker_has_its_images_when_it_is_back(served: Serve) -> None:
    """By the cached prefix that it finds again. Its new process has encoded nothing."""
    question = long(questions()[4])
    async with http_client() as client:
        first = await ask(client, served, message(question))
        pid = served.process_of("worker-0")["pid"]
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            row = served.process_of("worker-0")
            return row["pid"] not in (None, pid) and row["state"] == "ready"

        until(is_back, "the worker is back")
        answer = await ask(client, served, message(question))
    assert answer["choices"] == first["choices"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= BLOCK
    assert encoded(served) == 0


def test_what_is_no_image_is_refused_by_its_place(served: Serve) -> None:
    question = questions()[0]
    for picture, problem in ((b"BM of another age", "neither PNG, JPEG, WebP nor GIF"), (b"\x89PNG\r\n\x1a\n", "")):
        response = HTTP.post(
            f"{served.base_url}/v1/chat/completions", json=body(message(Question((picture,), "what ?", "")))
        )
        assert response.status_code == 400
        error = response.json()["error"]
        assert problem in error["message"]
        assert "messages[0]" in error["param"]
    cut = Question((question.pictures[0][:200],), question.text, "")
    response = HTTP.post(f"{served.base_url}/v1/chat/completions", json=body(message(cut)))
    assert response.status_code == 400, "the process that encodes images says so"
    assert "truncated or broken PNG" in response.json()["error"]["message"]


def test_explain_tells_pictures_apart(served: Serve, tmp_path: Path) -> None:
    """And finds what is cached of a chat that was answered."""
    one, *others = [question for question in questions() if len(question.pictures) == 1]
    other = next(question for question in others if question.text == one.text)
    asyncio.run(words(served, [long(one)]))
    files = []
    for number, question in enumerate((one, other)):
        files.append(tmp_path / str(number))
        files[-1].write_text(json.dumps(body(message(long(question)))))
    explained = headrace(
        *("explain", "--url", served.base_url, "--model", MODEL, f"@{files[0]}", "--against", f"@{files[1]}")
    )
    assert explained.returncode == 0, explained.stderr
    assert "have their first difference at token 1;" in explained.stdout
    assert f"<{12} tokens of images>" in explained.stdout
    cached = re.search(r"(\d+) of (\d+)", explained.stdout.partition("Expected milliseconds")[2])
    assert cached is not None
    assert int(cached[1]) >= BLOCK
    same = headrace("explain", "--url", served.base_url, "--model", MODEL, f"@{files[0]}", "--against", f"@{files[0]}")
    assert "The prompts are the same" in same.stdout
