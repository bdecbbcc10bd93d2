from __future__ import annotations

import pytest

from midstream.errors import ProtocolError
from midstream.protocol.checkpoint import FILLER
from midstream.protocol.command_outbox import Outbox


def outbox(*bodies: bytes) -> Outbox:
    made = Outbox()
    for body in bodies:
        made.store(made.number(), body)
    return made


def test_commands_are_sent_once_on_a_connection_and_again_on_the_next() -> None:
    box = outbox(b"a", b"b")
    assert [*box.due(is_welcomed=True)] == [(0, b"a"), (1, b"b")]
    assert [*box.due(is_welcomed=True)] == []
    assert box.acknowledge(0) == 0
    box.play_back()
    assert [*box.due(is_welcomed=True)] == [(1, b"b")]


def test_commands_in_flight_are_limited() -> None:
    box = outbox(b"a", b"b", b"c")
    box.in_flight_max = 2
    assert [seqno for seqno, _ in box.due(is_welcomed=True)] == [0, 1]
    box.acknowledge(0)
    assert [seqno for seqno, _ in box.due(is_welcomed=True)] == [2]


def test_single_acks_count_once_the_earlier_commands_are_acknowledged() -> None:
    box = outbox(b"a", b"b", b"c")
    assert box.acknowledge(1, is_single=True) is None
    assert dict(box.unacked) == {0: b"a", 1: b"b", 2: b"c"}
    assert box.acknowledge(0, is_single=True) == 1
    assert dict(box.unacked) == {2: b"c"}


@pytest.mark.parametrize(("seqno", "is_single"), [(2, False), (2, True), (-1, True)])
def test_an_ack_of_an_unsent_command_is_a_protocol_error(seqno: int, *, is_single: bool) -> None:
    box = outbox(b"a", b"b")
    with pytest.raises(ProtocolError):
        box.acknowledge(seqno, is_single=is_single)
    assert box.acked == 0


def test_nothing_is_sent_after_a_filler_before_the_welcome() -> None:
    box = outbox(b"a", FILLER, b"c")
    assert [seqno for seqno, _ in box.due(is_welcomed=False)] == [0]
    assert [seqno for seqno, _ in box.due(is_welcomed=True)] == [1, 2]
