"""Texts that a repair writes into a history.

Constant, short and true: no clock, no id, no count. Each resume writes the same bytes, so that the provider's
prefix cache stays warm, and the model reads exactly what it may assume.
"""

from __future__ import annotations

UNKNOWN = (
    "The tool call was interrupted before a result was recorded. "
    "It may or may not have taken effect; check before repeating it."
)
DENIED = "The user did not approve this tool call."
NOT_STARTED = "The tool call was not executed."

ORPHAN = "[result of a tool call that is no longer in this history]"
SECOND = "[another result of a tool call that already has one]"
HOSTED_ORPHAN = "[result of a hosted tool call that is no longer in this history]"
HOSTED_CUT = "[hosted tool call without a recorded result]"
SYSTEM_NOTE = "[system message]"
FIRST = "(the start of this conversation is not available)"
INTERRUPTED = "(this reply was interrupted)"
NO_RESPONSE = "(no reply was recorded)"
NO_OUTPUT = "(no output)"
GO_ON = "Please continue."
NO_NAME = "unknown_tool"
NO_WORDS = "(no words)"
ATTACHED = "[attachment of what stands above]"
ATTACHED_BELOW = "(the output is attached below)"
NO_REASON = "(failed without a message)"
NO_REASONING = "(the reasoning of this step was not recorded)"

ANSWERS = frozenset({UNKNOWN, DENIED, NOT_STARTED})
"""Results that only stand in for one: a real result that turns up later takes their place."""

OUTCOMES = {"unknown": UNKNOWN, "interrupted": UNKNOWN, "denied": DENIED, "not-started": NOT_STARTED}
"""How a call without a result ended, where the caller can provide it, and the text for the model."""

SENTINEL = "skip_thought_signature_validator"
"""Google's documented stand-in for a lost thought signature."""
