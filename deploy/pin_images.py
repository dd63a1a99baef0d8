"""`python deploy/pin_images.py`: hold the images that are not built here to what their tags stand for now.

Every NAME:TAG@sha256:DIGEST in the compose files and manifests gets the digest that the registry has for NAME:TAG, as
`docker buildx imagetools inspect` tells it: that of the index of all platforms.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINNED = re.compile(r"\b([a-z0-9./_-]+:[A-Za-z0-9._-]+)@(sha256:[0-9a-f]{64})\b")


def files() -> list[Path]:
    """The files that may name images."""
    return [ROOT / "compose.yaml", *sorted((ROOT / "deploy").rglob("*.yaml"))]


def renewed(text: str, digest_of: Callable[[str], str]) -> str:
    """The text with each image's digest as `digest_of` gives it for NAME:TAG."""
    return PINNED.sub(lambda found: f"{found[1]}@{digest_of(found[1])}", text)


def digest_of(image: str) -> str:
    """The digest of NAME:TAG in its registry. Raises CalledProcessError if it does not answer."""
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    digest = subprocess.check_output(command, text=True).strip()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest), digest
    return digest


def main() -> None:
    """Rewrite the files, and say what each image is now."""
    known: dict[str, str] = {}

    def cached(image: str) -> str:
        if image not in known:
            known[image] = digest_of(image)
            print(f"{image}@{known[image]}")
        return known[image]

    for path in files():
        path.write_text(renewed(path.read_text(), cached))


if __name__ == "__main__":
    main()
