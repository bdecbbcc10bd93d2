"""Translation of one turn's updates of the Agent Client Protocol into events of an upstream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from midstream.agents.tool_value_json import json_text
from midstream.extras import extra
from midstream.history.messages import Finish, Outcome, Usage
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)

with extra("acp"):
    from acp.schema import (
        AgentMessageChunk,
        AgentPlanUpdate,
        AgentThoughtChunk,
        ContentToolCallContent,
        FileEditToolCallContent,
        PromptResponse,
        TextContentBlock,
        ToolCallProgress,
        ToolCallStart,
        ToolCallUpdate,
    )
    from acp.schema import Usage as CountedTokens

_FINISHES: Mapping[str, Finish] = {
    "end_turn": Finish.STOP,
    "max_tokens": Finish.LENGTH,
    "max_turn_requests": Finish.LENGTH,
    "refusal": Finish.FILTER,
}
_FOLDER = {"cwd"}
CHANGES_SHOWN_MAX = 8
"""Changes of a running call's arguments that are shown immediately; later ones are shown with the end of the call."""
_MARKS = {"pending": " ", "in_progress": ">", "completed": "x"}


class _Call:
    """State of a tool that the agent runs, from several updates."""

    def __init__(self) -> None:
        self.title = ""
        self.kind = "other"
        self.arguments: object = None
        self.places: list[str] = []
        self.content = ""
        self.shown: list[str] = []
        """The arguments that readers have, the newest last."""
        self.refusal = ""

    def merge(self, update: ToolCallStart | ToolCallUpdate) -> None:
        self.title = update.title or self.title
        self.kind = update.kind or self.kind
        self.arguments = update.raw_input if update.raw_input is not None else self.arguments
        self.places = [place.path for place in update.locations or ()] or self.places
        if update.content:
            self.content = "\n".join(filter(None, map(_content, update.content)))
        elif update.raw_output is not None:
            self.content = self.content or _plain(update.raw_output)

    @property
    def is_vague(self) -> bool:
        """Whether the arguments do not describe the act yet: opencode (1.18) first sends only the folder."""
        return not self.arguments or (isinstance(self.arguments, dict) and {*self.arguments} <= _FOLDER)

    @property
    def name(self) -> str:
        """The kind of act, or else its title, because the protocol has no names of tools."""
        return self.title if self.kind == "other" and self.title else self.kind

    @property
    def shown_arguments(self) -> str:
        shown = {"title": self.title, "locations": self.places}
        return json_text(shown if self.is_vague else self.arguments)


class AcpReader:
    """Reads one turn: pass each update to `update`, then the answer to the prompt to `end`."""

    def __init__(self) -> None:
        self.has_words = False
        self._calls: dict[str, _Call] = {}
        self._plan = ""

    @property
    def is_in_tool(self) -> bool:
        """Whether a tool of the agent is running."""
        return bool(self._calls)

    def update(self, update: object) -> Iterator[ModelEvent]:
        """Yield the events of an update; a keep-alive for an unknown kind."""
        match update:
            case AgentMessageChunk(content=TextContentBlock(text=text)):
                self.has_words = self.has_words or bool(text)
                yield TextDelta(text)
            case AgentThoughtChunk(content=TextContentBlock(text=text)):
                yield ThinkingDelta(text)
            case AgentMessageChunk() | AgentThoughtChunk():
                yield Working(f"content of kind {update.content.type}")
            case ToolCallStart() | ToolCallProgress():
                yield from self._tool(update)
            case AgentPlanUpdate():
                plan = "".join(f"\n- [{_MARKS[entry.status]}] {entry.content}" for entry in update.entries)
                if plan != self._plan:
                    self._plan = plan
                    yield ThinkingDelta(f"\nPlan:{plan}\n")
            case _:
                yield KeepAlive()

    def describe_request(self, update: ToolCallUpdate) -> tuple[str, str, str, bool]:
        """Return name, kind and arguments of the tool in a permission request, and whether the arguments are vague."""
        call = self._calls.setdefault(update.tool_call_id, _Call())
        call.merge(update)
        return call.title or call.name, call.kind, call.shown_arguments, call.is_vague

    def note_refusal(self, call_id: str, why: str) -> None:
        """Store the reason for a refused permission: the agent reports only that the tool failed."""
        self._calls.setdefault(call_id, _Call()).refusal = why

    def end(self, response: PromptResponse) -> Iterator[ModelEvent]:
        """Yield the remaining events of a complete turn."""
        for call_id in [*self._calls]:
            yield from self._end_call(call_id, Outcome.UNKNOWN, "(the agent did not say how this ended)")
        yield Finished(
            _FINISHES.get(response.stop_reason, Finish.STOP),
            usage=usage_in(response),
        )

    def _tool(self, update: ToolCallStart | ToolCallProgress) -> Iterator[ModelEvent]:
        if isinstance(update, ToolCallProgress) and update.tool_call_id not in self._calls:
            yield KeepAlive()  # of an earlier turn, or already ended
            return
        call = self._calls.setdefault(update.tool_call_id, _Call())
        call.merge(update)
        status = update.status or "pending"
        if status == "pending" and call.is_vague:
            yield Working(call.name)  # a later update has the arguments
            return
        yield from self._show_call(update.tool_call_id)
        if status == "completed":
            yield from self._end_call(update.tool_call_id, Outcome.OK)
        elif status == "failed":
            yield from self._end_call(update.tool_call_id, Outcome.ERROR)
        else:
            yield Working(call.name)

    def _show_call(self, call_id: str, *, is_last: bool = False) -> Iterator[ModelEvent]:
        """Yield a call at its begin, and when its arguments have changed."""
        call = self._calls[call_id]
        arguments = call.shown_arguments
        is_changed = bool(call.shown) and not call.is_vague and arguments != call.shown[-1]
        if not call.shown or (is_changed and (is_last or len(call.shown) <= CHANGES_SHOWN_MAX)):
            call.shown.append(arguments)
            yield UpstreamCallStarted(call_id, call.name, arguments)

    def _end_call(self, call_id: str, outcome: Outcome, content: str = "") -> Iterator[ModelEvent]:
        yield from self._show_call(call_id, is_last=True)
        call = self._calls.pop(call_id)
        if call.refusal and outcome is not Outcome.OK:
            yield UpstreamCallEnded(call_id, call.refusal, Outcome.DENIED)
        else:
            yield UpstreamCallEnded(call_id, call.content or content, outcome)


def usage_in(response: PromptResponse) -> Usage | None:
    """Return the tokens of a turn, or None if the agent does not report them."""
    if response.usage is not None:
        return usage_of(response.usage)
    counted: Any = response.field_meta or {}
    for name in ("quota", "token_count"):  # Gemini CLI (0.61)
        counted = counted.get(name) if isinstance(counted, dict) else None
    match counted:
        case {"input_tokens": int(given), "output_tokens": int(written)}:
            return Usage(given, written)
        case _:
            return None


def usage_of(counted: CountedTokens) -> Usage:
    """Return the tokens of a turn. The total shows whether the other numbers include cached tokens and thoughts."""
    read, written = counted.cached_read_tokens or 0, counted.cached_write_tokens or 0
    given, thought = counted.input_tokens, counted.thought_tokens or 0
    output = counted.output_tokens
    if counted.total_tokens >= given + output + read + written:
        given += read + written
    if counted.total_tokens >= given + output + thought:
        output += thought
    return Usage(given, output, read, written)


def _content(content: object) -> str:
    match content:
        case ContentToolCallContent(content=TextContentBlock(text=text)):
            return text
        case ContentToolCallContent():
            return f"[{content.content.type}]"
        case FileEditToolCallContent():
            return f"[{'an edit of' if content.old_text is not None else 'a new file,'} {content.path}]"
        case _:
            return f"[{getattr(content, 'type', 'something else')}]"


def _plain(output: Any) -> str:  # noqa: ANN401 - any JSON
    return output if isinstance(output, str) else json_text(output)
