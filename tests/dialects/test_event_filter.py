from __future__ import annotations

from midstream.dialects.event_filter import render_call
from midstream.history.messages import Outcome
from midstream.history.upstream_calls import end_call, start_call
from midstream.models.responses import ThinkingDelta
from tests.spec import spec


@spec("REUSE-67")
def test_a_tool_of_the_upstream_is_shown_as_a_short_thought() -> None:
    begun = start_call("u1", "Bash", "{}")
    assert render_call(begun) == ThinkingDelta("\n[Bash {}]\n")
    failed = render_call(end_call(begun, "x" * 3000, Outcome.ERROR))
    assert failed == ThinkingDelta(f"\n[Bash (error): {'x' * 2000} (+1000 characters)]\n")
