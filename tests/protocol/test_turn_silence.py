"""The silence of a turn without a stream around it; `test_client_stream_stalls.py` covers it within one."""

from __future__ import annotations

from midstream.protocol.turn_silence import TurnSilence
from tests.spec import spec


@spec("STREAM-47")
def test_a_heartbeat_older_than_the_last_event_is_ignored() -> None:
    silence = TurnSilence(3.0)
    silence.begin(0.0)
    silence.heartbeat("model", 1.0)
    silence.begin(2.0)  # The event of a question to a person.
    assert (silence.judge(4.9), silence.judge(5.0), silence.is_stalled) == (False, True, False)
    silence.heartbeat("person", 5.1)
    assert (silence.is_stalled, silence.due_at) == (False, 8.1)


def test_without_a_connection_nothing_is_due() -> None:
    silence = TurnSilence(3.0)
    assert (silence.judge(100.0), silence.due_at) == (False, None)
    silence.begin(0.0)
    silence.pause(2.0)
    assert silence.due_at == 5.0
    silence.stop()
    assert (silence.judge(100.0), silence.is_stalled) == (False, False)
