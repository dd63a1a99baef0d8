"""Sizes from headers, and decoding: equal to Pillow's on files that are whole, refused in our words on others."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import re
import struct
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from headrace.common.vision import header as header_module
from headrace.common.vision.bounds import check_size
from headrace.common.vision.decode import decode
from headrace.common.vision.header import ImageError, ImageHeader, read_header
from tests.common.vision.image_files import encoded, files, with_chunk, with_segment
from tests.common.vision.pictures import picture

# What transformers makes of the same files; write_references.py says how it was made.
REFERENCES: dict[str, dict[str, dict[str, str]]] = json.loads((Path(__file__).parent / "references.json").read_text())


def as_loaded(data: bytes) -> Image.Image:
    """A picture as transformers' load_image reads it: upright."""
    found = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert found is not None
    # A palette with several alphas is converted by way of RGBA; without, Pillow does the same and warns.
    return found.convert("RGBA") if isinstance(found.info.get("transparency"), bytes) else found


@pytest.mark.parametrize("name", files())
def test_size_and_pixels_are_those_of_the_upright_picture(name: str) -> None:
    data = files()[name]
    expected = as_loaded(data)
    header = read_header(data)
    assert (header.width, header.height) == expected.size
    assert header.format.lower() == name.split("-")[0]
    image = decode(data, header)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(expected.convert("RGB")))


def test_orientations_turn_sizes() -> None:
    assert all(read_header(data).stored_size == (23, 17) for data in files().values())
    for kind in ("png", "jpeg", "webp"):
        headers = [read_header(files()[f"{kind}-exif-{orientation}"]) for orientation in range(11)]
        assert [header.orientation for header in headers] == [1, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1]
        assert [header.width for header in headers] == [23] * 5 + [17] * 4 + [23] * 2


def hashed(image: Image.Image) -> str:
    array = np.asarray(image)
    return f"{'x'.join(map(str, array.shape))} {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"


@pytest.mark.parametrize("version", REFERENCES)
def test_pixels_are_those_that_transformers_reads(version: str) -> None:
    wanted = REFERENCES[version]["files"]
    assert set(wanted) == set(files())
    assert {name: hashed(decode(data, read_header(data))) for name, data in files().items()} == wanted


def test_transparent_pixels_are_laid_on_white_as_transformers_does() -> None:
    wanted = REFERENCES["5.24.0"]["files on white"]
    found = {name: decode(data, read_header(data), white_under_alpha=True) for name, data in files().items()}
    assert {name: hashed(image) for name, image in found.items()} == wanted
    changed = {name for name in wanted if wanted[name] != REFERENCES["5.24.0"]["files"][name]}
    assert changed >= {"png-alpha", "png-grey-alpha", "png-palette-alphas", "webp-alpha", "gif-transparent"}
    assert not changed & {"png", "jpeg-cmyk", "png-16-bit", "gif"}


def test_only_the_first_frame_is_decoded() -> None:
    for name in ("png-animated", "webp-animated", "gif-animated"):
        data = files()[name]
        assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
        first = Image.open(io.BytesIO(data))
        assert np.array_equal(np.asarray(decode(data, read_header(data))), np.asarray(first.convert("RGB")))


def test_a_first_frame_beyond_the_screen_enlarges_it() -> None:
    gif = bytearray(encoded(Image.fromarray(picture(40, 30)), "GIF"))
    gif[6:10] = struct.pack("<HH", 7, 5)
    header = read_header(bytes(gif))
    assert (header.width, header.height) == (40, 30)
    assert decode(bytes(gif), header).size == (40, 30)


@contextlib.contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fails if Python's memory grows by more, in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def png_of(width: int, height: int) -> bytes:
    """A PNG file whose header has this size, with a few pixels."""
    content = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 0, b"IEND") + struct.pack(">I", zlib.crc32(b"IEND"))
    start = with_chunk(start[:8] + bytes(25) + start[8:], b"IDAT", pixels, at_end=True)
    named = b"IHDR" + content
    return start[:8] + struct.pack(">I", 13) + named + struct.pack(">I", zlib.crc32(named)) + start[33:]


def gif_of(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0)


def webp_of(width: int, height: int) -> bytes:
    sides = (side - 1 for side in (width, height))
    content = bytes([0]) + bytes(3) + b"".join(side.to_bytes(3, "little") for side in sides)
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + content


def jpeg_of(width: int, height: int) -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    return with_segment(b"\xff\xd8\xff\xda\0\x08\1\1\0\0\x3f\0", 0xC0, frame)


BOMBS = {
    "png": png_of(40_000, 25_000),
    "png-widest": png_of(2**31 - 1, 2**31 - 1),
    "jpeg": jpeg_of(65_535, 65_535),
    "gif": gif_of(65_535, 65_535),
    "webp": webp_of(2**24, 200_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_headers(name: str) -> None:
    with memory_below(100_000):
        header = read_header(BOMBS[name])
        with pytest.raises(ImageError, match=r"; at most 50,000,000 are accepted. Make it smaller"):
            check_size(header)


def test_long_images_are_refused() -> None:
    for data in (png_of(65_535, 1), jpeg_of(1, 65_535), gif_of(65_535, 1), webp_of(1, 16_383)):
        with pytest.raises(ImageError, match="one side may be at most 200 times the other. Crop it"):
            check_size(read_header(data))
    check_size(read_header(png_of(2000, 10)))


def test_a_bound_is_exact() -> None:
    check_size(ImageHeader("PNG", 100, 10, 1), max_pixels=1000)
    with pytest.raises(ImageError):
        check_size(ImageHeader("PNG", 1001, 10, 1), max_pixels=10_009)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
def test_images_without_pixels_are_refused(width: int, height: int) -> None:
    with pytest.raises(ImageError, match="without pixels"):
        read_header(png_of(width, height))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the image is empty"),
        (b"\xff\xd8\xff garbage", "the image is a"),
        (b"BM" + bytes(100), "neither PNG, JPEG, WebP nor GIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "neither PNG, JPEG, WebP nor GIF"),
        (b"II*\0" + bytes(100), "neither PNG, JPEG, WebP nor GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "neither PNG, JPEG, WebP nor GIF"),
        (b"RIFF\0\0\0\0WEBPVP9 " + bytes(50), "a WebP file of an unknown kind"),
        (b"GIF89a" + bytes(7) + b";", "a GIF file without a frame"),
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "a PNG file without a header"),
        (b"\xff\xd8" + b"\xff\xe0\0\2" * 30_000, "a JPEG file of too many segments"),
    ],
)
def test_what_is_no_image_is_refused_in_our_words(data: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        read_header(data)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_many_parts_are_not_walked_for_long() -> None:
    """Each of these would take seconds in Python."""
    comment = b"GIF89a" + bytes(7) + b"!\xfe" + b"\1a" * 2_000_000
    chunks = png_of(5, 5)[:33] + struct.pack(">I4sI", 0, b"abCd", 0) * 500_000
    for data in (comment, chunks, b"\xff\xd8\xff" + b"\0\xff" * 4_000_000, b"\xff\xd8" + b"\xff" * 8_000_000):
        with pytest.raises(ImageError):
            read_header(data)


def test_of_many_texts_one_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    inflated = []
    monkeypatch.setattr(header_module, "_inflated", lambda text: inflated.append(text) or b"")
    chunk = with_chunk(files()["png"], b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"text"), at_end=False)
    start, chunk = chunk[:33], chunk[33 : -len(files()["png"]) + 33]
    assert read_header(start + chunk * 1000 + files()["png"][33:]).width == 23
    assert len(inflated) == 1


def test_scans_of_a_jpeg_are_bounded() -> None:
    data = files()["jpeg-progressive"]
    first = data.rindex(b"\xff\xda")
    more = data[:-2] + data[first:-2] * 100 + data[-2:]
    with pytest.raises(ImageError, match="a JPEG file of too many scans"):
        read_header(more)
    assert read_header(data[:-2] + data[first:-2] * 50 + data[-2:]).width == 23


def test_inflated_text_is_bounded() -> None:
    packed = b"Raw profile type exif\0\0" + zlib.compress(bytes(50_000_000), 9)
    data = with_chunk(files()["png"], b"zTXt", packed, at_end=False)
    with memory_below(8_000_000):
        assert read_header(data).orientation == 1


@pytest.mark.parametrize("name", ["png", "jpeg", "jpeg-progressive", "webp", "webp-animated", "gif"])
def test_truncated_files_are_refused(name: str) -> None:
    data = files()[name]
    # The last 16 bytes of a PNG file only tell that it ends.
    for length in range(0, len(data) - 18, max(1, len(data) // 60)):
        with pytest.raises(ImageError, match=r"^the image (is|ends|'s)"):
            decode(data[:length], read_header(data[:length]))


def test_a_picture_of_another_size_than_its_header_is_refused() -> None:
    """So memory is never more than what was checked."""
    data = files()["png"]
    with pytest.raises(ImageError, match="not the one that its header gives"):
        decode(data, ImageHeader("PNG", 24, 17, 1))
    with pytest.raises(ImageError, match="broken GIF file"):
        decode(data, ImageHeader("GIF", 23, 17, 1))


def test_decoding_warns_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in files().values():
            decode(data, read_header(data))
    assert capfd.readouterr() == ("", "")


def test_headers_are_read_without_a_decoder() -> None:
    tree = ast.parse(Path(header_module.__file__).read_text())
    imports = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imports |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imports} <= sys.stdlib_module_names


def test_messages_tell_nothing_of_the_process() -> None:
    for name in ("png", "jpeg", "webp", "gif"):
        data = files()[name]
        with pytest.raises(ImageError) as caught:
            decode(data[: len(data) * 2 // 3], read_header(data))
        assert not re.search(r"0x|BytesIO|PIL|libjpeg|object", str(caught.value))
