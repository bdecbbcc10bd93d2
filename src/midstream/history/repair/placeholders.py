"""Texts that repairs write into histories.

They are constant, so that each repair writes the same bytes and the provider's prefix cache stays valid, and true, so
that the model may rely on them.
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
"""Stand-ins for results: a real result that is found later replaces them."""

OUTCOMES = {"unknown": UNKNOWN, "interrupted": UNKNOWN, "denied": DENIED, "not-started": NOT_STARTED}
"""Outcomes of calls without a result that a caller may know, each with its text for the model."""

SENTINEL = "skip_thought_signature_validator"
"""Google's documented stand-in for a lost thought signature."""
