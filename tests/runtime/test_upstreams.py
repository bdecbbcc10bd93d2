from __future__ import annotations

from midstream.core.messages import Text, UserMessage
from midstream.core.replies import Finished, TextDelta
from midstream.runtime.upstreams import ForkingUpstream, Opened, Said, Setup, Upstream, UpstreamAgent
from midstream.testing.upstreams import ScriptedUpstream


async def test_the_scripted_upstream_is_one_that_can_fork() -> None:
    upstream: Upstream = ScriptedUpstream()
    assert isinstance(upstream, ForkingUpstream)
    agent: UpstreamAgent = await upstream.open(Setup())
    said = Said(UserMessage((Text("hi"),)))
    events = [event async for event in agent.send(said, key="k")]
    assert events[0] == Opened("agent-1")
    assert isinstance(events[1], TextDelta)
    assert isinstance(events[-1], Finished)
