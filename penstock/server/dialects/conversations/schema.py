"""Bodies and queries of the Conversations API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from penstock.config import limits
from penstock.server import shapes
from penstock.server.dialects.responses.schema import ITEM, Includes
from penstock.server.pages import PageQuery

Items = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(ITEM)]],
    Field(max_length=limits.MAX_ITEMS_PER_CALL, fail_fast=True),
]


class ConversationBody(shapes.Body):
    """POST /v1/conversations."""

    items: Items | None = None
    metadata: shapes.Metadata | None = None


class ConversationUpdateBody(shapes.Body):
    """POST /v1/conversations/{conversation_id}."""

    metadata: shapes.Metadata | None


class ConversationItemsBody(shapes.Body):
    """POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[Items, Field(min_length=1)]


class ConversationItemsQuery(PageQuery):
    """GET /v1/conversations/{conversation_id}/items."""

    include: Includes | None = None


CONVERSATION_BODIES = (ConversationBody, ConversationUpdateBody, ConversationItemsBody)
