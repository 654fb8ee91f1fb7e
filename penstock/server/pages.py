"""Long lists as OpenAI's API gives them out: a page at a time, each from the id where the one before it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.server.errors import bad_value
from penstock.server.shapes import Query


class PageQuery(Query):
    """Which page."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Field(min_length=1)] | None = None


def page_of(entries: Sequence[dict[str, Any]], query: PageQuery) -> dict[str, Any]:
    """The list object of a page; `entries` are all there are, each with its id, the oldest first.

    Raises:
        RequestError: `after` is none of the ids.
    """
    rest = entries if query.order == "asc" else entries[::-1]
    if query.after is not None:
        names = [entry["id"] for entry in rest]
        if query.after not in names:
            raise bad_value("after", query.after, "the id of one of the items")
        rest = rest[names.index(query.after) + 1 :]
    page = rest[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(rest) > len(page)}
