"""Short constructors of the requests and records for the tests of session reuse."""

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


def user_message(text: str) -> UserMessage:
    return UserMessage.of(text)


def step_of(text: str = "Well.", calls: Sequence[str] = ()) -> Step:
    """Return a response with the results of its tool calls."""
    parts: tuple[ResponsePart, ...] = (Text(text), *(ToolCall(call, "read") for call in calls))
    return Step(Response(parts), tuple(ToolResult(call, "ok") for call in calls))


def outline_of(
    *entries: Entry,
    system: str = "Be brief.",
    tools: Sequence[ToolSpec] = (),
    servers: Sequence[ForwardedMcpServer] = (),
    identity: dict[str, str] | None = None,
) -> Outline:
    """Return the outline of a client application's request."""
    return outline(system, tools, servers, HERE if identity is None else identity, History(entries))


def conversation(*texts: str) -> tuple[Entry, ...]:
    """Return user messages, each but the last with a response."""
    entries: list[Entry] = []
    for text in texts:
        entries += [user_message(text), step_of(f"on {text}")]
    return tuple(entries[:-1])


def confirmed(asked: Outline, *, agent: str = "agent-1", calls: Sequence[str] = ()) -> PoolRecord:
    """Return the record of an agent that received this request, answered it completely and gave a mark."""
    record = confirm(create_fresh(asked, upstream="scripted", now=1.0), agent, now=2.0)
    return with_answer(record, agent=agent, mark=f"mark-{asked.fingerprint.count}", open_calls=calls, now=3.0)


def pending(asked: Outline) -> PoolRecord:
    """Return the record of an agent whose process died while it received this request."""
    return create_fresh(asked, upstream="scripted", now=1.0)
