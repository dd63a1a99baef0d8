"""Where images may stand, what callers write beside them, and how refusals are told and counted."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.protos import inference_pb2
from headrace.protos.status import Reason, StatusError
from tests.gateway import image_model
from tests.gateway.batches.test_batches import Site, ended, jsonl, line, read, start
from tests.gateway.image_model import BLUE, GREEN, MAX_BYTES, RED, b64, data_url, image_part, png

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMAGE_ID = 264
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(autouse=True)
def fresh(seer: Any) -> None:
    seer.reset()
    seer.cards = seer.seeing_cards


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(image_files: dict[str, bytes], kit_of_module: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A model whose template has places for images in turns of the user alone, and its gateway."""
    async with kit_of_module.serving_model(image_files, image_model.USERS_ONLY) as fake:
        sha256 = hashlib.sha256(fake.bundle).hexdigest()
        fake.cards = [fake.card(images=image_model.limits(), tokenizer_sha256=sha256)]
        async with kit_of_module.serving_gateway(fake.address) as running:
            yield fake, running


async def chat(view: Any, *messages: dict[str, Any], **fields: Any) -> Any:
    return await view.http.post("/v1/chat/completions", json={"model": "seeing", "messages": messages, **fields})


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": x} if isinstance(x, str) else x for x in content]}


def shown(request: Any, kit: Any) -> str:
    """The prompt, with a # for each image token."""
    pieces = [
        b"#" if i >= FIRST_PSEUDO_TOKEN else b"<image>" if i == IMAGE_ID else b"<pad>" if i > IMAGE_ID else kit.VOCAB[i]
        for i in request.token_ids
    ]
    return b"".join(pieces).decode()


# --- places ---------------------------------------------------------------------------------------------------------


async def test_images_of_tools_follow_in_a_turn_of_the_user_where_the_template_wants_that(
    narrow: Any, kit: Any
) -> None:
    fake, gateway = narrow
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]}
    results = [
        {"role": "tool", "tool_call_id": f"c{i}", "content": [{"type": "text", "text": f"r{i}"}, image_part(data)]}
        for i, data in ((1, RED), (2, GREEN))
    ]
    answer = await chat(gateway, user("a", image_part(BLUE)), called, *results, user("b"), model=kit.MODEL)
    assert answer.status_code == 200, answer.text
    request = fake.streams[-1].request
    assert [image.data for image in request.images] == [BLUE, RED, GREEN]
    prompt = shown(request, kit)
    assert "tool\nr1\n[image: in the next message]<|im_end|>\n<|im_start|>tool\nr2\n[image" in prompt
    assert "user\n########<|im_end|>\n<|im_start|>user\nb<|im_end|>" in prompt


async def test_an_image_without_a_place_is_refused_by_name(narrow: Any, kit: Any) -> None:
    _, gateway = narrow
    system = {"role": "system", "content": [{"type": "text", "text": "s"}, image_part(RED)]}
    answer = await chat(gateway, system, user("a", image_part(BLUE)), model=kit.MODEL)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1]"
    assert "has no place for an image in a message of the role system" in error["message"]
    metrics = (await gateway.http.get("/metrics")).text
    assert 'headrace_image_refusals_total{reason="place"} 1.0' in metrics


async def test_images_of_the_assistant_are_hints(view: Any, seer: Any) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "x"}, image_part(RED)]}
    answer = await chat(view, user("a"), said, user("b", image_part(BLUE)))
    assert [image.data for image in seer.streams[-1].request.images] == [BLUE]
    assert answer.headers["x-headrace-ignored"] == "messages.content.image_url"


async def test_a_final_message_with_images_can_be_continued(view: Any, seer: Any, kit: Any) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert (await chat(view, user(image_part(RED), "the"), **fields)).status_code == 200
    assert shown(seer.streams[-1].request, kit).endswith("user\n####the")
    answer = await chat(view, user("the", image_part(RED)), **fields)
    assert answer.json()["error"]["param"] == "continue_final_message"


# --- texts of image tokens ------------------------------------------------------------------------------------------

SPECIALS = ("<image>", "<pad>", "<|im_end|>", "<|bos|>")


def everywhere(word: str) -> dict[str, Any]:
    """A chat with a word in every field that a template may show, and three images."""
    call = {"id": word, "type": "function", "function": {"name": word, "arguments": f'{{"{word}": "{word}"}}'}}
    tool = {"type": "function", "function": {"name": "f", "description": word, "parameters": {"title": word}}}
    messages = [
        {"role": "system", "content": word, "name": word},
        user(word, image_part(RED), word, image_part(GREEN), f"a{word}b"),
        {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": word, "content": [{"type": "text", "text": word}, image_part(BLUE)]},
        user(word[:3], word[3:], f"{word[:1]}{word}{word[1:]}"),
    ]
    return {"messages": messages, "tools": [tool], "chat_template_kwargs": {"more": word}}


@pytest.mark.parametrize("word", SPECIALS)
async def test_no_text_of_a_caller_becomes_a_special_token(view: Any, seer: Any, word: str) -> None:
    for text in (word, "plain"):
        answer = await view.http.post("/v1/chat/completions", json={"model": "seeing", **everywhere(text)})
        assert answer.status_code == 200, answer.text
    with_word, plain = (list(stream.request.token_ids) for stream in seer.streams)
    assert [image.data for image in seer.streams[0].request.images] == [RED, GREEN, BLUE]
    for special in (*range(3), IMAGE_ID, IMAGE_ID + 1):
        assert with_word.count(special) == plain.count(special), special
    assert plain.count(IMAGE_ID) == 0
    assert sum(token_id >= FIRST_PSEUDO_TOKEN for token_id in with_word) == 12


async def test_prompts_written_whole_have_no_image_tokens_either(view: Any, seer: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a<image>b"}),
        ("/generate", {"inputs": "a<image>![](http://127.0.0.1/x.png)"}),
        ("/api/generate", {"prompt": "a<image>", "raw": True, "stream": False}),
    ):
        answer = await view.http.post(path, json={"model": "seeing", **body})
        assert answer.status_code == 200, answer.text
        request = seer.streams[-1].request
        assert IMAGE_ID not in request.token_ids
        assert not request.images


async def test_pseudo_tokens_of_callers_are_refused(view: Any, seer: Any) -> None:
    for token_id in (FIRST_PSEUDO_TOKEN, FIRST_PSEUDO_TOKEN + 7, 2**32 - 1, 2**32, -1):
        answer = await view.http.post("/v1/completions", json={"model": "seeing", "prompt": [5, token_id]})
        assert answer.status_code == 400, token_id
    body = {"model": "seeing", "prompt": "a", "context": [FIRST_PSEUDO_TOKEN], "stream": False}
    assert (await view.http.post("/api/generate", json=body)).status_code == 400
    assert not seer.streams


async def test_objects_of_callers_are_no_images(view: Any, seer: Any) -> None:
    part = {"type": "image", "image": {"base64": b64(RED)}}
    assert (await chat(view, user(part))).status_code == 400
    assert (await chat(view, user({"type": "image_url", "image": b64(RED)}))).status_code == 400
    assert not seer.streams


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "param", "problem"),
    [
        ([image_part(RED)] * 4, 3, "the request has 4 images, and the model takes at most 3: leave out"),
        ([image_part(png() + bytes(MAX_BYTES))], 0, f"the image is larger than {MAX_BYTES} bytes, the maximum"),
        ([image_part(RED), image_part(png(2000, 600))], 1, "the image has 2000 x 600 pixels; at most 1,000,000"),
        ([image_part(b"GIF8")], 0, "the image is neither PNG, JPEG, WebP nor GIF"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,%%%%"}}], 0, " is not valid base64"),
    ],
)
async def test_limits_name_the_image(view: Any, seer: Any, parts: Any, param: int, problem: str) -> None:
    answer = await chat(view, {"role": "user", "content": parts})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"messages[0].content[{param}]"
    assert problem in error["message"]
    assert not seer.streams


async def test_tokenize_tells_images_apart_if_asked(view: Any) -> None:
    async def tokens(data: bytes, **fields: Any) -> list[int]:
        body = {"model": "seeing", "messages": [user("a", image_part(data), "b")], **fields}
        answer = (await view.http.post("/tokenize", json=body)).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"] or answer["tokens"])
        return list(answer["tokens"])

    assert await tokens(RED) == await tokens(GREEN), "the model's image token stands for both"
    identities = {"return_image_identities": True, "return_token_strs": True}
    red, same, green = [await tokens(data, **identities) for data in (RED, RED, GREEN)]
    assert red == same
    different = [place for place, (one, other) in enumerate(zip(red, green, strict=True)) if one != other]
    assert different == [place for place, token in enumerate(await tokens(RED)) if token == IMAGE_ID]
    assert len(different) == image_model.NUM_TOKENS
    assert all(red[place] >= FIRST_PSEUDO_TOKEN for place in different)


async def test_images_count_for_the_context(view: Any, seer: Any) -> None:
    card = seer.cards[0]
    whole, card.max_context_tokens = card.max_context_tokens, 10
    await view.models.refresh()
    try:
        answer = await chat(view, user(image_part(RED), image_part(RED), image_part(RED)))
    finally:
        card.max_context_tokens = whole
        await view.models.refresh()
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not seer.streams


async def test_a_prompt_with_images_is_not_cut(view: Any, seer: Any) -> None:
    answer = await chat(view, user("x" * 50, image_part(RED)), truncate_prompt_tokens=20)
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"
    assert (await chat(view, user(image_part(RED)), truncate_prompt_tokens=200)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [user({"type": "image_embeds"})]}, "content[0].type"),
        ("/v1/chat/completions", {"messages": [user({"type": "input_image", "file_id": "f"})]}, "content[0].file_id"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
            "messages[0].content[0].source: a source of type file is not supported",
        ),
    ],
)
async def test_what_is_no_image_is_refused_by_name(view: Any, path: str, body: Any, param: str) -> None:
    answer = await view.http.post(path, json={"model": "seeing", **body})
    assert answer.status_code == 400
    assert param in answer.text


HEARD = "the model hears no audio; send a transcript of it as text"
SEEN = "the model sees no videos; send single pictures of it as images"
READ = "the server reads no files; send its text, or pictures of its pages as images"
CONVERTED = "the image is neither PNG, JPEG, WebP nor GIF. Convert it to one of these"
PDF, WAV, MP4 = b"%PDF-1.7\n", b"RIFF\x24\0\0\0WAVEfmt ", b"\0\0\0\x18ftypmp42"


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ({"type": "input_audio", "input_audio": {"data": b64(WAV), "format": "wav"}}, HEARD),
        ({"type": "audio_url", "audio_url": {"url": data_url(WAV, "audio/wav")}}, HEARD),
        ({"type": "video_url", "video_url": {"url": data_url(MP4, "video/mp4")}}, SEEN),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": data_url(PDF, "application/pdf")}}, READ),
        ({"type": "file", "file": {"file_id": "file-1"}}, READ),
        ({"type": "document", "document": {}}, READ),
        ({"type": "image_url", "image_url": {"url": data_url(WAV, "audio/wav")}}, HEARD),
        ({"type": "image_url", "image_url": {"url": data_url(MP4, "video/mp4")}}, SEEN),
        ({"type": "image_url", "image_url": {"url": data_url(PDF, "application/pdf")}}, READ),
        ({"type": "image_url", "image_url": {"url": data_url(PDF)}}, CONVERTED),
    ],
)
async def test_other_media_of_chats_are_refused_with_what_to_send_instead(view: Any, part: Any, remedy: str) -> None:
    for role in ("user", "system"):
        answer = await chat(view, {"role": role, "content": [{"type": "text", "text": "a"}, part]})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"].startswith("messages[0].content[1]")
        assert remedy in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "name", "remedy"),
    [
        *(
            (
                "/v1/responses",
                {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, part]}]},
                "input[0].content[1].type",
                remedy,
            )
            for part, remedy in (
                ({"type": "input_file", "filename": "a.pdf", "file_data": data_url(PDF, "application/pdf")}, READ),
                ({"type": "input_file", "file_url": "https://example.com/a.pdf"}, READ),
                ({"type": "input_file", "file_id": "file-1"}, READ),
                ({"type": "input_audio", "input_audio": {"data": b64(WAV), "format": "wav"}}, HEARD),
            )
        ),
        *(
            (
                "/v1/messages",
                {"max_tokens": 5, "messages": [user("a", {"type": "document", "source": source})]},
                "messages[0].content[1].source",
                READ,
            )
            for source in (
                {"type": "base64", "media_type": "application/pdf", "data": b64(PDF)},
                {"type": "url", "url": "https://example.com/a.pdf"},
                {"type": "file", "file_id": "file_1"},
            )
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    user("a", {"type": "image", "source": {"type": "base64", "media_type": "application/pdf"}})
                ],
            },
            "messages[0].content[1].source.media_type",
            "must be one of image/jpeg, image/png, image/gif, image/webp",
        ),
        ("/api/chat", {"messages": [{"role": "user", "images": [b64(PDF)]}]}, "messages[0].images[0]", CONVERTED),
        ("/api/chat", {"messages": [{"role": "user", "images": [b64(WAV)]}]}, "messages[0].images[0]", CONVERTED),
        ("/api/generate", {"prompt": "a", "images": [b64(MP4)]}, "images[0]", CONVERTED),
        ("/api/generate", {"prompt": "a", "images": [data_url(PDF, "application/pdf")]}, "images[0]", READ),
        ("/v2/models/seeing/generate", {"text_input": "a", "image": b64(PDF)}, "image[0]", CONVERTED),
        ("/completion", {"prompt": "a", "multimodal_data": [b64(RED)]}, "multimodal_data", "/v1/chat/completions"),
    ],
)
async def test_other_media_are_refused_with_what_to_send_instead(
    view: Any, seer: Any, path: str, body: Any, name: str, remedy: str
) -> None:
    answer = await view.http.post(path, json={"model": "seeing", **body})
    assert answer.status_code == 400
    assert name in answer.text
    assert remedy in answer.text
    assert not seer.streams


async def test_files_of_tools_are_notes(view: Any, seer: Any, kit: Any) -> None:
    """In the order in which they stand beside texts and images."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [
                {"type": "input_file", "file_id": "file-1"},
                {"type": "input_image", "image_url": data_url(RED)},
                {"type": "input_text", "text": "done"},
            ],
        },
    ]
    answer = await view.http.post("/v1/responses", json={"model": "seeing", "input": items})
    assert answer.status_code == 200, answer.text
    note = "[file: omitted, because this model cannot read it]"
    assert f"tool\n{note}####done<|im_end|>" in shown(seer.streams[-1].request, kit)
    assert answer.headers["x-headrace-ignored"] == "input.content.input_file"


# --- batches --------------------------------------------------------------------------------------------------------


async def test_lines_of_batches_have_images(seer: Any, kit_of_module: Any, tmp_path: Path) -> None:
    def about(name: str, data: bytes, **fields: Any) -> dict[str, Any]:
        return line(name, **{"model": "seeing", "messages": [user("a", image_part(data))], **fields})

    lines = [about("red", RED), about("broken", b"GIF8"), about("blind", RED, model="reading"), about("green", GREEN)]
    site = Site(kit_of_module, seer, tmp_path)
    async with site.gateway() as gateway, site.client(gateway) as client:
        batch = await ended(client, await start(client, jsonl(*lines)))
        answers = await read(client, batch.output_file_id)
        errors = await read(client, batch.error_file_id)
    assert answers.keys() == {"red", "green"}
    for row in answers.values():
        assert row["response"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] == image_model.NUM_TOKENS
    assert sorted(image.data for stream in seer.streams for image in stream.request.images) == sorted([RED, GREEN])
    told = {name: row["response"]["body"]["error"] for name, row in errors.items()}
    assert {name: error["param"] for name, error in told.items()} == dict.fromkeys(
        ("broken", "blind"), "messages[0].content[1]"
    )
    assert "models that read images: 'seeing'" in told["blind"]["message"]


# --- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/chat/completions",
            {"messages": [user("a", image_part(RED), image_part(GREEN))]},
            "messages[0].content[2]",
        ),
        (
            "/v1/responses",
            {"input": [user(*[{"type": "input_image", "image_url": data_url(data)} for data in (RED, GREEN)])]},
            "input[0].content[1]",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": [b64(RED), b64(GREEN)]}], "stream": False},
            "messages[0].images[1]",
        ),
        ("/api/generate", {"prompt": "a", "images": [b64(RED), b64(GREEN)], "stream": False}, "images[1]"),
    ],
)
async def test_errors_of_workers_name_the_callers_image(view: Any, seer: Any, path: str, body: Any, name: str) -> None:
    async def refuse(router: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.INVALID_FIELD, "images[1]: the image ends within its rows", field="images[1]")

    seer.script = refuse
    answer = await view.http.post(path, json={"model": "seeing", **body})
    assert answer.status_code == 400
    assert f"{name}: the image ends within its rows" in answer.text


async def test_tokens_of_images_have_no_probability(view: Any, seer: Any) -> None:
    async def speak(router: Any, stream: Any, send: Any) -> None:
        message = inference_pb2.GenerateResponse(token_ids=[2])
        for token_id in stream.request.token_ids[1:]:
            is_image = token_id >= FIRST_PSEUDO_TOKEN
            message.prompt_logprobs.add(logprob=0 if is_image else -1, rank=0 if is_image else 1)
        message.finish.reason = inference_pb2.FINISH_REASON_STOP
        await router.context_of(stream).write(message)

    seer.script = speak
    answer = await chat(view, user("a", image_part(RED)), prompt_logprobs=0)
    assert answer.status_code == 200, answer.text
    assert [one is None for one in answer.json()["prompt_logprobs"]].count(True) == 5


async def test_images_and_refusals_are_counted(view: Any, seer: Any) -> None:
    async def counts() -> dict[str, float]:
        lines = [line for line in (await view.http.get("/metrics")).text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "image" in name}

    before = await counts()
    await chat(view, user(image_part(RED), image_part(GREEN)), n=2)
    await chat(view, user(image_part(b"x")))
    await chat(view, user(image_part(RED)), model="reading")
    await chat(view, user({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}))
    after = await counts()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("headrace_images_total") == 2
    assert grown("headrace_prompt_tokens_of_images_total") == 8
    for why in ("format", "text_model", "url"):
        assert grown(f'headrace_image_refusals_total{{reason="{why}"}}') == 1
