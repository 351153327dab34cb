"""/files"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse

from jaxllm.serving.access.tenant import tenant_of
from jaxllm.serving.batches.file_types import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    FileDeleted,
    FileList,
    FileListQuery,
    FileObject,
    Purpose,
)
from jaxllm.serving.batches.runner import Batches
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.multipart import MultipartRoute, too_large
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute

upload_router = APIRouter(route_class=MultipartRoute, tags=["files"])
router = APIRouter(route_class=JSONRoute, tags=["files"])

_ANCHOR = "From when the seconds count; without the two the file is kept until it is deleted."
_BYTES: dict[str, Any] = {
    "description": "Success",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


@upload_router.post("/files", responses=returns(FileObject))
async def upload_file(
    request: Request,
    file: Annotated[UploadFile, File(description="The file, with its name.")],
    purpose: Annotated[Purpose, Form(description="Batches take files of purpose batch; the others mean nothing here.")],
    anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]", description=_ANCHOR)] = None,
    seconds: Annotated[
        int | None,
        Form(
            alias="expires_after[seconds]",
            ge=MIN_EXPIRY_SECONDS,
            le=MAX_EXPIRY_SECONDS,
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
    batches: Batches = request.app.state.batches
    await batches.files.delete_expired()
    saved = await batches.files.save(
        file.file, tenant_of(request).name, filename=file.filename or "", purpose=purpose, expires_after=seconds
    )
    return json_response(saved)


@router.get("/files", responses=returns(FileList))
async def list_files(request: Request, query: Annotated[FileListQuery, Query()]) -> Response:
    """Files, the newest first unless asked otherwise."""
    batches: Batches = request.app.state.batches
    return json_response(await batches.files.page(query, tenant_of(request).name))


@router.get("/files/{file_id}", responses=returns(FileObject))
async def retrieve_file(file_id: str, request: Request) -> Response:
    """What is known about a file."""
    batches: Batches = request.app.state.batches
    return json_response(await batches.files.get(file_id, tenant_of(request).name))


@router.get("/files/{file_id}/content", response_class=FileResponse, responses=returns(FileObject) | {200: _BYTES})
async def download_file(file_id: str, request: Request) -> Response:
    """The bytes of a file, as they were uploaded; never shown inside a page by a browser."""
    batches: Batches = request.app.state.batches
    owner = tenant_of(request).name
    file = await batches.files.get(file_id, owner)
    path = await batches.files.path(file_id, owner)
    return FileResponse(
        path,
        media_type="application/octet-stream",
        filename=file.filename or file.id,
        headers={"X-Content-Type-Options": "nosniff"},
        stat_result=await asyncio.to_thread(path.stat),
    )


@router.delete("/files/{file_id}", responses=returns(FileDeleted))
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file. A batch that was made from it goes on: it has kept its input."""
    batches: Batches = request.app.state.batches
    await batches.files.delete(file_id, tenant_of(request).name)
    return json_response(FileDeleted(id=file_id))
