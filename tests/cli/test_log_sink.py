"""Log lines of many processes on one stream, as text and as JSON."""

from __future__ import annotations

import io
import json
import threading

from headrace.cli.serving.log_sink import LogSink
from tests.patience import patience

RECORD = b'{"time":"2026-01-31T12:00:00.000Z","level":"warning","logger":"l","message":"m"}'


class Kept(io.BytesIO):
    """A stream whose content outlives it."""


def written(*lines: tuple[str, bytes | str], **options: bool) -> list[bytes]:
    stream = Kept()
    sink = LogSink(stream, **options)
    for name, line in lines:
        sink.line(name, line)
    sink.close(10.0)
    return stream.getvalue().splitlines()


def test_text_lines_stand_behind_the_name_of_their_process() -> None:
    assert written(("router", b"up"), ("serve", "stopping")) == [b"router | up", b"serve | stopping"]


def test_a_record_gets_its_process_and_is_otherwise_left_as_it_is() -> None:
    (line,) = written(("worker-0", RECORD), as_json=True)
    assert line == b'{"process":"worker-0",' + RECORD[1:]


def test_whatever_else_a_process_prints_becomes_a_record() -> None:
    lines = written(
        ("worker-0", b'I1120 chttp2_transport.cc:1403] "quoted" \xff'),
        ("worker-0", b"error: no such model"),
        ("serve", "stopping; once more kills"),
        ("router", b'{"time": cut off'),
        as_json=True,
        colour=True,
    )
    native, refused, own, cut = map(json.loads, lines)
    assert native["message"] == 'I1120 chttp2_transport.cc:1403] "quoted" �'
    assert (native["process"], native["level"], native["logger"]) == ("worker-0", "info", "stderr")
    assert refused["level"] == "error"
    assert (own["process"], own["logger"]) == ("serve", "headrace.serve")
    assert cut["message"] == '{"time": cut off'


class Stuck(io.BytesIO):
    """A stream that blocks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, data: object) -> int:
        assert self.let_go.wait(patience(20))
        return super().write(data)  # type: ignore[arg-type]


def test_dropped_lines_are_reported_as_a_record_too() -> None:
    stream = Stuck()
    sink = LogSink(stream, as_json=True)
    for number in range(10_050):
        sink.line("router", f"line {number}")
    stream.let_go.set()
    while not sink._queue.empty():
        threading.Event().wait(0.01)
    sink.line("router", "afterwards")
    sink.close(10.0)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert records[-1]["message"] == "afterwards"
    assert records[-2]["process"] == "serve"
    assert records[-2]["message"].endswith("lines were dropped")
