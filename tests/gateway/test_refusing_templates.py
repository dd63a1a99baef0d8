"""Over HTTP: chats with models whose templates refuse them, or that have none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway import conftest as kit

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALTERNATES = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{% endfor %}"
)


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]


async def prompt(gateway: Any, router: Any, path: str, **body: Any) -> tuple[int, Any]:
    """The status, and the prompt that the worker got, or the error."""
    router.reset()
    response = await gateway.http.post(path, json={"model": kit.MODEL, **body})
    if response.status_code != 200:
        return response.status_code, response.json()["error"]
    ids = router.streams[0].request.token_ids
    return 200, b"".join(kit.VOCAB[token_id] for token_id in ids).decode()


async def test_turns_that_do_not_alternate_are_folded(tiny_files: dict[str, bytes]) -> None:
    async with kit.serving_model(tiny_files, ALTERNATES) as router, kit.serving_gateway(router.address) as gateway:
        messages = turns("system", "developer", "user", "user")
        for _ in range(2):
            status, text = await prompt(gateway, router, "/v1/chat/completions", messages=messages)
            assert status == 200
            assert text == "<|im_start|>user\nsystem 0\n\ndeveloper 1\n\nuser 2\n\nuser 3<|im_end|>"
        status, text = await prompt(gateway, router, "/v1/chat/completions", messages=turns("assistant", "assistant"))
        assert status == 400
        assert text["message"].endswith("does not accept this conversation: roles must alternate")


async def test_a_model_without_a_template_takes_a_message_as_its_prompt(tiny_files: dict[str, bytes]) -> None:
    files = {name: raw for name, raw in tiny_files.items() if name != "chat_template.jinja"}
    fake = kit.FakeRouter(kit.tar_of(files))
    async with kit.serving_router(fake), kit.serving_gateway(fake.address) as gateway:
        status, text = await prompt(gateway, fake, "/v1/chat/completions", messages=turns("user"))
        assert (status, text) == (200, "<|bos|>user 0")
        assert await prompt(gateway, fake, "/v1/completions", prompt="user 0") == (status, text)
        status, error = await prompt(gateway, fake, "/v1/chat/completions", messages=turns("system", "user"))
        assert status == 400
        assert "takes a single message" in error["message"]
        assert "/v1/completions" in error["message"]
        body = {"prompt": "user 0", "stream": False}
        assert await prompt(gateway, fake, "/api/generate", **body) == (200, "<|bos|>user 0")
