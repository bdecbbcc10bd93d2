"""Stateful upstream agents, and the pool that reuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.agents.acp import AcpAgent as AcpAgent
    from midstream.agents.claude import Claude as Claude
    from midstream.agents.claude_sessions import KeyValueSessions as KeyValueSessions
    from midstream.agents.codex import Codex as Codex
    from midstream.agents.cursor import Cursor as Cursor
    from midstream.agents.openai_conversation import OpenAIChain as OpenAIChain
    from midstream.agents.openai_conversation import OpenAIConversation as OpenAIConversation
    from midstream.agents.permission_rules import ASK_FIRST as ASK_FIRST
    from midstream.agents.permission_rules import HARMLESS as HARMLESS
    from midstream.agents.permission_rules import Rules as Rules
    from midstream.agents.permission_rules import Verdict as Verdict
    from midstream.agents.pool import Pooled as Pooled
    from midstream.agents.pool import PoolLimits as PoolLimits
    from midstream.agents.prefix_difference import first_difference as first_difference
    from midstream.agents.upstream_abilities import Abilities as Abilities
    from midstream.agents.upstreams import ForkingUpstream as ForkingUpstream
    from midstream.agents.upstreams import Marked as Marked
    from midstream.agents.upstreams import MessageDropped as MessageDropped
    from midstream.agents.upstreams import MessageTaken as MessageTaken
    from midstream.agents.upstreams import ResponseRestarted as ResponseRestarted
    from midstream.agents.upstreams import Setup as Setup
    from midstream.agents.upstreams import Upstream as Upstream
    from midstream.agents.upstreams import UpstreamAgent as UpstreamAgent
    from midstream.agents.upstreams import UpstreamEvent as UpstreamEvent
    from midstream.agents.upstreams import UpstreamMessage as UpstreamMessage
    from midstream.session.permissions import Allowed as Allowed
    from midstream.session.permissions import Ask as Ask
    from midstream.session.permissions import Permission as Permission

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "agents.upstream_abilities": "Abilities",
        "agents.acp": "AcpAgent",
        "agents.claude": "Claude",
        "agents.claude_sessions": "KeyValueSessions",
        "agents.codex": "Codex",
        "agents.cursor": "Cursor",
        "agents.openai_conversation": "OpenAIChain OpenAIConversation",
        "agents.permission_rules": "ASK_FIRST HARMLESS Rules Verdict",
        "agents.pool": "PoolLimits Pooled",
        "agents.prefix_difference": "first_difference",
        "agents.upstreams": (
            "ForkingUpstream Marked MessageDropped MessageTaken ResponseRestarted Setup Upstream UpstreamAgent "
            "UpstreamEvent UpstreamMessage"
        ),
        "session.permissions": "Allowed Ask Permission",
    },
)
