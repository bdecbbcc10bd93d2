"""Short words for the requests and the records that the tests of session reuse are about."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.agents.pool_records import PoolRecord, confirm, create_fresh, with_answer
from midstream.history.messages import (
    Entry,
    History,
    Response,
    ResponsePart,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
)
from midstream.models.fingerprint import Outline, outline
from midstream.tools.forwarded_servers import ForwardedMcpServer

HERE = {"model": "opus", "folder": "/work"}


def said(text: str) -> UserMessage:
    return UserMessage.of(text)


def responded(text: str = "Well.", calls: Sequence[str] = ()) -> Step:
    """A response, with the results of the calls it asked for."""
    parts: tuple[ResponsePart, ...] = (Text(text), *(ToolCall(call, "read") for call in calls))
    return Step(Response(parts), tuple(ToolResult(call, "ok") for call in calls))


def sent(
    *entries: Entry,
    system: str = "Be brief.",
    tools: Sequence[ToolSpec] = (),
    servers: Sequence[ForwardedMcpServer] = (),
    identity: dict[str, str] | None = None,
) -> Outline:
    """What a host sent."""
    return outline(system, tools, servers, HERE if identity is None else identity, History(entries))


def talk(*texts: str) -> tuple[Entry, ...]:
    """User messages, each but the last with a response."""
    entries: list[Entry] = []
    for text in texts:
        entries += [said(text), responded(f"on {text}")]
    return tuple(entries[:-1])


def known(asked: Outline, *, agent: str = "agent-1", calls: Sequence[str] = ()) -> PoolRecord:
    """The record of an agent that was asked this, answered it whole and gave a mark."""
    record = confirm(create_fresh(asked, upstream="scripted", now=1.0), agent, now=2.0)
    return with_answer(record, agent=agent, mark=f"mark-{asked.fingerprint.count}", open_calls=calls, now=3.0)


def pending(asked: Outline) -> PoolRecord:
    """The record of an agent that was being asked this when its process died."""
    return create_fresh(asked, upstream="scripted", now=1.0)
