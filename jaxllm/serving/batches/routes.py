"""/batches"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from jaxllm.serving.access.tenant import tenant_of
from jaxllm.serving.batches.batch_store import batch_object
from jaxllm.serving.batches.batch_types import Batch, BatchList, BatchListQuery, BatchRequest
from jaxllm.serving.batches.runner import Batches
from jaxllm.serving.http.json_response import json_response
from jaxllm.serving.http.openapi import returns
from jaxllm.serving.http.route import JSONRoute

router = APIRouter(route_class=JSONRoute, tags=["batches"])


@router.post("/batches", responses=returns(Batch))
async def create_batch(body: BatchRequest, request: Request) -> Response:
    """Run the requests of an uploaded file in the background, behind all other requests."""
    batches: Batches = request.app.state.batches
    return json_response(batch_object(await batches.create(body, tenant_of(request))))


@router.get("/batches", responses=returns(BatchList))
async def list_batches(request: Request, query: Annotated[BatchListQuery, Query()]) -> Response:
    """Batches, the newest first."""
    batches: Batches = request.app.state.batches
    return json_response(await batches.store.page(query, tenant_of(request).name))


@router.get("/batches/{batch_id}", responses=returns(Batch))
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """Where a batch stands."""
    batches: Batches = request.app.state.batches
    return json_response(batch_object(await batches.store.get(batch_id, tenant_of(request).name)))


@router.post("/batches/{batch_id}/cancel", responses=returns(Batch))
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Stop a batch; what has been answered by then is in its output file."""
    batches: Batches = request.app.state.batches
    return json_response(batch_object(await batches.cancel(batch_id, tenant_of(request).name)))
