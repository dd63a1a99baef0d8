"""`headrace batch FILE`: runs the requests of a file at the lowest priority, and writes the answers to another.

The batch is at the server. What this command keeps is its id, in a file beside the output, by which the same command
finds the batch again after Ctrl-C or a reboot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from headrace.cli.fleet.fleet_access import ApiAccess, api_options
from headrace.cli.fleet.gateway_access import default_url
from headrace.cli.http_client import server_url, tls_problem
from headrace.common.commands import EXIT_FAILED, EXIT_INTERRUPTED, CommandError, CommandFailed

_POLL_S = 1.0
_PLAIN_INTERVAL_S = 10.0
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_MAX_SHOWN_ERRORS = 10
_FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of a batch's files on this host."""

    input: Path
    output: Path
    errors: Path

    @classmethod
    def of(cls, given: Path, output: Path | None) -> Places:
        """The paths for an input file. Results go beside it, unless `output` is given."""
        stem = given.with_suffix("") if given.suffix == ".jsonl" else given
        output = output or stem.with_name(f"{stem.name}.output.jsonl")
        name = output.name.removesuffix(".jsonl").removesuffix(".output")
        return cls(given, output, output.with_name(f"{name}.errors.jsonl"))

    @property
    def state(self) -> Path:
        """The file with the id of the batch, as long as the batch is not done."""
        return self.output.with_name(f"{self.output.name}.batch")


class BatchClient:
    """A client of one server. Failures are CommandErrors with the server's message."""

    def __init__(self, url: str, access: ApiAccess) -> None:
        self.url = server_url(url)
        self._http = access.client(self.url, httpx.Timeout(60.0, connect=5.0))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def create(self, file: Path, endpoint: str, window: str) -> dict[str, Any]:
        """Upload a file and make a batch of it."""
        with file.open("rb") as content:
            uploaded = self._call("POST", "/files", data={"purpose": "batch"}, files={"file": (file.name, content)})
        body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        return self._call("POST", "/batches", json=body)

    def show(self, batch_id: str) -> dict[str, Any]:
        """The batch now."""
        return self._call("GET", f"/batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel the batch."""
        return self._call("POST", f"/batches/{batch_id}/cancel")

    def download(self, file_id: str, path: Path) -> None:
        """Write a file of the server. It appears whole."""
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as file, self._http.stream("GET", f"{self.url}/v1/files/{file_id}/content") as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._refused(answer)
                for piece in answer.iter_bytes():
                    file.write(piece)
            os.replace(part, path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        finally:
            part.unlink(missing_ok=True)

    def delete(self, file_id: str) -> None:
        """Delete a file of the server."""
        self._call("DELETE", f"/files/{file_id}")

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, f"{self.url}/v1{path}", **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise self._refused(answer)
        try:
            value: Any = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise CommandError(f"{self.url} has no batches as OpenAI's API has them: its answer is not valid")
        return value

    def _refused(self, answer: httpx.Response) -> CommandFailed:
        if answer.status_code == 401:
            return CommandFailed(f"{self.url} accepts no request without a valid key; give one with --api-key")
        try:
            said = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = f"the server answered {answer.status_code}"
        return NotThere(said) if answer.status_code == 404 else CommandFailed(said)

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        problem = tls_problem(error)
        if problem is None and isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return Unreachable(f"no server at {self.url}; start one with headrace serve, or name another with --url")
        return Unreachable(f"{self.url}: {problem or str(error) or type(error).__name__}")


class Unreachable(CommandFailed):
    """The server does not answer at the moment."""


class NotThere(CommandFailed):
    """The server has no such batch or file."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--output", "-o", type=_FILE, help="File for the answers.  [default: FILE.output.jsonl]")
@click.option("--endpoint", help="Endpoint of all requests.  [default: the url of the first line]")
@click.option("--window", default="24h", show_default=True, help="Time after which the batch expires; at most 7d.")
@click.option("--detach", is_flag=True, help="Begin the batch, and leave it. The same command without it follows it.")
@click.option("--cancel", is_flag=True, help="Cancel the batch of this file, and write the answers that it has.")
@click.option("--keep", is_flag=True, help="Leave the files at the server when they have been written here.")
@click.option("--url", help="Server, such as http://127.0.0.1:8000.  [default: the one on this host]")
@api_options
def batch(
    file: Path,
    output: Path | None,
    endpoint: str | None,
    window: str,
    detach: bool,
    cancel: bool,
    keep: bool,
    url: str | None,
    access: ApiAccess,
) -> None:
    """Run the requests of FILE at the lowest priority, and write the answers to another file.

    FILE is JSONL as for OpenAI's Batch API: each line has custom_id, method, url and body. Ctrl-C leaves the batch
    running; the same command follows it again. The status is 0 if every line was answered.
    """
    places = Places.of(file, output)
    client = BatchClient(url or _begun_at(places) or default_url(), access)
    try:
        begun = _begun(places, client)
        if cancel:
            if begun is None:
                raise CommandError(f"{file} has no batch that this command has begun; see {places.state.name}")
            client.cancel(begun)
        elif begun is None:
            begun = _begin(client, places, endpoint or _endpoint_of(file), window)
        if detach and not cancel:
            click.echo(f"{begun} goes on at {client.url}; the same command without --detach follows it", err=True)
            return
        try:
            ended = _follow(client, begun)
        except KeyboardInterrupt:
            click.echo(f"\n{begun} goes on at {client.url}; the same command follows it, --cancel ends it", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except NotThere:
            places.state.unlink(missing_ok=True)
            raise
        sys.exit(_finish(client, places, ended, keep=keep))
    finally:
        client.close()


def _begun_at(places: Places) -> str | None:
    """The server of the batch that was begun; None if none was."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(places.state.read_text())["url"])
    return None


def _begun(places: Places, client: BatchClient) -> str | None:
    """The id of the batch that was begun for the file; None if none was. Raises CommandError if the file has another
    content now."""
    try:
        state = json.loads(places.state.read_text())
        batch_id, url, digest = str(state["batch_id"]), str(state["url"]), str(state["sha256"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"{places.state} is not what headrace batch wrote; remove it to begin again") from None
    if url != client.url:
        raise CommandError(f"the batch of {places.input} is at {url}; leave out --url, or remove {places.state}")
    if digest != _sha256(places.input):
        problem = f"{places.input} has changed since its batch began"
        raise CommandError(f"{problem}; put it back, or remove {places.state} to begin a new one")
    return batch_id


def _begin(client: BatchClient, places: Places, endpoint: str, window: str) -> str:
    digest = _sha256(places.input)
    for path in (places.output, places.errors):
        if path.exists():
            raise CommandError(f"{path} exists; move it, or name another file with --output")
    batch_id = str(client.create(places.input, endpoint, window)["id"])
    places.state.write_text(json.dumps({"url": client.url, "batch_id": batch_id, "sha256": digest}))
    return batch_id


def _follow(client: BatchClient, batch_id: str) -> dict[str, Any]:
    """Show the progress until the batch has ended. A server that restarts is waited for."""
    is_lost = False
    with _shown(batch_id) as show:
        while True:
            try:
                found = client.show(batch_id)
            except Unreachable as error:
                if not is_lost:
                    click.echo(f"{error.format_message()}; waiting for it", err=True)
                is_lost = True
            else:
                is_lost = False
                show.at(found)
                if found["status"] in _ENDED:
                    return found
            time.sleep(_POLL_S)


def _finish(client: BatchClient, places: Places, ended: dict[str, Any], *, keep: bool) -> int:
    """Write the files of a batch that has ended. Returns the exit status."""
    counts = ended["request_counts"]
    for file_id, path in ((ended["output_file_id"], places.output), (ended["error_file_id"], places.errors)):
        if file_id is not None:
            client.download(file_id, path)
            click.echo(str(path))
    places.state.unlink(missing_ok=True)
    if not keep:
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            with contextlib.suppress(CommandFailed):
                if ended[name] is not None:
                    client.delete(ended[name])
    errors = (ended["errors"] or {"data": []})["data"]
    for error in errors[:_MAX_SHOWN_ERRORS]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        click.echo(f"{where}{error['message']}", err=True)
    if len(errors) > _MAX_SHOWN_ERRORS:
        click.echo(f"and {len(errors) - _MAX_SHOWN_ERRORS} more", err=True)
    total, completed, failed = counts["total"], counts["completed"], counts["failed"]
    click.echo(f"{ended['status']}: {completed} of {total} lines answered, {failed} failed", err=True)
    return 0 if ended["status"] == "completed" and not failed else EXIT_FAILED


class _Plain:
    """Progress as lines, for logs."""

    def __init__(self) -> None:
        self._last = ""
        self._last_s = -_PLAIN_INTERVAL_S

    def at(self, found: dict[str, Any]) -> None:
        """Write a line if something has changed, and the last line is old enough or the status is new."""
        counts = found["request_counts"]
        line = f"{found['status']}: {counts['completed'] + counts['failed']} of {counts['total']} lines"
        if line == self._last:
            return
        now_s = time.monotonic()
        if found["status"] != self._last.partition(":")[0] or now_s - self._last_s >= _PLAIN_INTERVAL_S:
            click.echo(line, err=True)
            self._last, self._last_s = line, now_s


class _Bar:
    """Progress as a bar."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def at(self, found: dict[str, Any]) -> None:
        """Move the bar."""
        counts = found["request_counts"]
        done, total = counts["completed"] + counts["failed"], counts["total"] or None
        text = found["status"] + (f", {counts['failed']} failed" if counts["failed"] else "")
        self._bar.update(self._task, completed=done, total=total, description=text)


@contextlib.contextmanager
def _shown(batch_id: str) -> Iterator[_Plain | _Bar]:
    click.echo(f"{batch_id}; Ctrl-C leaves it running", err=True)
    if not sys.stderr.isatty():
        yield _Plain()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, bar.add_task("validating", total=None))


def _endpoint_of(file: Path) -> str:
    """The url of the first line. Raises CommandError."""
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                try:
                    return str(json.loads(line)["url"])
                except (ValueError, KeyError, TypeError):
                    break
    raise CommandError(
        f"{file} has no requests in its first line: write JSONL with custom_id, method, url and body, "
        "or name the endpoint with --endpoint"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
