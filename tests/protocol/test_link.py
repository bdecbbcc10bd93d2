from __future__ import annotations

import pytest

from midstream.errors import ConnectionLostError, DrainingError, ProtocolError
from midstream.protocol.link import CONNECTIONS_OF_A_LIFE, Link, LinkState
from midstream.retries import HEARTBEATS_MISSED_MAX, RECONNECT_BACKOFF, STOPPED_PATIENCE_S


def waiting(*, patience_s: float = 100.0) -> Link:
    return Link(life=2, backoff=RECONNECT_BACKOFF, patience_s=patience_s, now=0.0)


def live() -> Link:
    link = waiting()
    link.handle_deadline(0.0)
    link.open(0.0)
    link.welcome(10.0)
    return link


def due_at(link: Link) -> float:
    assert link.deadline is not None
    return link.deadline.at


def test_a_connection_is_required_from_its_deadline_to_its_end() -> None:
    link = waiting()
    assert (link.state, link.is_wanted) == (LinkState.WAITING, False)
    link.handle_deadline(0.0)
    assert (link.state, link.is_wanted, link.is_open) == (LinkState.CONNECTING, True, False)
    link.open(0.0)
    assert (link.number, link.is_open) == (2 * CONNECTIONS_OF_A_LIFE + 1, True)
    link.welcome(10.0)
    link.end()
    assert (link.state, link.is_wanted, link.deadline) == (LinkState.ENDED, False, None)


def test_the_first_retry_after_a_loss_is_immediate_and_the_last_at_the_end_of_the_patience() -> None:
    link = live()
    assert link.lose(None, is_cancelled=False, chance=0.5, now=50.0) is None
    assert (due_at(link), link.is_reconnecting) == (50.0, True)
    ended = None
    while ended is None:
        now = due_at(link)
        link.handle_deadline(now)
        ended = link.lose(None, is_cancelled=False, chance=0.5, now=now)
    assert isinstance(ended, ConnectionLostError)
    assert now == 150.0


def test_a_cancelled_turn_has_a_short_patience() -> None:
    link = live()
    link.lose(None, is_cancelled=True, chance=0.5, now=0.0)
    assert link.lose(None, is_cancelled=True, chance=0.5, now=STOPPED_PATIENCE_S) is not None


def test_a_delay_requested_by_the_server_is_kept_also_after_hurry() -> None:
    link = live()
    link.refuse(DrainingError("bye"), 7.0)
    link.lose(None, is_cancelled=False, chance=0.5, now=1.0)
    assert due_at(link) == 8.0
    link.hurry()
    assert due_at(link) == 8.0


def test_heartbeats_without_a_due_ack_end_the_connection() -> None:
    link = live()
    for _ in range(HEARTBEATS_MISSED_MAX - 1):
        link.heartbeat(is_awaiting_ack=True, acked=3)
    link.note_ack()
    for _ in range(HEARTBEATS_MISSED_MAX - 1):
        link.heartbeat(is_awaiting_ack=True, acked=3)
    with pytest.raises(ProtocolError, match="command 3 was not acknowledged"):
        link.heartbeat(is_awaiting_ack=True, acked=3)


def test_silence_drops_the_connection() -> None:
    link = live()
    link.note_traffic(5.0)
    link.handle_deadline(due_at(link) - 0.1)
    assert link.is_open
    link.handle_deadline(due_at(link))
    assert (link.state, link.is_open) == (LinkState.DROPPING, False)
