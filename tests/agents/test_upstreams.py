from __future__ import annotations

from midstream.agents.upstreams import (
    ForkingUpstream,
    MessageTaken,
    Setup,
    Upstream,
    UpstreamAgent,
    UpstreamMessage,
)
from midstream.history.messages import Text, UserMessage
from midstream.models.responses import Finished, TextDelta
from midstream.testing.scripted_upstream import ScriptedUpstream


async def test_the_scripted_upstream_can_fork() -> None:
    upstream: Upstream = ScriptedUpstream()
    assert isinstance(upstream, ForkingUpstream)
    agent: UpstreamAgent = await upstream.open(Setup())
    message = UpstreamMessage(UserMessage((Text("hi"),)))
    events = [event async for event in agent.send(message, key="k")]
    assert events[0] == MessageTaken("agent-1")
    assert isinstance(events[1], TextDelta)
    assert isinstance(events[-1], Finished)
