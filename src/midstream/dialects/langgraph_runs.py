"""Converts one run of a thread to server-sent events of LangGraph's runs API, the same for every reader.

An event id is the position of its record in the journal and the number of the event in it. It is equal on every server
and for all stream modes, so that a reader can resume after any event by `Last-Event-ID`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
from typing_extensions import override

from midstream.dialects import langgraph_messages as messages
from midstream.dialects.record_events import RecordEvents
from midstream.dialects.run_fold import (
    STREAM_PREFIX,
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
)
from midstream.dialects.ui_message_stream import value_of
from midstream.session.records import Record

Json = dict[str, Any]

StreamMode = Literal["values", "updates", "messages-tuple", "custom"]
MODES: tuple[StreamMode, ...] = get_args(StreamMode)
"""The supported stream modes."""
BEGINNING = (0, -1)
"""The place before all events."""
_EVENTS = {"messages-tuple": "messages"}
_ALWAYS = ""
_json = msgspec.json.encode
_Event = tuple[str, str, object]
"""Mode, name and data of an event; an event without a mode is for every reader."""


def place_of(event_id: str) -> tuple[int, int] | None:
    """Parse the place from an event id; return None if the id is invalid. -1 is the beginning."""
    if event_id in ("-1", "0", ""):
        return BEGINNING
    position, mark, number = event_id.partition("-")
    is_ours = mark and position.isdecimal() and number.isdecimal() and len(event_id) <= 40  # noqa: PLR2004
    return (int(position), int(number)) if is_ours else None


class RunEvents(RecordEvents):
    """Converts the records of a thread to the events of one run, in order, for one reader.

    Args:
        fold: Thread before the run.
        run_id: Id of the run to read, which may still be queued.
        modes: Requested stream modes.
        after: Place of the last event that the reader has.
        assistant: Metadata of the agent for messages.
    """

    def __init__(
        self, fold: RunFold, run_id: str, modes: Sequence[str], after: tuple[int, int], assistant: Json
    ) -> None:
        self.fold = fold
        self._run_id = run_id
        self._modes = frozenset(modes)
        self._after = after
        self._about = {**assistant, "thread_id": fold.thread, "run_id": run_id}
        self._template = messages.WordsTemplate()
        self._current = fold.run
        run = fold.find(run_id)
        self.ended = run if run is not None and run.status != "running" else None
        """The run, after its end."""
        self.is_over = self.ended is not None

    @override
    def rest(self) -> list[bytes]:
        """End the body of a reader whose queued run was withdrawn."""
        self.is_over = self.is_over or not (
            self.fold.find(self._run_id) or queued_number(self.fold, self._run_id)
        )
        return []

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        if self.is_over:
            return []
        number, events = -1, list[bytes]()
        for fact in self.fold.take(record, epoch=epoch):
            run = fact.run if isinstance(fact, RunBegan | RunEnded) else self._current
            self._current = run
            if run is None or run.id != self._run_id:
                continue
            for mode, name, data in self._render(fact):
                number += 1
                if (mode == _ALWAYS or mode in self._modes) and self._is_new(number):
                    place = (self.fold.session.position, number)
                    events.append(
                        b"id: %d-%d\nevent: %b\ndata: %b\n\n" % (*place, name.encode(), _json(data))
                    )
            if isinstance(fact, RunEnded):
                self.ended, self.is_over = run, True
                return events
        return events

    def _is_new(self, number: int) -> bool:
        return (self.fold.session.position, number) > self._after

    def _render(self, fact: Fact) -> list[_Event]:
        match fact:
            case RunBegan(run):
                return [(_ALWAYS, "metadata", {"run_id": run.id, "attempt": run.attempt})]
            case StateChanged():
                return [self._values(fact)]
            case WordsCame():
                return [("messages-tuple", "messages", self._words(fact))]
            case AnswerCompleted(name, response):
                chunks = [messages.call_chunk(name, call, index) for index, call in enumerate(response.calls)]
                chunks.append(messages.last_chunk(name, response.usage))
                update = {messages.AGENT_NODE: {"messages": [messages.ai_message(name, response)]}}
                sent = [self._message(chunk, messages.AGENT_NODE) for chunk in chunks]
                return [*sent, ("updates", "updates", update)]
            case ToolFinished(name, call, result, is_upstream=False):
                return [self._message(messages.tool_message(name, call, result), messages.TOOLS_NODE)]
            case ResultsCommitted(name, step):
                results = messages.tool_messages(name, step.response, step.results)
                return [("updates", "updates", {messages.TOOLS_NODE: {"messages": results}})]
            case ToolReported(text=text):
                return [("custom", "custom", value_of(text))]
            case RunPaused(interrupts):
                interrupt_update = {"__interrupt__": interrupts}
                values = {**self.fold.state.values(), **interrupt_update} if "values" in self._modes else None
                return [("updates", "updates", interrupt_update), ("values", "values", values)]
            case RunEnded(run) if run.error:
                return [(_ALWAYS, "error", {"error": run.error, "message": run.message})]
            case RunEnded() | ToolBegan() | ToolFinished() | AnswerVoided():
                return []

    def _values(self, fact: StateChanged) -> _Event:
        return "values", "values", fact.values() if "values" in self._modes else None

    def _words(self, fact: WordsCame) -> object:
        if "messages-tuple" not in self._modes:
            return None
        name, kind = fact.message_id, fact.kind
        return self._template.fill(
            (name, kind),
            fact.words,
            lambda words: [
                messages.words_chunk(name, kind, words),
                {**self._about, "langgraph_node": messages.AGENT_NODE},
            ],
        )

    def _message(self, message: Json, node: str) -> _Event:
        about = {**self._about, "langgraph_node": node} if "messages-tuple" in self._modes else {}
        return "messages-tuple", _EVENTS["messages-tuple"], [message, about]


class RunOutcome(RecordEvents):
    """The state at the end of a run, as one body."""

    def __init__(self, fold: RunFold, run_id: str) -> None:
        self._events = RunEvents(fold, run_id, (), BEGINNING, {})

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        self._events.take(record, epoch=epoch)
        return self._outcome()

    @override
    def rest(self) -> list[bytes]:
        self._events.rest()
        return self._outcome()

    def _outcome(self) -> list[bytes]:
        if self.is_over or not self._events.is_over:
            return []
        self.is_over = True
        fold, run = self._events.fold, self._events.ended
        if run is not None and run.error:
            return [_json({"__error__": {"error": run.error, "message": run.message}})]
        interrupts = messages.interrupts_of(fold.questions)
        return [_json({**fold.state.values(), **({"__interrupt__": interrupts} if interrupts else {})})]


def queued_number(fold: RunFold, run_id: str) -> int:
    """Return the number of a run's message in the queue; 0 if it is not queued."""
    prefix = f"{STREAM_PREFIX}{run_id}."
    return next((each.number for each in fold.session.queue if each.stream.startswith(prefix)), 0)
