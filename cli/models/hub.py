"""Fetch a model from a hub that speaks the Hugging Face API ($HF_ENDPOINT, $HF_TOKEN).

Only two requests of that API are used: /api/models/REPO/revision/REVISION?blobs=true, which lists the files with sizes
and, for large ones, SHA-256; and /REPO/resolve/COMMIT/PATH, the file itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from headrace.cli.errors import CommandError, CommandFailed
from headrace.cli.models.download import DownloadError, Wanted, download
from headrace.cli.models.model_cache import download_locks
from headrace.cli.models.progress import progress_for, say
from headrace.cli.models.reference import HubReference
from headrace.cli.models.selection import HubFile, HubListing
from headrace.common.model_files.config import config_in
from headrace.common.model_files.heads import HEADS_CONFIG

_PUBLIC_ENDPOINT = "https://huggingface.co"
_DEFAULT_REVISION = "main"
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 1 << 50


def hub_endpoint() -> str:
    """The hub's address, without a slash at the end."""
    return (os.environ.get("HF_ENDPOINT") or _PUBLIC_ENDPOINT).rstrip("/")


def list_files(client: httpx.Client, reference: HubReference) -> HubListing:
    """The repository's files at the revision. Raises CommandError."""
    revision = reference.revision or _DEFAULT_REVISION
    url = f"{hub_endpoint()}/api/models/{quote(reference.repository)}/revision/{quote(revision, safe='')}"
    try:
        response = client.get(url, params={"blobs": "true"}, headers=_headers())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandFailed(
            f"the hub {hub_endpoint()} cannot be reached: {str(error) or type(error).__name__}; "
            "set HF_ENDPOINT to one that can"
        ) from None
    if response.status_code in (401, 403, 404):
        raise _refusal(reference, response.status_code, response.headers.get("X-Error-Code", ""))
    if response.status_code != 200:
        raise CommandFailed(f"{url} answered {response.status_code}")
    return _parsed(response, reference.repository, url)


def _refusal(reference: HubReference, status: int, code: str) -> CommandError:
    """The error for a 401, 403 or 404, with a remedy. `code` is the hub's X-Error-Code, which mirrors may omit."""
    repository, has_token = reference.repository, _token() is not None
    page = f"{hub_endpoint()}/{repository}"
    if code == "GatedRepo":
        if has_token:
            return CommandError(
                f"{repository} is gated, and the account of HF_TOKEN has no access to it; ask for it at {page}"
            )
        return CommandError(
            f"{repository} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account"
        )
    if code == "RevisionNotFound":
        return CommandError(f"{repository} has no revision {reference.revision or _DEFAULT_REVISION}; see {page}")
    if status == 401 and has_token:
        return CommandError(f"{hub_endpoint()} does not accept the token in HF_TOKEN; make a new one, or unset it")
    if has_token:
        hint = "check the name, and that the account of HF_TOKEN may read it"
    else:
        hint = "check the name, and set HF_TOKEN if the model needs an account"
    return CommandError(f"{hub_endpoint()} shows no model {repository} (it answered {status}); {hint}")


def _parsed(response: httpx.Response, repository: str, url: str) -> HubListing:
    try:
        answer = response.json()
        files = tuple(_file_of(sibling) for sibling in answer["siblings"])
        return HubListing(repository, str(answer["sha"]), files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CommandFailed(f"{url} did not answer with a list of files") from None


def _file_of(sibling: Mapping[str, object]) -> HubFile:
    """A file of the list. ValueError or TypeError if the entry is invalid. Downloads are named by the SHA-256, so a hub
    must not put a path there."""
    path, num_bytes, lfs = sibling["rfilename"], sibling.get("size"), sibling.get("lfs")
    digest = lfs.get("sha256") if isinstance(lfs, Mapping) else None
    if not isinstance(path, str):
        raise TypeError("rfilename")
    if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise ValueError("sha256")
    if not isinstance(num_bytes, int):
        return HubFile(path, None, digest)
    if not 0 <= num_bytes <= _MOST_BYTES:
        raise ValueError("size")
    return HubFile(path, num_bytes, digest)


def present_bytes(listing: HubListing, files: Iterable[HubFile], folder: Path) -> int:
    """Bytes of the files that earlier attempts have left in `folder`."""
    waiting = [_waiting(listing, file, folder) for file in files]
    found = [path for target in waiting for path in (target, target.with_name(f"{target.name}.part"))]
    return sum(path.stat().st_size for path in found if path.is_file())


def lock_files(
    reference: HubReference, listing: HubListing, files: Iterable[HubFile], folder: Path
) -> AbstractContextManager[None]:
    """Context manager that keeps other pulls from downloading the same files into `folder`, and from removing them.
    Models often share files, such as tokenizers."""
    waiting = f"{reference}: another pull downloads some of its files, waiting for that"
    return download_locks([_waiting(listing, file, folder) for file in files], lambda: say(waiting))


def download_files(
    client: httpx.Client, reference: HubReference, listing: HubListing, files: Iterable[HubFile], folder: Path
) -> dict[str, Path]:
    """Download the files into `folder`: path in the repository -> file name there. Existing files are kept, so an
    interrupted download of many files continues where it stopped. The caller holds `lock_files`. Raises
    CommandError."""
    fetched = {}
    for file in files:
        target = _waiting(listing, file, folder)
        if not _is_whole(file, target):
            _download(client, reference, listing, file, target)
        fetched[file.path] = target
    return fetched


def fetched_config(client: httpx.Client, reference: HubReference, listing: HubListing, folder: Path) -> dict[str, Any]:
    """The repository's config.json, downloaded into `folder`; empty if there is none. Raises CommandError."""
    configs = [file for file in listing.files if file.path == HEADS_CONFIG]
    with lock_files(reference, listing, configs, folder):
        found = download_files(client, reference, listing, configs, folder)
        return config_in(found[HEADS_CONFIG]) if found else {}


def _waiting(listing: HubListing, file: HubFile, folder: Path) -> Path:
    """The path of a file until all files are complete: named by its content hash if known, otherwise by commit and
    path."""
    return folder / (file.sha256 or sha256(f"{listing.repository}\n{listing.commit}\n{file.path}".encode()).hexdigest())


def _is_whole(file: HubFile, target: Path) -> bool:
    """Whether an earlier attempt finished the file. Only a finished file has this name and a verified checksum."""
    return file.sha256 is not None and target.is_file() and target.stat().st_size == file.num_bytes


def _download(client: httpx.Client, reference: HubReference, listing: HubListing, file: HubFile, target: Path) -> None:
    url = f"{hub_endpoint()}/{quote(listing.repository)}/resolve/{quote(listing.commit)}/{quote(file.path)}"
    progress = progress_for(f"{listing.repository} {file.path}")
    try:
        with progress:
            download(client, Wanted(url, file.sha256, file.num_bytes, _headers()), target, progress)
    except DownloadError as error:
        if error.http_status in (401, 403):
            raise _refusal(reference, error.http_status, error.hub_code or "GatedRepo") from None
        raise


def _token() -> str | None:
    return os.environ.get("HF_TOKEN") or None


def _headers() -> dict[str, str]:
    token = _token()
    return {"Authorization": f"Bearer {token}"} if token else {}
