"""The gateway makes the same prompts of images as transformers' processors: tokens of texts, marks and images."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.common.model_files.names import BUNDLE_FILES, IMAGE_FILES
from headrace.gateway.chat.conversation import Reader, conversation_of
from headrace.gateway.chat.prompts import Prompts
from headrace.gateway.chat.request import Chat, ChatMessage
from headrace.gateway.images.given import GivenImage, part_of
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.text.image_tokens import shown
from headrace.gateway.text.models import Model, image_tokens_of, load_text_side
from headrace.protos.worker_pb2 import ImageLimits, ModelCard
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import FAMILIES
from tests.architectures.image_processing import PROCESSING
from tests.architectures.image_references import ImagePrompt, prompts_in

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
NAMES = [name for name in PROCESSING if ALL or FAMILIES[name].is_short]
UNBOUNDED = 10**9
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="the environment that exports models is not installed: make test"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def bundle_of(directory: Path) -> bytes:
    """The tokenizer bundle that a worker would hand out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in (*BUNDLE_FILES, *IMAGE_FILES):
            if (directory / name).is_file():
                archive.add(directory / name, name)
    return buffer.getvalue()


def model_in(directory: Path) -> Model:
    """The model without bounds on its images."""
    side = load_text_side(bundle_of(directory))
    limits = ImageLimits(max_images=16, max_pixels=UNBOUNDED, max_bytes=UNBOUNDED, max_view_pixels=UNBOUNDED)
    card = ModelCard(name="m", max_context_tokens=UNBOUNDED, vocab_size=UNBOUNDED, images=limits)
    return Model(card, side, images=image_tokens_of(side.image_files, side.tokenizer, UNBOUNDED))


def messages_of(prompt: ImagePrompt) -> list[ChatMessage]:
    """The chat with the files of its images."""
    files = iter(prompt.images)
    found = []
    for message in prompt.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [part_of(GivenImage(data=next(files))) if one["type"] == "image" else one for one in content]
        found.append(ChatMessage(role=message["role"], content=content))
    return found


@pytest.mark.parametrize("name", NAMES)
async def test_prompts_are_those_of_transformers(name: str, pool: ThreadPoolExecutor) -> None:
    directory = exported([name])[name]
    model = model_in(directory)
    assert model.images is not None
    prompts = Prompts(pool, images=ImageLoader(pool))
    for prompt in prompts_in(directory):
        chat = Chat(messages=messages_of(prompt))
        conversation = conversation_of(chat, model.chat_template(), reader=Reader(model.images.placeholder))
        made = await prompts.of_conversation(model, conversation)
        assert shown(made.token_ids, model.images) == prompt.token_ids
    model.text.tokenizer.close()
