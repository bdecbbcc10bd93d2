"""What a client keeps of a stream: whether it follows a turn, and what of it may be seen in a log."""

from __future__ import annotations

import pytest

from midstream.core import frames
from midstream.core.calls import Choice
from midstream.core.checkpoint import Checkpoint
from midstream.core.frames import AbortPayload, AnswerPayload, Payload, SayPayload, WithdrawPayload
from midstream.core.messages import Text

ANSWER = AnswerPayload(1, 1, "c1", "digest", Choice.ALLOW)


@pytest.mark.parametrize("payload", [AbortPayload(), ANSWER, WithdrawPayload(3)])
def test_a_stream_that_began_with_a_stop_an_answer_or_a_withdrawal_waits_for_acks_only(
    payload: Payload,
) -> None:
    assert Checkpoint("a", "secret", None, 1, ((0, frames.encode(payload)),)).is_finishing


def test_a_stream_that_follows_a_turn_is_not_finishing() -> None:
    said = ((0, frames.encode(SayPayload((Text("hi"),)))), (1, frames.encode(AbortPayload())))
    assert not Checkpoint("a", "secret", None, 2, said).is_finishing
    assert not Checkpoint("a", "secret", None, 2, said[1:]).is_finishing
    assert not Checkpoint("a", "secret").is_finishing


def test_neither_the_secret_nor_what_was_said_is_in_a_log() -> None:
    shown = repr(Checkpoint("a", "secret", None, 1, ((0, b'{"type":"say"}'),)))
    assert "secret" not in shown
    assert "say" not in shown
