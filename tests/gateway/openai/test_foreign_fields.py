"""Fields of other servers that are not supported: each is refused by name, and docs/protocol.md has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.openai.foreign_fields import FOREIGN_FIELDS

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
REFERENCE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FOREIGN_FIELDS)
async def test_a_field_of_another_server_is_refused_with_what_to_use_instead(
    gateway: Any, router: Any, path: str, name: str
) -> None:
    router.reset()
    neutral, instead = FOREIGN_FIELDS[name]
    other = not neutral[0] if neutral and isinstance(neutral[0], bool) else {"some": "value"}
    response = await gateway.http.post(path, json={**BODIES[path], name: other})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    assert error["message"].startswith(f"{name} is not supported")
    assert error["message"].endswith(instead)
    assert router.streams == []


@pytest.mark.parametrize("value", [b"1e999", b"1" * 400, b'{"a": [1e999]}', b'"\xff"'])
async def test_a_value_that_cannot_be_read_is_refused_by_its_field(gateway: Any, value: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "n_predict": %b}' % value
    response = await gateway.http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n_predict")


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_change_nothing_are_taken(gateway: Any, path: str) -> None:
    for position in range(max(len(neutral) for neutral, _ in FOREIGN_FIELDS.values()) + 1):
        fields = {
            name: neutral[position] if position < len(neutral) else None
            for name, (neutral, _) in FOREIGN_FIELDS.items()
        }
        response = await gateway.http.post(path, json={**BODIES[path], **fields})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", FOREIGN_FIELDS)
async def test_the_reference_has_each_of_them(name: str) -> None:
    assert f"`{name}`" in REFERENCE.partition("**Fields of other servers.**")[2].partition("\n\n")[0]
