"""Compacted conversations as items of the Responses API: a summary that applications send back unchanged.

The content is opaque for applications, but not encrypted: it is the summary of their own conversation.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from midstream.dialects.request_fields import bad_field
from midstream.history.codecs.codec_spec import Json, Value
from midstream.history.messages import Entry, File, Text, UserMessage

KINDS = ("compaction", "compaction_summary")
"""Types of such an item: that of the API, and that of Codex."""
SUMMARY = "Summary of the conversation so far, which continues here:\n\n"
"""Beginning of the message that replaces an item."""
_CONTENT = "midstream-1."


def compaction_item(summary: str, item_id: str) -> Json:
    """Return the item with the summary of a conversation."""
    content = _CONTENT + base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()
    return {"id": item_id, "type": "compaction", "encrypted_content": content}


def expand_compacted(items: Sequence[Value]) -> list[Value]:
    """Replace each compaction item by a message with its summary.

    Raises:
        BadFieldError: An item was made elsewhere; without it the model would lose the conversation.
    """
    return [_expand(item) if isinstance(item, dict) and item.get("type") in KINDS else item for item in items]


def _expand(item: Json) -> Json:
    summary = _read_summary(item.get("encrypted_content"))
    if summary is None:
        message = "a compaction item of the input was not made by midstream, and cannot be read"
        raise bad_field("input", message)
    return {"type": "message", "role": "user", "content": SUMMARY + summary}


def _read_summary(content: Value) -> str | None:
    if not isinstance(content, str) or not content.startswith(_CONTENT):
        return None
    try:
        return base64.b64decode(content.removeprefix(_CONTENT), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None


def list_user_items(entries: Sequence[Entry], prefix: str) -> list[Json]:
    """Return the user's messages, without summaries, as items; their ids begin with `prefix`."""
    messages = [entry for entry in entries if isinstance(entry, UserMessage) and not _is_summary(entry)]
    return [
        {
            "id": f"{prefix}_{at}",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [_content(part) for part in message.parts],
        }
        for at, message in enumerate(messages)
    ]


def _is_summary(message: UserMessage) -> bool:
    first = message.parts[0] if message.parts else None
    return isinstance(first, Text) and first.text.startswith(SUMMARY)


def _content(part: Text | File) -> Json:
    if isinstance(part, Text):
        return {"type": "input_text", "text": part.text}
    address = part.url or f"data:{part.media_type};base64,{part.data}"
    if part.media_type.startswith("image/"):
        return {"type": "input_image", "image_url": address, "detail": part.detail or "auto"}
    place = {"file_url": part.url} if part.url else {"file_data": address}
    return {"type": "input_file", "filename": part.name or "file", **place}
