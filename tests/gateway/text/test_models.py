"""The list of models: polled, refreshed once for unknown names, with tokenizers by content hash."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.gateway.text import models as models_module
from headrace.gateway.text.models import FORGET_AFTER_S, MAX_LIST_AGE_S, RETRY_BUNDLE_AFTER_S, Models
from headrace.gateway.upstream.bundle import BundleError
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard


class FakeUpstream:
    """Lists cards and hands out bundles; counts both."""

    def __init__(self, bundle: bytes) -> None:
        self.bundle = bundle
        self.sha256 = hashlib.sha256(bundle).hexdigest()
        self.cards: list[ModelCard] | StatusError = []
        self.num_lists = self.num_bundles = 0
        self.on_demand: frozenset[str] = frozenset()
        self.started = asyncio.Event()
        self.awaited: list[str] = []
        self.used: frozenset[str] = frozenset()
        self.used_at_bundles: list[frozenset[str]] = []

    @asynccontextmanager
    async def using(self, models: Iterable[str]) -> AsyncIterator[None]:
        self.used = frozenset(models)
        yield
        self.used = frozenset()

    async def await_model(self, name: str) -> None:
        self.awaited.append(name)
        await self.started.wait()
        self.cards = [self.card(name)]

    def card(self, name: str) -> ModelCard:
        return ModelCard(name=name, tokenizer_sha256=self.sha256)

    async def list_models(self) -> list[ModelCard]:
        self.num_lists += 1
        await asyncio.sleep(0)
        if isinstance(self.cards, StatusError):
            raise self.cards
        return self.cards

    async def get_tokenizer(self, sha256: str) -> bytes:
        assert sha256 == self.sha256
        self.num_bundles += 1
        self.used_at_bundles.append(self.used)
        return self.bundle


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def parts(tiny_bundle: bytes) -> Iterator[tuple[FakeUpstream, Clock, Models]]:
    upstream, clock = FakeUpstream(tiny_bundle), Clock()
    with ThreadPoolExecutor(1) as executor:
        models = Models(upstream, executor, clock, settle_s=0.0)  # type: ignore[arg-type]
        yield upstream, clock, models
        models.close()


async def failure(models: Models, name: str) -> StatusError:
    with pytest.raises(StatusError) as caught:
        await models.find(name)
    return caught.value


async def test_nothing_is_ready_until_a_model_is_listed_and_its_tokenizer_loaded(parts: Any) -> None:
    upstream, clock, models = parts
    assert not models.ready
    assert (await failure(models, "a")).reason is Reason.NO_CAPACITY
    assert not models.ready
    upstream.cards = [upstream.card("a")]
    clock.now_s += 1
    assert (await models.find("a")).name == "a"
    assert models.ready
    assert (upstream.num_lists, upstream.num_bundles) == (2, 1)


@pytest.mark.parametrize("name", ["a", ""])
async def test_a_model_on_demand_is_awaited_with_its_tokenizer(parts: Any, name: str) -> None:
    upstream, clock, models = parts
    upstream.on_demand = frozenset({"a"})
    assert [(listed.name, listed.state) for listed in await models.overview()] == [("a", "unloaded")]
    assert models.ready
    clock.now_s += 1
    asked = asyncio.create_task(models.find(name))
    while not upstream.awaited:
        await asyncio.sleep(0)
    assert not asked.done()
    upstream.started.set()
    assert (await asked).name == "a"
    assert upstream.awaited == ["a"]
    assert (upstream.used_at_bundles, upstream.used) == ([{"a"}], set()), "it is not idle while its tokenizer loads"
    assert [(listed.name, listed.state) for listed in await models.overview()] == [("a", "loaded")]
    with pytest.raises(StatusError) as caught:
        await models.find("b")
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


async def test_models_with_the_same_bundle_share_a_tokenizer(parts: Any) -> None:
    upstream, _, models = parts
    upstream.cards = [upstream.card("b"), upstream.card("a")]
    assert [model.name for model in await models.listed()] == ["a", "b"]
    assert (await models.find("a")).text is (await models.find("b")).text
    assert upstream.num_bundles == 1


async def test_an_unknown_name_refreshes_once_and_not_again_at_once(parts: Any) -> None:
    upstream, clock, models = parts
    upstream.cards = [upstream.card("a")]
    await models.listed()
    errors = await asyncio.gather(*(failure(models, "b") for _ in range(5)))
    assert {error.reason for error in errors} == {Reason.MODEL_NOT_FOUND}
    assert upstream.num_lists == 2
    upstream.cards = [upstream.card("a"), upstream.card("b")]
    clock.now_s += 1
    assert (await models.find("b")).name == "b"


async def test_an_empty_name_means_the_only_model(parts: Any) -> None:
    upstream, clock, models = parts
    upstream.cards = [upstream.card("a")]
    assert (await models.find("")).name == "a"
    upstream.cards = [upstream.card("b"), upstream.card("c")]
    clock.now_s += MAX_LIST_AGE_S + 1
    await models.listed()
    error = await failure(models, "")
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "model")


async def test_a_list_is_used_for_a_while_and_then_asked_for_again(parts: Any) -> None:
    upstream, clock, models = parts
    upstream.cards = [upstream.card("a")]
    await models.listed()
    clock.now_s += MAX_LIST_AGE_S - 1
    await models.listed()
    assert upstream.num_lists == 1
    clock.now_s += 2
    upstream.cards = StatusError(Reason.WORKER_LOST, "no router")
    with pytest.raises(StatusError, match="no router"):
        await models.listed()
    assert models.ready  # what is known is good for some seconds more
    clock.now_s += MAX_LIST_AGE_S
    assert not models.ready


async def test_a_model_that_is_gone_can_be_asked_for_until_it_is_forgotten(parts: Any) -> None:
    upstream, clock, models = parts
    upstream.cards = [upstream.card("a")]
    await models.listed()
    upstream.cards = []
    clock.now_s += MAX_LIST_AGE_S + 1
    assert await models.listed() == []
    assert not models.ready
    assert (await models.find("a")).name == "a"
    clock.now_s += FORGET_AFTER_S
    await models.listed()
    assert (await failure(models, "a")).reason is Reason.NO_CAPACITY


async def test_a_bundle_that_cannot_be_used_is_told_and_tried_again_later(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, clock, models = parts

    def refuse(raw: bytes, named_templates: object = None) -> Any:
        raise BundleError("openvino_tokenizer.bin is missing")

    upstream.cards = [upstream.card("a")]
    with monkeypatch.context() as patched:
        patched.setattr(models_module, "load_text_side", refuse)
        error = await failure(models, "a")
    assert (error.reason, "openvino_tokenizer.bin" in error.message) == (Reason.INTERNAL, True)
    clock.now_s += 1
    assert (await failure(models, "a")).reason is Reason.INTERNAL
    assert upstream.num_bundles == 1
    clock.now_s += RETRY_BUNDLE_AFTER_S
    assert (await models.find("a")).name == "a"


async def test_a_gateway_that_has_just_started_lets_requests_wait_for_the_list(parts: Any) -> None:
    upstream, clock, _ = parts
    with ThreadPoolExecutor(1) as executor:
        models = Models(upstream, executor, clock)
        asked = asyncio.create_task(models.find("a"))
        while not upstream.num_lists:
            await asyncio.sleep(0)
        upstream.cards = [upstream.card("a")]
        running = asyncio.create_task(models.run())
        assert (await asked).name == "a"
        running.cancel()
        clock.now_s += 1
        assert (await failure(models, "b")).reason is Reason.MODEL_NOT_FOUND
        models.close()


async def test_routers_that_do_not_answer_are_in_the_log_once_and_when_they_do_again(
    parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    upstream, clock, models = parts
    caplog.set_level("INFO", "headrace.gateway.text.models")

    def told() -> list[tuple[str, str]]:
        entries = [(entry.levelname, entry.getMessage()) for entry in caplog.records]
        return [entry for entry in entries if "router" in entry[1]]

    upstream.cards = StatusError(Reason.UNAUTHENTICATED, "the join token is not valid")
    for _ in range(10):
        await failure(models, "a")
        clock.now_s += 1
    assert told() == [
        (
            "WARNING",
            "no router answers, so no model is known to be ready; still trying: the join token is not valid",
        )
    ]
    upstream.cards = [upstream.card("a")]
    await models.find("a")
    assert told()[-1] == ("INFO", "a router answers again after 10 s")
    upstream.cards = StatusError(Reason.WORKER_LOST, "gone")
    await failure(models, "b")
    assert len(told()) == 2
