"""Images are bounded by their number, length and header before anything is decoded."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.images import loading
from headrace.gateway.images.given import GivenImage, image_of_base64
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.images.local import LocalImages
from headrace.gateway.images.refusal import ImageRefusal, Why
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ImageLimits
from tests.gateway.image_model import RED, b64, png
from tests.hostile_images import has_remedy

LIMITS = ImageLimits(max_images=2, max_pixels=10_000, max_bytes=2000)
MAX_BYTES = 32 << 20


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def load(
    pool: Any, *images: GivenImage, limits: ImageLimits = LIMITS, max_bytes: int = MAX_BYTES, loader: Any = None
) -> Any:
    named = [(f"i{number}", image) for number, image in enumerate(images)]
    return await (loader or ImageLoader(pool)).load(named, limits, max_bytes)


def given(data: bytes) -> GivenImage:
    return GivenImage(base64=b64(data))


async def why(pool: Any, *images: GivenImage, **more: Any) -> tuple[Why, str, str]:
    with pytest.raises(ImageRefusal) as refused:
        await load(pool, *images, **more)
    assert refused.value.field is not None
    assert has_remedy(refused.value.message)
    return refused.value.why, refused.value.field, refused.value.message


async def test_base64_is_decoded_once(pool: Any) -> None:
    image = given(png(30, 20))
    ((data, header),) = await load(pool, image)
    assert (data, header.width, header.height) == (png(30, 20), 30, 20)
    assert (image.base64, image.data) == (None, data), "the text is given up"
    assert (await load(pool, image))[0][0] is data


@pytest.mark.parametrize(
    "text",
    [
        "Q",
        "QUJDQ",
        "QUJDQ===",
        "QUJ\\",
        "QUJD\0",
        "QUJD\xa0",
        "QUJDÄÄÄÄ",
        "%51UJD",
        "QU=D",
        "QQ=",
        "=",
        "=QUJ",
        "====",
        "QQ==QUJD",
        "QQ== QUJD",
        "QUJD" * 40000 + "QQ=Q",
        "QUJD" * (loading._SLICE_CHARS // 4 - 1) + "QQ==" + "QUJD",
        "QUJD" * (loading._SLICE_CHARS // 4 - 1) + "QQ=" + " " * loading._SLICE_CHARS + "QUJD",
    ],
)
async def test_what_is_not_base64_is_refused(pool: Any, text: str) -> None:
    limits = ImageLimits(max_images=1, max_pixels=10, max_bytes=1_000_000)
    found = await why(pool, image_of_base64("i", text), limits=limits)
    assert found[:2] == (Why.FORMAT, "i0")
    assert found[2].startswith("i0 is not valid base64")


def in_lines(text: str, line_break: str) -> str:
    return line_break.join([*(text[start : start + 76] for start in range(0, len(text), 76)), ""])


@pytest.mark.parametrize(
    "form",
    [
        lambda text: in_lines(text, "\n"),
        lambda text: in_lines(text, "\r\n"),
        lambda text: " \t" + " ".join(text) + "\f ",
        lambda text: text.rstrip("="),
        lambda text: text.rstrip("=") + "\n",
        lambda text: text.translate(str.maketrans("+/", "-_")),
        lambda text: text.translate(str.maketrans("+/", "-_")).rstrip("="),
    ],
)
@pytest.mark.parametrize("num_more", range(4))
async def test_base64_may_have_white_space_the_alphabet_for_urls_and_no_padding(
    pool: Any, monkeypatch: pytest.MonkeyPatch, form: Callable[[str], str], num_more: int
) -> None:
    """Wherever slices end."""
    monkeypatch.setattr(loading, "_SLICE_CHARS", 61 + num_more)
    data = png(30, 20) + b"\xfb\xef\xff\xbf"[:num_more]
    ((found, _),) = await load(pool, GivenImage(base64=form(b64(data))))
    assert found == data


async def test_lines_do_not_count_as_bytes_of_an_image(pool: Any) -> None:
    data = RED + bytes(2000 - len(RED))
    ((found, _),) = await load(pool, GivenImage(base64=in_lines(b64(data), "\r\n")))
    assert len(found) == LIMITS.max_bytes
    assert (await why(pool, GivenImage(base64=in_lines(b64(data + b"x"), "\r\n"))))[0] == Why.BYTES


async def test_a_request_that_is_given_up_while_its_base64_is_decoded_may_come_again(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_SLICE_CHARS", 4)
    image = given(RED)
    task = asyncio.create_task(load(pool, image))
    for _ in range(4):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (image.base64, image.data) == (b64(RED), None)
    assert (await load(pool, image))[0][0] == RED


async def test_long_base64_lets_others_have_their_turn(pool: Any) -> None:
    limits = ImageLimits(max_images=1, max_pixels=10_000, max_bytes=15_000_000)
    data = RED + bytes(12_000_000)
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(neighbour())
    assert (await load(pool, given(data), limits=limits))[0][0] == data
    task.cancel()
    assert turns > 50


async def test_lengths_are_checked_before_anything_is_decoded(pool: Any) -> None:
    kinds = await why(pool, GivenImage(base64="!" * 4000))
    assert kinds == (Why.BYTES, "i0", "i0: the image is larger than 2000 bytes, the maximum. Send a smaller file")
    assert (await why(pool, GivenImage(data=bytes(2001))))[0] == Why.BYTES
    assert (await why(pool, *[GivenImage(base64="!")] * 3))[:2] == (Why.NUMBER, "i2")


async def test_all_images_together_are_bounded_and_the_first_that_is_too_much_is_named(pool: Any) -> None:
    limits = ImageLimits(max_images=9, max_pixels=10_000, max_bytes=1000)
    files = [RED + bytes(1000 - len(RED))] * 3
    assert len(await load(pool, *map(given, files), limits=limits, max_bytes=3000)) == 3
    kind, field, message = await why(pool, *map(given, files), limits=limits, max_bytes=1800)
    assert (kind, field) == (Why.BYTES, "i1")
    assert "the images up to this one have more than 1800 bytes" in message
    assert "leave out images of earlier turns" in message
    source: Any = Source(files[0])
    urls = [GivenImage(url=f"https://a.example/{number}.png") for number in range(3)]
    found = await why(pool, *urls, limits=limits, max_bytes=2999, loader=ImageLoader(pool, source))
    assert found[:2] == (Why.BYTES, "i2"), "what is fetched counts when it is here"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(200, 200), Why.PIXELS),
        (png(2000, 2), Why.PIXELS),
        (b"", Why.FORMAT),
        (b"\xff\xd8\xff garbage", Why.FORMAT),
        (b"%PDF-1.7", Why.FORMAT),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Why.FORMAT),
        (b"II*\0" + bytes(100), Why.FORMAT),
        (RED[:20], Why.FORMAT),
    ],
)
async def test_headers_are_checked(pool: Any, data: bytes, kind: Why) -> None:
    found = await why(pool, GivenImage(data=data))
    assert found[0] == kind
    assert "0x" not in found[2], "no address of an object"


async def test_urls_need_the_operators_permission(pool: Any) -> None:
    assert "--allowed-media-domains" in (await why(pool, GivenImage(url="https://a.example/x.png")))[2]
    assert "--allowed-local-media-path" in (await why(pool, GivenImage(url="file:///etc/passwd")))[2]


class Source:
    """A remote source that gives the same file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.num_calls = 0

    async def fetch(self, name: str, url: str, max_bytes: int) -> bytes:
        self.num_calls += 1
        if "missing" in url:
            raise ImageRefusal(Why.FETCH, name, "missing; send another")
        return self.data


async def test_a_url_is_fetched_once_for_a_request_and_its_copies(pool: Any) -> None:
    source: Any = Source(RED)
    loader = ImageLoader(pool, source)
    image = GivenImage(url="https://a.example/x.png")
    for _ in range(2):
        assert (await load(pool, image, loader=loader))[0][0] == RED
    assert source.num_calls == 1


async def test_fetched_bytes_are_bounded_until_they_are_freed(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_FETCHED_BYTES", len(RED))
    source: Any = Source(RED)
    loader = ImageLoader(pool, source)
    image = GivenImage(url="https://a.example/x.png")
    await load(pool, image, loader=loader)
    other = GivenImage(url="https://a.example/x.png")
    with pytest.raises(StatusError) as refused:
        await load(pool, other, loader=loader)
    assert refused.value.reason is Reason.QUEUE_FULL
    del image
    gc.collect()
    assert (await load(pool, other, loader=loader))[0][0] == RED


async def test_a_failure_ends_the_other_fetches(pool: Any) -> None:
    cancelled = asyncio.Event()

    class Slow(Source):
        async def fetch(self, name: str, url: str, max_bytes: int) -> bytes:
            if "missing" in url:
                return await super().fetch(name, url, max_bytes)
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return b""

    source: Any = Slow(RED)
    images = [GivenImage(url="https://a.example/slow"), GivenImage(url="https://a.example/missing")]
    assert (await why(pool, *images, loader=ImageLoader(pool, source)))[:2] == (Why.FETCH, "i1")
    assert cancelled.is_set()


async def test_a_request_fetches_a_few_of_its_images_at_a_time(pool: Any) -> None:
    class Counted(Source):
        num_open = most = 0

        async def fetch(self, name: str, url: str, max_bytes: int) -> bytes:
            self.num_open += 1
            self.most = max(self.most, self.num_open)
            for _ in range(3):
                await asyncio.sleep(0)
            self.num_open -= 1
            return await super().fetch(name, url, max_bytes)

    source: Any = Counted(RED)
    limits = ImageLimits(max_images=99, max_pixels=10_000, max_bytes=2000)
    images = [GivenImage(url=f"https://a.example/{number}") for number in range(3 * loading.MAX_FETCHES_OF_REQUEST)]
    assert len(await load(pool, *images, limits=limits, loader=ImageLoader(pool, source))) == len(images)
    assert (source.most, source.num_calls) == (loading.MAX_FETCHES_OF_REQUEST, len(images))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    allowed = tmp_path / "allowed"
    (allowed / "below").mkdir(parents=True)
    (tmp_path / "allowed-not").mkdir()
    for place in (allowed / "a.png", allowed / "below" / "b c.png", tmp_path / "secret.png"):
        place.write_bytes(RED)
    (tmp_path / "allowed-not" / "a.png").write_bytes(RED)
    (allowed / "large.png").write_bytes(bytes(2001))
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    (allowed / "inner.png").symlink_to(allowed / "a.png")
    (allowed / "up").symlink_to(tmp_path)
    os.mkfifo(allowed / "pipe")
    return allowed


@pytest.mark.parametrize("path", ["a.png", "below/b%20c.png", "below/../a.png", "inner.png"])
async def test_files_below_the_directory_are_read(pool: Any, directory: Path, path: str) -> None:
    loader = ImageLoader(pool, None, LocalImages(directory))
    for start in ("file://", "FILE://localhost"):
        url = f"{start}{directory}/{path}"
        assert (await load(pool, GivenImage(url=url), loader=loader))[0][0] == RED


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "%2e%2e/secret.png",
        "link.png",
        "up/secret.png",
        "../allowed-not/a.png",
        "missing.png",
        "below",
        "",
        "pipe",
        "a.png%00",
    ],
)
async def test_what_is_elsewhere_or_no_file_is_refused_in_one_sentence(pool: Any, directory: Path, path: str) -> None:
    loader = ImageLoader(pool, None, LocalImages(directory))
    began_s = time.monotonic()
    found = await why(pool, GivenImage(url=f"file://{directory}/{path}"), loader=loader)
    assert found[:2] == (Why.URL, "i0")
    assert found[2].startswith("i0: there is no such file where the server may read images; send")
    assert time.monotonic() - began_s < 5, "a pipe does not block"


@pytest.mark.parametrize("url", ["file:/etc/passwd", "file://host/etc/passwd", "file:etc/passwd", "file:///dev/zero"])
async def test_other_files_are_refused(pool: Any, directory: Path, url: str) -> None:
    assert (await why(pool, GivenImage(url=url), loader=ImageLoader(pool, None, LocalImages(directory))))[0] == Why.URL


async def test_large_files_are_not_read(pool: Any, directory: Path) -> None:
    image = GivenImage(url=f"file://{directory}/large.png")
    assert (await why(pool, image, loader=ImageLoader(pool, None, LocalImages(directory))))[0] == Why.BYTES
