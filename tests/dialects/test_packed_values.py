"""Values that clients send back as they got them."""

from __future__ import annotations

import pytest

from midstream.dialects.mcp_messages import CallPlace
from midstream.dialects.packed_values import packed, unpacked
from midstream.store.contract import ListPlace


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (CallPlace("sé", 3), CallPlace),
        (ListPlace(1.25, "s 1"), ListPlace),
        ((1.5, "a"), tuple[float, str]),
    ],
)
def test_a_value_comes_back_from_its_text(value: object, kind: object) -> None:
    text = packed(value)
    assert text.isascii()
    assert "=" not in text
    assert unpacked(text, kind) == unpacked(text + "=" * (-len(text) % 4), kind) == value
    for other in (None, 3, "", "x", "%", "é", text[:-2], packed("another")):
        assert unpacked(other, kind) is None
