"""A gateway in front of a model that reads images and one that reads text only."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway import image_model


@pytest.fixture(scope="session")
def image_files() -> dict[str, bytes]:
    """The files of the model's bundle, without a template."""
    from tests.gateway.conftest import VOCAB, tiny_graphs

    return {**tiny_graphs(True, image_model.MORE_SPECIAL), **image_model.files(len(VOCAB))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seer(image_files: dict[str, bytes], kit_of_module: Any) -> AsyncIterator[Any]:
    """The fake router of both models."""
    async with kit_of_module.serving_model(image_files, image_model.TEMPLATE) as fake:
        sha256 = hashlib.sha256(fake.bundle).hexdigest()
        images = image_model.limits()
        fake.seeing_cards = [
            fake.card(name="seeing", images=images, tokenizer_sha256=sha256),
            fake.card(name="reading", tokenizer_sha256=sha256),
        ]
        fake.cards = fake.seeing_cards
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def view(seer: Any, kit_of_module: Any) -> AsyncIterator[Any]:
    """The gateway in front of both."""
    async with kit_of_module.serving_gateway(seer.address) as running:
        yield running
