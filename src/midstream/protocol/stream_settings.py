"""Settings of a server's streams, which may change while it is running."""

from __future__ import annotations

from msgspec import Struct

from midstream.errors import UsageError
from midstream.protocol.frames import COALESCE_S_MAX, HEARTBEAT_S, IN_FLIGHT_MAX
from midstream.session.turn.states import LOOK_BACK_S

HEARTBEAT_S_MIN = 0.1
HEARTBEAT_S_MAX = 300.0
"""Clients do not accept a longer silence of a server."""
TAIL_BYTES = 8 * 2**20
"""Enough for text of hours; large tool results are stored separately from 64 KiB on."""
LOOK_BACK_S_MAX = 366 * 24 * 3600.0
SWITCHED_OFF = "resuming is switched off at this server"


class StreamSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of streams. A change applies to later connections.

    Args:
        is_recovery_on: Whether streams can be resumed. If not, every welcome is degraded: clients store nothing and
            retry nothing. Accepted commands are journaled nevertheless.
        look_back_s: Seconds after its last record in which a stream, or a turn of a dead process, is resumed.
        heartbeat_s: Seconds of silence after which a server sends a heartbeat.
        in_flight_max: Commands of a client that may be unacknowledged.
        coalesce_s: Seconds (0.1 at most) for which events are held back, so that several are sent together: fewer
            writes for tokens that come 5 to 20 ms later. A client may request it if this is 0.
        tail_bytes_max: Bytes of its newest events that each awake session keeps in memory, for readers near its end;
            others are read from the store. A change applies to sessions that wake later.

    Raises:
        UsageError: A number is out of bounds.
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
        if not self.tail_bytes_max >= 0:
            raise UsageError("a session keeps 0 bytes of its events in memory, or more")

    @property
    def degraded_reason(self) -> str:
        """Why streams cannot be resumed; "" if they can."""
        return "" if self.is_recovery_on else SWITCHED_OFF
