"""/responses: OpenAI's Responses API"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, get_args

from fastapi import APIRouter, Query, Request
from fastapi import Response as HTTPResponse

from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import EventStream, JSONRoute, until_disconnect
from jaxllm.serving.responses.events import ResponseStreamEvent
from jaxllm.serving.responses.objects import RUNNING, DeletedResponse, InputTokens, ItemList, Response
from jaxllm.serving.responses.paging import After, Include, Limit, OrderQuery, page
from jaxllm.serving.responses.request import InputTokensRequest, ResponseRequest
from jaxllm.serving.responses.service import Responses
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["responses"])


@router.post("/responses", responses=returns(Response, events=get_args(ResponseStreamEvent)))
async def create_response(body: ResponseRequest, request: Request) -> HTTPResponse:
    """Answer an input, and what it continues, with text or function calls."""
    state: ServerState = request.app.state.server
    responses: Responses = request.app.state.responses
    keep_alive = state.config.sse_keep_alive
    run = await responses.prepare(
        body, await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    )
    if body.background:
        begun = await responses.background.start(run)
        if body.stream:
            return EventStream(run.response.id, begun.follow(-1, keep_alive))
        return json_response(run.response, request_id=run.response.id)
    if body.stream:
        await run.call.enter(run)
        return EventStream(run.response.id, run.events(keep_alive))
    async with run:
        response = await until_disconnect(request.receive, run.to_end())
    return json_response(response, request_id=response.id)


@router.post("/responses/input_tokens", responses=returns(InputTokens))
async def count_input_tokens(body: InputTokensRequest, request: Request) -> HTTPResponse:
    """How many tokens the prompt of a response would have."""
    responses: Responses = request.app.state.responses
    call = await open_call(request, body.model)
    return json_response(InputTokens(await responses.count_tokens(body, call)))


@router.get("/responses/{response_id}", responses=returns(Response, events=get_args(ResponseStreamEvent)))
async def retrieve_response(
    response_id: str,
    request: Request,
    include: Include = None,
    stream: Annotated[bool, Query(description="Send the events of its stream.")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="Only the events behind this number.")] = None,
    include_obfuscation: Annotated[bool, Query(description="Accepted, without effect: no event is padded.")] = False,
) -> HTTPResponse:
    """A stored response, or with `stream` its events, of one created with background and stream."""
    state: ServerState = request.app.state.server
    responses: Responses = request.app.state.responses
    if starting_after is not None and not stream:
        raise APIError(400, "starting_after needs stream to be true", param="starting_after")
    owner = tenant_of(request).name
    active = responses.background.get(response_id, owner)
    if not stream:
        response = active.run.response if active is not None else await responses.store.get(response_id, owner)
        return json_response(response, request_id=response_id)
    after = -1 if starting_after is None else starting_after
    if active is not None and active.run.keeps_events:
        return EventStream(response_id, active.follow(after, state.config.sse_keep_alive))
    events = None if active is not None else await responses.store.events(response_id, owner)
    if events is None:
        message = f"{response_id} has no stream; responses created with background and stream keep theirs"
        raise APIError(400, message, param="stream", code="no_stream")
    return EventStream(response_id, _replay(events, after))


@router.delete("/responses/{response_id}", responses=returns(DeletedResponse))
async def delete_response(response_id: str, request: Request) -> HTTPResponse:
    """Forget a stored response; one that runs in the background is stopped."""
    responses: Responses = request.app.state.responses
    await responses.background.delete(response_id, tenant_of(request).name)
    return json_response(DeletedResponse(response_id))


@router.post("/responses/{response_id}/cancel", responses=returns(Response))
async def cancel_response(response_id: str, request: Request) -> HTTPResponse:
    """Stop a background response; one that has ended stays as it is."""
    responses: Responses = request.app.state.responses
    response = await responses.store.get(response_id, tenant_of(request).name)
    if not response.background:
        message = f"{response_id} was not created with background; only such responses can be cancelled"
        raise APIError(400, message, param="response_id", code="not_background")
    if response.status in RUNNING:
        response = await responses.background.cancel(response_id)
    return json_response(response, request_id=response_id)


@router.get("/responses/{response_id}/input_items", responses=returns(ItemList))
async def list_input_items(
    response_id: str,
    request: Request,
    after: After = None,
    include: Include = None,
    limit: Limit = 20,
    order: OrderQuery = "desc",
) -> HTTPResponse:
    """What a response was given, with the items of the responses that it continues."""
    responses: Responses = request.app.state.responses
    items = await responses.store.input_items(response_id, tenant_of(request).name)
    return json_response(page(items, after=after, limit=limit, order=order))


async def _replay(events: bytes, after: int) -> AsyncIterator[list[bytes]]:
    """The events of a stored stream behind number `after`."""
    yield [event + b"\n\n" for event in events.split(b"\n\n")[after + 1 : -1]]
