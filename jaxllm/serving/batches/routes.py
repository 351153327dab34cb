"""/files and /batches."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse, PlainTextResponse

from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.batches import types
from jaxllm.serving.batches.run import Batches
from jaxllm.serving.batches.stores import batch_object
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.documents import MAX_BYTES, text_of
from jaxllm.serving.http.route import JSONRoute, MultipartRoute, too_large

router = APIRouter(route_class=JSONRoute, tags=["batches"])

upload_router = APIRouter(route_class=MultipartRoute, tags=["files"])
files_router = APIRouter(route_class=JSONRoute, tags=["files"])
_ANCHOR = "From when the seconds count; without the two the file is kept until it is deleted."
_BYTES: dict[str, Any] = {
    "description": "Success",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


@router.post("/batches", responses=returns(types.Batch))
async def create_batch(body: types.BatchRequest, request: Request) -> Response:
    """Run the requests of an uploaded file in the background, after all other requests."""
    return json_response(batch_object(await _batches(request).create(body, tenant_of(request))))


@router.get("/batches", responses=returns(types.BatchList))
async def list_batches(request: Request, query: Annotated[types.BatchListQuery, Query()]) -> Response:
    """Batches, the newest first."""
    return json_response(await _batches(request).store.page(query, tenant_of(request).name))


@router.get("/batches/{batch_id}", responses=returns(types.Batch))
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """The state of a batch."""
    return json_response(batch_object(await _batches(request).store.get(batch_id, tenant_of(request).name)))


@router.post("/batches/{batch_id}/cancel", responses=returns(types.Batch))
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Stop a batch; what has been answered by then is in its output file."""
    return json_response(batch_object(await _batches(request).cancel(batch_id, tenant_of(request).name)))


@upload_router.post("/files", responses=returns(types.FileObject))
async def upload_file(
    request: Request,
    file: Annotated[UploadFile, File(description="The file, with its name.")],
    purpose: Annotated[
        types.Purpose, Form(description="Batches take files of purpose batch; the others mean nothing here.")
    ],
    anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]", description=_ANCHOR)] = None,
    seconds: Annotated[
        int | None,
        Form(
            alias="expires_after[seconds]",
            ge=types.MIN_EXPIRY_SECONDS,
            le=types.MAX_EXPIRY_SECONDS,
            description="When it is deleted, from one hour to 30 days.",
        ),
    ] = None,
) -> Response:
    """Keep a file, until it is deleted or expires."""
    if (anchor is None) != (seconds is None):
        missing = "expires_after[anchor]" if anchor is None else "expires_after[seconds]"
        raise APIError(400, f"{missing} is required when expires_after is given", param=missing)
    limit = request.app.state.server.config.max_file_size
    if (file.size or 0) > limit:
        raise too_large(limit)
    await _batches(request).files.delete_expired()
    saved = await _batches(request).files.save(
        file.file, tenant_of(request).name, filename=file.filename or "", purpose=purpose, expires_after=seconds
    )
    return json_response(saved)


@upload_router.post("/files/text", response_class=PlainTextResponse)
async def read_file(file: Annotated[UploadFile, File(description="A PDF, or a text in UTF-8.")]) -> Response:
    """The text of a file, which is not kept."""
    return PlainTextResponse(await asyncio.to_thread(lambda: text_of(file.file.read(MAX_BYTES + 1))))


@files_router.get("/files", responses=returns(types.FileList))
async def list_files(request: Request, query: Annotated[types.FileListQuery, Query()]) -> Response:
    """Files, the newest first unless asked otherwise."""
    return json_response(await _batches(request).files.page(query, tenant_of(request).name))


@files_router.get("/files/{file_id}", responses=returns(types.FileObject))
async def retrieve_file(file_id: str, request: Request) -> Response:
    """The facts about a file."""
    return json_response(await _batches(request).files.get(file_id, tenant_of(request).name))


@files_router.get(
    "/files/{file_id}/content", response_class=FileResponse, responses=returns(types.FileObject) | {200: _BYTES}
)
async def download_file(file_id: str, request: Request) -> Response:
    """The bytes of a file, as they were uploaded; never shown inside a page by a browser."""
    file, path = await _batches(request).files.located(file_id, tenant_of(request).name)
    return FileResponse(
        path,
        media_type="application/octet-stream",
        filename=file.filename or file.id,
        headers={"X-Content-Type-Options": "nosniff"},
        stat_result=await asyncio.to_thread(path.stat),
    )


@files_router.delete("/files/{file_id}", responses=returns(types.FileDeleted))
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file. A batch that was made from it goes on: it has kept its input."""
    await _batches(request).files.delete(file_id, tenant_of(request).name)
    return json_response(types.FileDeleted(id=file_id))


def _batches(request: Request) -> Batches:
    return request.app.state.batches
