"""A fake hub with the requests of the Hugging Face API that huggingface_hub makes to list and fetch files. Large files
are redirected to another address, which must not get the token.

Everyone can list the files of gated repositories, but only accounts with access can download them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.http_server import http_server, respond

_LARGE = (".bin", ".gguf", ".safetensors")


@dataclass
class Repository:
    """`revisions` has branches and tags by name, and their files by path. `private` ones are hidden from strangers."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    private: bool = False

    def commit(self, revision: str) -> str:
        """The commit of a branch or tag; a commit is its own."""
        if revision not in self.revisions:
            return revision
        content = sorted((path, sha1(raw).hexdigest()) for path, raw in self.revisions[revision].items())
        return sha1(repr(content).encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        """The files at a branch, tag or commit."""
        return next((self.revisions[name] for name in self.revisions if revision in (name, self.commit(name))), None)


@dataclass
class Hub:
    """`tokens` maps each known token to the gated and private repositories that it may read. `cut_after` cuts each of
    the next responses with large files after that many bytes. `failures` are status codes for the next requests of
    files. Files whose paths are in `corrupted` are sent with another first byte."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    tokens: dict[str, set[str]] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    corrupted: set[str] = field(default_factory=set)
    seen: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], revision: str = "main", **of_repository: bool) -> None:
        """Add files to a repository, which is created if necessary."""
        repository = self.repositories.setdefault(name, Repository({}, **of_repository))
        repository.revisions[revision] = files

    def add_directory(self, name: str, directory: Path) -> None:
        """A repository with the files of a directory."""
        self.add(name, {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()})

    def fetched(self, name: str) -> list[str]:
        """The requested paths of files in a repository."""
        found = (re.fullmatch(rf"(HEAD )?/{re.escape(name)}/resolve/[^/]+/(.+)", path) for path, _range in self.seen)
        # Of a large file there is only the HEAD request: what it redirects to is asked for directly.
        return [matched[2] for matched in found if matched and bool(matched[1]) == matched[2].endswith(_LARGE)]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        if handler.path.startswith("/large/"):
            self._answer_large(handler, handler.path.removeprefix("/large/"))
            return
        path = unquote(urlsplit(handler.path).path)
        # The list, and GET requests of files that are not redirected; the library asks for each file with HEAD first.
        if handler.command == "HEAD":
            path = f"HEAD {path}"
        self.seen.append((path, handler.headers.get("Range")))
        if listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._answer_list(handler, listed[1], listed[2])
        elif resolved := re.fullmatch(r"(?:HEAD )?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._answer_file(handler, resolved[1], resolved[2], resolved[3])
        else:
            respond(handler, 404, b"")

    def _refusal(self, handler: BaseHTTPRequestHandler, name: str, *, of_files: bool) -> tuple[int, str] | None:
        given = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        repository = self.repositories.get(name)
        if given and given not in self.tokens:
            return 401, ""
        if repository is None or (repository.private and name not in self.tokens.get(given, ())):
            return (404 if given else 401), "RepoNotFound"
        if of_files and repository.gated and name not in self.tokens.get(given, ()):
            return (403 if given else 401), "GatedRepo"
        return None

    def _answer_list(self, handler: BaseHTTPRequestHandler, name: str, revision: str) -> None:
        if refusal := self._refusal(handler, name, of_files=False):
            respond(handler, refusal[0], b"{}", {"X-Error-Code": refusal[1]})
            return
        repository = self.repositories[name]
        files = repository.files(revision)
        if files is None:
            respond(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [_sibling(path, raw) for path, raw in files.items()]
        answer = {"id": name, "sha": repository.commit(revision), "gated": repository.gated and "auto"}
        respond(handler, 200, json.dumps({**answer, "siblings": siblings}).encode())

    def _answer_file(self, handler: BaseHTTPRequestHandler, name: str, revision: str, path: str) -> None:
        if refusal := self._refusal(handler, name, of_files=True):
            respond(handler, refusal[0], b"", {"X-Error-Code": refusal[1]})
            return
        repository = self.repositories[name]
        commit = {"X-Repo-Commit": repository.commit(revision)}
        raw = (repository.files(revision) or {}).get(path)
        if self.failures:
            respond(handler, self.failures.pop(0), b"")
        elif raw is None:
            respond(handler, 404, b"", {"X-Error-Code": "EntryNotFound", **commit})
        elif path.endswith(_LARGE):
            port = self.url.rpartition(":")[2]
            digest = sha256(raw).hexdigest()
            linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(raw))}
            # Another host name for the same server: the client has to take it for another origin.
            respond(handler, 302, b"", {"Location": f"http://localhost:{port}/large/{digest}", **linked, **commit})
        else:
            sent = bytes([raw[0] ^ 1]) + raw[1:] if path in self.corrupted else raw
            respond(handler, 200, sent, {"ETag": f'"{git_name(raw)}"', **commit})

    def _answer_large(self, handler: BaseHTTPRequestHandler, digest: str) -> None:
        """Send the file with this SHA-256, or the part in the Range header."""
        assert "Authorization" not in handler.headers, "the token went to another origin"
        everything = (
            (path, raw)
            for repository in self.repositories.values()
            for raws in repository.revisions.values()
            for path, raw in raws.items()
        )
        path, raw = next(found for found in everything if sha256(found[1]).hexdigest() == digest)
        if path in self.corrupted:
            raw = bytes([raw[0] ^ 1]) + raw[1:]
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        self.seen.append((f"/large/{digest}", handler.headers.get("Range")))
        start = int(wanted[1]) if wanted else 0
        headers = {"Content-Range": f"bytes {start}-{len(raw) - 1}/{len(raw)}"} if wanted else {}
        cut = self.cut_after.pop(0) if self.cut_after else None
        respond(handler, 206 if wanted else 200, raw[start:], headers, cut)


def git_name(raw: bytes) -> str:
    """The name of a file's content in git, which hubs use as the ETag of small files."""
    return sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


def _sibling(path: str, raw: bytes) -> dict[str, object]:
    plain = {"rfilename": path, "size": len(raw), "blobId": git_name(raw)}
    if not path.endswith(_LARGE):
        return plain
    return {**plain, "lfs": {"sha256": sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 134}}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without models, on loopback."""
    hub = Hub()
    with http_server(hub.answer) as hub.url:
        yield hub
