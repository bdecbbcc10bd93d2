"""A client's stored state of a stream: whether it follows a turn, and its loggable part."""

from __future__ import annotations

import msgspec
import pytest

from midstream.history.messages import Text
from midstream.protocol import frames
from midstream.protocol.checkpoint import FILLER, Checkpoint
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.frames import (
    AnswerPayload,
    CancelPayload,
    CommandFrame,
    EventId,
    Payload,
    SendPayload,
    Welcome,
    WithdrawPayload,
)
from midstream.session.calls import Choice
from tests.spec import spec

ANSWER = AnswerPayload(1, 1, "c1", "digest", Choice.ALLOW)


@pytest.mark.parametrize("payload", [CancelPayload(), ANSWER, WithdrawPayload(3)])
def test_a_stream_that_began_with_a_cancel_an_answer_or_a_withdrawal_waits_for_acks_only(
    payload: Payload,
) -> None:
    assert Checkpoint("a", "secret", None, 1, ((0, frames.encode(payload)),)).is_finishing


def test_a_stream_that_follows_a_turn_is_not_finishing() -> None:
    sent = ((0, frames.encode(SendPayload((Text("hi"),)))), (1, frames.encode(CancelPayload())))
    assert not Checkpoint("a", "secret", None, 2, sent).is_finishing
    assert not Checkpoint("a", "secret", None, 2, sent[1:]).is_finishing
    assert not Checkpoint("a", "secret").is_finishing


def test_neither_the_secret_nor_the_payload_is_in_a_repr() -> None:
    shown = repr(Checkpoint("a", "secret", None, 1, ((0, b'{"type":"send"}'),)))
    assert "secret" not in shown
    assert "send" not in shown


@spec("STREAM-48")
@pytest.mark.parametrize(("acked", "sent"), [(1, [CommandFrame(1, msgspec.Raw(FILLER))]), (2, [])])
def test_a_lost_command_is_not_replaced_where_the_server_has_it(acked: int, sent: list[CommandFrame]) -> None:
    kept = Checkpoint("a", "secret", EventId(1, 3), 2, ((1, FILLER),))
    stream = ClientStream.resume(kept, now=0.0)
    stream.handle_deadline(now=0.0)
    stream.begin_connection(now=0.0)
    assert len(stream.frames_to_send()) == 1, "the open alone"
    stream.receive(frames.encode(Welcome("a", "1-3", "1-3", acked, 1)), now=0.0)
    stream.writes()
    assert stream.frames_to_send() == [frames.encode(each) for each in sent]
