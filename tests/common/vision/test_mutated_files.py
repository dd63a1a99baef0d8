"""Whatever is sent as an image, reading it either works or raises ImageError."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from PIL import Image

from headrace.common.vision.bounds import check_size
from headrace.common.vision.decode import decode
from headrace.common.vision.header import ImageError, read_header
from tests.common.vision.image_files import OURS, SIGNATURES, WRITERS, files, written
from tests.hostile_images import has_remedy

OTHERS = sorted({*WRITERS, *SIGNATURES} - OURS)
NUM_MUTATED = 4000
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


def read(data: bytes) -> Image.Image:
    """As an encoder reads it."""
    header = read_header(data)
    check_size(header, 1_000_000)
    image = decode(data, header)
    assert image.size == (header.width, header.height)
    assert image.mode == "RGB"
    return image


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data with one to four changes, more of them near its begin."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = int(len(found) * rng.random() ** rng.choice((1, 3)))
        match rng.randrange(7):
            case 0:
                found[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                found[place : place + 1] = bytes([rng.choice(EDGES)])
            case 2:
                found[place : place + 4] = bytes([rng.choice(EDGES)]) * 4
            case 3:
                del found[place:]
            case 4:
                del found[place : place + rng.randint(1, 30)]
            case 5:
                found[place:place] = rng.randbytes(rng.randint(1, 30))
            case 6:
                begin = int(len(found) * rng.random())
                found[place:place] = found[begin : begin + 40]
    return bytes(found)


def all_mutated() -> Iterator[bytes]:
    rng = random.Random(40)
    originals = list(files().values())
    for number in range(NUM_MUTATED):
        yield mutated(originals[number % len(originals)], rng)


def test_mutated_files_are_read_or_refused() -> None:
    num_read, refusals = 0, []
    for data in all_mutated():
        try:
            read(data)
            num_read += 1
        except ImageError as error:
            refusals.append(str(error))
    assert min(num_read, len(refusals)) > NUM_MUTATED / 10
    assert {refusal[:9] for refusal in refusals} == {"the image"}
    assert not [refusal for refusal in set(refusals) if not has_remedy(refusal)]


def test_all_formats_of_pillow_have_a_file_here() -> None:
    assert {*WRITERS, *Image.OPEN} <= {*OTHERS, *OURS}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_refused_or_are_one_of_ours(kind: str) -> None:
    data = written(Image.new("RGB", (64, 64), "red"), kind)
    if kind == "MPO":  # a JPEG file that several pictures may follow
        assert read(data).size == (64, 64)
        return
    with pytest.raises(ImageError, match="neither PNG, JPEG, WebP nor GIF"):
        read(data)
    rng = random.Random(kind)
    for case in (data, *(mutated(data, rng) for _ in range(20))):
        with pytest.raises(ImageError, match=r"^the image"):
            read(case)
    # What another format's decoder would take does not reach it under our formats' signatures.
    for start in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF" + data[4:8] + b"WEBP"):
        with pytest.raises(ImageError, match=r"^the image"):
            read(start + data[len(start) :])


def test_random_bytes_are_refused() -> None:
    rng = random.Random(41)
    for start in (
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"GIF89a",
        b"RIFF\xff\xff\xff\0WEBPVP8X",
        b"RIFF\1\0\0\0WEBP",
    ):
        for _ in range(100):
            with pytest.raises(ImageError, match=r"^the image"):
                read(start + rng.randbytes(rng.randrange(200)))
