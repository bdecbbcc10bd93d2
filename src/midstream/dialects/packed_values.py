"""Values in the ids and tokens that clients send back as they got them: places in lists, tasks, events."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import msgspec


def packed(value: object) -> str:
    """Return a value as text for headers, paths and ids."""
    return urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def unpacked(text: object, kind: Any) -> Any:  # noqa: ANN401 - any type, and a value of it
    """Return the value that a text stands for; None where it is none of this kind."""
    if not isinstance(text, str):
        return None
    try:
        return msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=kind)
    except (msgspec.DecodeError, UnicodeError, ValueError):
        return None
