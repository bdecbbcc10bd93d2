"""Values that clients send back unchanged."""

from __future__ import annotations

import pytest

from midstream.dialects.mcp_messages import CallPlace
from midstream.dialects.opaque_tokens import pack, unpack
from midstream.store.contract import ListPlace


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (CallPlace("sé", 3), CallPlace),
        (ListPlace(1.25, "s 1"), ListPlace),
        ((1.5, "a"), tuple[float, str]),
    ],
)
def test_a_value_is_read_back_from_its_token(value: object, kind: object) -> None:
    text = pack(value)
    assert text.isascii()
    assert "=" not in text
    assert unpack(text, kind) == unpack(text + "=" * (-len(text) % 4), kind) == value
    for other in (None, 3, "", "x", "%", "é", text[:-2], pack("another")):
        assert unpack(other, kind) is None
