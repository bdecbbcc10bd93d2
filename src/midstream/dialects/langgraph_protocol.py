"""The thread protocol of LangGraph clients (version 3): everything in a thread as numbered events.

`seq` counts all events of the thread from 1, independent of subscriptions. It is derived from the journal, as is the
event id. A reader of all channels sees no gap, even if servers are killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from typing_extensions import override

from midstream.dialects import langgraph_messages as messages
from midstream.dialects.record_events import RecordEvents
from midstream.dialects.run_fold import (
    AnswerCompleted,
    AnswerVoided,
    Fact,
    ResultsCommitted,
    RunBegan,
    RunEnded,
    RunFold,
    RunPaused,
    StateChanged,
    ToolBegan,
    ToolFinished,
    ToolReported,
    WordsCame,
    is_error,
)
from midstream.dialects.ui_message_stream import value_of
from midstream.history.messages import Response
from midstream.session.records import Record

Json = dict[str, Any]

CHANNELS = frozenset(
    ("values", "updates", "checkpoints", "messages", "tools", "custom", "lifecycle", "input", "tasks")
)
"""Channels that a reader may subscribe to. `tasks` has no events, since a session has no sub-graphs."""
CHANNEL_PATTERN = f"^({'|'.join(sorted(CHANNELS))}|custom:.+)$"
"""Pattern of channel names in requests; `custom:NAME` has the custom events of one name."""
EVENTS_PER_RECORD = 16
"""Average upper bound: a call has at least three records and nine events; other records have at most eight events."""
_PROGRESS = "progress"
PROGRESS_CHANNEL = f"custom:{_PROGRESS}"
"""The channel of the only custom events, the progress reports of running tools."""
_METHODS = {"input": "input.requested"}
_VOID = "This attempt was cut. Its words are void, and the answer begins again as another message."
PHASES = {
    "success": "completed",
    "error": "failed",
    "interrupted": "interrupted",
    "paused": "interrupted",
}
"""The last lifecycle event of a run, by its status."""
_json = msgspec.json.encode
_Event = tuple[str, Json | None]
"""Channel and data of an event; the data is None if no reader of the channel needs it."""


class Subscription(Struct, frozen=True):
    """The subscription of a reader.

    Args:
        channels: Subscribed channels.
        is_root: Whether it includes events of the thread itself, which has no sub-graphs.
        since: Number of the last event that the reader has.
    """

    channels: frozenset[str]
    is_root: bool = True
    since: int = 0

    def takes(self, channel: str) -> bool:
        """Return whether the subscription includes a channel."""
        is_named = channel == "custom" and PROGRESS_CHANNEL in self.channels
        return self.is_root and (channel in self.channels or is_named)


class ProtocolEvents(RecordEvents):
    """Converts the records of a thread to its events, in order, for one reader.

    Args:
        fold: Thread at its beginning, or between two turns.
        seq: Number of the last event there.
        wanted: Subscription of the reader; None only counts events.
        graph: Name of the agent.
    """

    def __init__(self, fold: RunFold, seq: int, wanted: Subscription | None, graph: str) -> None:
        self.fold = fold
        self.seq = seq
        self._wanted = wanted
        self._graph = graph
        self._blocks: list[tuple[str, list[str]]] = []
        """Kind and text of the blocks of the open message."""
        self._message_id = ""
        """Id of the open message; "" for none."""

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        events: list[bytes] = []
        number = 0
        for fact in self.fold.take(record, epoch=epoch):
            for channel, data in self._render(fact):
                self.seq += 1
                if data is not None and self._takes(channel) and self.seq > self._since:
                    events.append(self._event(channel, data, number))
                number += 1
        return events

    @property
    def _since(self) -> int:
        return self._wanted.since if self._wanted is not None else 0

    def _takes(self, channel: str) -> bool:
        return self._wanted is not None and self._wanted.takes(channel)

    def _event(self, channel: str, data: Json, number: int) -> bytes:
        method = _METHODS.get(channel, channel)
        event = {
            "type": "event",
            "event_id": f"{self.fold.session.position}-{number}",
            "seq": self.seq,
            "method": method,
            "params": {"namespace": [], "timestamp": int(self.fold.at * 1000), "data": data},
        }
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (self.seq, method.encode(), _json(event))

    def _render(self, fact: Fact) -> Iterable[_Event]:
        match fact:
            case RunBegan():
                return [self._lifecycle("running")]
            case StateChanged():
                return self._state(fact)
            case WordsCame(name, kind, words):
                return self._words(name, kind, words)
            case AnswerCompleted(name, response):
                return self._complete(name, response)
            case AnswerVoided(name, shown):
                return self._void(name, shown)
            case ToolBegan(name, call):
                place = self._tool("tool-started", name, call.id)
                return [("tools", {**place, "tool_name": call.name, "input": value_of(call.arguments)})]
            case ToolReported(name, call_id, text):
                named = {"name": _PROGRESS, "payload": value_of(text)}
                return [
                    ("tools", {**self._tool("tool-output-delta", name, call_id), "delta": text}),
                    ("custom", named),
                ]
            case ToolFinished(name, call, result):
                if is_error(result):
                    return [("tools", {**self._tool("tool-error", name, call.id), "message": result.content})]
                message = messages.tool_message(name, call, result)
                return [("tools", {**self._tool("tool-finished", name, call.id), "output": message})]
            case ResultsCommitted(name, step):
                results = messages.tool_messages(name, step.response, step.results)
                return [("updates", {"node": messages.TOOLS_NODE, "values": {"messages": results}})]
            case RunPaused(interrupts):
                return [
                    ("input", {"interrupt_id": each["id"], "payload": each["value"]}) for each in interrupts
                ]
            case RunEnded(run):
                phase = PHASES[run.status]
                return [self._lifecycle(phase, **({"error": run.message} if phase == "failed" else {}))]

    def _lifecycle(self, phase: str, **more: str) -> _Event:
        return "lifecycle", {"event": phase, "graph_name": self._graph, **more}

    def _state(self, fact: StateChanged) -> list[_Event]:
        """Return a state after its id, by which clients recognize an old state that is read again."""
        values = fact.values() if self._takes("values") else None
        place = {"id": checkpoint_id(fact.session.position), "step": fact.step, "source": "loop"}
        return [("checkpoints", place), ("values", values)]

    # --- messages ---------------------------------------------------------------------------------------------

    def _tool(self, event: str, message_id: str, call_id: str) -> Json:
        return {"event": event, "tool_call_id": messages.call_id_of(message_id, call_id)}

    def _message(self, event: str, **more: object) -> _Event:
        return "messages", {"event": event, "id": self._message_id, **more}

    def _start(self, name: str) -> list[_Event]:
        if self._message_id:
            return []
        self._message_id, self._blocks = name, []
        about = {"langgraph_node": messages.AGENT_NODE}
        return [("messages", {"event": "message-start", "role": "ai", "id": name, "metadata": about})]

    def _words(self, name: str, kind: str, words: str) -> list[_Event]:
        events = self._start(name)
        block = "reasoning" if kind == "thinking" else "text"
        if not self._blocks or self._blocks[-1][0] != block:
            self._blocks.append((block, []))
            content = {"type": block, block: ""}
            events.append(self._message("content-block-start", index=len(self._blocks) - 1, content=content))
        self._blocks[-1][1].append(words)
        delta = {"type": f"{block}-delta", block: words}
        return [*events, self._message("content-block-delta", index=len(self._blocks) - 1, delta=delta)]

    def _complete(self, name: str, response: Response) -> list[_Event]:
        events = self._start(name)
        message = messages.ai_message(name, response)
        finished: list[_Event] = []
        for index, (block, words) in enumerate(self._blocks):
            content = {"type": block, block: "".join(words)}
            finished.append(self._message("content-block-finish", index=index, content=content))
        index = len(self._blocks)
        for call in (*message["tool_calls"], *message["invalid_tool_calls"]):
            made = next(each for each in response.calls if messages.call_id_of(name, each.id) == call["id"])
            head = {"type": "tool_call_chunk", "id": call["id"], "name": made.name, "args": ""}
            events += [
                self._message("content-block-start", index=index, content=head),
                self._message(
                    "content-block-delta",
                    index=index,
                    delta={"type": "tool-call-delta", "args": made.arguments},
                ),
            ]
            finished.append(self._message("content-block-finish", index=index, content=call))
            index += 1
        usage = messages.usage_of(response.usage)
        ending = self._message("message-finish", **({"usage": usage} if usage else {}))
        update = {"node": messages.AGENT_NODE, "values": {"messages": [message]}}
        self._message_id, self._blocks = "", []
        return [*events, *finished, ending, ("updates", update)]

    def _void(self, name: str, shown: Response) -> list[_Event]:
        """Withdraw a message. Clients remove a message that one state has and the next lacks: send a state with it."""
        if not self._message_id:
            return []
        error = self._message("error", message=_VOID, code="attempt_void")
        self._message_id, self._blocks = "", []
        values = self.fold.state.values() if self._takes("values") else None
        if values is not None:
            values["messages"].append(messages.ai_message(name, shown))
        return [error, ("values", values)]


def first_seq(pruned_to: int) -> int:
    """Return the number before the first event of a journal that was pruned to a position.

    No event up to that position had a greater number, so a reader that resumes after an older event misses nothing. It
    gets some events again, with their previous ids. A record has at most `EVENTS_PER_RECORD` events, on average.
    """
    return pruned_to * EVENTS_PER_RECORD


def checkpoint_id(position: int) -> str:
    """Return the id of the state at a position; ids grow with the position."""
    return f"{position >> 16:08x}-{position & 0xFFFF:04x}-8000-8000-000000000000"
