"""Downloads end complete and verified, or leave only a part from which the next attempt continues."""

from __future__ import annotations

import contextlib
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cli.models.download import DownloadError, RetryRule, Wanted, download, hub_client
from headrace.cli.models.progress import PlainProgress
from headrace.common.commands import CommandError
from tests.cli.conftest import FileServer
from tests.http_server import http_server, respond

CONTENT = bytes(range(256)) * 400
DIGEST = sha256(CONTENT).hexdigest()
QUIET = PlainProgress("test", write=lambda _line: None)


def fetch(url: str, target: Path, sha: str | None = DIGEST, num_bytes: int | None = None) -> list[float]:
    """Download with a clock that does not wait. Returns the requested delays."""
    delays: list[float] = []
    with hub_client() as client:
        download(client, Wanted(url, sha, num_bytes), target, QUIET, RetryRule(sleep=delays.append))
    return delays


def test_a_file_arrives_whole_and_no_part_stays(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    fetch(f"{file_server.url}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_part_is_continued_where_it_ended(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    (tmp_path / "a.part").write_bytes(CONTENT[:1000])
    fetch(f"{file_server.url}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert file_server.seen == [("/a", "bytes=1000-")]


def test_a_connection_that_breaks_is_taken_up_again(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    file_server.cut_after = [10_000, 20_000]
    fetch(f"{file_server.url}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert file_server.seen == [("/a", None), ("/a", "bytes=10000-"), ("/a", "bytes=30000-")]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 40_000), max_size=8), ignore_range=st.booleans())
def test_however_the_connection_breaks_the_bytes_are_right(
    file_server: FileServer, tmp_path: Path, cuts: list[int], ignore_range: bool
) -> None:
    file_server.files["/a"] = CONTENT
    file_server.cut_after = list(cuts)
    file_server.ignore_range = ignore_range
    (tmp_path / "a").unlink(missing_ok=True)
    with hub_client() as client:
        rule = RetryRule(max_fruitless=20, sleep=lambda _delay_s: None)
        download(client, Wanted(f"{file_server.url}/a", DIGEST), tmp_path / "a", QUIET, rule)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_part_of_another_version_is_thrown_away_once(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    (tmp_path / "a.part").write_bytes(b"x" * 1000)
    fetch(f"{file_server.url}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert file_server.seen == [("/a", "bytes=1000-"), ("/a", None)]


def test_a_part_longer_than_the_file_is_thrown_away(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    (tmp_path / "a.part").write_bytes(CONTENT + b"more")
    fetch(f"{file_server.url}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_wrong_file_is_refused_and_nothing_is_kept(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = b"something else"
    with pytest.raises(DownloadError, match=f"not the expected file .SHA-256 {DIGEST}"):
        fetch(f"{file_server.url}/a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_length_is_refused_when_only_that_is_known(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = b"short"
    with pytest.raises(DownloadError, match=r"not the expected file .6 bytes"):
        fetch(f"{file_server.url}/a", tmp_path / "a", sha=None, num_bytes=6)
    assert not (tmp_path / "a").exists()


def test_a_file_without_end_is_not_read_beyond_its_length(tmp_path: Path) -> None:
    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(64):
                handler.wfile.write(bytes(1 << 20))
            sent.append(handler.path)

    sent: list[str] = []
    with http_server(send) as url, pytest.raises(DownloadError, match="not the expected file"):
        fetch(f"{url}/a", tmp_path / "a", num_bytes=1000)
    assert (list(tmp_path.iterdir()), sent) == ([], [])


def test_without_a_checksum_a_part_is_not_trusted(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    (tmp_path / "a.part").write_bytes(b"x" * 1000)
    fetch(f"{file_server.url}/a", tmp_path / "a", sha=None)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_busy_server_is_asked_again_after_growing_delays(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    file_server.failures = [503, 500, 429]
    delays = fetch(f"{file_server.url}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert [round(delay, 1) > 0 for delay in delays] == [True] * 3
    assert delays[0] < delays[1] < delays[2]


@pytest.mark.parametrize("retry_after", ["\u00b2", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_time_to_come_back_that_is_no_number_is_ignored(tmp_path: Path, retry_after: str) -> None:
    answers = [(503, b"", {"Retry-After": retry_after}), (200, CONTENT, {})]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        respond(handler, *answers.pop(0))

    with http_server(answer) as url:
        (delay_s,) = fetch(f"{url}/a", tmp_path / "a")
    assert delay_s < 1
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_server_that_stays_busy_is_given_up_and_the_part_stays(file_server: FileServer, tmp_path: Path) -> None:
    file_server.files["/a"] = CONTENT
    file_server.failures = [503] * 100
    (tmp_path / "a.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DownloadError, match="answered 503; try again to resume"):
        fetch(f"{file_server.url}/a", tmp_path / "a")
    assert len(file_server.seen) == RetryRule().max_fruitless
    assert (tmp_path / "a.part").read_bytes() == CONTENT[:1000]


def test_a_missing_file_is_not_asked_for_twice(file_server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="answered 404") as raised:
        fetch(f"{file_server.url}/a", tmp_path / "a")
    assert raised.value.http_status == 404
    assert len(file_server.seen) == 1


def test_a_server_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="could not be downloaded"):
        fetch("http://127.0.0.1:9/a", tmp_path / "a")


def test_a_ca_bundle_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "missing.pem"))
    with pytest.raises(CommandError, match=r"PIP_CERT names .*missing\.pem"):
        hub_client()
