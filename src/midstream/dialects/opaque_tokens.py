"""Encoding of values in ids and tokens that clients return unchanged, such as places in lists."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import msgspec


def pack(value: object) -> str:
    """Encode a value as text for headers, paths and ids."""
    return urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def unpack(text: object, kind: Any) -> Any:  # noqa: ANN401 - any type, and a value of it
    """Decode the value in a text; return None if it is not of this type."""
    if not isinstance(text, str):
        return None
    try:
        return msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=kind)
    except (msgspec.DecodeError, UnicodeError, ValueError):
        return None
