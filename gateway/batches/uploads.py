"""Uploads: files in the multipart bodies that OpenAI's clients send, written to a file on the disk as they arrive."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from headrace.gateway.checks import invalid
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.failures import HttpError
from headrace.protos.status import Reason, StatusError

_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_MAX_NAME_CHARS = 255


@dataclass(slots=True)
class Upload:
    """A file that has arrived, and the form's fields beside it."""

    path: Path
    num_bytes: int = 0
    filename: str = ""
    has_file: bool = False
    fields: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def upload_of(exchange: Exchange, max_bytes: int) -> AsyncIterator[Upload]:
    """Context manager: the upload in a request's body. Its file exists until it exits. Raises `StatusError`, and
    `HttpError` (413, 408, 415)."""
    kind, _, options = exchange.header("content-type").partition(";")
    if kind.strip().lower() != "multipart/form-data" or "boundary=" not in options:
        problem = "send the file as multipart/form-data with the fields file and purpose"
        raise HttpError(415, "content_type_not_supported", problem, param="content-type")
    with tempfile.NamedTemporaryFile(prefix="headrace-upload-") as file:
        upload = Upload(Path(file.name))
        form = _Form(upload, file, max_bytes, exchange.header("content-type"))
        problem = f"the file is larger than {max_bytes} bytes; divide it"
        too_large = HttpError(413, "file_too_large", problem, [(b"connection", b"close")])
        async for piece in exchange.body_pieces(max_bytes + _MAX_FIELDS * _MAX_FIELD_BYTES, too_large):
            form.feed(piece)
        form.end()
        file.flush()
        yield upload


class _Form:
    """Feeds a multipart body to python-multipart, and keeps its parts."""

    def __init__(self, upload: Upload, file: IO[bytes], max_bytes: int, content_type: str) -> None:
        from python_multipart.exceptions import ParseError
        from python_multipart.multipart import MultipartParser, parse_options_header

        self._upload = upload
        self._file = file
        self._max_bytes = max_bytes
        self._parse_options = parse_options_header
        self._error = ParseError
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._name = ""
        self._is_file = False
        self._is_whole = False
        self._text = bytearray()
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, piece: bytes) -> None:
        """Parse the next piece. Raises `StatusError` and `HttpError`."""
        try:
            self._parser.write(piece)
        except self._error as error:
            raise StatusError(Reason.INVALID_FIELD, f"the body is not a multipart form: {error}") from error

    def end(self) -> None:
        """The body is complete. Raises `StatusError`."""
        if not self._is_whole:
            raise StatusError(Reason.INVALID_FIELD, "the multipart form has no end")
        if not self._upload.has_file:
            raise invalid("file", "file is required: send the content as a part named file, with a file name")

    def _begin(self) -> None:
        self._headers = {}
        self._text.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = self._parse_options(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file" and b"filename" in options
        if not self._is_file:
            return
        if self._upload.has_file:
            raise invalid("file", "file: send one file at a time")
        self._upload.has_file = True
        name = options[b"filename"].decode(errors="replace").replace("\\", "/").rpartition("/")[2]
        self._upload.filename = "".join(c for c in name if c.isprintable())[:_MAX_NAME_CHARS] or "file"

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._upload.num_bytes += end - start
            if self._upload.num_bytes > self._max_bytes:
                raise HttpError(413, "file_too_large", f"the file is larger than {self._max_bytes} bytes; divide it")
            self._file.write(data[start:end])
        else:
            self._text += data[start:end]
            if len(self._text) > _MAX_FIELD_BYTES:
                raise invalid(self._name, f"{self._name[:100]} has more than {_MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self._upload.fields) >= _MAX_FIELDS:
            raise StatusError(Reason.INVALID_FIELD, f"the form has more than {_MAX_FIELDS} fields")
        self._upload.fields[self._name] = self._text.decode(errors="replace")

    def _end(self) -> None:
        self._is_whole = True
