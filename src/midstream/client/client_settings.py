"""Settings of an application's streams, which may change while it runs."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct

from midstream.errors import UsageError
from midstream.number_checks import require_seconds
from midstream.protocol.client_stream import STALL_AFTER_S
from midstream.protocol.stream_settings import LOOK_BACK_S_MAX
from midstream.session.turn.states import LOOK_BACK_S

Option = TypeVar("Option", bound=StrEnum)


class ClientSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a client's streams. A change applies to streams that begin or are resumed later.

    Args:
        is_recovery_on: Whether streams are stored in the state file, so that another process can resume them. Otherwise
            a new stream survives lost connections, but not its process. Stored streams stay, and can be resumed when it
            is on again.
        look_back_s: Seconds without use after which a stream is deleted instead of resumed.
        patience_s: Seconds without a working connection after which an iterator raises `ConnectionLostError`.
        stall_after_s: Seconds without an event, while the turn waits for a model, a tool or a client, after which
            `on_stalled` is called.

    Raises:
        UsageError: A number is out of its range.
    """

    is_recovery_on: bool = True
    look_back_s: float = LOOK_BACK_S
    patience_s: float = LOOK_BACK_S
    stall_after_s: float = STALL_AFTER_S

    def __post_init__(self) -> None:
        require_seconds("look_back_s", self.look_back_s, most=LOOK_BACK_S_MAX)
        require_seconds("patience_s", self.patience_s, most=math.inf)
        require_seconds("stall_after_s", self.stall_after_s, most=math.inf, is_positive=True)


def parse_option(kind: type[Option], name: str) -> Option:
    """Return the member of an enumeration by its value.

    Raises:
        UsageError: The value is unknown. The message lists the known ones.
    """
    try:
        return kind(name)
    except ValueError as error:
        raise UsageError(f"{name!r} is not one of {', '.join(kind)}") from error
