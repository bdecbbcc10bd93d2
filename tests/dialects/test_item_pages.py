"""Lists of items, in pages."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.dialects.gateway_bodies import Arrived
from midstream.dialects.item_pages import page_of
from midstream.dialects.request_fields import BadFieldError

ITEMS = [{"id": str(number)} for number in range(5)]


def page(**query: str) -> tuple[list[Any], bool]:
    body = page_of(ITEMS, Arrived("GET", "/", query, {}, b""))
    ids = [item["id"] for item in body["data"]]
    assert [body["first_id"], body["last_id"]] == [ids[0] if ids else "", ids[-1] if ids else ""]
    return ids, body["has_more"]


def test_pages_follow_one_another_in_either_order() -> None:
    assert page() == (["4", "3", "2", "1", "0"], False)
    assert page(order="asc", limit="2") == (["0", "1"], True)
    assert page(order="asc", limit="2", after="3") == (["4"], False)
    assert page(after="elsewhere") == ([], False)
    with pytest.raises(BadFieldError):
        page(limit="many")
