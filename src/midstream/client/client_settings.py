"""Settings of an application's streams, which may change while it runs."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from msgspec import Struct

from midstream.errors import UsageError
from midstream.protocol.client_stream import STALL_AFTER_S
from midstream.protocol.stream_settings import LOOK_BACK_S_MAX
from midstream.session.turn.states import LOOK_BACK_S

Option = TypeVar("Option", bound=StrEnum)


class ClientSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a client keeps and resumes its streams. A change holds for the streams that begin, or are resumed, after it.

    Args:
        is_recovery_on: Whether streams are kept in the state file, so that another process can go on. Where not, a new
            stream lives and dies with its process; it survives lost connections all the same. What was kept before
            stays, and is resumed when it is on again.
        look_back_s: Seconds without use after which a stream is cleared instead of resumed.
        patience_s: Seconds without a working connection after which an iterator raises `ConnectionLostError`.
        stall_after_s: Seconds without an event, while the turn waits for a model, a tool or a client, after which
            `on_stalled` is called.

    Raises:
        UsageError: A number is out of its bounds.
    """

    is_recovery_on: bool = True
    look_back_s: float = LOOK_BACK_S
    patience_s: float = LOOK_BACK_S
    stall_after_s: float = STALL_AFTER_S

    def __post_init__(self) -> None:
        if not 0 <= self.look_back_s <= LOOK_BACK_S_MAX:
            raise UsageError(f"a look-back has 0 to {LOOK_BACK_S_MAX:g} seconds")
        if not self.patience_s >= 0:
            raise UsageError("patience has at least 0 seconds")
        if not self.stall_after_s > 0:
            raise UsageError("a turn stands still after more than 0 seconds")


def parse_option(kind: type[Option], name: str) -> Option:
    """Return the member of an enumeration that a program names.

    Raises:
        UsageError: There is none of this name. The message lists them.
    """
    try:
        return kind(name)
    except ValueError as error:
        raise UsageError(f"{name!r} is none of {', '.join(kind)}") from error
