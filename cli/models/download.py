"""Downloads a file over HTTP. The file appears only when it is complete and verified.

Bytes go to TARGET.part. An existing part is continued with a Range request if a checksum can verify the result. At the
end, the part is renamed to the target.
"""

from __future__ import annotations

import os
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import httpx

from headrace.cli.http_client import http_client
from headrace.cli.models.progress import Progress
from headrace.common.commands import CommandError, CommandFailed

_PIECE_BYTES = 1 << 18
_CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_RETRY_AFTER_S = 30.0


class DownloadError(CommandFailed):
    """A download failed. The message says which one and why. `http_status` is the last answer's, if any."""

    def __init__(self, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status


@dataclass(frozen=True, slots=True)
class RetryRule:
    """The number of attempts and their delays, which double up to a maximum. Attempts that got bytes do not count."""

    max_fruitless: int = 5
    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0
    sleep: Callable[[float], object] = field(default=time.sleep)

    def wait(self, fruitless: int, asked_s: float | None) -> None:
        """Sleep before the next attempt, at least as long as the server requested, up to a limit."""
        delay_s = min(self.longest_delay_s, self.first_delay_s * 2 ** max(0, fruitless - 1))
        if asked_s is not None:
            delay_s = max(delay_s, min(asked_s, _MAX_RETRY_AFTER_S))
        self.sleep(delay_s * random.uniform(0.8, 1.2))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file to download. `sha256` is in hex. Without it, the result is checked only against `num_bytes`, if known."""

    url: str
    sha256: str | None = None
    num_bytes: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class _TryAgain(Exception):
    """An attempt failed, but another may succeed."""

    def __init__(self, why: str, asked_s: float | None = None) -> None:
        super().__init__(why)
        self.asked_s = asked_s


def hub_client() -> httpx.Client:
    """A client with the CA bundle and the proxies of the environment. Its waits are limited. Raises CommandError."""
    timeout = httpx.Timeout(30.0, connect=10.0)
    return http_client(verify=_tls_context(), timeout=timeout, follow_redirects=True, max_redirects=10)


def named_authorities() -> tuple[str, str] | None:
    """The variable of the environment that names a CA bundle, and the bundle; None if there is none."""
    return next(((name, bundle) for name in _CA_VARIABLES if (bundle := os.environ.get(name))), None)


def _tls_context() -> ssl.SSLContext:
    if (named := named_authorities()) is None:
        return httpx.create_ssl_context()
    variable, bundle = named
    try:
        return ssl.create_default_context(cafile=bundle)
    except (OSError, ssl.SSLError) as error:
        raise CommandError(f"{variable} names {bundle}, which is no usable CA bundle: {error}") from None


def download(
    client: httpx.Client, wanted: Wanted, target: Path, progress: Progress, retry: RetryRule | None = None
) -> None:
    """Fetch into `target`, resuming and retrying. Raises DownloadError; the part then stays for the next time."""
    part = target.with_name(target.name + ".part")
    if wanted.sha256 is None:
        part.unlink(missing_ok=True)
    try:
        _fetch(client, wanted, part, progress, retry if retry is not None else RetryRule())
        if not _verified(wanted, part):
            # The part may combine pieces of different versions, so try once more with an empty one.
            part.unlink()
            _fetch(client, wanted, part, progress, retry if retry is not None else RetryRule())
            if not _verified(wanted, part):
                part.unlink()
                raise DownloadError(f"{wanted.url} is not the expected file ({_expectation(wanted)}); nothing was kept")
        part.replace(target)
    except OSError as error:
        raise DownloadError(f"{part} could not be written: {error.strerror or error}") from None


def _fetch(client: httpx.Client, wanted: Wanted, part: Path, progress: Progress, rule: RetryRule) -> None:
    """Try until the file is complete, or until too many attempts in a row received nothing."""
    fruitless = 0
    furthest = _size(part)
    while True:
        try:
            _attempt(client, wanted, part, progress)
            return
        except (httpx.TransportError, _TryAgain) as error:
            reached = _size(part)
            fruitless = 0 if reached > furthest else fruitless + 1
            furthest = max(furthest, reached)
            if fruitless >= rule.max_fruitless:
                message = f"{wanted.url} could not be downloaded: {_reason(error)}; try again to resume"
                raise DownloadError(message) from None
            rule.wait(fruitless, error.asked_s if isinstance(error, _TryAgain) else None)
        except httpx.HTTPError as error:
            raise DownloadError(f"{wanted.url} could not be downloaded: {_reason(error)}") from None


def _attempt(client: httpx.Client, wanted: Wanted, part: Path, progress: Progress) -> None:
    """Send one request. Returns when the server's last byte is in the part."""
    done = _size(part)
    if wanted.num_bytes is not None and done == wanted.num_bytes and done > 0:
        return
    headers = dict(wanted.headers)
    # A compressed body would have other bytes than those that were counted and hashed.
    headers["Accept-Encoding"] = "identity"
    if done:
        headers["Range"] = f"bytes={done}-"
    with client.stream("GET", wanted.url, headers=headers) as response:
        if done and response.status_code == 416:
            part.unlink()
            raise _TryAgain("the server has no such range")
        _refuse_failure(response, wanted.url)
        if response.status_code != 206:
            done = 0
        elif _range_start(response) != done:
            part.unlink()
            raise _TryAgain("the server sent another range than requested")
        total = _total_bytes(response, done) or wanted.num_bytes
        progress.at(done, total)
        with part.open("ab" if done else "wb") as file:
            # Write bytes as they arrive. Gathering pieces of a fixed size would lose the last bytes before an
            # interruption.
            for piece in response.iter_raw():
                file.write(piece)
                done += len(piece)
                progress.at(done, total)
                if wanted.num_bytes is not None and done > wanted.num_bytes:
                    return  # another file, which may be endless
    if total is not None and done < total:
        raise _TryAgain(f"the connection ended after {done} of {total} bytes")


def _refuse_failure(response: httpx.Response, url: str) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in RETRIED_STATUS:
        asked = response.headers.get("Retry-After", "")
        raise _TryAgain(f"the server answered {status}", float(asked) if asked.isdecimal() else None)
    raise DownloadError(f"{url} could not be downloaded: the server answered {status}", status)


def _range_start(response: httpx.Response) -> int | None:
    matched = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(matched[1]) if matched else None


def _total_bytes(response: httpx.Response, done: int) -> int | None:
    length = response.headers.get("Content-Length", "")
    return done + int(length) if length.isdecimal() else None


def _verified(wanted: Wanted, part: Path) -> bool:
    if wanted.sha256 is None:
        return wanted.num_bytes is None or _size(part) == wanted.num_bytes
    digest = sha256()
    with part.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest() == wanted.sha256


def _expectation(wanted: Wanted) -> str:
    return f"{wanted.num_bytes} bytes" if wanted.sha256 is None else f"SHA-256 {wanted.sha256}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
