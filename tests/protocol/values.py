"""Halves of the protocol as values: copied, and compared."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, TypeVar

from midstream.protocol.command_outbox import Outbox
from midstream.protocol.event_inbox import Inbox
from midstream.protocol.link import Link
from midstream.protocol.server_stream import Submit
from midstream.protocol.turn_silence import TurnSilence

T = TypeVar("T")


def copied(half: T) -> T:
    """Copy a half of the protocol: its attributes are values, flat containers of values, or parts of that kind."""
    other = object.__new__(type(half))
    attributes = vars(other)
    for name, value in vars(half).items():
        kind = type(value)
        attributes[name] = value.copy() if kind in _CONTAINERS else copied(value) if kind in PARTS else value
    return other


def shallow(whole: T) -> T:
    """Copy an object without its content: as `copy.copy`, in a third of the time."""
    other = object.__new__(type(whole))
    vars(other).update(vars(whole))
    return other


PARTS = frozenset((Inbox, Link, Outbox, TurnSilence))
"""Classes of the parts of a half."""


_CONTAINERS = frozenset((list, dict, set))
_PLAIN = frozenset((bool, bytes, float, int, str, type(None)))
UNSEEN = frozenset(
    (
        "_backoff",
        "_deadline",
        "_failures",
        "_lost_at",
        "_patience_s",
        "_retry_after_s",
        "_silence",
        "_silence_s",
        "_wire",
        "deadline",
    )
)
"""Attributes that no behaviour depends on while time stands still."""


def distinguishing_parts(half: object, unseen: Collection[str] = UNSEEN) -> Hashable:
    """Return the parts that distinguish a half from others of its kind, without the attributes of these names."""
    return tuple(
        [
            value if type(value) in _PLAIN else _flat(value, unseen)
            for name, value in vars(half).items()
            if name not in unseen
        ]
    )


def _flat(value: Any, unseen: Collection[str]) -> Hashable:  # noqa: ANN401 - any state of a half
    kind = type(value)
    if kind in _PLAIN:
        return value  # type: ignore[no-any-return]  # it is hashable
    if kind is list:
        return tuple([_flat(each, unseen) for each in value])
    if kind is dict:
        return tuple([(key, _flat(each, unseen)) for key, each in value.items()])
    if kind is set:
        return frozenset(value)
    if kind is Submit:
        return value.seqno, value.received.digest
    if kind in PARTS:
        return distinguishing_parts(value, unseen)
    if isinstance(value, Exception):
        return kind.__name__
    return value  # type: ignore[no-any-return]  # hashable, or the caller learns
