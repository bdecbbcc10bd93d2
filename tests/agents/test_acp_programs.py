"""Known properties of agent programs with the protocol."""

from __future__ import annotations

from midstream.agents.acp_programs import FailedMessage, failed_message_of


def test_a_program_without_a_row_has_no_assumed_properties() -> None:
    assert failed_message_of("gemini-cli") is FailedMessage.DROPPED
    assert failed_message_of("OpenCode") is FailedMessage.KEPT
    assert failed_message_of("gemini-cli-fork") is FailedMessage.UNKNOWN
