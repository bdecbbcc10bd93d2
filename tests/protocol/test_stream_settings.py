"""Permitted settings of streams."""

from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.protocol.stream_settings import SWITCHED_OFF, StreamSettings
from tests.spec import spec


@spec("STREAM-56")
def test_streams_can_be_resumed_unless_recovery_is_switched_off() -> None:
    assert StreamSettings().degraded_reason == ""
    assert StreamSettings(is_recovery_on=False).degraded_reason == SWITCHED_OFF


@pytest.mark.parametrize(
    "numbers",
    [
        {"look_back_s": -1.0},
        {"look_back_s": float("nan")},
        {"heartbeat_s": 0.0},
        {"heartbeat_s": 301.0},
        {"in_flight_max": 0},
        {"in_flight_max": 65},
        {"tail_bytes_max": -1},
    ],
)
def test_a_number_out_of_its_bounds_is_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        StreamSettings(**numbers)  # type: ignore[arg-type]  # numbers by name
