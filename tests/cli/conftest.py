"""A file server on loopback with scripted failures, and an empty cache for each test."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import huggingface_hub.constants
import pytest

from headrace.cli.models import pull
from tests.http_server import http_server, respond
from tests.hub import Hub, running_hub


@dataclass
class FileServer:
    """Serves `files` by path, with Range.

    `cut_after` cuts each of the next responses after that many bytes of body. `failures` are status codes for the first
    responses. With `ignore_range`, every response has the whole file.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    ignore_range: bool = False
    token: str | None = None
    seen: list[tuple[str, str | None]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.seen.append((path, handler.headers.get("Range")))
        body = self.files.get(path)
        if self.token is not None and handler.headers.get("Authorization") != f"Bearer {self.token}":
            status, body = 401, b""
        elif self.failures:
            status, body = self.failures.pop(0), b""
        elif body is None:
            status, body = 404, b""
        else:
            status = 200
        start = 0
        if status == 200 and not self.ignore_range:
            matched = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
            if matched and body is not None:
                start, status = int(matched[1]), 206
                if start >= len(body):
                    status, body = 416, b""
        assert body is not None
        rest = body[start:] if status == 206 else body
        headers = {"Content-Type": "text/html" if path.endswith("/") else "application/octet-stream"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        cut = self.cut_after.pop(0) if status in (200, 206) and self.cut_after else None
        respond(handler, status, rest, headers, cut)


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    state = FileServer()
    with http_server(state.answer) as state.url:
        yield state


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Separate caches, of headrace and of the Hub, and a runtime directory. No hub or package index is reachable unless
    the test sets it up."""
    folder = tmp_path / "cache"
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    # The models of these tests are names and sizes only; tests/e2e/test_by_name.py has real ones checked.
    monkeypatch.setattr(pull, "_check_servable", lambda _name, _directory: None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    indexes = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTP_PROXY", "http_proxy")
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", *indexes):
        monkeypatch.delenv(variable, raising=False)
    # huggingface_hub reads the environment when it is imported.
    with monkeypatch.context() as of_hub:
        of_hub.setenv("HF_HOME", str(tmp_path / "huggingface"))
        importlib.reload(huggingface_hub.constants)
        yield folder
    importlib.reload(huggingface_hub.constants)


@pytest.fixture
def hub_cache(cache: Path, tmp_path: Path) -> Path:
    """The Hub's cache, which does not exist yet."""
    return tmp_path / "huggingface" / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, which the commands use."""
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
        yield hub


@pytest.fixture
def model_files() -> dict[str, bytes]:
    """The least that a complete model directory has; not a model that anything could run."""
    stems = ("openvino_model", "openvino_tokenizer", "openvino_detokenizer")
    return {f"{stem}.{suffix}": f"{stem} {suffix}".encode() for stem in stems for suffix in ("xml", "bin")}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def model_folder(tmp_path: Path, model_files: dict[str, bytes]) -> Path:
    return write_files(tmp_path / "my-model", model_files)
