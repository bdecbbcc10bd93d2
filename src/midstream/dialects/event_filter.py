"""Tools that an upstream runs itself, as a client application is shown them.

An application that declared tools would run whatever looks like a call of its own. So such a tool is shown as thinking.
"""

from __future__ import annotations

from midstream.history.messages import Outcome, UpstreamCall
from midstream.models.call_filter import ARGUMENTS_CHARS_MAX, shorten
from midstream.models.responses import ThinkingDelta

RESULT_CHARS_MAX = 2000
"""Characters an application is shown of what an upstream's own tool has read."""


def render_call(call: UpstreamCall) -> ThinkingDelta:
    """Return what an application is shown of a tool that the upstream runs itself, at its start and at its end."""
    if call.outcome is None:
        return ThinkingDelta(f"\n[{call.name} {shorten(call.arguments, ARGUMENTS_CHARS_MAX)}]\n")
    how = "" if call.outcome is Outcome.OK else f" ({call.outcome})"
    return ThinkingDelta(f"\n[{call.name or 'tool'}{how}: {shorten(call.content, RESULT_CHARS_MAX)}]\n")
