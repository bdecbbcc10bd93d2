"""A summary survives the way to the application and back."""

from __future__ import annotations

import pytest

from midstream.dialects.compacted_items import (
    KINDS,
    SUMMARY,
    compaction_item,
    expand_compacted,
    list_user_items,
)
from midstream.dialects.request_fields import BadFieldError
from midstream.history.messages import File, Text, UserMessage


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_is_read_back(kind: str) -> None:
    item = {**compaction_item("Grüße 😀", "cmp_1"), "type": kind}
    (message,) = expand_compacted([item])
    assert message == {"type": "message", "role": "user", "content": f"{SUMMARY}Grüße 😀"}
    assert expand_compacted(["hi", {"type": "message"}]) == ["hi", {"type": "message"}]


@pytest.mark.parametrize("content", [None, "", "gAAAAA", "midstream-1.%%", "midstream-1._w=="])
def test_a_foreign_summary_is_refused(content: object) -> None:
    with pytest.raises(BadFieldError):
        expand_compacted([{"type": "compaction", "encrypted_content": content}])


def test_user_messages_are_listed_without_summaries() -> None:
    file = File("application/pdf", data="AA==", name="a.pdf")
    entries = [UserMessage((Text(f"{SUMMARY}x"),)), UserMessage((Text("hi"), file))]
    (item,) = list_user_items(entries, "msg_1")
    assert item["content"][1] == {
        "type": "input_file",
        "filename": "a.pdf",
        "file_data": "data:application/pdf;base64,AA==",
    }
