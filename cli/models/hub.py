"""Fetch a model from a hub that speaks the Hugging Face API ($HF_ENDPOINT, $HF_TOKEN).

Only two requests of that API are used: /api/models/REPO/revision/main?blobs=true, which lists the files with sizes and,
for large ones, SHA-256; and /REPO/resolve/COMMIT/PATH, the file itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from headrace.cli.errors import CommandError, CommandFailed
from headrace.cli.models.download import DownloadError, Wanted, download
from headrace.cli.models.model_cache import OPTIONAL_FILES, REQUIRED_FILES
from headrace.cli.models.progress import progress_for

_PUBLIC_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `sha256` (hex) is known for large files only."""

    path: str
    num_bytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files of a repository at one commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class HubChoice:
    """What to download: the files of an OpenVINO model, or one GGUF file to be converted."""

    files: tuple[HubFile, ...]
    gguf: bool


def hub_endpoint() -> str:
    """The hub's address, without a slash at the end."""
    return (os.environ.get("HF_ENDPOINT") or _PUBLIC_ENDPOINT).rstrip("/")


def choose_files(listing: HubListing) -> HubChoice:
    """An OpenVINO model if there is one, else the only GGUF file. Raises CommandError saying what was looked for."""
    by_path = {file.path: file for file in listing.files}
    if "openvino_model.xml" in by_path:
        missing = [name for name in REQUIRED_FILES if name not in by_path]
        if missing:
            raise CommandError(f"{listing.repository} has openvino_model.xml but lacks {', '.join(missing)}")
        return HubChoice(
            tuple(by_path[name] for name in REQUIRED_FILES + OPTIONAL_FILES if name in by_path), gguf=False
        )
    ggufs = [file for file in listing.files if file.path.endswith(".gguf")]
    if len(ggufs) == 1:
        return HubChoice((ggufs[0],), gguf=True)
    if ggufs:
        names = ", ".join(file.path for file in ggufs[:8]) + (", ..." if len(ggufs) > 8 else "")
        raise CommandError(
            f"{listing.repository} has no openvino_model.xml and several GGUF files ({names}); "
            "download the one you want and pull that file"
        )
    raise CommandError(
        f"{listing.repository} has neither openvino_model.xml (an OpenVINO export) nor a .gguf file at its top level "
        f"(looked through {len(listing.files)} files); export it with optimum-cli and pull the directory"
    )


def list_files(client: httpx.Client, repository: str) -> HubListing:
    """The repository's files on its main branch. Raises CommandError."""
    url = f"{hub_endpoint()}/api/models/{quote(repository)}/revision/main"
    try:
        response = client.get(url, params={"blobs": "true"}, headers=_headers())
    except httpx.HTTPError as error:
        raise CommandFailed(
            f"the hub {hub_endpoint()} cannot be reached: {str(error) or type(error).__name__}; "
            "set HF_ENDPOINT to one that can"
        ) from None
    if response.status_code in (401, 403, 404):
        raise CommandError(
            f"{hub_endpoint()} shows no model {repository} (it answered {response.status_code}); "
            "check the name, and set HF_TOKEN if the model needs an account"
        )
    if response.status_code != 200:
        raise CommandFailed(f"{url} answered {response.status_code}")
    return _parsed(response, repository, url)


def _parsed(response: httpx.Response, repository: str, url: str) -> HubListing:
    try:
        answer = response.json()
        files = tuple(_file_of(sibling) for sibling in answer["siblings"])
        return HubListing(repository, str(answer["sha"]), files)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandFailed(f"{url} did not answer with a list of files") from None


def _file_of(sibling: Mapping[str, object]) -> HubFile:
    path, num_bytes, lfs = sibling["rfilename"], sibling.get("size"), sibling.get("lfs")
    if not isinstance(path, str):
        raise TypeError("rfilename")
    sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else None
    return HubFile(path, num_bytes if isinstance(num_bytes, int) else None, sha256 if isinstance(sha256, str) else None)


def download_files(
    client: httpx.Client, listing: HubListing, choice: HubChoice, parts: Path, into: Path
) -> tuple[Path, ...]:
    """Download the chosen files into `into`; large parts wait in `parts`, to be resumed after an interruption."""
    fetched = []
    for file in choice.files:
        url = f"{hub_endpoint()}/{quote(listing.repository)}/resolve/{quote(listing.commit)}/{quote(file.path)}"
        waiting = parts / (file.sha256 or f"{listing.repository.replace('/', '--')}--{file.path}")
        progress = progress_for(f"{listing.repository} {file.path}")
        try:
            with progress:
                download(client, Wanted(url, file.sha256, file.num_bytes, _headers()), waiting, progress)
        except DownloadError as error:
            if error.http_status in (401, 403):
                raise CommandError(f"{error.message}; set HF_TOKEN to a token that may read it") from None
            raise
        target = into / file.path
        waiting.replace(target)
        fetched.append(target)
    return tuple(fetched)


def _headers() -> dict[str, str]:
    token = os.environ.get("HF_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}
