"""Files and batches, by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import ApiKey, new_secret, sha256_of, write_keys
from headrace.common.tasks import end_tasks
from headrace.gateway.batches import runner
from headrace.gateway.batches.journal import PLAN
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.protos.status import Reason, StatusError
from tests.gateway import encoder_model
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
LEASE_S = 600.0


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A line of an input file, by default of a chat."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    """Lines as a file."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def rows_of(content: bytes) -> dict[str, dict[str, Any]]:
    """The rows of a file of output or errors, by custom_id. Each comes once."""
    rows = [json.loads(row) for row in content.splitlines()]
    assert not [name for name, number in Counter(row["custom_id"] for row in rows).items() if number > 1]
    return {row["custom_id"]: row for row in rows}


class Site:
    """Gateways with one store, each with its own client, and a key for each of two tenants."""

    def __init__(self, kit: Any, router: Any, folder: Path, **flags: Any) -> None:
        self.secrets = {name: new_secret() for name in ("ann", "bob")}
        self._kit, self._router = kit, router
        self._keys = folder / "keys.json"
        keys = [
            ApiKey(f"key_{name}", sha256_of(secret), name, name, 0, requests_per_minute=1000, tokens_per_minute=100_000)
            for name, secret in self.secrets.items()
        ]
        self.write_keys(*keys)
        self.flags = {"batch_store": str(folder / "store"), "batch_lease_s": LEASE_S, **flags}

    def write_keys(self, *keys: ApiKey) -> None:
        """Replace the keys."""
        self.keys = keys
        write_keys(self._keys, keys)

    @asynccontextmanager
    async def gateway(self, **flags: Any) -> AsyncIterator[Any]:
        """A gateway that runs batches."""
        controls = EdgeControls(EdgeSettings(api_keys=self._keys))
        await controls.start()
        try:
            async with self._kit.serving_gateway(
                self._router.address, controls=controls, flags={**self.flags, **flags}
            ) as gateway:
                running = asyncio.create_task(gateway.protocols["batches"].run())
                try:
                    yield gateway
                finally:
                    await end_tasks(running)
        finally:
            await controls.close()

    def client(self, gateway: Any, tenant: str = "ann") -> openai.AsyncOpenAI:
        """OpenAI's client with a tenant's key."""
        return openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=self.secrets[tenant], max_retries=0, timeout=patience(60)
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(kit_of_module: Any, router: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(kit_of_module, router, tmp_path_factory.mktemp("site"), batch_max_lines=100, batch_file_mb=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(site: Site) -> AsyncIterator[Any]:
    async with site.gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def client(site: Site, front: Any, router: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    router.reset()
    async with site.client(front) as made:
        yield made


async def start(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, window: Any = "24h") -> Any:
    """A new batch of these lines."""
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    """The batch when it has ended."""
    async with asyncio.timeout(patience(30)):
        while True:
            batch = await client.batches.retrieve(batch.id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The rows of a file."""
    assert file_id is not None
    return rows_of((await client.files.content(file_id)).content)


async def test_a_batch_answers_every_line_once_and_keeps_its_names(client: openai.AsyncOpenAI, router: Any) -> None:
    lines = [line(f"one {number}") for number in range(70)]
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"why": "night"}
    )
    assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", CHAT)
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = await ended(client, batch)
    assert (done.status, done.errors, done.error_file_id) == ("completed", None, None)
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (70, 70, 0)
    assert done.metadata == {"why": "night"}
    assert done.model == "tiny"
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    rows = await read(client, done.output_file_id)
    assert rows.keys() == {one["custom_id"] for one in lines}
    row = rows["one 7"]
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    assert row["response"]["body"]["choices"][0]["message"]["content"] == router.answer
    assert row["response"]["body"]["object"] == "chat.completion"
    assert len({one["id"] for one in rows.values()}) == 70
    output = await client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output"
    assert output.filename == f"{batch.id}_output.jsonl"


async def test_lines_have_the_lowest_priority_whatever_they_ask_for_and_no_limits(
    kit: Any, router: Any, tmp_path: Path
) -> None:
    router.reset()
    site = Site(kit, router, tmp_path)
    site.write_keys(*(replace(key, requests_per_minute=3, tokens_per_minute=300) for key in site.keys))
    async with site.gateway() as gateway, site.client(gateway) as client:
        batch = await start(client, jsonl(*(line(str(number), priority=-7) for number in range(20))))
        done = await ended(client, batch)
        assert (done.request_counts.completed, done.request_counts.failed) == (20, 0)
        assert {stream.request.priority for stream in router.streams} == {BACKGROUND_PRIORITY}
        assert {stream.request.tenant for stream in router.streams} == {"ann"}
        messages: Any = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="tiny", messages=messages, max_tokens=10)
        assert router.streams[-1].request.priority == 0
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=messages, max_tokens=10)


async def test_each_endpoint_answers_in_its_own_shape(client: openai.AsyncOpenAI, router: Any, front: Any) -> None:
    bodies: dict[Any, dict[str, Any]] = {
        "/v1/completions": {"model": "tiny", "prompt": "hi"},
        "/v1/responses": {"model": "tiny", "input": "hi"},
    }
    for url, body in bodies.items():
        entry = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        done = await ended(client, await start(client, jsonl(entry), url))
        answer = (await read(client, done.output_file_id))["a"]["response"]["body"]
        assert answer["object"] == {"/v1/completions": "text_completion", "/v1/responses": "response"}[url]
    router.script, router.cards = encoder_model.encode, encoder_model.cards(router)
    await front.models.refresh()
    try:
        name = encoder_model.VECTORS
        entry = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": name, "input": ["x", "y"]},
        }
        done = await ended(client, await start(client, jsonl(entry), "/v1/embeddings"))
        answer = (await read(client, done.output_file_id))["a"]["response"]["body"]
        assert [one["object"] for one in answer["data"]] == ["embedding", "embedding"]
    finally:
        router.reset()
        await front.models.refresh()


async def test_a_line_that_fails_is_an_error_of_its_own(client: openai.AsyncOpenAI, router: Any) -> None:
    lines = [line("good"), line("no such model", model="other"), line("too hot", temperature=3)]
    done = await ended(client, await start(client, jsonl(*lines)))
    assert done.status == "completed"
    assert done.model is None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    assert (await read(client, done.output_file_id)).keys() == {"good"}
    errors = await read(client, done.error_file_id)
    assert errors["no such model"]["response"]["status_code"] == 404
    assert errors["no such model"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert errors["too hot"]["response"]["status_code"] == 400
    assert errors["too hot"]["response"]["body"]["error"]["param"] == "temperature"


async def test_a_file_with_wrong_lines_fails_as_a_whole_and_names_each(client: openai.AsyncOpenAI, router: Any) -> None:
    content = jsonl(
        line("a"),
        line("a"),
        {"custom_id": "b", "method": "GET", "url": CHAT, "body": {}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {}},
        {"method": "POST", "url": CHAT, "body": {}},
        [1],
        line("d", stream=True),
        {"custom_id": "e", "method": "POST", "url": CHAT, "body": "text"},
    )
    done = await ended(client, await start(client, content + b"{not json\n\xff\xff\n\n"))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at is not None
    with pytest.raises(openai.ConflictError, match="the batch is failed"):
        await client.batches.cancel(done.id)
    found = [(error.line, error.code, error.param) for error in done.errors.data]
    assert found == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_method", "method"),
        (4, "invalid_url", "url"),
        (5, "missing_required_parameter", "custom_id"),
        (6, "invalid_json_line", None),
        (7, "unsupported_parameter", "body.stream"),
        (8, "invalid_type", "body"),
        (9, "invalid_json_line", None),
        (10, "invalid_json_line", None),
    ]
    assert not router.streams
    empty = await ended(client, await start(client, b"\n\n"))
    assert [(error.code, error.line) for error in empty.errors.data] == [("empty_file", None)]
    many = await ended(client, await start(client, jsonl(*(line(str(number)) for number in range(101)))))
    assert [(error.code, error.line) for error in many.errors.data] == [("too_many_requests", 101)]
    assert not router.streams


async def test_lines_of_one_prefix_run_together(kit: Any, router: Any, tmp_path: Path) -> None:
    router.reset()
    site = Site(kit, router, tmp_path, batch_lines=1)
    lines = []
    for number in range(12):
        system = {"role": "system", "content": "xyz"[number % 3] * 150}
        messages = [system, {"role": "user", "content": str(number)}]
        lines.append({**line(str(number)), "body": {"model": "tiny", "messages": messages, "max_tokens": 2}})
    async with site.gateway() as gateway, site.client(gateway) as client:
        done = await ended(client, await start(client, jsonl(*lines)))
        assert (await read(client, done.output_file_id)).keys() == set(map(str, range(12)))
    texts = [bytes(token - 3 for token in stream.request.token_ids if 3 <= token < 259) for stream in router.streams]
    assert [next(name for name in "xyz" if name.encode() * 150 in text) for text in texts] == list("xxxxyyyyzzzz")


async def test_lines_that_find_no_room_are_asked_again(client: openai.AsyncOpenAI, router: Any, kit: Any) -> None:
    refused = Counter[str]()

    async def script(fake: Any, stream: Any, send: Any) -> None:
        text = str(stream.request.token_ids)
        refused[text] += 1
        if refused[text] < 3:
            raise StatusError(Reason.QUEUE_FULL, "no room", retry_after_s=0.1)
        await kit.speak(fake, stream, send)

    router.script = script
    done = await ended(client, await start(client, jsonl(line("a"), line("b"))))
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 0)
    assert set(refused.values()) == {3}


async def test_a_batch_that_is_cancelled_keeps_what_it_has(client: openai.AsyncOpenAI, router: Any, kit: Any) -> None:
    slow = asyncio.get_running_loop().create_future()

    async def script(fake: Any, stream: Any, send: Any) -> None:
        if b"slow" in bytes(token - 3 for token in stream.request.token_ids if token >= 3 and token < 259):
            slow.set_result(stream)
            await asyncio.Event().wait()
        await kit.speak(fake, stream, send)

    router.script = script
    batch = await start(client, jsonl(line("fast"), line("slow")))
    async with asyncio.timeout(patience(20)):
        await asyncio.shield(slow)
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            await asyncio.sleep(0.05)
    with pytest.raises(openai.ConflictError, match="cancel the batch first"):
        await client.files.delete(batch.input_file_id)
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    done = await ended(client, batch)
    assert done.status == "cancelled"
    assert done.cancelling_at <= done.cancelled_at
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (2, 1, 0)
    assert (await read(client, done.output_file_id)).keys() == {"fast"}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    async with asyncio.timeout(patience(20)):
        await slow.result().cancelled.wait()


async def test_a_batch_is_cancelled_while_its_file_is_checked(
    client: openai.AsyncOpenAI, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.reset()
    checks, may_check = runner.BatchRunner._check, asyncio.Event()

    async def check_later(*args: Any) -> None:
        await may_check.wait()
        await checks(*args)

    monkeypatch.setattr(runner.BatchRunner, "_check", check_later)
    batch = await start(client, jsonl(line("a")))
    assert batch.status == "validating"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    may_check.set()
    done = await ended(client, batch)
    assert (done.status, done.output_file_id, done.error_file_id) == ("cancelled", None, None)
    assert done.request_counts.completed == 0
    assert not router.streams


async def test_a_batch_whose_time_is_over_says_so_for_each_line(
    client: openai.AsyncOpenAI, router: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(fake: Any, stream: Any, send: Any) -> None:
        if b"slow" in bytes(token - 3 for token in stream.request.token_ids if token >= 3 and token < 259):
            await asyncio.Event().wait()
        await kit.speak(fake, stream, send)

    router.script = script
    batch = await start(client, jsonl(line("fast"), line("slow"), line("slow too")), window="90m")
    assert batch.expires_at == batch.created_at + 5400
    async with asyncio.timeout(patience(20)):
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            await asyncio.sleep(0.05)
    monkeypatch.setattr(runner, "now_s", lambda: batch.expires_at)
    done = await ended(client, batch)
    assert (done.status, done.expired_at) == ("expired", done.expires_at)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    errors = await read(client, done.error_file_id)
    assert errors.keys() == {"slow", "slow too"}
    assert errors["slow"]["response"] is None
    assert errors["slow"]["error"]["code"] == "batch_expired"
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(done.id)


async def test_another_tenant_sees_nothing(client: openai.AsyncOpenAI, site: Site, front: Any, router: Any) -> None:
    done = await ended(client, await start(client, jsonl(line("a"))))
    async with site.client(front, "bob") as bob:
        for ask in (
            bob.files.retrieve(done.input_file_id),
            bob.files.content(done.output_file_id),
            bob.files.delete(done.input_file_id),
            bob.batches.retrieve(done.id),
            bob.batches.cancel(done.id),
            bob.batches.create(input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        assert [file async for file in bob.files.list()] == []
        assert [batch async for batch in bob.batches.list()] == []
    for odd in ("file-..", "file-%2e%2e%2fx", "batch_1", "x" * 300):
        assert (await front.http.get(f"/v1/files/{odd}", headers={"x-api-key": site.secrets["bob"]})).status_code == 404


async def test_files_and_batches_are_listed_in_pages(site: Site, front: Any, router: Any) -> None:
    router.reset()
    async with site.client(front, "bob") as bob:
        files = [(await bob.files.create(file=(f"{n}.jsonl", jsonl(line("a"))), purpose="batch")).id for n in range(3)]
        assert [file.id async for file in bob.files.list(limit=2, order="asc")] == files
        assert [file.id async for file in bob.files.list()] == files[::-1]
        assert [file.id async for file in bob.files.list(purpose="vision")] == []
        batches = [
            await bob.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h") for file_id in files
        ]
        for batch in batches:
            await ended(bob, batch)
        assert [batch.id async for batch in bob.batches.list(limit=2)] == [batch.id for batch in batches[::-1]]
        deleted = await bob.files.delete(files[0])
        assert (deleted.deleted, deleted.id, deleted.object) == (True, files[0], "file")
        with pytest.raises(openai.NotFoundError):
            await bob.files.retrieve(files[0])


async def test_uploads_are_bounded_and_say_what_is_wrong(client: openai.AsyncOpenAI, site: Site, front: Any) -> None:
    with pytest.raises(openai.APIStatusError) as large:
        await client.files.create(file=("in.jsonl", b"x" * (1 << 20) + b"x"), purpose="batch")
    assert (large.value.status_code, large.value.code) == (413, "file_too_large")
    with pytest.raises(openai.BadRequestError, match="purpose=batch"):
        await client.files.create(file=("in.jsonl", b"x"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await start(client, jsonl(line("a")), window="8d")
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of /v1/chat/completions"):
        await start(client, jsonl(line("a")), endpoint="/v1/models")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.batches.create(input_file_id="file-0", endpoint=CHAT, completion_window="24h")
    assert missing.value.param == "input_file_id"
    headers = {"x-api-key": site.secrets["ann"]}
    bare = await front.http.post("/v1/files", json={"file": "x"}, headers=headers)
    assert bare.status_code == 415
    nameless = await front.http.post("/v1/files", files={"file": (None, b"x")}, headers=headers)
    assert nameless.json()["error"]["param"] == "file"
    kept = await client.files.create(
        file=("in.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert kept.expires_at == kept.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="seconds"):
        await client.files.create(
            file=("in.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 10}
        )


async def test_a_tenant_has_bounds_of_bytes_and_batches(kit: Any, router: Any, tmp_path: Path) -> None:
    router.reset()
    site = Site(kit, router, tmp_path, batch_tenant_mb=1, batch_tenant_max=1)
    router.script = never
    async with site.gateway() as gateway, site.client(gateway) as client:
        batch = await start(client, jsonl(line("a")))
        with pytest.raises(openai.RateLimitError, match="maximum of a tenant"):
            await start(client, jsonl(line("a")))
        await client.files.create(file=("in.jsonl", b"x" * 900_000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as full:
            await client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
        assert (full.value.status_code, full.value.code) == (413, "storage_full")
        async with site.client(gateway, "bob") as bob:
            await bob.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
        await client.batches.cancel(batch.id)
        await ended(client, batch)


async def never(fake: Any, stream: Any, send: Any) -> None:
    await asyncio.Event().wait()


async def test_a_key_that_is_revoked_ends_its_lines(kit: Any, router: Any, tmp_path: Path) -> None:
    router.reset()
    site = Site(kit, router, tmp_path)
    async with site.gateway() as gateway:
        async with site.client(gateway) as client:
            router.script = no_room
            batch = await start(client, jsonl(line("a")))
            async with asyncio.timeout(patience(20)):
                while not router.streams:
                    await asyncio.sleep(0.05)
        ann, bob = site.keys
        second = new_secret()
        site.secrets["ann"] = second
        site.write_keys(replace(ann, id="key_new", sha256=sha256_of(second)), bob)
        async with site.client(gateway) as client:
            async with asyncio.timeout(patience(20)):
                while True:
                    try:
                        done = await ended(client, batch)
                    except openai.AuthenticationError:  # the gateway looks at its keys each second
                        await asyncio.sleep(0.1)
                    else:
                        break
            assert done.request_counts.failed == 1
            errors = await read(client, done.error_file_id)
            assert errors["a"]["response"]["status_code"] == 401


async def no_room(fake: Any, stream: Any, send: Any) -> None:
    raise StatusError(Reason.QUEUE_FULL, "no room", retry_after_s=0.1)


async def test_gateways_share_the_lines_and_take_over_those_of_a_dead_one(
    kit: Any, router: Any, tmp_path: Path
) -> None:
    router.reset()
    site = Site(kit, router, tmp_path, batch_lines=8)
    asked = Counter[str]()
    answered = 0
    enough = asyncio.Event()

    async def script(fake: Any, stream: Any, send: Any) -> None:
        nonlocal answered
        asked[str(stream.request.token_ids)] += 1
        if answered >= 20 and not enough.is_set():
            await asyncio.Event().wait()
        answered += 1
        await kit.speak(fake, stream, send)

    router.script = script
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(site.gateway())
        client = await stack.enter_async_context(site.client(first))
        batch = await start(client, jsonl(*(line(f"one {number}") for number in range(100))))
        async with asyncio.timeout(patience(30)):
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 20:
                await asyncio.sleep(0.05)
        # It dies as if killed, and is not heard of for longer than its lease.
        dead = first.protocols["batches"]._runner
        dead._is_stopping = True
        dead.journal.leave = nothing
        await end_tasks(*(task for known in dead._known.values() for task in known.tasks))
        heartbeat = Path(site.flags["batch_store"], "gateways", dead.journal._own)
        os.utime(heartbeat, (heartbeat.stat().st_mtime - 2 * LEASE_S,) * 2)
        enough.set()
        second = await stack.enter_async_context(site.gateway())
        third = await stack.enter_async_context(site.gateway())
        async with site.client(second) as other, site.client(third) as last:
            done = await ended(other, batch)
            assert (await last.batches.retrieve(batch.id)) == done
            rows = await read(last, done.output_file_id)
    assert (done.status, done.request_counts.completed) == ("completed", 100)
    assert len(rows) == 100
    # Only what was under way when the gateway died was asked for again.
    assert sum(number > 1 for number in asked.values()) <= 8
    assert max(asked.values()) <= 2


async def test_a_gateway_that_drains_while_it_claims_runs_nothing_more(kit: Any, router: Any, tmp_path: Path) -> None:
    router.reset()
    site = Site(kit, router, tmp_path)
    is_taken_over = False

    async def script(fake: Any, stream: Any, send: Any) -> None:
        if not is_taken_over:
            await asyncio.Event().wait()
        await kit.speak(fake, stream, send)

    router.script = script
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(site.gateway())
        draining = first.protocols["batches"]._runner
        claim = draining.journal.claim
        drained = asyncio.Event()

        async def claim_as_it_drains(batch: Any, what: str, *args: Any) -> bool:
            is_own: bool = await claim(batch, what, *args)
            if what != PLAN:
                await draining.drain(0)
                drained.set()
            return is_own

        draining.journal.claim = claim_as_it_drains
        client = await stack.enter_async_context(site.client(first))
        batch = await start(client, jsonl(line("one")))
        async with asyncio.timeout(patience(30)):
            await drained.wait()
        is_taken_over = True
        second = await stack.enter_async_context(site.gateway())
        other = await stack.enter_async_context(site.client(second))
        done = await ended(other, batch)
    assert (done.status, done.request_counts.completed) == ("completed", 1)
    # The gateway that claimed the part left it to the other one.
    assert len(router.streams) == 1


async def nothing() -> None:
    return
