"""Fetches models from a hub that speaks the Hugging Face API, with huggingface_hub.

Files go to the Hub's cache (HF_HOME, HF_HUB_CACHE), which other programs share. What is there already is used, and
checked like a download. Tokens, mirrors (HF_ENDPOINT), proxies, resuming and Xet are the library's. It takes more than
half a second to import, so functions import it.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha1
from pathlib import Path
from typing import Any

from headrace.cli.models.download import RETRIED_STATUS, RetryRule, hub_client, named_authorities
from headrace.cli.models.model_cache import sha256_of
from headrace.cli.models.progress import Progress, progress_for, say, stages
from headrace.cli.models.reference import HubReference
from headrace.cli.models.selection import HubFile, HubListing
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.model_files.config import config_in
from headrace.common.model_files.heads import HEADS_CONFIG
from headrace.common.version import headrace_version

_PUBLIC_ENDPOINT = "https://huggingface.co"
_DEFAULT_REVISION = "main"
_COMMIT = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 1 << 50
_LIST_TIMEOUT_S = 30.0
_WATCH_INTERVAL_S = 0.5
# It takes seconds to read a larger file.
_LONG_TO_READ_BYTES = 1 << 30
_HTTP_LIBRARIES = frozenset({"requests", "urllib3"})
"""Whose errors huggingface_hub passes on."""


def hub_endpoint() -> str:
    """The hub's address, without a slash at the end."""
    return (os.environ.get("HF_ENDPOINT") or _PUBLIC_ENDPOINT).rstrip("/")


def hub_cache() -> Path:
    """The folder of the Hub's cache; it need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def made_hub_cache() -> Path:
    """The folder of the Hub's cache; made if missing. Raises CommandError."""
    folder = hub_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"the Hub's cache {folder} cannot be made ({error.strerror}); set HF_HUB_CACHE to another folder"
        ) from None
    return folder


def list_files(reference: HubReference) -> HubListing:
    """The repository's files at the revision. If the hub cannot be reached, those in the Hub's cache. Raises
    CommandError."""
    _prepare()
    from huggingface_hub import HfApi

    revision = reference.revision or _DEFAULT_REVISION
    url = f"{hub_endpoint()}/api/models/{reference.repository}/revision/{revision}"
    try:
        info = HfApi(endpoint=hub_endpoint(), library_name="headrace", library_version=headrace_version()).model_info(
            reference.repository, revision=revision, files_metadata=True, timeout=_LIST_TIMEOUT_S
        )
        if _COMMIT.fullmatch(str(info.sha)) is None:
            raise ValueError("sha")
        return HubListing(reference.repository, str(info.sha), tuple(map(_file_of, info.siblings or ())))
    except Exception as error:
        status, code = _status_of(error)
        if status in (401, 403, 404):
            raise _refusal(reference, status, code) from None
        if status is not None:
            raise CommandFailed(f"{url} answered {status}") from None
        if not _is_of_transport(error):
            if isinstance(error, (ValueError, KeyError, TypeError, AttributeError, RecursionError)):
                raise CommandFailed(f"{url} did not answer with a list of files") from None
            raise
        return _instead_of(reference, _reason_of(error))


def _instead_of(reference: HubReference, problem: str) -> HubListing:
    """The files in the Hub's cache, because the hub cannot be reached."""
    found = cached_listing(reference)
    if found is None:
        raise CommandFailed(
            f"the hub {hub_endpoint()} cannot be reached: {problem}; set HF_ENDPOINT to one that can"
        ) from None
    say(f"{reference}: the hub {hub_endpoint()} cannot be reached; the Hub's cache has its commit {found.commit[:12]}")
    return found


def cached_listing(reference: HubReference) -> HubListing | None:
    """The files of the revision that are in the Hub's cache; None if it has no such revision."""
    folder = _repository_folder(reference.repository)
    revision = reference.revision or _DEFAULT_REVISION
    branch = folder / "refs" / revision
    commit = branch.read_text().strip() if branch.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if _COMMIT.fullmatch(commit) is None or not snapshot.is_dir():
        return None
    paths = sorted(path for path in snapshot.rglob("*") if path.is_file())
    return HubListing(reference.repository, commit, tuple(_cached_file(path, snapshot) for path in paths))


def _cached_file(path: Path, snapshot: Path) -> HubFile:
    digest = path.resolve().name
    name = path.relative_to(snapshot).as_posix()
    return HubFile(name, path.stat().st_size, digest if _SHA256.fullmatch(digest) else None)


def _repository_folder(repository: str) -> Path:
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def _file_of(sibling: Any) -> HubFile:
    """A file of the list. ValueError or TypeError if the entry is invalid."""
    path, num_bytes = sibling.rfilename, sibling.size
    digest = None if sibling.lfs is None else sibling.lfs.sha256
    if not isinstance(path, str):
        raise TypeError("rfilename")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("rfilename")
    if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise ValueError("sha256")
    if not isinstance(num_bytes, int):
        return HubFile(path, None, digest)
    if not 0 <= num_bytes <= _MOST_BYTES:
        raise ValueError("size")
    return HubFile(path, num_bytes, digest)


def _refusal(reference: HubReference, status: int, code: str) -> CommandError:
    """The error for a 401, 403 or 404, with a remedy. `code` is the hub's X-Error-Code, which mirrors may omit."""
    from huggingface_hub import get_token

    repository, has_token = reference.repository, get_token() is not None
    token = "HF_TOKEN" if os.environ.get("HF_TOKEN") or not has_token else "hf auth login"
    page = f"{hub_endpoint()}/{repository}"
    if code == "GatedRepo":
        if has_token:
            return CommandError(
                f"{repository} is gated, and the account of {token} has no access to it; ask for it at {page}"
            )
        return CommandError(
            f"{repository} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account"
        )
    if code == "RevisionNotFound":
        return CommandError(f"{repository} has no revision {reference.revision or _DEFAULT_REVISION}; see {page}")
    if status == 401 and has_token and code != "RepoNotFound":
        return CommandError(f"{hub_endpoint()} does not accept the token in {token}; make a new one, or unset it")
    if has_token:
        hint = f"check the name, and that the account of {token} may read it"
    else:
        hint = "check the name, and set HF_TOKEN if the model needs an account"
    return CommandError(f"{hub_endpoint()} shows no model {repository} (it answered {status}); {hint}")


def present_bytes(listing: HubListing, files: Iterable[HubFile]) -> int:
    """Bytes of the files that are in the Hub's cache, with those of downloads that broke off."""
    return sum(_present(listing, file) for file in files)


def _present(listing: HubListing, file: HubFile) -> int:
    folder = _repository_folder(listing.repository)
    pointer = folder / "snapshots" / listing.commit / file.path
    if pointer.is_file():
        return pointer.stat().st_size
    if file.sha256 is None:
        return 0
    blob = folder / "blobs" / file.sha256
    return blob.stat().st_size if blob.is_file() else _incomplete_bytes(folder, file)


def _incomplete(folder: Path, file: HubFile) -> list[Path]:
    """The partial files that interrupted downloads of this file have left. Only those of large files can be found,
    because their names contain the SHA-256."""
    return [] if file.sha256 is None else list((folder / "blobs").glob(f"{file.sha256}*.incomplete"))


def _incomplete_bytes(folder: Path, file: HubFile) -> int:
    sizes = []
    for path in _incomplete(folder, file):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # finished meanwhile
            continue
    return max(sizes, default=0)


def download_files(reference: HubReference, listing: HubListing, files: Iterable[HubFile]) -> dict[str, Path]:
    """Path in the repository -> file in the Hub's cache, where missing and damaged ones are downloaded. An interrupted
    download continues where it stopped. Raises CommandError."""
    fetched = {file.path: _whole_file(reference, listing, file) for file in files}
    _name_commit(reference, listing)
    return fetched


def _name_commit(reference: HubReference, listing: HubListing) -> None:
    """Write which commit the branch or tag has, as the library does for files that are fetched by branch, so that it
    finds them without a network."""
    revision = reference.revision or _DEFAULT_REVISION
    branch = _repository_folder(listing.repository) / "refs" / revision
    if revision == listing.commit or (branch.is_file() and branch.read_text() == listing.commit):
        return
    try:
        branch.parent.mkdir(parents=True, exist_ok=True)
        branch.write_text(listing.commit)
    except OSError:  # a cache that may only be read
        return


def fetched_config(reference: HubReference, listing: HubListing) -> dict[str, Any]:
    """The repository's config.json; empty if there is none. Raises CommandError."""
    configs = [file for file in listing.files if file.path == HEADS_CONFIG]
    found = download_files(reference, listing, configs)
    return config_in(found[HEADS_CONFIG]) if found else {}


def fetched_contents(reference: HubReference, listing: HubListing, names: Collection[str]) -> dict[str, bytes]:
    """The content of small files of the repository, as far as it has them. Raises CommandError."""
    wanted = [file for file in listing.files if file.path in names]
    return {name: path.read_bytes() for name, path in download_files(reference, listing, wanted).items()}


def _whole_file(reference: HubReference, listing: HubListing, file: HubFile) -> Path:
    pointer = _repository_folder(listing.repository) / "snapshots" / listing.commit / file.path
    was_there = pointer.is_file()
    path = pointer if was_there else _downloaded(reference, listing, file, again=False)
    if _is_whole(file, path):
        return path
    if was_there:
        say(f"{reference}: {file.path} in the Hub's cache {hub_cache()} is damaged; fetching it again")
    path = _downloaded(reference, listing, file, again=True)
    if _is_whole(file, path):
        return path
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise _wrong_file(listing, file)


def _is_whole(file: HubFile, path: Path) -> bool:
    """Whether a file has the content that the hub lists. The Hub's cache names files by their SHA-256, or as git does;
    mirrors may name them otherwise."""
    if file.num_bytes is not None and path.stat().st_size != file.num_bytes:
        return False
    if file.sha256 is not None:
        return _shown_sha256_of(path, file.path) == file.sha256
    name = path.resolve().name
    return _COMMIT.fullmatch(name) is None or _git_name(path.read_bytes()) == name


def _shown_sha256_of(path: Path, name: str) -> str:
    """The SHA-256 of a file, and that it is being computed if it is large."""
    if path.stat().st_size < _LONG_TO_READ_BYTES:
        return sha256_of(path)
    with stages(name) as at:
        at("comparing it with its SHA-256")
        return sha256_of(path)


def _git_name(raw: bytes) -> str:
    return sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()


def _wrong_file(listing: HubListing, file: HubFile) -> CommandFailed:
    expected = f"{file.num_bytes} bytes" if file.sha256 is None else f"SHA-256 {file.sha256}"
    url = f"{hub_endpoint()}/{listing.repository}/resolve/{listing.commit}/{file.path}"
    return CommandFailed(f"{url} is not the expected file ({expected}); nothing was kept")


def _downloaded(reference: HubReference, listing: HubListing, file: HubFile, *, again: bool) -> Path:
    """The file in the Hub's cache, downloaded if it is missing, or in any case if `again`. Failures that may pass are
    tried again, as long as some attempts bring bytes. Raises CommandError."""
    rule = RetryRule()
    folder = _repository_folder(listing.repository)
    fruitless, furthest = 0, _incomplete_bytes(folder, file)
    while True:
        try:
            return _attempt(listing, file, again=again)
        except Exception as error:
            if not _may_pass(error):
                raise _failure(reference, listing, file, error) from None
            reached = _incomplete_bytes(folder, file)
            fruitless = 0 if reached > furthest else fruitless + 1
            furthest = max(furthest, reached)
            if fruitless >= rule.max_fruitless:
                raise _failure(reference, listing, file, error) from None
            rule.wait(fruitless, None)
            again = again and not reached


def _attempt(listing: HubListing, file: HubFile, *, again: bool) -> Path:
    _prepare()
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    folder = _repository_folder(listing.repository)
    with _watched(lambda: _incomplete_bytes(folder, file), file, progress_for(f"{listing.repository} {file.path}")):
        found = hf_hub_download(
            listing.repository,
            file.path,
            revision=listing.commit,
            cache_dir=hub_cache(),
            endpoint=hub_endpoint(),
            force_download=again,
            library_name="headrace",
            library_version=headrace_version(),
        )
    return Path(found)


@contextmanager
def _watched(done: Callable[[], int], file: HubFile, progress: Progress) -> Iterator[None]:
    """Show how far the download of a large file is. The library's own bars are silent without a terminal."""
    if file.sha256 is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_WATCH_INTERVAL_S):
            if present := done():
                progress.at(present, file.num_bytes)

    watcher = threading.Thread(target=watch, daemon=True)
    with progress:
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _prepare() -> None:
    """Check the proxies and the CA bundle of the environment, and name the bundle by the variables that the library and
    Xet read. Raises CommandError."""
    hub_client().close()
    if bundle := named_authorities():
        for variable in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
            os.environ.setdefault(variable, bundle[1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _reason_of(error: BaseException) -> str:
    """Why a connection failed, in the words of the system. The HTTP libraries put these into several exceptions of
    their own, each with the text of the one within."""
    innermost = error
    while (within := innermost.__cause__ or innermost.__context__) is not None:
        innermost = within
    return getattr(innermost, "strerror", None) or str(innermost) or type(innermost).__name__


def _status_of(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status and the X-Error-Code of the hub's answer that caused the error; (None, "") if no answer did."""
    for each in _chain(error):
        if (response := getattr(each, "response", None)) is not None:
            return int(response.status_code), str(response.headers.get("X-Error-Code", ""))
    return None, ""


def _is_of_transport(error: BaseException) -> bool:
    """Whether the connection failed, or the hub's address is not a valid URL."""
    return any(
        type(each).__module__.partition(".")[0] in _HTTP_LIBRARIES and not isinstance(each, json.JSONDecodeError)
        for each in _chain(error)
    )


def _may_pass(error: BaseException) -> bool:
    status, _code = _status_of(error)
    return status in RETRIED_STATUS if status is not None else _is_of_transport(error)


def _failure(reference: HubReference, listing: HubListing, file: HubFile, error: Exception) -> CommandError:
    """The error for a download that failed."""
    status, code = _status_of(error)
    url = f"{hub_endpoint()}/{listing.repository}/resolve/{listing.commit}/{file.path}"
    if status in (401, 403):
        return _refusal(reference, status, code or "GatedRepo")
    if status is not None:
        return CommandFailed(f"{url} could not be downloaded: the server answered {status}")
    if _is_of_transport(error):
        return CommandFailed(f"{url} could not be downloaded: {_reason_of(error)}; try again to resume")
    if isinstance(error, CommandError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return CommandFailed(f"{error.filename or hub_cache()} could not be written: {error.strerror}")
    if type(error) is OSError:  # of the library, about the size
        for path in _incomplete(_repository_folder(listing.repository), file):
            path.unlink(missing_ok=True)
        return _wrong_file(listing, file)
    return CommandFailed(f"{url} could not be downloaded: {error}")


def held_bytes(repository: str, commit: str) -> int:
    """Bytes of the repository's files at a commit in the Hub's cache."""
    snapshot = _repository_folder(repository) / "snapshots" / commit
    if _COMMIT.fullmatch(commit) is None or not snapshot.is_dir():
        return 0
    return sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())


def remove_held(repository: str, commit: str) -> int:
    """Remove a commit of the repository from the Hub's cache, with the files that no other commit of it has. Returns
    the bytes freed."""
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(hub_cache())
    # A copy of the repository under another name may have the same commit.
    found = replace(found, repos=frozenset(repo for repo in found.repos if repo.repo_id == repository))
    strategy = found.delete_revisions(commit)
    strategy.execute()
    return strategy.expected_freed_size
