"""Reads the size of an image from the header of its file. Nothing is decoded, and no decoder is loaded.

Formats are PNG, JPEG, WebP and GIF. The size is that after the orientation is applied, which EXIF or XMP data in the
file give: cameras store pictures as the sensor lies. `decode.py` holds pictures to what is read here.
"""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Format = Literal["PNG", "JPEG", "WEBP", "GIF"]

_PNG_START = b"\x89PNG\r\n\x1a\n"
_EXIF_START = b"Exif\0\0"
_XMP_START = b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION = 0x0112
# Struct codes of the TIFF types of whole numbers.
_WHOLE_TYPES = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# A code stands behind one 0xff or more.
_JPEG_FILL = re.compile(rb"\xff+")
# Orientations that exchange width and height.
_TURNED = (5, 6, 7, 8)
# More segments or chunks than any writer makes, so that walking over them takes milliseconds.
_MAX_PARTS = 20_000
# Codes of JPEG frames whose scans each add to all pixels.
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# Each scan of such a JPEG goes over all pixels: a file of 1 MB could take a decoder hours.
_MAX_SCANS = 100
_MAX_INFLATED = 1 << 20


class ImageError(ValueError):
    """An image that is refused. Its text is ours, names the remedy, and may be sent to the client."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The facts in the header of an image."""

    format: Format
    width: int
    """In pixels, after the orientation is applied."""
    height: int
    orientation: int
    """1 to 8, as in EXIF: how the stored picture is to be turned and mirrored."""

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height of the picture as it is stored."""
        return (self.height, self.width) if self.orientation in _TURNED else (self.width, self.height)


def read_header(data: bytes) -> ImageHeader:
    """The header of an image file. Raises `ImageError` if the file is none of the four formats, or is broken."""
    if not data:
        raise ImageError("the image is empty. Send the whole file")
    if data.startswith(_PNG_START):
        read, kind = _png, "PNG"
    elif data.startswith(b"\xff\xd8\xff"):
        read, kind = _jpeg, "JPEG"
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        read, kind = _webp, "WebP"
    elif data.startswith((b"GIF87a", b"GIF89a")):
        read, kind = _gif, "GIF"
    else:
        raise ImageError("the image is neither PNG, JPEG, WebP nor GIF. Convert it to one of these")
    try:
        found = read(data)
    except (struct.error, IndexError):
        raise ImageError(f"the image is a {kind} file that ends in its header. Send the whole file") from None
    if found.width < 1 or found.height < 1:
        raise ImageError(f"the image is a {kind} file without pixels: {found.width} x {found.height}. Save it anew")
    return found


def _png(data: bytes) -> ImageHeader:
    """Chunks: length, name, content, checksum. IHDR is the first; data about the picture may follow its pixels."""
    length, name, width, height = struct.unpack_from(">I4sII", data, 8)
    if name != b"IHDR" or length < 13:
        raise ImageError("the image is a PNG file without a header. Send the whole file")
    exif, texts = None, {}
    at = 8
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data) or name == b"IEND":
            break
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"eXIf":
            exif = data[at + 8 : at + 8 + length]
        elif name in (b"zTXt", b"tEXt", b"iTXt") and length < _MAX_INFLATED:
            key, _, text = data[at + 8 : at + 8 + length].partition(b"\0")
            texts[key] = name, text  # inflated below, once: there may be thousands
        at += length + 12
    else:
        raise ImageError("the image is a PNG file of too many chunks. Save it anew")
    name, text = texts.get(b"Raw profile type exif", (b"", b""))
    if exif is None and name in (b"zTXt", b"tEXt"):
        lines = (_inflated(text[1:]) if name == b"zTXt" else text).split(b"\n")
        # A line with the name, one with the length, then hexadecimal digits.
        with contextlib.suppress(ValueError):
            exif = bytes.fromhex(b"".join(lines[3:]).decode("latin-1"))
    name, text = texts.get(b"XML:com.adobe.xmp", (b"", b""))
    return _turned("PNG", width, height, exif or b"", _international_text(text) if name == b"iTXt" else b"")


def _international_text(text: bytes) -> bytes:
    """The text of an iTXt chunk, after its keyword."""
    parts = text[2:].split(b"\0", 2)
    if len(parts) < 3:
        return b""
    return _inflated(parts[2]) if text[0] else parts[2]


def _inflated(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, _MAX_INFLATED)
    except zlib.error:
        return b""


def _jpeg(data: bytes) -> ImageHeader:
    """Segments: 0xff, a code, and with most codes a length and content. Those up to the first scan are read."""
    size, exif, xmp = None, bytearray(), b""
    has_many_scans = False
    for code, content in _jpeg_segments(data):
        if code == 0xE1 and content.startswith(_EXIF_START):
            exif += content[len(_EXIF_START) :]
        elif code == 0xE1 and content.startswith(_XMP_START):
            xmp = content
        elif 0xC0 <= code <= 0xCF and code not in (0xC4, 0xC8, 0xCC):
            height, width, num_components = struct.unpack_from(">HHB", content, 1)
            size = width, height
            has_many_scans = code in _PROGRESSIVE
        elif code == 0xDA and size is not None:
            has_many_scans |= content[0] < num_components
    if size is None:
        raise ImageError("the image is a JPEG file without a size. Send the whole file")
    if has_many_scans and data.count(b"\xff\xda") > _MAX_SCANS:
        raise ImageError("the image is a JPEG file of too many scans. Save it anew")
    return _turned("JPEG", *size, bytes(exif), xmp)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 2
    for _ in range(_MAX_PARTS):
        at = data.find(b"\xff", at)
        if at < 0:
            raise IndexError
        fill = _JPEG_FILL.match(data, at)
        assert fill is not None
        code = data[fill.end()]
        at = fill.end() + 1
        if code in (0x00, 0xC8) or 0xD0 <= code <= 0xD9 or 0xF0 <= code <= 0xFD:
            continue  # these have no content
        if code < 0xC0:
            raise ImageError("the image is a broken JPEG file. Save it anew")
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2 or at + length > len(data):
            raise IndexError
        yield code, data[at + 2 : at + length]
        if code == 0xDA:
            return
        at += length
    raise ImageError("the image is a JPEG file of too many segments. Save it anew")


def _webp(data: bytes) -> ImageHeader:
    """Chunks: name, length, content, and a byte if the length is odd. The first one tells the kind of file."""
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise ImageError("the image is a broken WebP file. Save it anew")
        width, height = struct.unpack_from("<HH", data, 26)
        return _turned("WEBP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        if data[20] != 0x2F:
            raise ImageError("the image is a broken WebP file. Save it anew")
        return _turned("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X":
        raise ImageError("the image is a WebP file of an unknown kind. Save it anew")
    flags, raw_width, raw_height = struct.unpack_from("<B3x3s3s", data, 20)
    wanted = {name: b"" for name, flag in ((b"EXIF", 0x08), (b"XMP ", 0x04)) if flags & flag}
    at = 30
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, at)
        if not wanted.get(name, b"is none"):
            wanted[name] = data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2
    else:
        raise ImageError("the image is a WebP file of too many chunks. Save it anew")
    width, height = (int.from_bytes(raw, "little") + 1 for raw in (raw_width, raw_height))
    return _turned("WEBP", width, height, wanted.get(b"EXIF", b""), wanted.get(b"XMP ", b""))


def _gif(data: bytes) -> ImageHeader:
    """The screen, its colours, extensions and the first frame, which enlarges the screen if it lies beyond."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    in_extension = False
    for _ in range(_MAX_PARTS):
        kind = data[at]
        at += 1
        if in_extension:  # a block of it, by its length; the last one is empty
            in_extension = kind > 0
            at += kind
        elif kind == 0x2C:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at)
            return _turned("GIF", max(width, left + columns), max(height, top + rows))
        elif kind == 0x21:
            in_extension = True
            at += 1
        elif kind == 0x3B:
            raise ImageError("the image is a GIF file without a frame. Save it anew")
    raise ImageError("the image is a GIF file of too many blocks. Save it anew")


def _turned(kind: Format, width: int, height: int, exif: bytes = b"", xmp: bytes = b"") -> ImageHeader:
    """The header of a file with this size, EXIF data and XMP data."""
    orientation = _exif_orientation(exif)
    if orientation is None:
        found = _XMP_ORIENTATION.search(xmp)
        orientation = int(found[1]) if found else 1
    if not 1 <= orientation <= 8:
        orientation = 1
    if orientation in _TURNED:
        width, height = height, width
    return ImageHeader(kind, width, height, orientation)


def _exif_orientation(exif: bytes) -> int | None:
    """The orientation in EXIF data, which is a TIFF file; None if there is none."""
    while exif.startswith(_EXIF_START):
        exif = exif[len(_EXIF_START) :]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    found = None
    with contextlib.suppress(struct.error):
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(order + "HHI", exif, entry)
            if tag != _ORIENTATION or kind not in _WHOLE_TYPES or not length:
                continue
            code = order + _WHOLE_TYPES[kind]
            place = entry + 8
            if length * struct.calcsize(code) > 4:
                (place,) = struct.unpack_from(order + "I", exif, place)
            (found,) = struct.unpack_from(code, exif, place)
    return found
