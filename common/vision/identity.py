"""The identity of an image in prompts, in KV blocks and in caches.

In the token ids of a prompt, each image token is replaced with a pseudo token: 31 bits of a hash of the image, with the
highest bit set, different for each place. So all code that compares or hashes token ids can tell images apart.
"""

from __future__ import annotations

import hashlib
from array import array

import numpy as np

from headrace.common.vision.family import Detail, ImageFamily

FIRST_PSEUDO_TOKEN = 1 << 31
"""No vocabulary has so many tokens."""


def digest(data: bytes, family: ImageFamily, detail: Detail) -> bytes:
    """SHA-256 of everything that an image's states depend on, except the weights: the file, the settings and the
    detail."""
    settings = family.settings(detail)
    found = hashlib.sha256(b"image\0%d\0" % len(settings))
    found.update(settings)
    found.update(data)
    return found.digest()


def pseudo_tokens(image_digest: bytes, count: int) -> array[int]:
    """The pseudo tokens of an image with `count` image tokens, as unsigned 32-bit integers."""
    raw = hashlib.shake_128(image_digest).digest(4 * count)
    found = array("I")
    found.frombytes((np.frombuffer(raw, "<u4") | np.uint32(FIRST_PSEUDO_TOKEN)).astype(np.uint32).tobytes())
    return found
