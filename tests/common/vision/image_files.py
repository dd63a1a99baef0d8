"""Image files of all kinds, made with Pillow."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from tests.common.vision.pictures import picture

Image.init()
OURS = frozenset({"PNG", "JPEG", "WEBP", "GIF"})
"""The formats that are read."""
WRITERS = tuple(sorted(Image.SAVE))
"""All formats that Pillow writes here."""
# Of formats that Pillow reads but does not write by itself, and of others that clients come with.
SIGNATURES: Mapping[str, bytes] = {
    "BUFR": b"BUFR\0\0\x34\4",
    "CUR": b"\0\0\2\0\1\0\x20\x20\0\0\0\0\0\0\x30\0\0\0\x16\0\0\0",
    "DCX": b"\xb1\x68\xde\x3a\x0c\0\0\0\0\0\0\0",
    "FITS": b"SIMPLE  =                    T",
    "FLI": b"\x80\0\0\0\x11\xaf\1\0\x40\1\xc8\0\x08\0\3\0",
    "FTEX": b"FTEX\1\0\0\0\x10\0\0\0\x10\0\0\0",
    "GBR": b"\0\0\0\x1c\0\0\0\2\0\0\0\x10\0\0\0\x10\0\0\0\1GIMP",
    "GRIB": b"GRIB\0\0\0\1",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "IMT": b"*IMT width 8\nheight 8\n\x0c",
    "IPTC": b"\x1c\1\x5a\0\2\0\2",
    "JXL": b"\0\0\0\x0cJXL \r\n\x87\n",
    "MCIDAS": b"\0\0\0\0\0\0\0\4\0\0\0\1",
    "MPEG": b"\0\0\1\xb3\x16\0\xf0\x15",
    "PCD": bytes(2048) + b"PCD_IPI",
    "PIXAR": b"\x80\xe8\0\0" + bytes(508),
    "PSD": b"8BPS\0\1\0\0\0\0\0\0\0\3\0\0\0\x08\0\0\0\x08\0\x08\0\3",
    "SUN": b"\x59\xa6\x6a\x95\0\0\0\x08\0\0\0\x08\0\0\0\x18",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/a.png"/></svg>',
    "WMF": b"\xd7\xcd\xc6\x9a\0\0\0\0\0\0",
    "XPM": b'/* XPM */\nstatic char *a[] = {"8 8 2 1",',
    "XVTHUMB": b"P7 332\n#END_OF_COMMENTS\n8 8 255\n",
}
_MODES = ("RGB", "L", "1", "P")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def written(image: Image.Image, kind: str) -> bytes:
    """An image as a file of any format, in the first mode that the format takes; or the format's signature, if Pillow
    does not write it by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in _MODES if kind in Image.SAVE else ():
            with contextlib.suppress(OSError, ValueError):
                return encoded(image.convert(mode), kind)
    return SIGNATURES[kind]


def exif_of(orientation: int) -> Image.Exif:
    """EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "maker"
    return exif


def with_chunk(png: bytes, name: bytes, content: bytes, *, at_end: bool) -> bytes:
    """A PNG file with one more chunk, behind its header or behind its pixels."""
    checksum = zlib.crc32(name + content)
    chunk = struct.pack(">I4s", len(content), name) + content + struct.pack(">I", checksum)
    place = len(png) - 12 if at_end else 33
    return png[:place] + chunk + png[place:]


def with_segment(jpeg: bytes, code: int, content: bytes) -> bytes:
    """A JPEG file with one more segment, which is its first."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, code, len(content) + 2) + content + jpeg[2:]


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'
XMP_ELEMENT = b"<x:xmpmeta><tiff:Orientation>%d</tiff:Orientation></x:xmpmeta>"


@cache
def files() -> Mapping[str, bytes]:
    """By name: pictures of 23 x 17 pixels in every format and mode, turned and not, animated and not."""
    colours = Image.fromarray(picture(23, 17))
    alpha = Image.fromarray(picture(23, 17, 4))
    grey = Image.fromarray(picture(23, 17, 1)[:, :, 0])
    grey_alpha = Image.merge("LA", (grey, alpha.getchannel("A")))
    palette = colours.quantize(16)
    deep = Image.fromarray(picture(23, 17, 1)[:, :, 0].astype(np.uint16) * 257)
    frames = [colours.rotate(90 * turn) for turn in range(3)]
    found = {
        "png": encoded(colours, "PNG"),
        "png-alpha": encoded(alpha, "PNG"),
        "png-grey": encoded(grey, "PNG"),
        "png-grey-alpha": encoded(grey_alpha, "PNG"),
        "png-palette": encoded(palette, "PNG"),
        "png-palette-transparent": encoded(palette, "PNG", transparency=3),
        "png-palette-alphas": encoded(palette, "PNG", transparency=bytes(range(0, 160, 10))),
        "png-colour-transparent": encoded(colours, "PNG", transparency=colours.getpixel((0, 0))),
        "png-16-bit": encoded(deep, "PNG"),
        "png-1-bit": encoded(grey.point(lambda value: 255 * (value > 60), "1"), "PNG"),
        "png-animated": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "jpeg": encoded(colours, "JPEG"),
        "jpeg-grey": encoded(grey, "JPEG"),
        "jpeg-cmyk": encoded(colours.convert("CMYK"), "JPEG"),
        "jpeg-progressive": encoded(colours, "JPEG", progressive=True),
        "jpeg-profile": encoded(colours, "JPEG", icc_profile=bytes(200_000)),
        "webp": encoded(colours, "WEBP"),
        "webp-lossless": encoded(colours, "WEBP", lossless=True),
        "webp-alpha": encoded(alpha, "WEBP"),
        "webp-animated": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": encoded(colours, "GIF"),
        "gif-grey": encoded(grey, "GIF"),
        "gif-transparent": encoded(palette, "GIF", transparency=3),
        "gif-animated": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], comment=b"c" * 1000),
    }
    for orientation in range(11):
        exif = exif_of(orientation)
        found[f"png-exif-{orientation}"] = encoded(colours, "PNG", exif=exif)
        found[f"jpeg-exif-{orientation}"] = encoded(colours, "JPEG", exif=exif)
        found[f"webp-exif-{orientation}"] = encoded(colours, "WEBP", exif=exif)
    png, jpeg = found["png"], found["jpeg"]
    for orientation in (1, 3, 6):
        xmp = XMP % orientation
        found[f"webp-xmp-{orientation}"] = encoded(colours, "WEBP", xmp=xmp)
        found[f"jpeg-xmp-{orientation}"] = encoded(colours, "JPEG", xmp=XMP_ELEMENT % orientation)
        text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp
        found[f"png-xmp-{orientation}"] = with_chunk(png, b"iTXt", text, at_end=False)
        packed = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)
        found[f"png-xmp-packed-{orientation}"] = with_chunk(png, b"iTXt", packed, at_end=False)
        # Data about the picture may follow its pixels.
        raw = exif_of(orientation).tobytes()
        found[f"png-exif-at-end-{orientation}"] = with_chunk(png, b"eXIf", raw[6:], at_end=True)
        profile = b"\nexif\n%8d\n" % len(raw) + raw.hex().encode() + b"\n"
        keyed = b"Raw profile type exif\0"
        found[f"png-exif-text-{orientation}"] = with_chunk(png, b"tEXt", keyed + profile, at_end=False)
        found[f"png-exif-packed-text-{orientation}"] = with_chunk(
            png, b"zTXt", keyed + b"\0" + zlib.compress(profile), at_end=False
        )
        # EXIF data wins over XMP data, in both orders of bytes.
        found[f"jpeg-exif-8-xmp-{orientation}"] = encoded(colours, "JPEG", exif=exif_of(8), xmp=xmp)
        big = b"MM\0*\0\0\0\x08\0\1" + struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0) + bytes(4)
        found[f"jpeg-exif-big-endian-{orientation}"] = with_segment(jpeg, 0xE1, b"Exif\0\0" + big)
    return found
