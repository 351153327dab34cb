"""/conversations: items that responses continue and add to"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jaxllm.serving.access.keys import tenant_of
from jaxllm.serving.http.answers import json_response, returns
from jaxllm.serving.http.route import JSONRoute
from jaxllm.serving.responses.conversation_store import ConversationStore
from jaxllm.serving.responses.objects import DeletedConversation, ItemList, ListedItem, StoredConversation, listed
from jaxllm.serving.responses.paging import After, Include, Limit, OrderQuery, page
from jaxllm.serving.responses.request import ConversationItemsRequest, ConversationRequest, ConversationUpdate
from jaxllm.serving.responses.service import Responses

router = APIRouter(route_class=JSONRoute, tags=["conversations"])


@router.post("/conversations", responses=returns(StoredConversation))
async def create_conversation(body: ConversationRequest, request: Request) -> Response:
    """Begin a conversation, empty or with items."""
    items = [item.item() for item in body.items]
    return json_response(await _store(request).create(body.metadata or {}, items, tenant_of(request).name))


@router.get("/conversations/{conversation_id}", responses=returns(StoredConversation))
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """A conversation, without its items."""
    return json_response(await _store(request).get(conversation_id, tenant_of(request).name))


@router.post("/conversations/{conversation_id}", responses=returns(StoredConversation))
async def update_conversation(conversation_id: str, body: ConversationUpdate, request: Request) -> Response:
    """Replace a conversation's metadata."""
    owner = tenant_of(request).name
    return json_response(await _store(request).update(conversation_id, body.metadata, owner))


@router.delete("/conversations/{conversation_id}", responses=returns(DeletedConversation))
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Forget a conversation and its items; responses that belonged to it stay."""
    await _store(request).delete(conversation_id, tenant_of(request).name)
    return json_response(DeletedConversation(conversation_id))


@router.post("/conversations/{conversation_id}/items", responses=returns(ItemList))
async def create_items(
    conversation_id: str, body: ConversationItemsRequest, request: Request, include: Include = None
) -> Response:
    """Put items at a conversation's end."""
    owner = tenant_of(request).name
    items = await _store(request).add(conversation_id, [item.item() for item in body.items], owner)
    shown = [listed(item) for item in items]
    return json_response(ItemList(shown, shown[0].id, shown[-1].id, has_more=False))


@router.get("/conversations/{conversation_id}/items", responses=returns(ItemList))
async def list_items(
    conversation_id: str,
    request: Request,
    after: After = None,
    include: Include = None,
    limit: Limit = 20,
    order: OrderQuery = "desc",
) -> Response:
    """A conversation's items."""
    items = await _store(request).items(conversation_id, tenant_of(request).name)
    return json_response(page(items, after=after, limit=limit, order=order))


@router.get("/conversations/{conversation_id}/items/{item_id}", responses=returns(ListedItem))
async def retrieve_item(conversation_id: str, item_id: str, request: Request, include: Include = None) -> Response:
    """One item of a conversation."""
    owner = tenant_of(request).name
    return json_response(listed(await _store(request).item_of(conversation_id, item_id, owner)))


@router.delete("/conversations/{conversation_id}/items/{item_id}", responses=returns(StoredConversation))
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Take an item out of a conversation."""
    owner = tenant_of(request).name
    return json_response(await _store(request).remove(conversation_id, item_id, owner))


def _store(request: Request) -> ConversationStore:
    responses: Responses = request.app.state.responses
    return responses.conversations
