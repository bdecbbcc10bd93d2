"""Settings of a server's streams, which may change while it runs."""

from __future__ import annotations

from msgspec import Struct

from midstream.errors import UsageError
from midstream.protocol.frames import COALESCE_S_MAX, HEARTBEAT_S, IN_FLIGHT_MAX
from midstream.session.turn.states import LOOK_BACK_S

HEARTBEAT_S_MIN = 0.1
HEARTBEAT_S_MAX = 300.0
"""Clients have no more patience than that with a server's silence."""
TAIL_BYTES = 8 * 2**20
"""Enough for the words of hours; what is larger (tools' results) is lifted out of records from 64 KiB on."""
LOOK_BACK_S_MAX = 366 * 24 * 3600.0
SWITCHED_OFF = "resuming is switched off at this server"


class StreamSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How streams are served. A change holds for the connections that are made after it.

    Args:
        is_recovery_on: Whether streams can be resumed at all. Where not, every welcome is degraded: clients keep
            nothing and retry nothing. What is accepted is kept in the journal all the same.
        look_back_s: Seconds after its last record in which a stream can be resumed; a turn that a dead process left is
            carried on if it is younger.
        heartbeat_s: Seconds of silence after which a server sends a heartbeat.
        in_flight_max: Commands a client may have sent and not seen acknowledged.
        coalesce_s: Seconds (0.1 at most) for which events are held back, so that several go out at once: fewer writes
            for words that come 5 to 20 ms later. A client may ask for it where this is 0.
        tail_bytes_max: Bytes of its newest events that each session which is awake keeps in memory, for readers near
            its end; others are read from the store. Holds for the sessions that wake after it was changed.

    Raises:
        UsageError: A number is out of its bounds.
    """

    is_recovery_on: bool = True
    look_back_s: float = LOOK_BACK_S
    heartbeat_s: float = HEARTBEAT_S
    in_flight_max: int = IN_FLIGHT_MAX
    coalesce_s: float = 0.0
    tail_bytes_max: int = TAIL_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.look_back_s <= LOOK_BACK_S_MAX:
            raise UsageError(f"a look-back has 0 to {LOOK_BACK_S_MAX:g} seconds")
        if not HEARTBEAT_S_MIN <= self.heartbeat_s <= HEARTBEAT_S_MAX:
            raise UsageError(f"heartbeats are {HEARTBEAT_S_MIN:g} to {HEARTBEAT_S_MAX:g} seconds apart")
        if not 1 <= self.in_flight_max <= IN_FLIGHT_MAX:
            raise UsageError(f"1 to {IN_FLIGHT_MAX} commands may be in flight")
        if not 0 <= self.coalesce_s <= COALESCE_S_MAX:
            raise UsageError(f"events are held back for 0 to {COALESCE_S_MAX} seconds")
        if self.tail_bytes_max < 0:
            raise UsageError("a session keeps 0 bytes of its events in memory, or more")

    @property
    def degraded_reason(self) -> str:
        """Why nothing can be resumed; "" where it can."""
        return "" if self.is_recovery_on else SWITCHED_OFF
