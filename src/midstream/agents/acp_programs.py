"""Behaviour of known agent programs that the Agent Client Protocol does not show."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class FailedMessage(StrEnum):
    """Place of a message whose turn does not come to its end."""

    KEPT = "kept"
    """It stays in the conversation."""
    DROPPED = "dropped"
    """It is removed from the conversation, with all that the turn did."""
    UNKNOWN = "unknown"


FAILED_MESSAGES: Mapping[str, FailedMessage] = MappingProxyType(
    {
        "@zed-industries/claude-code-acp": FailedMessage.KEPT,
        "codex-acp": FailedMessage.KEPT,
        "gemini-cli": FailedMessage.DROPPED,
        "OpenCode": FailedMessage.KEPT,
    }
)
"""By the name that a program has in its answer to `initialize`; observed with the versions of `make agents`."""


def failed_message_of(program: str) -> FailedMessage:
    """Return what a program does with a message whose turn fails."""
    return FAILED_MESSAGES.get(program, FailedMessage.UNKNOWN)
