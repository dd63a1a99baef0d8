"""An image in each protocol becomes the same tokens and bytes for the worker, or a refusal by name."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import pytest

from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import Detail
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN, digest, pseudo_tokens
from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.inference_pb2 import IMAGE_DETAIL_HIGH, IMAGE_DETAIL_LOW, IMAGE_DETAIL_UNSPECIFIED
from tests.gateway.image_model import BLUE, GREEN, RED, b64, data_url, files, image_part, limits, png

pytestmark = pytest.mark.asyncio(loop_scope="module")
IMAGE_ID = 264


@pytest.fixture(autouse=True)
def fresh(seer: Any) -> None:
    seer.reset()
    seer.cards = seer.seeing_cards


def pseudo(data: bytes) -> list[int]:
    family = family_of(files(IMAGE_ID))
    assert family is not None
    return pseudo_tokens(digest(data, family, Detail.AUTO), 4).tolist()


def shown(seer: Any, kit: Any) -> tuple[str, list[bytes]]:
    """The last prompt, with each image's number in its place, and the files; checks the pseudo tokens."""
    request = seer.streams[-1].request
    images = [image.data for image in request.images]
    token_ids, text, number = list(request.token_ids), "", 0
    while token_ids:
        if token_ids[0] >= FIRST_PSEUDO_TOKEN:
            assert token_ids[:4] == pseudo(images[number])
            text += f"({number})"
            number += 1
            del token_ids[:4]
        else:
            text += {IMAGE_ID: "<image>"}.get(token_ids[0]) or kit.VOCAB[token_ids[0]].decode("latin-1")
            del token_ids[0]
    assert number == len(images)
    return text, images


USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


async def chat(view: Any, content: Any, model: str = "seeing", **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
    return await view.http.post("/v1/chat/completions", json=body)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


async def test_images_stand_where_the_caller_put_them(view: Any, seer: Any, kit: Any) -> None:
    answer = await chat(view, [text("first"), image_part(RED), text("then"), text("x"), image_part(GREEN)])
    assert answer.status_code == 200, answer.text
    assert shown(seer, kit) == (USER.format("first(0)then\nx(1)"), [RED, GREEN])
    assert seer.streams[-1].request.image_view_pixels == limits().max_view_pixels
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(seer.streams[-1].request.token_ids)
    assert usage["prompt_tokens_details"]["image_tokens"] == 8


UNUSUAL = (
    f"data:image/jpg;base64,{b64(RED)}",
    f"data:IMAGE/PNG;BASE64,{b64(RED)}",
    f"data:image/png;charset=utf-8;base64,{b64(RED)}",
    f'data:image/png; name="a.png"; base64,{b64(RED)}',
    f"data:;base64,{b64(RED)}",
    f"data:application/octet-stream;base64,{b64(RED)}",
    f" data:image/png;base64, {b64(RED)}\n",
    f"data:image/png;base64,{b64(RED).rstrip('=')}",
    f"data:image/png;base64,{b64(RED).translate(str.maketrans('+/', '-_'))}",
    f"data:image/png;base64,{b64(RED)[:60]}\r\n{b64(RED)[60:]}\r\n",
)
"""Data URLs that clients send, of which not all follow their standard."""


@pytest.mark.parametrize("url", UNUSUAL)
async def test_unusual_data_urls_are_read_in_every_protocol(view: Any, seer: Any, url: str) -> None:
    data = url.partition(",")[2]
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
        for kind in ("image/jpg", "IMAGE/PNG", "image/webp")
    ]
    blocks += [
        {"type": "image", "source": {"type": "base64", "data": url}, "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "url", "url": url}},
    ]
    for path, body in (
        ("/v1/chat/completions", {"messages": [turn({"type": "image_url", "image_url": {"url": url}})]}),
        ("/v1/chat/completions", {"messages": [turn({"type": "image_url", "image_url": url})]}),
        ("/v1/responses", {"input": [turn({"type": "input_image", "image_url": url, "file_id": None})]}),
        *(("/v1/messages", {"max_tokens": 5, "messages": [turn(block)]}) for block in blocks),
        ("/api/chat", {"stream": False, "messages": [{"role": "user", "images": [data]}]}),
        ("/api/chat", {"stream": False, "messages": [{"role": "user", "images": [url]}]}),
        ("/api/generate", {"stream": False, "prompt": "a", "images": [data]}),
        ("/v2/models/seeing/generate", {"text_input": "a", "image": data}),
    ):
        answer = await view.http.post(path, json={"model": "seeing", **body})
        assert answer.status_code == 200, (path, body, answer.text)
        assert [image.data for image in seer.streams[-1].request.images] == [RED]


def turn(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*content]}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([turn(image_part(RED))], USER.format("(0)")),
        ([turn(text(""), image_part(RED))], USER.format("(0)")),
        ([turn(image_part(RED), text(""))], USER.format("(0)")),
        ([turn(image_part(RED), text("a"), image_part(RED))], USER.format("(0)a(1)")),
        (
            [turn(text("s"), image_part(RED), role="system"), turn(text("a"))],
            "<|im_start|>system\ns(0)<|im_end|>\n" + USER.format("a"),
        ),
        (
            [turn(image_part(RED), role="developer"), turn(image_part(RED))],
            "<|im_start|>system\n(0)<|im_end|>\n" + USER.format("(1)"),
        ),
        (
            [turn(image_part(RED)), {"role": "assistant", "content": "b"}, turn(image_part(RED))],
            "<|im_start|>user\n(0)<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" + USER.format("(1)"),
        ),
    ],
)
async def test_images_may_be_alone_beside_nothing_and_the_same(
    view: Any, seer: Any, kit: Any, messages: list[dict[str, Any]], prompt: str
) -> None:
    answer = await view.http.post("/v1/chat/completions", json={"model": "seeing", "messages": messages})
    assert answer.status_code == 200, answer.text
    assert shown(seer, kit) == (prompt, [RED] * prompt.count("("))


async def test_a_chat_without_images_is_as_before(view: Any, seer: Any, kit: Any) -> None:
    answer = await chat(view, [text("a"), text("b")])
    assert shown(seer, kit) == (USER.format("a\nb"), [])
    assert not seer.streams[-1].request.image_view_pixels
    assert "image_tokens" not in answer.json()["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize(
    ("detail", "sent"),
    [
        (None, IMAGE_DETAIL_UNSPECIFIED),
        ("auto", IMAGE_DETAIL_UNSPECIFIED),
        ("low", IMAGE_DETAIL_LOW),
        ("high", IMAGE_DETAIL_HIGH),
        ("original", IMAGE_DETAIL_HIGH),
    ],
)
async def test_the_detail_is_passed_on(view: Any, seer: Any, detail: str | None, sent: int) -> None:
    await chat(view, [image_part(RED, detail=detail)])
    assert [image.detail for image in seer.streams[-1].request.images] == [sent]


async def test_a_detail_may_stand_on_either_level(view: Any, seer: Any) -> None:
    """Chats have it in the object of the URL, Responses beside it; clients of one send parts to the other."""
    url = data_url(RED)
    for part in (
        {"type": "image_url", "image_url": {"url": url}, "detail": "low"},
        {"type": "image_url", "image_url": url, "detail": "low"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}, "detail": "high"},
        {"type": "input_image", "image_url": url, "detail": "low"},
    ):
        assert (await chat(view, [part])).status_code == 200
    for given in ({"url": url, "detail": "low"}, {"url": url}):
        part = {"type": "input_image", "image_url": given} | ({} if "detail" in given else {"detail": "low"})
        body = {"model": "seeing", "input": [{"role": "user", "content": [part]}]}
        answer = await view.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        listed = (await view.http.get(f"/v1/responses/{answer.json()['id']}/input_items")).json()
        assert listed["data"][0]["content"] == [{"type": "input_image", "image_url": url, "detail": "low"}]
    details = [image.detail for stream in seer.streams for image in stream.request.images]
    assert details == [IMAGE_DETAIL_LOW] * 6
    answer = await chat(view, [{"type": "image_url", "image_url": {"url": url}, "detail": "medium"}])
    assert answer.json()["error"]["param"] == "messages[0].content[0].detail"


async def test_marks_for_the_cache_of_the_provider_change_nothing(view: Any, seer: Any, kit: Any) -> None:
    mark, breakpoint_ = {"type": "ephemeral"}, {"mode": "explicit"}
    answer = await chat(view, [{**image_part(RED), "cache_control": mark, "prompt_cache_breakpoint": breakpoint_}])
    assert answer.status_code == 200, answer.text
    part = {"type": "input_image", "image_url": data_url(RED), "prompt_cache_breakpoint": breakpoint_}
    body: dict[str, Any] = {"model": "seeing", "input": [{"role": "user", "content": [part]}]}
    assert (await view.http.post("/v1/responses", json=body)).status_code == 200
    source = {"type": "base64", "media_type": "image/png", "data": b64(RED)}
    block = {"type": "image", "source": source, "cache_control": mark}
    body = {"model": "seeing", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert (await view.http.post("/v1/messages", json=body)).status_code == 200
    assert len(seer.streams) == 3
    assert len({tuple(stream.request.token_ids) for stream in seer.streams}) == 1


async def test_choices_share_the_images(view: Any, seer: Any, kit: Any) -> None:
    assert (await chat(view, [image_part(RED)], n=3)).status_code == 200
    assert len(seer.streams) == 3
    for stream in seer.streams:
        assert [image.data for image in stream.request.images] == [RED]


async def test_tokens_of_a_prompt_are_shown_as_image_tokens(view: Any, seer: Any) -> None:
    answer = await chat(view, [image_part(RED)], return_token_ids=True, prompt_logprobs=0)
    value = answer.json()
    assert value["prompt_token_ids"].count(IMAGE_ID) == 4
    assert max(value["prompt_token_ids"]) < 270
    assert len(value["prompt_logprobs"]) == len(value["prompt_token_ids"])
    answer = await view.http.post(
        "/tokenize", json={"model": "seeing", "messages": [{"role": "user", "content": [image_part(RED)]}]}
    )
    assert answer.json()["tokens"].count(IMAGE_ID) == 4
    assert answer.json()["count"] == value["usage"]["prompt_tokens"]


async def test_responses_take_images_in_messages_and_outputs(view: Any, seer: Any, kit: Any) -> None:
    image = {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": data_url(BLUE)}],
        },
    ]
    answer = await view.http.post("/v1/responses", json={"model": "seeing", "input": items})
    assert answer.status_code == 200, answer.text
    prompt, images = shown(seer, kit)
    assert images == [RED, BLUE]
    assert "user\n(0)look" in prompt
    assert "tool\ndone(1)" in prompt
    assert answer.json()["usage"]["input_tokens_details"]["image_tokens"] == 8
    more = {"model": "seeing", "previous_response_id": answer.json()["id"], "input": "and now?"}
    assert (await view.http.post("/v1/responses", json=more)).status_code == 200
    assert shown(seer, kit)[1] == [RED, BLUE]
    listed = await view.http.get(f"/v1/responses/{answer.json()['id']}/input_items")
    parts = [part for item in listed.json()["data"] for part in item.get("content") or ()]
    assert {"type": "input_image", "image_url": data_url(RED), "detail": "auto"} in parts


async def test_truncation_of_responses_drops_turns_with_their_images(view: Any, seer: Any, kit: Any) -> None:
    image = {"type": "input_image", "image_url": data_url(RED)}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "x" * 4000}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{**image, "image_url": data_url(BLUE)}]},
    ]
    body = {"model": "seeing", "input": items, "truncation": "auto", "max_output_tokens": 50}
    assert (await view.http.post("/v1/responses", json=body)).status_code == 200
    assert shown(seer, kit) == (USER.format("(0)"), [BLUE])


async def test_messages_take_images_in_turns_and_results(view: Any, seer: Any, kit: Any) -> None:
    def block(data: bytes) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(data)}}

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [block(RED), text("look")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [text("file"), block(GREEN)]},
                block(BLUE),
                text("?"),
            ],
        },
    ]
    body = {"model": "seeing", "max_tokens": 5, "messages": messages}
    answer = await view.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    prompt, images = shown(seer, kit)
    assert images == [RED, GREEN, BLUE]
    assert "user\n(0)look" in prompt
    assert "tool\nfile(1)<|im_end|>" in prompt
    assert "user\n(2)?<|im_end|>" in prompt
    del body["max_tokens"]
    counted = await view.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["input_tokens"] == len(seer.streams[-1].request.token_ids)


async def test_documents_of_messages_may_have_images(view: Any, seer: Any, kit: Any) -> None:
    def document(data: bytes, **fields: Any) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": b64(data)}
        content = [text("It rains."), {"type": "image", "source": source}, text("It snows.")]
        return {"type": "document", "source": {"type": "content", "content": content}, **fields}

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [document(RED, title="Log"), text("?")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [document(GREEN)]}]},
    ]
    body = {"model": "seeing", "max_tokens": 5, "messages": messages}
    answer = await view.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    prompt, images = shown(seer, kit)
    assert images == [RED, GREEN]
    assert "user\n<document>\nTitle: Log\nIt rains.(0)It snows.\n</document>\n?<|im_end|>" in prompt
    assert "tool\n<document>\nIt rains.(1)It snows.\n</document><|im_end|>" in prompt
    content = document(b"GIF8")["source"]["content"]
    broken = {
        "role": "user",
        "content": [text("a"), {"type": "document", "source": {"type": "content", "content": content}}],
    }
    answer = await view.http.post("/v1/messages", json={**body, "messages": [broken]})
    assert answer.status_code == 400
    assert "messages[0].content[1].source.content[1]: the image is neither" in answer.text


@pytest.mark.parametrize("transformations", [None, {}, {"oversized_image": "downsize"}, {"oversized_image": "error"}])
async def test_messages_say_whether_images_may_be_reduced(view: Any, seer: Any, transformations: Any) -> None:
    """The model reads 28 x 28 pixels of the middle."""

    async def ask(data: bytes) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": b64(data)}
        block = {"type": "image", "source": source, "transformations": transformations}
        body = {"model": "seeing", "max_tokens": 5, "messages": [{"role": "user", "content": [block, text("?")]}]}
        return await view.http.post("/v1/messages", json=body)

    assert (await ask(png(28, 28))).status_code == 200
    answer = await ask(png(56, 84))
    if not transformations or transformations["oversized_image"] == "downsize":
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert "messages[0].content[0]" in answer.text
    assert "the image has 56 x 84 pixels, and the model reads at most 28 x 42 of an image of this shape" in answer.text


@pytest.mark.parametrize(
    ("transformations", "problem"),
    [
        ("error", "transformations must be an object"),
        ({"oversized_image": "crop"}, "transformations.oversized_image must be downsize or error"),
        ({"rotated_image": "error"}, "transformations.rotated_image is not supported; there is oversized_image"),
    ],
)
async def test_other_transformations_are_refused_by_name(view: Any, transformations: Any, problem: str) -> None:
    block = {"type": "image", "source": {"type": "base64", "data": b64(RED)}, "transformations": transformations}
    body = {"model": "seeing", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    answer = await view.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert f"messages[0].content[0].{problem}" in answer.text


async def test_ollama_takes_images_in_messages_and_prompts(view: Any, seer: Any, kit: Any) -> None:
    message = {"role": "user", "content": "what?", "images": [b64(RED), data_url(GREEN)]}
    answer = await view.http.post("/api/chat", json={"model": "seeing", "stream": False, "messages": [message]})
    assert answer.status_code == 200, answer.text
    assert shown(seer, kit) == (USER.format("(0)(1)what?"), [RED, GREEN])
    body = {"model": "seeing", "stream": False, "prompt": "what?", "images": [b64(BLUE)]}
    answer = await view.http.post("/api/generate", json=body)
    assert shown(seer, kit) == (USER.format("(0)what?"), [BLUE])
    assert "context" not in answer.json(), "without the image, its tokens mean something else"
    capabilities = {
        name: (await view.http.post("/api/show", json={"model": name})).json()["capabilities"]
        for name in ("seeing", "reading")
    }
    assert ("vision" in capabilities["seeing"], "vision" in capabilities["reading"]) == (True, False)


async def test_ollama_takes_images_in_any_turn_of_the_user(view: Any, seer: Any, kit: Any) -> None:
    messages = [
        {"role": "system", "content": "see"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c", "images": [b64(RED)]},
        {"role": "user", "images": [b64(GREEN), b64(BLUE)]},
    ]
    body = {"model": "seeing", "stream": False, "messages": messages}
    answer = await view.http.post("/api/chat", json=body)
    assert answer.status_code == 200, answer.text
    prompt, images = shown(seer, kit)
    assert images == [RED, GREEN, BLUE]
    assert "user\n(0)c<|im_end|>\n<|im_start|>user\n(1)(2)<|im_end|>" in prompt
    messages[-1]["images"] = [b64(GREEN), b64(b"%PDF-1.7")]
    answer = await view.http.post("/api/chat", json=body)
    assert answer.json()["error"].startswith("messages[4].images[1]: the image is neither PNG, JPEG, WebP nor GIF")
    messages[2]["images"] = [b64(RED)]
    messages.pop()
    answer = await view.http.post("/api/chat", json=body)
    assert answer.headers["x-headrace-ignored"] == "messages.images", "the model does not read its own turns' images"


async def test_grpc_takes_parts(view: Any, seer: Any, kit: Any) -> None:
    image = text_pb2.ChatImage(data=RED, detail=IMAGE_DETAIL_LOW)
    parts = [text_pb2.ChatPart(text="a"), text_pb2.ChatPart(image=image)]
    parts.append(text_pb2.ChatPart(image=text_pb2.ChatImage(url=data_url(BLUE))))
    message = text_pb2.ChatMessage(role="user", parts=parts)
    async with grpc.aio.insecure_channel(view.grpc_address) as channel:
        stub = text_pb2_grpc.TextStub(channel)
        answers = [one async for one in stub.Chat(text_pb2.ChatRequest(model="seeing", messages=[message]))]
        assert shown(seer, kit) == (USER.format("a(0)(1)"), [RED, BLUE])
        assert answers[-1].usage.image_tokens == 8
        message.content = "b"
        with pytest.raises(grpc.aio.AioRpcError, match=r"messages\[0\]\.content must be empty beside parts"):
            async for _ in stub.Chat(text_pb2.ChatRequest(model="seeing", messages=[message])):
                pass
        listed = await stub.ListModels(text_pb2.TextListModelsRequest())
        assert {model.name: model.max_images for model in listed.models} == {"seeing": 3, "reading": 0}


async def test_kserve_takes_base64(view: Any, seer: Any, kit: Any) -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["what?"]},
        {"name": "image", "datatype": "BYTES", "shape": [2], "data": [b64(RED), b64(GREEN)]},
    ]
    answer = await view.http.post("/v2/models/seeing/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    assert shown(seer, kit) == (USER.format("(0)(1)what?"), [RED, GREEN])
    answer = await view.http.post("/v2/models/seeing/generate", json={"text_input": "what?", "image": b64(BLUE)})
    assert answer.status_code == 200, answer.text
    assert shown(seer, kit) == (USER.format("(0)what?"), [BLUE])
    answer = await view.http.post("/v2/models/seeing/generate", json={"text_input": "what?", "image": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("image[0] is not valid base64")


async def test_the_list_of_models_tells_what_they_read(view: Any) -> None:
    cards = {card["id"]: card for card in (await view.http.get("/v1/models")).json()["data"]}
    assert cards["seeing"]["architecture"] == {
        "modality": "text+image->text",
        "input_modalities": ["text", "image"],
        "output_modalities": ["text"],
    }
    assert cards["seeing"]["images"] == {"max_images": 3, "max_bytes": 65536, "max_pixels": 1_000_000}
    assert cards["reading"]["architecture"]["input_modalities"] == ["text"]
    assert cards["reading"]["images"] is None


async def test_equal_images_have_equal_tokens_and_others_do_not(view: Any, seer: Any) -> None:
    near = bytearray(RED)
    near[-5] ^= 1
    for data in (RED, RED, bytes(near)):
        await chat(view, [image_part(data)])
    first, second, third = (list(stream.request.token_ids) for stream in seer.streams)
    assert first == second
    assert [a == b for a, b in zip(first, third, strict=True)].count(False) == 4
    assert hashlib.sha256(RED).digest() != hashlib.sha256(bytes(near)).digest()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [text("a"), image_part(RED)]}]},
            "messages[0].content[1]",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED)}]}]},
            "input[0].content[0]",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {
                        "role": "user",
                        "content": [text("a"), {"type": "image", "source": {"type": "base64", "data": b64(RED)}}],
                    }
                ],
            },
            "messages[0].content[1]",
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [b64(RED)]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "a", "images": [b64(RED)]}, "images[0]"),
        ("/v2/models/reading/generate", {"text_input": "a", "image": b64(RED)}, "image[0]"),
    ],
)
async def test_a_text_model_refuses_images_and_names_one_that_reads_them(
    view: Any, seer: Any, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await view.http.post(path, json={"model": "reading", **body})
    assert answer.status_code == 400
    problem = "the model 'reading' reads text only; models that read images: 'seeing'"
    assert f"{field}: {problem}" in answer.text
    assert not seer.streams


async def test_a_text_model_reads_a_note_for_the_image_of_a_tool(view: Any, seer: Any, kit: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image_part(RED)]},
    ]
    answer = await view.http.post("/v1/chat/completions", json={"model": "reading", "messages": messages})
    assert answer.status_code == 200
    assert "[image: omitted, because this model cannot read it]" in seer.prompt
