"""Calls to the API server of the cluster in which a process runs, over httpx.

The credentials are those of the pod's service account, in a directory that the kubelet keeps current:

    token       sent with every call; the kubelet replaces it before it expires, so that it is read for each call
    ca.crt      the authority of the API server's certificate; connections are made anew when it has changed
    namespace   the namespace of the pod

Without such a directory (behind `kubectl proxy`, for example) calls have no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.common.kubernetes import CREDENTIALS
from headrace.common.kubernetes.services import Status, decode
from headrace.common.stores.watched_files import stamp_of

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
# Until the first byte of an answer, and for a whole list.
ANSWER_TIMEOUT_S = 15.0
_MAX_BYTES = 64 << 20
_MAX_RETRY_AFTER_S = 30.0


class ClusterError(ValueError):
    """There is no API server to call. The message has the remedy."""


class CallError(Exception):
    """A call failed. `reason` is a word for metrics: unreachable, refused, failed, expired or silent."""

    def __init__(self, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Cluster:
    """The API server: at `url`, or that of the cluster in which this process runs. Use it in one event loop."""

    def __init__(self, url: str | None = None, credentials: Path = CREDENTIALS) -> None:
        """Raises ClusterError if there is no `url` and the process does not run in a cluster."""
        self.url = (url or _url_of_pod()).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ClusterError(f"--kubernetes-api {self.url[:200]!r} is not a URL: write https://HOST:PORT")
        self._credentials = credentials
        self._client: httpx.AsyncClient | None = None
        self._authority = stamp_of(credentials / "ca.crt")

    @property
    def namespace(self) -> str:
        """The namespace of this process; `default` if it has none."""
        with contextlib.suppress(OSError, ValueError):
            return (self._credentials / "namespace").read_text(encoding="ascii").strip() or "default"
        return "default"

    async def close(self) -> None:
        """End all connections."""
        if self._client is not None:
            await self._client.aclose()

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """The whole answer to a GET. Raises CallError."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), self._call(path, parameters) as response:
                return await _whole(response)
        except TimeoutError:
            raise self._silent() from None

    @contextlib.asynccontextmanager
    async def lines(self, path: str, parameters: Mapping[str, str]) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        """Context manager: the lines of a streamed answer, in lists of those that arrived together. Raises CallError on
        entry, and while the answer is read."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    response = await stack.enter_async_context(self._call(path, parameters))
            except TimeoutError:
                raise self._silent() from None
            yield _lines(response)

    @contextlib.asynccontextmanager
    async def _call(self, path: str, parameters: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        import httpx

        try:
            client = await self._current_client()
            headers = {"Accept": "application/json", **self._authorization()}
            async with client.stream("GET", self.url + path, params=dict(parameters), headers=headers) as response:
                if response.status_code != 200:
                    raise _refusal(response, await _whole(response))
                yield response
        except httpx.HTTPError as error:
            raise CallError("unreachable", f"{self.url}: {str(error) or type(error).__name__}") from error
        except (OSError, ValueError) as error:  # of a file, or of a certificate in it
            raise CallError("failed", str(error)) from error

    def _silent(self) -> CallError:
        return CallError("silent", f"{self.url} does not answer within {ANSWER_TIMEOUT_S:g} s")

    def _authorization(self) -> dict[str, str]:
        path = self._credentials / "token"
        if not path.exists():
            return {}
        return {"Authorization": f"Bearer {path.read_text(encoding='ascii').strip()}"}

    async def _current_client(self) -> httpx.AsyncClient:
        """The client, with the authority that is in force now."""
        import httpx

        path = self._credentials / "ca.crt"
        authority = stamp_of(path)
        if self._client is not None and authority != self._authority:
            await self._client.aclose()
            self._client = None
        if self._client is None:
            context = ssl.create_default_context(cafile=str(path) if authority is not None else None)
            # The deadlines of answers are ours: a watch may be silent for long. Proxies of the environment are for
            # other hosts.
            timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, write=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S)
            self._client = httpx.AsyncClient(verify=context, timeout=timeout, trust_env=False)
            self._authority = authority
        return self._client


def _url_of_pod() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ClusterError(
            "kubernetes:/// needs a cluster, and this process does not run in a pod: name the API server with "
            "--kubernetes-api URL (kubectl proxy serves one at http://127.0.0.1:8001)"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


async def _whole(response: httpx.Response) -> bytes:
    raw = bytearray()
    async for chunk in response.aiter_bytes():
        raw += chunk
        if len(raw) > _MAX_BYTES:
            raise CallError("failed", f"an answer has more than {_MAX_BYTES} bytes")
    return bytes(raw)


async def _lines(response: httpx.Response) -> AsyncIterator[list[bytes]]:
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_BYTES:
            raise CallError("failed", f"a line has more than {_MAX_BYTES} bytes")
        if lines:
            yield lines


def _refusal(response: httpx.Response, raw: bytes) -> CallError:
    """The error for a response with a failed status, with a remedy if one is known."""
    code = response.status_code
    try:
        said = decode(raw, Status).message
    except ValueError:
        said = ""
    text = f"{code} {said[:500] or response.reason_phrase}"
    if code == 410:
        return CallError("expired", text)
    after = response.headers.get("retry-after", "")
    retry_after_s = min(float(after), _MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0
    if code == 401:
        text += "; the pod's service account has no valid token: mount one (serviceAccountToken)"
    elif code == 403:
        text += "; give the pod's service account get, list and watch of endpointslices (deploy/kubernetes/base)"
    elif code == 404:
        text += "; Kubernetes 1.21 or newer has discovery.k8s.io/v1"
    return CallError("refused" if code < 500 else "failed", text, retry_after_s)
