"""The endpoints of files and batches: OpenAI's, with its shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from headrace.gateway.batches.fields import BATCH
from headrace.gateway.batches.files import Bounds, Files
from headrace.gateway.batches.journal import Journal
from headrace.gateway.batches.records import (
    BATCH_PURPOSE,
    Batch,
    BatchList,
    BatchRecord,
    DeletedFile,
    FileList,
    FileObject,
    new_id,
    now_s,
    tenant_folder,
)
from headrace.gateway.batches.runner import BatchRunner
from headrace.gateway.batches.types import (
    CreateBatch,
    check_metadata,
    check_purpose,
    ttl_s,
    upload_ttl_s,
    window_s,
)
from headrace.gateway.batches.uploads import upload_of
from headrace.gateway.checks import invalid
from headrace.gateway.edge.endpoint import API, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.failures import HttpError
from headrace.gateway.edge.requests import number_of, query_of, request_of
from headrace.gateway.edge.wire import encode
from headrace.protos.status import Reason, StatusError

LINE_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
)
"""What lines of a batch may ask for, where the gateway serves it."""
_MAX_FILES = 10_000
_MAX_BATCHES = 100
_DEFAULT_BATCHES = 20
_T = TypeVar("_T", FileObject, Batch)


def endpoints(runner: BatchRunner | None, files: Files | None, bounds: Bounds) -> Sequence[Endpoint]:
    """All endpoints. Without a store, each refuses."""
    own = _Refusing() if runner is None or files is None else _Batches(runner, files, bounds)
    upload = Operation("Upload a file for a batch, as multipart/form-data with file and purpose", FileObject)
    page = {"limit": {"type": "integer", "minimum": 1}, "after": {"type": "string"}}
    files_page = {**page, "order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}}
    listed_files = Operation("List your files", FileList, query=files_page)
    found = Operation("Describe a file", FileObject)
    content = Operation("Download a file")
    deleted = Operation("Delete a file", DeletedFile)
    create = Operation("Run the requests of a file at the lowest priority", Batch, (CreateBatch,))
    listed = Operation("List your batches", BatchList, query=page)
    batch = Operation("Show a batch", Batch)
    cancel = Operation("Cancel a batch", Batch)
    one_file, one = "/files/{file_id}", "/batches/{batch_id}"
    return under(
        API,
        Endpoint("POST", "/files", "files_create", own.upload, upload),
        Endpoint("GET", "/files", "files_list", own.list_files, listed_files),
        Endpoint("GET", one_file, "files_get", own.get_file, found),
        Endpoint("GET", f"{one_file}/content", "files_content", own.content, content),
        Endpoint("DELETE", one_file, "files_delete", own.delete_file, deleted),
        Endpoint("POST", "/batches", "batches_create", own.create, create),
        Endpoint("GET", "/batches", "batches_list", own.list_batches, listed),
        Endpoint("GET", one, "batches_get", own.get, batch),
        # A key whose requests are all running must be able to cancel.
        Endpoint("POST", f"{one}/cancel", "batches_cancel", own.cancel, cancel, makes_work=False),
    )


class _Batches:
    def __init__(self, runner: BatchRunner, files: Files, bounds: Bounds) -> None:
        self._runner = runner
        self._journal: Journal = runner.journal
        self._files = files
        self._bounds = bounds

    # --- files ------------------------------------------------------------------------------------------------------

    async def upload(self, exchange: Exchange) -> None:
        """POST files."""
        bounds = self._bounds
        await self._files.check_room(exchange.owner, 0)
        async with upload_of(exchange, bounds.max_file_bytes) as upload:
            check_purpose(upload.fields.get("purpose"))
            kept_s = upload_ttl_s(upload.fields, bounds.retention_s)
            await self._files.check_room(exchange.owner, upload.num_bytes)
            file = await self._files.add(
                exchange.owner, upload.path, upload.num_bytes, upload.filename, BATCH_PURPOSE, kept_s
            )
        await exchange.respond(encode(file))

    async def list_files(self, exchange: Exchange) -> None:
        """GET files."""
        query = _query(exchange, ("after", "limit", "order", "purpose"))
        limit = number_of(query, "limit", _MAX_FILES, 1, _MAX_FILES)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "order must be asc or desc")
        files = await self._files.of_tenant(exchange.owner)
        if "purpose" in query:
            files = [file for file in files if file.purpose == query["purpose"]]
        ids = [file.id for file in (files if order == "asc" else files[::-1])]
        named = {file.id: file for file in files}
        page = [named[file_id] for file_id in _after(ids, query.get("after"))]
        first, last, more = _ends(page, limit)
        await exchange.respond(encode(FileList(data=page[:limit], first_id=first, last_id=last, has_more=more)))

    async def get_file(self, exchange: Exchange) -> None:
        """GET files/{id}."""
        await exchange.respond(encode(await self._file(exchange)))

    async def content(self, exchange: Exchange) -> None:
        """GET files/{id}/content."""
        file = await self._file(exchange)
        exchange.stream_type = b"application/octet-stream"
        try:
            async for piece in self._files.content(exchange.owner, file.id):
                await exchange.write(piece)
        except FileNotFoundError:
            raise StatusError(Reason.NOT_FOUND, "the file was deleted meanwhile", field="file_id") from None
        await exchange.write(b"", last=True)

    async def delete_file(self, exchange: Exchange) -> None:
        """DELETE files/{id}."""
        file = await self._file(exchange)
        folder = tenant_folder(exchange.owner).partition("/")[2]
        for batch in await self._journal.open_batches(folder):
            record = await self._journal.record(batch)
            if record is not None and record.input_file_id == file.id:
                message = f"the file is the input of {batch.id}, which has not ended; cancel the batch first"
                raise HttpError(409, "file_in_use", message, param="file_id")
        await self._files.delete(exchange.owner, file.id)
        await exchange.respond(encode(DeletedFile(id=file.id)))

    async def _file(self, exchange: Exchange) -> FileObject:
        return await self._files.find(exchange.owner, exchange.scope["path_params"]["file_id"])

    # --- batches ----------------------------------------------------------------------------------------------------

    async def create(self, exchange: Exchange) -> None:
        """POST batches."""
        request = await request_of(exchange, CreateBatch, BATCH)
        seconds = window_s(request.completion_window)
        check_metadata(request.metadata)
        bounds = self._bounds
        output_ttl_s = ttl_s(request.output_expires_after, "output_expires_after", bounds.retention_s)
        served = self._runner.line_endpoints
        if request.endpoint not in served:
            raise invalid("endpoint", f"endpoint must be one of {', '.join(served)}")
        file = await self._files.find(exchange.owner, request.input_file_id, "input_file_id")
        if file.purpose != BATCH_PURPOSE:
            problem = f"input_file_id: the file has the purpose {file.purpose}; upload the requests with purpose=batch"
            raise invalid("input_file_id", problem)
        if file.bytes > bounds.max_file_bytes:
            raise invalid("input_file_id", f"input_file_id: the file is larger than {bounds.max_file_bytes} bytes")
        folder = tenant_folder(exchange.owner).partition("/")[2]
        if len(await self._journal.open_batches(folder)) >= bounds.max_tenant_batches:
            problem = f"you have {bounds.max_tenant_batches} batches that have not ended, the maximum of a tenant"
            raise StatusError(Reason.QUOTA, f"{problem}; wait for one, or cancel it", retry_after_s=60.0)
        now = now_s()
        authorization = exchange.caller.authorization
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=exchange.owner,
            key_id="" if authorization is None else authorization.key.id,
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + seconds,
            output_ttl_s=bounds.retention_s if output_ttl_s is None else output_ttl_s,
            metadata=request.metadata,
        )
        batch = await self._journal.create(record)
        self._runner.wake()
        await exchange.respond(encode(await self._journal.shown(batch, record)))

    async def list_batches(self, exchange: Exchange) -> None:
        """GET batches."""
        query = _query(exchange, ("after", "limit"))
        limit = number_of(query, "limit", _DEFAULT_BATCHES, 1, _MAX_BATCHES)
        page = []
        for batch_id in _after(await self._journal.ids(exchange.owner), query.get("after"))[: limit + 1]:
            batch, record = await self._journal.find(exchange.owner, batch_id)
            page.append(await self._journal.shown(batch, record))
        first, last, more = _ends(page, limit)
        await exchange.respond(encode(BatchList(data=page[:limit], first_id=first, last_id=last, has_more=more)))

    async def get(self, exchange: Exchange) -> None:
        """GET batches/{id}."""
        batch, record = await self._journal.find(exchange.owner, exchange.scope["path_params"]["batch_id"])
        await exchange.respond(encode(await self._journal.shown(batch, record)))

    async def cancel(self, exchange: Exchange) -> None:
        """POST batches/{id}/cancel."""
        batch, record = await self._journal.find(exchange.owner, exchange.scope["path_params"]["batch_id"])
        ended = await self._journal.ended(batch)
        if ended is not None and ended.status != "cancelled":
            message = f"the batch is {ended.status}; only one that has not ended can be cancelled"
            raise HttpError(409, "batch_has_ended", message, param="batch_id")
        await self._journal.cancel(batch)
        self._runner.wake()
        await exchange.respond(encode(await self._journal.shown(batch, record)))


class _Refusing:
    """The handlers of a gateway without a store."""

    async def _refuse(self, exchange: Exchange) -> None:
        problem = "this gateway keeps no files and runs no batches; start it with --batch-store DIR"
        raise StatusError(Reason.UNSUPPORTED, problem)

    upload = list_files = get_file = content = delete_file = create = list_batches = get = cancel = _refuse


def _query(exchange: Exchange, known: Sequence[str]) -> Mapping[str, str]:
    query = query_of(exchange)
    for name in query.keys() - set(known):
        raise invalid(name[:100], f"{name[:100]} is not a parameter here; there are {', '.join(known)}")
    return query


def _after(ids: list[str], after: str | None) -> list[str]:
    """The ids after `after`. Raises `StatusError`."""
    if after is None:
        return ids
    if after not in ids:
        raise invalid("after", "after: there is no file or batch with this id; take an id from the list")
    return ids[ids.index(after) + 1 :]


def _ends(page: Sequence[_T], limit: int) -> tuple[str | None, str | None, bool]:
    """The first and the last id of a page, and whether there is more than the page."""
    shown = page[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return first, last, len(page) > limit
