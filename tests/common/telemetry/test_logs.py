"""Log lines: one a record, as text or JSON, with the request's id and without secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.telemetry.logs import JsonFormatter, TextFormatter, request_id_of, request_id_var, without_secrets
from tests.patience import patience


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("headrace.test", logging.WARNING, __file__, 1, message, args, None)
    made.request_id = "-"
    made.__dict__.update(fields)
    return made


def raised() -> logging.LogRecord:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        return record("failed", exc_info=sys.exc_info())


@given(st.text(), st.text())
def test_a_json_record_is_one_line_whatever_its_message_holds(message: str, argument: str) -> None:
    line = JsonFormatter().format(record("%s: %s", message, argument))
    assert "\n" not in line
    assert "\r" not in line
    assert json.loads(line)["message"] == without_secrets(f"{message}: {argument}")


def test_a_json_record_has_time_level_logger_message_and_request_id() -> None:
    fields = json.loads(JsonFormatter().format(record("placed on %s", "w", request_id="req_1", created=1.5)))
    assert fields == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "logger": "headrace.test",
        "message": "placed on w",
        "request_id": "req_1",
    }
    assert datetime.fromisoformat(fields["time"]).timestamp() == 1.5


def test_a_json_record_outside_of_requests_has_no_request_id() -> None:
    assert "request_id" not in json.loads(JsonFormatter().format(record("listening")))


def test_an_exception_is_one_field_of_its_json_record() -> None:
    line = JsonFormatter().format(raised())
    assert "\n" not in line
    exception = json.loads(line)["exception"]
    assert exception.startswith("Traceback")
    assert exception.endswith("ValueError: two\nlines")


def test_a_text_record_is_one_line_and_a_traceback_follows_it() -> None:
    forged = "x\n2026-01-31 12:00:00,000 INFO headrace [-] forged"
    assert TextFormatter().format(record(forged)).count("\n") == 0
    lines = TextFormatter().format(raised()).splitlines()
    assert lines[0].endswith(" WARNING headrace.test [-] failed")
    assert lines[1].startswith("Traceback")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host:6379/0", "redis://user:***@host:6379/0"),
        ("cannot reach redis://:hunter2@host:6379: refused", "cannot reach redis://:***@host:6379: refused"),
        ("authorization: Bearer abc.def-123", "authorization: Bearer ***"),
        ("key sk-0123456789abcdef is unknown", "key sk-*** is unknown"),
        ("key hr-pX0_9-zzzzzzzzzzzzzz is over its quota", "key hr-*** is over its quota"),
        ("nothing to hide: http://127.0.0.1:8000/v1", "nothing to hide: http://127.0.0.1:8000/v1"),
    ],
)
def test_passwords_tokens_and_keys_are_not_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert TextFormatter().format(record(text)).endswith(shown)
    assert json.loads(JsonFormatter().format(record(text)))["message"] == shown


def test_an_id_is_taken_from_metadata_only_if_it_is_a_printable_word() -> None:
    assert request_id_of((("x-other", "a"), ("x-request-id", "req_1"))) == "req_1"
    assert request_id_of((("x-request-id", "two words"),)) is None
    assert request_id_of((("x-request-id", "a" * 129),)) is None
    assert request_id_of((("x-request-id", b"req_1"),)) is None
    assert request_id_of(None) is None


async def test_tasks_of_different_requests_log_different_ids() -> None:
    async def task(name: str) -> str:
        request_id_var.set(name)
        await asyncio.sleep(0)
        return request_id_var.get()

    assert await asyncio.gather(*map(task, "ab")) == ["a", "b"]
    assert request_id_var.get() == "-"


PROGRAM = """
import logging, threading, warnings
from headrace.common.telemetry.logs import configure_logging
configure_logging("info", "json")
logging.getLogger("uvicorn.error").warning("from the server")
logging.getLogger("uvicorn.error").info("not worth a line")
logging.getLogger("httpx").info("not worth a line either")
warnings.warn("mind this")
thread = threading.Thread(target=lambda: 1 / 0, name="t"); thread.start(); thread.join()
raise RuntimeError("over")
"""


def test_what_libraries_say_and_what_nobody_caught_is_logged_in_the_same_form() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.returncode == 1
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert [entry["logger"] for entry in records] == ["uvicorn.error", "py.warnings", "headrace", "headrace"]
    assert "mind this" in records[1]["message"]
    assert records[2]["message"] == "thread t ends because of an exception"
    assert "ZeroDivisionError" in records[2]["exception"]
    assert records[3]["exception"].endswith("RuntimeError: over")


def test_a_process_that_dies_of_a_fault_says_where() -> None:
    program = (
        "import ctypes; from headrace.common.telemetry.logs import configure_logging; configure_logging('info');"
        "ctypes.string_at(0)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in string_at" in done.stderr


def test_at_debug_level_libraries_for_connections_stay_out_of_the_log() -> None:
    program = """
import logging
from headrace.common.telemetry.logs import configure_logging
for level in ("debug", "error"):
    configure_logging(level)
    logging.getLogger("headrace.x").debug("ours at %s", level)
    logging.getLogger("grpc._cython.cygrpc").debug("loaded running loop")
    logging.getLogger("grpc._channel").warning("worth a line at %s", level)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60), check=True
    )
    messages = [line.partition("] ")[2] for line in done.stderr.splitlines()]
    assert messages == ["ours at debug", "worth a line at debug"]
