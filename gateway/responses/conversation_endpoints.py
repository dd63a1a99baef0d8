"""The Conversations API: create, retrieve, update and delete conversations, and their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.edge.endpoint import API, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import query_of, request_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.responses.background import ResponseRuns
from headrace.gateway.responses.conversations import Conversations, StoredConversation
from headrace.gateway.responses.fields import CONVERSATION, CONVERSATION_ITEMS, CONVERSATION_UPDATE
from headrace.gateway.responses.included import INCLUDE, included, shown_item
from headrace.gateway.responses.items import input_items
from headrace.gateway.responses.paging import QUERY, page, page_of
from headrace.gateway.responses.references import resolved
from headrace.gateway.responses.response import Conversation, DeletedConversation, ItemPage
from headrace.gateway.responses.types import (
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
    check_metadata,
)
from headrace.protos.status import Reason, StatusError


def conversation_endpoints(runs: ResponseRuns, conversations: Conversations) -> Sequence[Endpoint]:
    """All endpoints under conversations. `runs` know the responses to whose items callers refer."""
    own = _Conversations(runs, conversations)
    root = "/conversations"
    one = f"{root}/{{conversation_id}}"
    items = f"{one}/items"
    item = f"{items}/{{item_id}}"
    query = {"include": INCLUDE}
    create = Operation("Begin a conversation", Conversation, (ConversationRequest,))
    retrieve = Operation("Retrieve a conversation", Conversation)
    update = Operation("Change the metadata of a conversation", Conversation, (ConversationUpdate,))
    delete = Operation("Forget a conversation", DeletedConversation)
    add = Operation("Add items to a conversation", ItemPage, (ConversationItemsRequest,), query=query)
    list_items = Operation("List the items of a conversation", ItemPage, query={**QUERY, **query})
    retrieve_item = Operation("Retrieve an item of a conversation", dict[str, Any], query=query)
    delete_item = Operation("Remove an item from a conversation", Conversation)
    return under(
        API,
        Endpoint("POST", root, "conversations", own.create, create),
        Endpoint("GET", one, "conversations_get", own.retrieve, retrieve),
        Endpoint("POST", one, "conversations_update", own.update, update),
        Endpoint("DELETE", one, "conversations_delete", own.delete, delete),
        Endpoint("POST", items, "conversations_items", own.add_items, add),
        Endpoint("GET", items, "conversations_items", own.list_items, list_items),
        Endpoint("GET", item, "conversations_item", own.retrieve_item, retrieve_item),
        Endpoint("DELETE", item, "conversations_item", own.delete_item, delete_item),
    )


class _Conversations:
    def __init__(self, runs: ResponseRuns, conversations: Conversations) -> None:
        self._runs = runs
        self._conversations = conversations

    async def create(self, exchange: Exchange) -> None:
        """POST conversations."""
        request = await request_of(exchange, ConversationRequest, CONVERSATION)
        check_metadata(request.metadata)
        items = await self._items(exchange, request.items) if request.items else []
        made = await self._conversations.create(exchange.owner, items, request.metadata or {})
        await exchange.respond(encode(_shown(*made)))

    async def retrieve(self, exchange: Exchange) -> None:
        """GET conversations/{id}."""
        conversation_id = _id_in(exchange)
        found = await self._conversations.find(exchange.owner, conversation_id)
        await exchange.respond(encode(_shown(conversation_id, found)))

    async def update(self, exchange: Exchange) -> None:
        """POST conversations/{id}: other metadata."""
        request = await request_of(exchange, ConversationUpdate, CONVERSATION_UPDATE)
        check_metadata(request.metadata)
        metadata = request.metadata or {}

        def change(conversation: StoredConversation) -> None:
            conversation.metadata = metadata

        conversation_id = _id_in(exchange)
        changed = await self._conversations.change(exchange.owner, conversation_id, change)
        await exchange.respond(encode(_shown(conversation_id, changed)))

    async def delete(self, exchange: Exchange) -> None:
        """DELETE conversations/{id}."""
        conversation_id = _id_in(exchange)
        await self._conversations.delete(exchange.owner, conversation_id)
        await exchange.respond(encode(DeletedConversation(id=conversation_id)))

    # --- items ------------------------------------------------------------------------------------------------------

    async def add_items(self, exchange: Exchange) -> None:
        """POST conversations/{id}/items."""
        include = included(exchange)
        request = await request_of(exchange, ConversationItemsRequest, CONVERSATION_ITEMS)
        conversation_id = _id_in(exchange)
        await self._conversations.find(exchange.owner, conversation_id)
        items = await self._items(exchange, request.items)
        await self._conversations.change(exchange.owner, conversation_id, lambda one: one.add("items", items))
        await exchange.respond(encode(page([shown_item(item, include) for item in items], has_more=False)))

    async def list_items(self, exchange: Exchange) -> None:
        """GET conversations/{id}/items."""
        include = included(exchange)
        found = await self._conversations.find(exchange.owner, _id_in(exchange))
        answer = page_of(found.items, query_of(exchange))
        answer.data = [shown_item(item, include) for item in answer.data]
        await exchange.respond(encode(answer))

    async def retrieve_item(self, exchange: Exchange) -> None:
        """GET conversations/{id}/items/{item}."""
        include = included(exchange)
        found = await self._conversations.find(exchange.owner, _id_in(exchange))
        await exchange.respond(encode(shown_item(found.items[_position(exchange, found)], include)))

    async def delete_item(self, exchange: Exchange) -> None:
        """DELETE conversations/{id}/items/{item}."""

        def change(conversation: StoredConversation) -> None:
            del conversation.items[_position(exchange, conversation)]

        conversation_id = _id_in(exchange)
        changed = await self._conversations.change(exchange.owner, conversation_id, change)
        await exchange.respond(encode(_shown(conversation_id, changed)))

    async def _items(self, exchange: Exchange, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Items of a request as they are stored."""

        def stored(response_id: str) -> Any:
            return self._runs.stored(exchange.owner, response_id)

        return input_items(await resolved(given, stored, "items"), "items")


def _id_in(exchange: Exchange) -> str:
    return str(exchange.scope["path_params"]["conversation_id"])


def _position(exchange: Exchange, conversation: StoredConversation) -> int:
    """The place of the item that the path names. Raises `StatusError`."""
    item_id = exchange.scope["path_params"]["item_id"]
    for position, item in enumerate(conversation.items):
        if item["id"] == item_id:
            return position
    raise StatusError(Reason.NOT_FOUND, "item_id: the conversation has no such item", field="item_id")


def _shown(conversation_id: str, conversation: StoredConversation) -> Conversation:
    return Conversation(id=conversation_id, created_at=conversation.created_at, metadata=conversation.metadata)
