"""JSON of a provider's stream, also with half a character in a text.

Servers in JavaScript cut texts between UTF-16 code units: one event ends with an escape for the first half of an emoji,
and the next event begins with the second half. msgspec refuses such a text, and cannot encode it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import msgspec

from midstream.errors import ModelUnavailableError
from midstream.history.messages import storable
from midstream.json_depth import require_shallow_text

_Event = TypeVar("_Event")


def decode_event(data: bytes, decoder: msgspec.json.Decoder[_Event], called: str) -> _Event:
    """Decode one event; its texts may contain surrogates.

    Args:
        data: JSON text.
        decoder: For the type of the event.
        called: The name of such an event for users, such as `a chat completion chunk`.

    Raises:
        ModelUnavailableError: It is not such an event.
    """
    try:
        require_shallow_text(data)
        try:
            return decoder.decode(data)
        except msgspec.DecodeError:
            if b"\\ud" not in data and b"\\uD" not in data:
                raise
        return msgspec.convert(json.loads(data), decoder.type, strict=decoder.strict)
    except (ValueError, RecursionError) as error:
        raise ModelUnavailableError(f"the server sent data that is not {called}") from error


def encode_json(value: object) -> str:
    """Return a decoded value as JSON text."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return joined_json(value)


def joined_json(value: object, *, enc_hook: Callable[[object], object] | None = None) -> str:
    """Return a value whose texts may have surrogates as JSON text, with pairs joined; see `storable`.

    Args:
        enc_hook: As msgspec's: returns a replacement for an object without a JSON form.
    """
    return storable(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=enc_hook))
