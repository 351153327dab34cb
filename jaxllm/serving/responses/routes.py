"""/responses and /conversations: OpenAI's Responses API"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi import Response as HTTPResponse

from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.call import open_call
from jaxllm.serving.http.answers import json_response, left_out, returns
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import EventStream, JSONRoute, until_disconnect
from jaxllm.serving.responses import objects
from jaxllm.serving.responses import request as bodies
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.service import Responses, compacted
from jaxllm.serving.state import ServerState

router = APIRouter(route_class=JSONRoute, tags=["responses"])
conversations_router = APIRouter(route_class=JSONRoute, tags=["conversations"])

MAX_PAGE = 100

After = Annotated[str | None, Query(description="The id of the item after which the page begins.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most items on a page.")]
OrderQuery = Annotated[Literal["asc", "desc"], Query(description="asc is oldest first, desc newest first.")]
Include = Annotated[
    list[bodies.Includable] | None,
    Query(alias="include[]", description="Accepted, without effect: items are returned with all that was kept."),
]


@router.post("/responses", responses=returns(objects.Response, events=objects.EVENTS.values()))
async def create_response(body: bodies.ResponseRequest, request: Request) -> HTTPResponse:
    """Answer an input, and what it continues, with text or function calls."""
    responses = _responses(request)
    call = await open_call(request, body.model, keep_alive=body.keep_alive, stream=body.stream)
    keep_alive = call.state.config.sse_keep_alive
    run = await responses.prepare(body, call)
    headers = left_out(body.left_out)
    if body.background:
        begun = await responses.background.start(run)
        if body.stream:
            return EventStream(run.response.id, begun.follow(-1, keep_alive), headers=headers)
        return json_response(run.response, request_id=run.response.id, headers=headers)
    if body.stream:
        await call.enter(run)
        return EventStream(run.response.id, run.events(keep_alive), headers=headers)
    async with run:
        response = await until_disconnect(request.receive, run.to_end())
    return json_response(response, request_id=response.id, headers=headers)


@router.post("/responses/input_tokens", responses=returns(objects.InputTokens))
async def count_input_tokens(body: bodies.InputTokensRequest, request: Request) -> HTTPResponse:
    """The number of tokens that the prompt of a response would have."""
    call = await open_call(request, body.model)
    return json_response(objects.InputTokens(await _responses(request).count_tokens(body, call)))


@router.post("/responses/compact", responses=returns(objects.CompactedResponse))
async def compact_response(body: bodies.CompactRequest, request: Request) -> HTTPResponse:
    """A conversation made short: what users said, and an item that has the model's summary of all of it."""
    call = await open_call(request, body.model)
    async with await _responses(request).compact(body, call) as run:
        await until_disconnect(request.receive, run.to_end())
    return json_response(compacted(run), request_id=run.response.id)


@router.get("/responses/{response_id}", responses=returns(objects.Response, events=objects.EVENTS.values()))
async def retrieve_response(
    response_id: str,
    request: Request,
    include: Include = None,
    stream: Annotated[bool, Query(description="Send the events of its stream.")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="Only the events after this number.")] = None,
    include_obfuscation: Annotated[bool, Query(description="Accepted, without effect: no event is padded.")] = False,
) -> HTTPResponse:
    """A stored response, or with `stream` its events, of one created with background and stream."""
    state: ServerState = request.app.state.server
    responses = _responses(request)
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


@router.delete("/responses/{response_id}", responses=returns(objects.DeletedResponse))
async def delete_response(response_id: str, request: Request) -> HTTPResponse:
    """Forget a stored response; one that runs in the background is stopped."""
    await _responses(request).background.delete(response_id, tenant_of(request).name)
    return json_response(objects.DeletedResponse(response_id))


@router.post("/responses/{response_id}/cancel", responses=returns(objects.Response))
async def cancel_response(response_id: str, request: Request) -> HTTPResponse:
    """Stop a background response; one that has ended stays as it is."""
    responses = _responses(request)
    response = await responses.store.get(response_id, tenant_of(request).name)
    if not response.background:
        message = f"{response_id} was not created with background; only such responses can be cancelled"
        raise APIError(400, message, param="response_id", code="not_background")
    if response.status in objects.RUNNING:
        response = await responses.background.cancel(response_id)
    return json_response(response, request_id=response_id)


@router.get("/responses/{response_id}/input_items", responses=returns(objects.ItemList))
async def list_input_items(
    response_id: str,
    request: Request,
    after: After = None,
    include: Include = None,
    limit: Limit = 20,
    order: OrderQuery = "desc",
) -> HTTPResponse:
    """The input of a response, with the items of the responses that it continues."""
    items = await _responses(request).store.input_items(response_id, tenant_of(request).name)
    return json_response(page(items, after=after, limit=limit, order=order))


@conversations_router.post("/conversations", responses=returns(objects.StoredConversation))
async def create_conversation(body: bodies.ConversationRequest, request: Request) -> HTTPResponse:
    """Begin a conversation, empty or with items."""
    items, owner = [item.item() for item in body.items], tenant_of(request).name
    return json_response(await _responses(request).conversations.create(body.metadata or {}, items, owner))


@conversations_router.get("/conversations/{conversation_id}", responses=returns(objects.StoredConversation))
async def retrieve_conversation(conversation_id: str, request: Request) -> HTTPResponse:
    """A conversation, without its items."""
    return json_response(await _responses(request).conversations.get(conversation_id, tenant_of(request).name))


@conversations_router.post("/conversations/{conversation_id}", responses=returns(objects.StoredConversation))
async def update_conversation(conversation_id: str, body: bodies.ConversationUpdate, request: Request) -> HTTPResponse:
    """Replace a conversation's metadata."""
    owner = tenant_of(request).name
    return json_response(await _responses(request).conversations.update(conversation_id, body.metadata, owner))


@conversations_router.delete("/conversations/{conversation_id}", responses=returns(objects.DeletedConversation))
async def delete_conversation(conversation_id: str, request: Request) -> HTTPResponse:
    """Forget a conversation and its items; responses that belonged to it stay."""
    await _responses(request).conversations.delete(conversation_id, tenant_of(request).name)
    return json_response(objects.DeletedConversation(conversation_id))


@conversations_router.post("/conversations/{conversation_id}/items", responses=returns(objects.ItemList))
async def create_items(
    conversation_id: str, body: bodies.ConversationItemsRequest, request: Request, include: Include = None
) -> HTTPResponse:
    """Put items at a conversation's end."""
    owner = tenant_of(request).name
    items = await _responses(request).conversations.add(conversation_id, [item.item() for item in body.items], owner)
    shown = [objects.listed(item) for item in items]
    return json_response(objects.ItemList(shown, shown[0].id, shown[-1].id, has_more=False))


@conversations_router.get("/conversations/{conversation_id}/items", responses=returns(objects.ItemList))
async def list_items(
    conversation_id: str,
    request: Request,
    after: After = None,
    include: Include = None,
    limit: Limit = 20,
    order: OrderQuery = "desc",
) -> HTTPResponse:
    """A conversation's items."""
    items = await _responses(request).conversations.items(conversation_id, tenant_of(request).name)
    return json_response(page(items, after=after, limit=limit, order=order))


@conversations_router.get("/conversations/{conversation_id}/items/{item_id}", responses=returns(objects.ListedItem))
async def retrieve_item(conversation_id: str, item_id: str, request: Request, include: Include = None) -> HTTPResponse:
    """One item of a conversation."""
    owner = tenant_of(request).name
    item = await _responses(request).conversations.item_of(conversation_id, item_id, owner)
    return json_response(objects.listed(item))


@conversations_router.delete(
    "/conversations/{conversation_id}/items/{item_id}", responses=returns(objects.StoredConversation)
)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> HTTPResponse:
    """Take an item out of a conversation."""
    owner = tenant_of(request).name
    return json_response(await _responses(request).conversations.remove(conversation_id, item_id, owner))


def _responses(request: Request) -> Responses:
    return request.app.state.responses


def page(items: Sequence[Item], *, after: str | None, limit: int, order: str) -> objects.ItemList:
    """Part of `items`, which are oldest first. Raises 404 when none has the id `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        start = next((at for at, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if start == 0:
            raise APIError(404, f"after is {after!r}; no item of this list has that id", param="after")
    shown = ordered[start : start + limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return objects.ItemList(
        [objects.listed(item) for item in shown], first_id, last_id, has_more=start + limit < len(ordered)
    )


async def _replay(events: bytes, after: int) -> AsyncIterator[list[bytes]]:
    yield [event + b"\n\n" for event in events.split(b"\n\n")[after + 1 : -1]]
