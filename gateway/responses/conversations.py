"""Conversations of the Conversations API: items that are kept under an id, to which responses add theirs.

A conversation is one value in the store of responses. Requests change it at the same time, so each change reads it and
swaps it for the changed one, and begins again if another request has changed it. Each change renews its time to live.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.gateway.checks import invalid
from headrace.gateway.responses.background import MAX_ID_CHARS
from headrace.gateway.responses.items import new_id
from headrace.gateway.responses.store import Store, StoreError, TooLargeError, packed, unavailable, unpacked
from headrace.protos.status import Reason, StatusError

MAX_CONVERSATION_ITEMS = 10_000
MAX_TRIES = 32
_PAUSE_S = 0.01


class StoredConversation(msgspec.Struct):
    """A conversation."""

    owner: str
    """The tenant that may see it; empty without keys."""
    created_at: int
    """Seconds since 1970."""
    metadata: dict[str, str]
    items: list[dict[str, Any]]
    """In their order, each with an id of its own."""

    def check_new(self, field: str, items: Sequence[dict[str, Any]]) -> None:
        """Raise `StatusError` unless these items, which the caller wrote in `field`, can be added."""
        known = {item["id"] for item in self.items}
        for position, item in enumerate(items):
            if item["id"] in known:
                where = f"{field}[{position}].id"
                raise invalid(where, f"{where}: the conversation has an item of this id already; send only new ones")
            known.add(item["id"])
        if len(known) > MAX_CONVERSATION_ITEMS:
            raise invalid(field, f"{field}: a conversation has at most {MAX_CONVERSATION_ITEMS} items; begin another")

    def add(self, field: str, items: Sequence[dict[str, Any]]) -> None:
        """Add items at the end, which the caller wrote in `field`. Raises `StatusError`."""
        self.check_new(field, items)
        self.items += items


class Conversations:
    """The conversations in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(
        self, owner: str, items: Sequence[dict[str, Any]], metadata: Mapping[str, str]
    ) -> tuple[str, StoredConversation]:
        """A new conversation and its id. Raises `StatusError`."""
        made = StoredConversation(owner, int(time.time()), {**metadata}, [])
        made.add("items", items)
        conversation_id = new_id("conv")
        try:
            await self._store.put(conversation_id, await packed(made), owner=owner)
        except StoreError as error:
            raise _not_kept("items", error) from error
        return conversation_id, made

    async def find(self, owner: str, conversation_id: str, field: str = "conversation_id") -> StoredConversation:
        """The conversation that the caller named in `field`. Raises `StatusError` if this owner has none."""
        return (await self._find(owner, conversation_id, field))[1]

    async def change(
        self,
        owner: str,
        conversation_id: str,
        change: Callable[[StoredConversation], None],
        field: str = "conversation_id",
    ) -> StoredConversation:
        """Change a conversation. `change` is called again if another change came first. Returns the changed one.
        Raises `StatusError`."""
        for _ in range(MAX_TRIES):
            value, conversation = await self._find(owner, conversation_id, field)
            change(conversation)
            try:
                if await self._store.swap(conversation_id, value, await packed(conversation), owner):
                    return conversation
            except StoreError as error:
                raise _not_kept(field, error) from error
            await asyncio.sleep(_PAUSE_S * random.random())
        message = f"{field}: others are changing the conversation; try again"
        raise StatusError(Reason.NO_CAPACITY, message, field=field, retry_after_s=1.0)

    async def delete(self, owner: str, conversation_id: str) -> None:
        """Delete a conversation. Raises `StatusError` if this owner has none."""
        await self._find(owner, conversation_id, "conversation_id")
        try:
            await self._store.delete(conversation_id, owner)
        except StoreError as error:
            raise unavailable(error) from error

    async def _find(self, owner: str, conversation_id: str, field: str) -> tuple[bytes, StoredConversation]:
        """The conversation, and the bytes that the store has of it."""
        value = None
        if conversation_id.startswith("conv_") and len(conversation_id) <= MAX_ID_CHARS and ":" not in conversation_id:
            try:
                value = await self._store.get(conversation_id)
            except StoreError as error:
                raise unavailable(error) from error
        conversation = None if value is None else await unpacked(value, StoredConversation)
        if value is None or conversation is None or conversation.owner != owner:
            message = f"there is no conversation '{conversation_id[:MAX_ID_CHARS]}'; was it deleted, or is it too old?"
            raise StatusError(Reason.NOT_FOUND, message, field=field)
        return value, conversation


def _not_kept(field: str, error: StoreError) -> StatusError:
    if isinstance(error, TooLargeError):
        return invalid(field, f"{field}: the conversation is too large to be kept; begin another")
    return unavailable(error)
