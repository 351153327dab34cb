"""Pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Query

from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.responses.items import Item
from jaxllm.serving.responses.objects import ItemList, listed
from jaxllm.serving.responses.request import Includable

MAX_PAGE = 100

After = Annotated[str | None, Query(description="The id of the item behind which the page begins.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most items on a page.")]
OrderQuery = Annotated[Literal["asc", "desc"], Query(description="asc is oldest first, desc newest first.")]
Include = Annotated[
    list[Includable] | None,
    Query(alias="include[]", description="Accepted, without effect: items are returned with all that was kept."),
]


def page(items: Sequence[Item], *, after: str | None, limit: int, order: str) -> ItemList:
    """Part of `items`, which are oldest first. Raises 404 when none has the id `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        start = next((at for at, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if start == 0:
            raise APIError(404, f"after is {after!r}; no item of this list has that id", param="after")
    shown = ordered[start : start + limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return ItemList([listed(item) for item in shown], first_id, last_id, has_more=start + limit < len(ordered))
