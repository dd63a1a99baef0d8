"""Requests with hostile images, made up from a seed: files of all kinds, broken ones, bombs, odd base64, odd URLs."""

from __future__ import annotations

import base64
import contextlib
import functools
import random
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tests.common.vision.image_files import OURS, SIGNATURES, WRITERS, encoded, written

PROTOCOLS = ("chat", "responses", "messages", "ollama", "generate", "completions")
WORDS = (
    "<image>",
    "<|image_pad|>",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "</s>",
    "![](http://127.0.0.1/a.png)",
    "![](data:image/png;base64,iVBORw0KGgo=)",
    "<start_of_image><image_soft_token><end_of_image>",
    "<fake_token_around_image><global-img><image>",
    "[IMG][IMG_BREAK][IMG_END]",
    "<|image|>",
    "<|image_1|>",
    "<image>" * 500,
)
# Hosts, as many ways to write addresses of the network behind the gateway as there are.
HOSTS = (
    *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "0.0.0.0", "10.0.0.1"),
    *("169.254.169.254", "192.168.0.1", "100.64.0.1", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[fd00::1]", "[::127.0.0.1]", "metadata.google.internal"),
    # Written out, mapped, translated by NAT64 and SIIT, tunnelled by 6to4, Teredo and ISATAP, with zones, of old kinds.
    *("[0:0:0:0:0:0:0:1]", "[0000::0001]", "[::FFFF:127.0.0.1]", "[::ffff:0:0]", "[::ffff:169.254.169.254]"),
    *("[::ffff:0:127.0.0.1]", "[64:ff9b::169.254.169.254]", "[64:ff9b:1::7f00:1]", "[2002:a9fe:a9fe::1]"),
    *("[2001:0:7f00:1::80ff:fffe]", "[fe80::5efe:7f00:1]", "[fe80::1%25lo]", "[fe80::1%25]", "[fe80::1%lo]"),
    *("[::1%25lo]", "[::1%lo]", "[fec0::1]", "[ff02::1]", "[fd00:ec2::254]", "[100::1]", "[::1", "::1", "[v1.a]"),
    *("[::1].example", "[::ffff:127.0.0.1.]", "[::ffff:0x7f.1]", "127。0。0。1", "①②⑦.0.0.1", "127.0.0.1%00.example"),
    *("six.example", "rebinding.example", "mixed.example", "allowed.example", "allowed.example.", "ALLOWED.EXAMPLE"),
    "a" * 300,
)


_REMEDY = re.compile(
    r"[.;:,] (?:or )?"
    r"(?:choose|compute|convert|crop|expand|give|leave|make|models that|put|remove|save|scale|send|write)\b",
    re.IGNORECASE,
)


def has_remedy(refusal: str) -> bool:
    """Whether the text of a refusal says what to do."""
    return _REMEDY.search(refusal) is not None


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request: its path and its body."""

    path: str
    body: Mapping[str, Any]


def requests(seed: int, number: int, model: str, port: int) -> Iterator[Hostile]:
    """So many requests to a model. `port` is one on loopback that nobody may call."""
    draw = random.Random(seed)
    for _ in range(number):
        yield _request(draw, model, port)


def _request(draw: random.Random, model: str, port: int) -> Hostile:
    urls = [_url(draw, port) for _ in range(draw.choice((1, 1, 1, 2, 3, 40)))]
    words = " ".join(draw.choices((*WORDS, "what is in the picture ?"), k=draw.randint(0, 3)))
    protocol = draw.choice(PROTOCOLS)
    if protocol == "chat":
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": draw.choice(_DETAILS)}} for url in urls]
        role = draw.choice(("user", "user", "user", "system", "tool", "assistant"))
        message = {"role": role, "content": _mixed(draw, parts, {"type": "text", "text": words})}
        return Hostile("/v1/chat/completions", {"model": model, "max_tokens": 2, "messages": [message]})
    if protocol == "responses":
        inputs = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
        item = {"role": "user", "content": _mixed(draw, inputs, {"type": "input_text", "text": words})}
        return Hostile("/v1/responses", {"model": model, "max_output_tokens": 2, "store": False, "input": [item]})
    if protocol == "messages":
        blocks = [{"type": "image", "source": _source(draw, url)} for url in urls]
        turn = {"role": "user", "content": _mixed(draw, blocks, {"type": "text", "text": words or "?"})}
        return Hostile("/v1/messages", {"model": model, "max_tokens": 2, "messages": [turn]})
    if protocol == "completions":
        tokens = [draw.choice((1, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -1)) for _ in range(draw.randrange(1, 30))]
        prompt = draw.choice((words or "?", f"{words}{urls[0][:300]}", tokens))
        return Hostile("/v1/completions", {"model": model, "max_tokens": 2, "prompt": prompt})
    raw = [url.partition(",")[2] or url for url in urls]
    options = {"num_predict": 2}
    if protocol == "ollama":
        said = {"role": "user", "content": words, "images": raw}
        return Hostile("/api/chat", {"model": model, "stream": False, "options": options, "messages": [said]})
    body = {"model": model, "stream": False, "options": options, "prompt": words or "?", "images": raw}
    return Hostile("/api/generate", body)


_DETAILS = ("low", "high", "auto", "original", None, "x")


def _mixed(draw: random.Random, parts: Sequence[Any], text: Any) -> list[Any]:
    found = [*parts, text]
    draw.shuffle(found)
    return found


def _source(draw: random.Random, url: str) -> dict[str, Any]:
    if url.startswith("data:"):
        return {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": draw.choice(("url", "url", "file", "x")), "url": url}


def _url(draw: random.Random, port: int) -> str:
    if draw.random() < 0.3:
        return _remote(draw, port)
    text = base64.b64encode(_file(draw)).decode()
    kind = draw.randrange(12)
    if kind == 0:
        text = text[: draw.randrange(len(text) + 1)]
    elif kind == 1:
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice("\\\n -_=%ä\0") + text[place:]
    start = draw.choice(_STARTS)
    return start + text if draw.random() < 0.97 else draw.choice(("data:,", "data:", "", "file:///etc/passwd")) + text


_STARTS = ("data:image/png;base64,", "data:;base64,", "data:image/svg+xml;base64,", "DATA:image/x;BASE64,")


def _remote(draw: random.Random, port: int) -> str:
    host = draw.choice((draw.choice(HOSTS), "allowed.example", "allowed.example"))
    scheme = draw.choice(("http", "https", "http", "https", "http", "HTTPS", "ftp", "gopher", "file", "javascript"))
    forms = (
        f"{scheme}://{host}:{port}/a.png",
        f"{scheme}://{host}/a.png",
        f"{scheme}://allowed.example@{host}:{port}/",
        f"{scheme}://allowed.example\\@{host}:{port}/",
        f"{scheme}://{host}:{port}\\.allowed.example/",
        f"{scheme}://allowed.example:{port}@{host}/#@allowed.example",
        f"{scheme}:///{host}/",
        f"//{host}:{port}/",
        f"{scheme}://{host}:{port}/%0d%0aX: y",
        f"{scheme}://{host}:{port}/\r\nHost: allowed.example\r\n",
        f"{scheme}://{host}:{draw.choice(('', '0', '99999', '-1', '8a'))}/",
    )
    return draw.choice((draw.choice(forms), forms[0]))


def _file(draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind < 3:
        return draw.choice(_files())
    if kind < 7:
        return _mutated(draw, draw.choice(_files()))
    return draw.choice(_BOMBS)(draw)


@functools.cache
def _files() -> tuple[bytes, ...]:
    """Small pictures in all formats that Pillow can write here, and the begin of files of others."""
    found = []
    for mode in ("RGB", "RGBA", "L", "P", "1", "CMYK", "LA", "I;16"):
        for size in ((1, 1), (3, 5), (40, 30)):
            for kind in sorted(OURS):
                with contextlib.suppress(OSError, ValueError):
                    found.append(encoded(Image.new(mode, size), kind))
    found += [written(Image.new("RGB", (20, 30)), kind) for kind in sorted({*WRITERS, *SIGNATURES} - OURS)]
    frames = [Image.new("P", (20, 20), colour) for colour in range(20)]
    found.append(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    return tuple(found)


def _mutated(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 50))):
        place = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                del found[place:]
            case 1:
                found[place : place + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
            case 2:
                found[place : place + 4] = struct.pack(">I", draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)))
            case _:
                found[place : place + 1] = bytes([draw.randrange(256)])
    return bytes(found)


def png(width: int, height: int, rows: bytes, kind: int = 2) -> bytes:
    """A PNG file of this size with these compressed rows."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _many_pixels(draw: random.Random) -> bytes:
    side = draw.choice((8_000, 65_535, 2**31 - 1))
    return png(side, draw.choice((1, side)), zlib.compress(bytes(1000)))


def _inflating(draw: random.Random) -> bytes:
    return png(200, 150, zlib.compress(bytes(draw.choice((10, 90_150, 5_000_000)))))


def _many_chunks(draw: random.Random) -> bytes:
    whole = png(8, 8, zlib.compress(bytes(8 * 25)))
    return whole[:33] + b"\0\0\0\0tEXt\x99\x8f\x8d\x1e" * draw.choice((10, 10_000, 25_000)) + whole[33:]


def _webp(draw: random.Random) -> bytes:
    size = struct.pack("<I", draw.choice((1, 0xFFFFFF)))[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes([draw.randrange(256)]) + b"\0\0\0" + size + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _gif(draw: random.Random) -> bytes:
    return b"GIF89a" + struct.pack("<HH", 65535, draw.choice((1, 65535))) + draw.randbytes(20)


def _jpeg(draw: random.Random) -> bytes:
    frame = (
        b"\xff\xc0\0\x11\x08" + struct.pack(">HH", draw.choice((0, 1, 65535)), 65535) + b"\x03\x01\x22\0\x02\x11\x01"
    )
    return b"\xff\xd8" + b"\xff\xe0\0\x02" * draw.choice((0, 30_000)) + frame + draw.randbytes(30)


_BOMBS = (_many_pixels, _inflating, _many_chunks, _webp, _gif, _jpeg)
