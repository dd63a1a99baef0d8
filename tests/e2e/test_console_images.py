"""Images in the web console, in a real browser, in front of a model that tells what is drawn."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import Browser, browser, chromium
from tests.e2e.console_page import DONE, ask, fresh_page, give_files
from tests.e2e.serving import MODEL as SERVED
from tests.e2e.serving import Serve, serving
from tests.e2e.shapes import MODEL as SHAPES
from tests.e2e.shapes import TOKENS_PER_PICTURE, Question, questions, swapped

pytestmark = pytest.mark.e2e
ONE, TWO, TWO_SWAPPED = questions()[0], questions()[1], swapped()[0]
MAX_IMAGES = 16
FLAGS = ("--threads", "1", "--execution-mode", "accuracy", "--kv-precision", "f32", "--max-images", str(MAX_IMAGES))
ANSWERS = "return [...document.querySelectorAll('.answer > .prose')].map((one) => one.textContent.trim())"
ATTACHED = "return [...document.querySelectorAll('.attached img')].map((one) => one.alt)"
KEPT = """return await new Promise((resolve) => {
  const opening = indexedDB.open('headrace', 1);
  opening.onsuccess = () => {
    const counting = opening.result.transaction('images').objectStore('images').count();
    counting.onsuccess = () => { opening.result.close(); resolve(counting.result); };
  };
});"""
# What the page makes of a file, with the colours of the four corners, each seen at a tenth of the sides.
MADE = """const { imageOf } = await import('/console/images.js');
const [type, text] = arguments;
const file = new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], 'a', {type});
const { about, blob } = await imageOf(file);
const seen = async (source) => {
  const bitmap = await createImageBitmap(source);
  const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext('2d', {willReadFrequently: true});
  context.drawImage(bitmap, 0, 0);
  const at = (x, y) => [...context.getImageData(x * bitmap.width, y * bitmap.height, 1, 1).data];
  return [at(.1, .1), at(.9, .1), at(.1, .9), at(.9, .9)];
};
const thumbnail = await (await new Response(Uint8Array.from(
  atob(about.thumbnail.split(',')[1]), (one) => one.charCodeAt(0)), {headers: {'Content-Type': 'image/jpeg'}})).blob();
return {width: about.width, height: about.height, type: blob.type, bytes: blob.size, original: file.size,
  sent: await seen(blob), shown: await seen(thumbnail), thumbnail: about.thumbnail.length};"""


@pytest.fixture(scope="module")
def served() -> Iterator[Serve]:
    """Skips before anything starts if there is no browser."""
    chromium()
    with serving("--workers", "1", *FLAGS, model=SHAPES) as system:
        yield system


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(served: Serve, tab: Browser) -> Iterator[Browser]:
    yield from fresh_page(served, tab)


def files_of(question: Question) -> list[tuple[str, str, bytes]]:
    return [(f"picture {i}.png", "image/png", picture) for i, picture in enumerate(question.pictures, 1)]


def give(page: Browser, kind: str, question: Question) -> None:
    """Paste or drop the pictures of a question, and wait for their thumbnails."""
    assert give_files(page, kind, *files_of(question))
    page.until("return document.querySelectorAll('.attached li').length === arguments[0]", len(question.pictures))


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_attached_picture_is_read(page: Browser, tmp_path: Path) -> None:
    path = tmp_path / "drawn.png"
    path.write_bytes(ONE.pictures[0])
    page.type("#files", str(path))
    page.until("return document.querySelectorAll('.attached li').length === 1")
    assert page.run(ATTACHED) == ["Image drawn.png"]
    assert page.run("return document.activeElement.id") == "prompt"
    ask(page, ONE.text)
    page.until(DONE)
    assert page.run(ANSWERS) == [ONE.reference]
    assert page.run(ATTACHED) == []
    assert page.run("return [...document.querySelectorAll('.sent-images img')].map((one) => one.alt)") == [
        "Image drawn.png"
    ]
    assert page.run("const one = document.querySelector('.sent-images img'); return one.naturalWidth === one.width")
    assert f"{TOKENS_PER_PICTURE} of the prompt for images" in page.text(".figures")


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_pictures_are_sent_in_their_order(page: Browser, kind: str) -> None:
    for question in (TWO, TWO_SWAPPED):
        give(page, kind, question)
        ask(page, question.text)
        page.until(DONE)
        page.click("#new-chat")
    answers = page.run("return JSON.parse(localStorage['headrace.chats']).map((one) => one.messages[1].content.trim())")
    assert answers == [TWO_SWAPPED.reference, TWO.reference]
    assert TWO.reference != TWO_SWAPPED.reference


def test_a_conversation_keeps_its_pictures_until_it_is_deleted(page: Browser, served: Serve) -> None:
    give(page, "drop", ONE)
    ask(page, ONE.text)
    page.until(DONE)
    page.open(served.base_url + "/")
    page.until("return document.querySelector('.sent-images img')?.naturalWidth > 0")
    page.run("window.before = document.querySelector('.answer')")
    page.click("[aria-label='Answer again']")
    page.until("return !window.before.isConnected")
    page.until(DONE)
    assert page.run(ANSWERS) == [ONE.reference]
    assert page.run(KEPT) == 1
    assert page.run("return localStorage['headrace.chats'].length") < 20_000, "pictures are not in localStorage"
    page.run("document.querySelector(\"#chats [aria-label^='Delete']\").click()")
    page.until(KEPT.replace("resolve(counting.result)", "resolve(counting.result === 0)"))


def test_a_question_is_taken_back_with_its_pictures(page: Browser) -> None:
    give(page, "paste", TWO)
    ask(page, TWO.text)
    page.until(DONE)
    page.run("document.querySelector(\"[aria-label='Edit and ask again']\").click()")
    page.until("return document.querySelectorAll('.attached li').length === 2")
    page.click("[aria-label='Remove picture 1.png']")
    assert page.run("return document.activeElement.ariaLabel") == "Remove picture 2.png"
    page.click("[aria-label='Remove picture 2.png']")
    assert page.run("return document.activeElement.id") == "prompt"
    assert page.run("return document.getElementById('attached').hidden")
    give(page, "paste", TWO)
    page.type("#prompt", "", then="Enter")
    page.until("return document.querySelector('.question .versions')?.innerText.includes('2 / 2')")
    page.until(DONE)
    assert page.run(ANSWERS) == [TWO.reference]


def test_a_picture_that_is_gone_is_named_and_not_left_out(page: Browser, served: Serve) -> None:
    give(page, "drop", ONE)
    ask(page, ONE.text)
    page.until(DONE)
    page.run(
        KEPT.replace("transaction('images')", "transaction('images', 'readwrite')").replace(".count()", ".clear()")
    )
    page.open(served.base_url + "/")
    page.until("return document.querySelectorAll('.message').length === 2")
    page.click("[aria-label='Answer again']")
    page.until("return document.querySelector('.ending.error:not([hidden])') !== null")
    assert page.text(".ending.error") == (
        "The image picture 1.png is no longer in this browser; edit its question and attach it again."
    )


def test_what_is_no_image_is_refused_beside_the_field(page: Browser) -> None:
    give_files(page, "drop", ("notes.pdf", "application/pdf", b"%PDF-1.7"))
    page.until("return document.getElementById('attach-problem').textContent !== ''")
    assert page.text("#attach-problem") == (
        "“notes.pdf” is neither an image that this browser can read nor text; attach its text."
    )
    give_files(page, "drop", ("broken.png", "image/png", b"no picture"))
    page.until("return document.getElementById('attach-problem').textContent.includes('broken')")
    assert page.text("#attach-problem") == "“broken.png” is not an image that this browser can read."
    give(page, "drop", ONE)
    assert page.text("#attach-problem") == ""
    give_files(page, "drop", ("broken.png", "image/png", b"no picture"), ("words.txt", "text/plain", b"words"))
    page.until("return document.getElementById('attach-problem').textContent.includes('broken')")
    assert page.text("#attach-problem") == "“broken.png” is not an image that this browser can read."
    assert page.run("return document.querySelectorAll('.attached li').length") == len(ONE.pictures) + 1


def test_more_images_than_the_model_takes_are_refused_before_they_are_sent(page: Browser) -> None:
    give_files(page, "drop", *(files_of(ONE) * (MAX_IMAGES + 1)))
    page.until("return document.getElementById('attach-problem').textContent !== ''")
    assert page.text("#attach-problem") == f"{SERVED} reads at most {MAX_IMAGES} images in a conversation."
    assert len(page.run(ATTACHED)) == MAX_IMAGES


def test_a_refusal_of_the_server_is_shown(page: Browser) -> None:
    """An image that the browser reads and the server does not: one side is more than 200 times the other."""
    made = io.BytesIO()
    Image.new("RGB", (402, 2)).save(made, "PNG")
    give_files(page, "drop", ("thread.png", "image/png", made.getvalue()))
    page.until("return document.querySelectorAll('.attached li').length === 1")
    ask(page, ONE.text)
    page.until("return document.querySelector('.ending.error:not([hidden])') !== null")
    assert "200" in page.text(".ending.error")
    assert all("400 (Bad Request)" in line for line in page.complaints())


def test_a_large_photo_is_scaled_down_upright(page: Browser) -> None:
    colours = [(200, 30, 30), (30, 160, 60), (40, 70, 220), (235, 210, 40)]  # by rows, as it is to be seen
    upright = Image.new("RGB", (3000, 4000))
    for i, colour in enumerate(colours):
        upright.paste(colour, (i % 2 * 1500, i // 2 * 2000, i % 2 * 1500 + 1500, i // 2 * 2000 + 2000))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    for media_type, options in (("image/jpeg", {"format": "JPEG", "quality": 90}), ("image/png", {"format": "PNG"})):
        file = io.BytesIO()
        stored.save(file, exif=exif, **options)
        made = page.run(MADE, media_type, base64_of(file.getvalue()))
        assert (made["width"], made["height"], made["type"]) == (1536, 2048, media_type)
        assert made["bytes"] <= 1 << 20
        assert made["thumbnail"] < 20_000
        for seen in (made["sent"], made["shown"]):
            for pixel, colour in zip(seen, colours, strict=True):
                assert max(abs(a - b) for a, b in zip(pixel, colour, strict=False)) < 12


def test_a_small_file_is_sent_as_it_is_and_other_formats_as_png(page: Browser) -> None:
    made = page.run(MADE, "image/png", base64_of(ONE.pictures[0]))
    assert (made["type"], made["bytes"]) == ("image/png", len(ONE.pictures[0]))
    bitmap = io.BytesIO()
    Image.new("RGB", (30, 20), (1, 2, 3)).save(bitmap, "BMP")
    made = page.run(MADE, "image/bmp", base64_of(bitmap.getvalue()))
    assert (made["type"], made["width"], made["height"], made["sent"][0]) == ("image/png", 30, 20, [1, 2, 3, 255])


def test_all_is_named_and_fits_320_pixels(page: Browser) -> None:
    page.look(width=320, height=640)
    give_files(page, "drop", *(files_of(TWO) * 4))
    page.until("return document.querySelectorAll('.attached li').length === 8")
    assert page.run("return document.documentElement.scrollWidth") <= 320
    nameless = """const named = (one) => one.ariaLabel || one.alt || one.textContent.trim() || one.labels?.length;
    return [...document.querySelectorAll('#chat button, #chat input, #chat textarea, #chat img')]
      .filter((one) => !named(one)).map((one) => one.outerHTML);"""
    assert page.run(nameless) == []
    assert page.run("return document.getElementById('announce').textContent").startswith("Attached picture")
    ask(page, "")
    page.until("return document.querySelectorAll('.sent-images img').length === 8")
    assert page.run("return document.documentElement.scrollWidth") <= 320
    assert page.run(nameless) == []
