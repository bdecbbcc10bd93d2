"""Lists of items of the Responses API, in pages."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.dialects.gateway_bodies import Arrived
from midstream.dialects.request_fields import bad_field
from midstream.history.codecs.codec_spec import Json

ITEMS_MAX, ITEMS = 100, 20
"""Greatest and default number of items of a page."""


def page_of(items: Sequence[Json], arrived: Arrived) -> Json:
    """Return the page of items for the query of a request: `limit`, `order`, `after`.

    Args:
        items: All items, oldest first.

    Raises:
        BadFieldError: `limit` is not a whole number.
    """
    listed = [*items]
    if arrived.query.get("order", "desc") != "asc":
        listed.reverse()
    if after := arrived.query.get("after"):
        ids = [item["id"] for item in listed]
        listed = listed[ids.index(after) + 1 :] if after in ids else []
    limit = min(max(1, read_number(arrived, "limit", ITEMS)), ITEMS_MAX)
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > limit,
    }


def read_number(arrived: Arrived, name: str, otherwise: int) -> int:
    """Return a number of the query.

    Raises:
        BadFieldError: The value is not a whole number.
    """
    text = arrived.query.get(name)
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) <= 9):  # noqa: PLR2004 - nine digits fit any count
        raise bad_field(name, f"`{name}` must be a whole number")
    return int(text)
