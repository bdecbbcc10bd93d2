"""Display of tools that an upstream runs itself.

An application with tools would try to run any tool call that it receives. So such a tool is shown as thinking.
"""

from __future__ import annotations

from midstream.history.messages import Outcome, UpstreamCall
from midstream.models.call_filter import ARGUMENTS_CHARS_MAX, shorten
from midstream.models.responses import ThinkingDelta

RESULT_CHARS_MAX = 2000
"""Characters of an upstream tool's result that an application receives."""


def render_call(call: UpstreamCall) -> ThinkingDelta:
    """Return the start or the end of a tool that the upstream runs itself, as thinking."""
    if call.outcome is None:
        return ThinkingDelta(f"\n[{call.name} {shorten(call.arguments, ARGUMENTS_CHARS_MAX)}]\n")
    how = "" if call.outcome is Outcome.OK else f" ({call.outcome})"
    return ThinkingDelta(f"\n[{call.name or 'tool'}{how}: {shorten(call.content, RESULT_CHARS_MAX)}]\n")
