"""Behaviour of known agent programs that the Agent Client Protocol does not show."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class FailedMessage(StrEnum):
    """The place of a message whose turn fails."""

    KEPT = "kept"
    """The message stays in the conversation."""
    DROPPED = "dropped"
    """The message is removed from the conversation, with all other results of the turn."""
    UNKNOWN = "unknown"


FAILED_MESSAGES: Mapping[str, FailedMessage] = MappingProxyType(
    {
        "@zed-industries/claude-code-acp": FailedMessage.KEPT,
        "codex-acp": FailedMessage.KEPT,
        "gemini-cli": FailedMessage.DROPPED,
        "OpenCode": FailedMessage.KEPT,
    }
)
"""By the program's name in its answer to `initialize`, as observed with the versions of `make agents`."""


def failed_message_of(program: str) -> FailedMessage:
    """Return the place of a message of this program whose turn fails."""
    return FAILED_MESSAGES.get(program, FailedMessage.UNKNOWN)
