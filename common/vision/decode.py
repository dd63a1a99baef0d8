"""Decodes an image: for the process that encodes images, and for nothing else.

Pillow is told the one format that the header has, so that none of its other decoders sees the file. Memory is bounded
by the size that the header says, which the caller has checked (`bounds.py`).
"""

from __future__ import annotations

import io
import warnings

from PIL import Image

from headrace.common.vision.header import ImageError, ImageHeader

# `bounds.py` has the bound on pixels; Pillow's own would refuse some images without saying why.
Image.MAX_IMAGE_PIXELS = None

# How a stored picture is turned, by its orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, header: ImageHeader, *, white_under_alpha: bool = False) -> Image.Image:
    """The first picture of an image file, upright, in mode RGB, of the header's size.

    Transparent pixels get what the file stores under them, or are laid on white. Raises `ImageError` if the file is
    truncated or broken, or is not what its header says.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened = Image.open(io.BytesIO(data), formats=(header.format,))
            if opened.size != header.stored_size:
                raise ImageError("the image's size is not the one that its header gives. Save it anew")
            opened.load()
            # A copy: what the decoder holds goes with it.
            image = _on_white(opened) if white_under_alpha else opened.convert("RGB")
            del opened
            return image.transpose(_TURNS[header.orientation]) if header.orientation in _TURNS else image
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("the image is too large to decode. Make it smaller") from None
    # Decoders raise nearly any exception on broken files, and their texts tell of the process.
    except Exception:
        name = "WebP" if header.format == "WEBP" else header.format
        raise ImageError(f"the image is a truncated or broken {name} file. Send the whole file") from None


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    upper = image if image.mode == "RGBA" else image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
