"""Settings of a server's streams, which may change while it is running."""

from __future__ import annotations

from msgspec import Struct

from midstream.number_checks import require_count, require_seconds
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
        require_seconds("look_back_s", self.look_back_s, most=LOOK_BACK_S_MAX)
        require_seconds("heartbeat_s", self.heartbeat_s, least=HEARTBEAT_S_MIN, most=HEARTBEAT_S_MAX)
        require_count("in_flight_max", self.in_flight_max, least=1, most=IN_FLIGHT_MAX)
        require_seconds("coalesce_s", self.coalesce_s, most=COALESCE_S_MAX)
        require_count("tail_bytes_max", self.tail_bytes_max)

    @property
    def degraded_reason(self) -> str:
        """Why streams cannot be resumed; "" if they can."""
        return "" if self.is_recovery_on else SWITCHED_OFF
