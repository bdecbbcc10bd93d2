"""Converts one run of a thread to AG-UI events: the same for every reader, and resumable at each event.

An event id is the position of its record in the journal and the number of the event in it, on every server. A body that
resumes after an event is a complete stream: it repeats the start of the run, the messages so far, and the start of open
messages. Repetitions have no id, so that a reader which kept its state can ignore them.

A snapshot of all messages removes the text of an interrupted attempt; the next attempt is another message.
"""

from __future__ import annotations

from typing import Any

import msgspec
from typing_extensions import override

from midstream.dialects.ag_ui_messages import (
    CONTINUES,
    arguments_of,
    interrupts_in,
    part_id,
    shown_call_id,
    snapshot_of,
    tool_message,
    upstream_message_id,
)
from midstream.dialects.langgraph_runs import BEGINNING
from midstream.dialects.record_events import RecordEvents
from midstream.dialects.run_fold import (
    AnswerCompleted,
    AnswerVoided,
    Fact,
    Run,
    RunBegan,
    RunEnded,
    RunFold,
    StateChanged,
    ToolBegan,
    ToolFinished,
    ToolReported,
    WordsCame,
)
from midstream.dialects.ui_message_stream import value_of
from midstream.history.messages import ToolCall
from midstream.session.calls import Site
from midstream.session.records import Record, StreamOpened
from midstream.session.session import Session
from midstream.session.turn.states import RunningCalls

Json = dict[str, Any]

STREAM_PREFIX = "ag-ui-"
"""Prefix of the names of streams that runs open in their sessions."""
CANCELLED = "cancelled"
"""The error code at the end of a stopped run."""
_PREFIXES = {"text": ("TEXT_MESSAGE",), "thinking": ("REASONING", "REASONING_MESSAGE")}
_json = msgspec.json.encode


def stream_name(run_id: str, message_id: str) -> str:
    """Return the stream name of a run, which contains the ids of the run and of its message."""
    return f"{STREAM_PREFIX}{run_id} {message_id}".rstrip()


class AgUiFold(RunFold):
    """Converts the records of a session to runs of AG-UI. A run also ends when client tools run."""

    rests_on_clients = True

    def __init__(self, thread: str, session: Session | None = None) -> None:
        super().__init__(thread, session)
        self._continuing: tuple[str, tuple[int, int]] = "", (0, 0)
        """The id of the run that brings answers, and the turn and response that wait for them."""

    @override
    def ids_in(self, stream: str) -> tuple[str, str]:
        if not stream.startswith(STREAM_PREFIX):
            return "", ""
        run_id, _, message_id = stream.removeprefix(STREAM_PREFIX).partition(" ")
        return run_id, message_id

    @override
    def take(self, record: Record, *, epoch: int) -> list[Fact]:
        if isinstance(record, StreamOpened):
            run_id, message_id = self.ids_in(record.stream)
            if message_id == CONTINUES:
                self._continuing = run_id, _place(self.session)
        return super().take(record, epoch=epoch)

    @override
    def _next_id(self, before: Session) -> str:
        run_id, place = self._continuing
        return run_id if place == _place(before) else ""


def _place(session: Session) -> tuple[int, int]:
    return session.turns, getattr(session.turn, "response_no", 0)


class _Shown:
    """The messages that a client has, and the open ones."""

    def __init__(self) -> None:
        self.started: Json = {}
        self.has_messages = False
        self._messages: dict[str, Json] = {}
        self._words: dict[str, list[str]] = {}
        """Events since the last snapshot, by message."""
        self._open: dict[tuple[str, str], list[Json]] = {}

    def take(self, event: Json) -> None:
        """Apply an event, as clients do."""
        kind = event["type"]
        if kind == "RUN_STARTED":
            self.started = event
        elif kind == "MESSAGES_SNAPSHOT":
            self._messages = {each["id"]: each for each in event["messages"]}
            self._words, self.has_messages = {}, True
        elif kind in ("TEXT_MESSAGE_START", "REASONING_MESSAGE_START"):
            role = event["role"]
            self._messages.setdefault(
                event["messageId"], {"id": event["messageId"], "role": role, "content": ""}
            )
        elif kind in ("TEXT_MESSAGE_CONTENT", "REASONING_MESSAGE_CONTENT"):
            self._words.setdefault(event["messageId"], []).append(event["delta"])
        elif kind == "TOOL_CALL_RESULT":
            names = ("toolCallId", "content")
            self._messages[event["messageId"]] = {
                "id": event["messageId"],
                "role": "tool",
                **{name: event[name] for name in names},
            }
        self._keep_open(event)

    def _keep_open(self, event: Json) -> None:
        prefix, _, step = event["type"].rpartition("_")
        name = event.get("toolCallId") or event.get("messageId") or ""
        if step == "START":
            self._open[prefix, name] = [event]
        elif step == "ARGS":
            self._open[prefix, name].append(event)
        elif step == "END":
            begun = self._open.pop((prefix, name), [])
            if prefix == "TOOL_CALL":
                self._add_call(begun)

    def _add_call(self, begun: list[Json]) -> None:
        start, *pieces = begun
        function = {"name": start["toolCallName"], "arguments": "".join(each["delta"] for each in pieces)}
        call = {"id": start["toolCallId"], "type": "function", "function": function}
        owner = self._messages[start["parentMessageId"]]
        owner["toolCalls"] = [*owner.get("toolCalls", ()), call]

    def repeat(self) -> list[Json]:
        """Return the events that give another client the same state."""
        events = [self.started]
        if self.has_messages:
            events.append(
                {"type": "MESSAGES_SNAPSHOT", "messages": [*map(self._whole, self._messages.values())]}
            )
        return [*events, *(event for begun in self._open.values() for event in begun)]

    def _whole(self, message: Json) -> Json:
        more = self._words.get(message["id"])
        return message if more is None else {**message, "content": message["content"] + "".join(more)}


class _Reader:
    """Numbers the events of a run, and collects those for its reader.

    Args:
        after: The place of the last event that the reader has.
    """

    def __init__(self, after: tuple[int, int]) -> None:
        self.events: list[bytes] = []
        """Position of the current record."""
        self._after = after
        self._shown = _Shown()
        self._is_there = after == BEGINNING
        """Whether the reader has all earlier events."""
        self._place = BEGINNING

    def begin_record(self, position: int) -> None:
        """Start numbering the events of the record at a position."""
        self._place, self.events = (position, -1), []

    def _next(self) -> tuple[int, int]:
        self._place = self._place[0], self._place[1] + 1
        return self._place

    def put(self, event: Json, *, is_last: bool = False) -> None:
        """Send an event, unless the reader has it. The end of a run is always sent."""
        place = self._next()
        if event["type"] == "RUN_STARTED" and place > self._after:
            self._is_there = True
        if place <= self._after and not is_last:
            self._shown.take(event)
            return
        if not self._is_there:
            self._is_there = True
            self.events += [_encoded(each) for each in self._shown.repeat()]
        self.events.append(b"id: %d-%d\ndata: %b\n\n" % (*place, _json(event)))

    def put_words(self, start: Json, head: bytes, words: str) -> None:
        """Send more text. Optimized: most events of a run differ only in their text."""
        position, number = self._place
        if self._is_there and (position, number + 1) > self._after:
            self.events.append(b"id: %d-%d\n%b%b}\n\n" % (*self._next(), head, _json(words)))
        else:
            self.put({**start, "delta": words})


class _Part(msgspec.Struct):
    """Position in the text of a run.

    Args:
        message: Id of the response.
        kinds: Kinds of the parts so far.
        open: Id of the unfinished part; "" between parts.
        content: Fields of each event of the part, without the text.
        head: The same fields, encoded, up to the text.
    """

    message: str = ""
    kinds: list[str] = []
    open: str = ""
    content: Json = {}
    head: bytes = b""


class AgUiEvents(RecordEvents):
    """Converts the records of a thread to the events of one run, in order, for one reader.

    Args:
        fold: Thread before the run.
        run: Run to read.
        after: Place of the last event that the reader has.
    """

    def __init__(self, fold: AgUiFold, run: Run, after: tuple[int, int]) -> None:
        self.fold = fold
        self._wanted = run
        self._reader = _Reader(after)
        self._put = self._reader.put
        self._is_current = False
        self._part = _Part()
        self._voided: tuple[str, ...] = ()
        """Kinds of the parts of the interrupted attempt, until a snapshot removes them."""
        self._completed = ""
        """Id of the message whose calls were sent."""
        self._known: set[str] = set()
        """Ids of messages that the client has, from the last snapshot and later events."""

    @override
    def begin(self) -> list[bytes]:
        run = self.fold.run
        if run is None or not self._is_wanted(run):
            return []
        self._is_current = True
        events = [self._started_event(run), self._snapshot()]
        if run.status != "running":
            events.append(self._end_of(run))
            self.is_over = True
        self._find_part()
        return [_encoded(event) for event in events]

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        if self.is_over:
            return []
        facts = self.fold.take(record, epoch=epoch)
        self._reader.begin_record(self.fold.session.position)
        for fact in facts:
            if isinstance(fact, RunBegan):
                self._is_current = self._is_wanted(fact.run)
            if self._is_current:
                self._render(fact)
            if isinstance(fact, RunEnded) and self._is_current:
                self._is_current, self.is_over = False, True
                break
        return self._reader.events

    # --- facts ------------------------------------------------------------------------------------------------

    def _render(self, fact: Fact) -> None:
        match fact:
            case RunBegan(run):
                self._begin_run(run)
            case StateChanged():
                if self._voided:
                    self._put(self._snapshot())
                    self._voided = ()
            case WordsCame():
                self._write(fact)
            case AnswerVoided():
                self._close()
                self._voided, self._part = ("", *self._part.kinds), _Part()
            case AnswerCompleted(name, response):
                self._close()
                self._completed = name
                for call in response.calls:
                    self._show_call(name, call)
            case ToolBegan(name, call) if name != self._completed and not self._is_own(call):
                self._show_call(name, call, is_upstream=True)
            case ToolReported(name, call_id, text):
                value = {"toolCallId": shown_call_id(name, call_id), "value": value_of(text)}
                self._put({"type": "CUSTOM", "name": "midstream.tool_progress", "value": value})
            case ToolFinished(name, _, result, is_upstream):
                message = tool_message(name, result, is_upstream=is_upstream)
                if message["id"] not in self._known:  # the snapshot contains the client's own results
                    names = ("toolCallId", "content", "role")
                    event = {"type": "TOOL_CALL_RESULT", "messageId": message["id"]}
                    self._put({**event, **{name: message[name] for name in names}})
            case RunEnded(run):
                self._end(run)
            case _:
                pass

    def _begin_run(self, run: Run) -> None:
        if run.attempt > 1:  # the same run, after an interrupted attempt
            return
        self._put(self._started_event(run))
        self._put(self._snapshot())
        self._find_part()

    def _find_part(self) -> None:
        """Continue in the response at the part where the previous run ended."""
        name, words = self.fold.open_words
        self._part = _Part(name, [kind for kind, _ in words])

    def _is_wanted(self, run: Run) -> bool:
        return (run.turn, run.number) == (self._wanted.turn, self._wanted.number)

    def _is_own(self, call: ToolCall) -> bool:
        """Return whether the session runs a call, not the upstream."""
        turn = self.fold.session.turn
        return isinstance(turn, RunningCalls) and any(each.call.id == call.id for each in turn.calls)

    def _started_event(self, run: Run) -> Json:
        names = {"threadId": self.fold.thread, "runId": self._wanted.id}
        return {"type": "RUN_STARTED", **names, "timestamp": int(run.created_at * 1000)}

    def _snapshot(self) -> Json:
        messages = snapshot_of(self.fold)
        self._known = {each["id"] for each in messages}
        name, _ = self.fold.open_words
        if "thinking" in self._voided and name and not any(each["role"] == "reasoning" for each in messages):
            # Clients keep thoughts that a snapshot lacks, unless it has an empty one of the next attempt.
            messages.append({"id": part_id(name, ["thinking"]), "role": "reasoning", "content": ""})
        return {"type": "MESSAGES_SNAPSHOT", "messages": messages}

    # --- parts ------------------------------------------------------------------------------------------------

    def _write(self, fact: WordsCame) -> None:
        part = self._part
        if fact.message_id != part.message:
            self._close()
            part = self._part = _Part(fact.message_id)
        if not part.kinds or part.kinds[-1] != fact.kind:
            self._close()
            part.kinds.append(fact.kind)
        if not part.open:
            self._open_part(part)
        self._reader.put_words(part.content, part.head, fact.words)

    def _open_part(self, part: _Part) -> None:
        part.open = part_id(part.message, part.kinds)
        self._known.add(part.open)
        prefixes = _PREFIXES[part.kinds[-1]]
        role = "reasoning" if part.kinds[-1] == "thinking" else "assistant"
        for prefix in prefixes:
            roled = {"role": role} if prefix != "REASONING" else {}
            self._put({"type": f"{prefix}_START", "messageId": part.open, **roled})
        part.content = {"type": f"{prefixes[-1]}_CONTENT", "messageId": part.open}
        part.head = b'data: %b,"delta":' % _json(part.content)[:-1]

    def _close(self) -> None:
        part = self._part
        if part.open:
            for prefix in reversed(_PREFIXES[part.kinds[-1]]):
                self._put({"type": f"{prefix}_END", "messageId": part.open})
            part.open = ""

    def _show_call(self, name: str, call: ToolCall, *, is_upstream: bool = False) -> None:
        """Show a call with its arguments. A call of the upstream interrupts the text, and is in another message."""
        parent = upstream_message_id(name) if is_upstream else name
        if parent not in self._known:
            self._known.add(parent)
            self._put({"type": "TEXT_MESSAGE_START", "messageId": parent, "role": "assistant"})
            self._put({"type": "TEXT_MESSAGE_END", "messageId": parent})
        shown = {"toolCallId": shown_call_id(name, call.id, is_upstream=is_upstream)}
        names = {"toolCallName": call.name or "tool", "parentMessageId": parent}
        self._put({"type": "TOOL_CALL_START", **shown, **names})
        self._put({"type": "TOOL_CALL_ARGS", **shown, "delta": arguments_of(call.arguments)})
        self._put({"type": "TOOL_CALL_END", **shown})

    # --- the end ----------------------------------------------------------------------------------------------

    def _end(self, run: Run) -> None:
        self._close()
        event = self._end_of(run)
        if run.status == "paused" and event["outcome"]["type"] == "interrupt":
            self._put(self._snapshot())
        self._put(event, is_last=True)

    def _end_of(self, run: Run) -> Json:
        if run.status in ("interrupted", "error"):
            code = CANCELLED if run.status == "interrupted" else run.error
            return {"type": "RUN_ERROR", "message": run.message or code, "code": code}
        outcome: Json = {"type": "success"}
        open_id, _ = self.fold.open_words
        if run.status == "paused":
            interrupts = interrupts_in(self.fold)
            waiting = self._waiting_calls(open_id)
            if interrupts:
                outcome = {"type": "interrupt", "interrupts": interrupts}
            elif waiting:
                outcome["pendingToolCallIds"] = waiting
        names = {"threadId": self.fold.thread, "runId": self._wanted.id}
        return {"type": "RUN_FINISHED", **names, "outcome": outcome}

    def _waiting_calls(self, open_id: str) -> list[str]:
        calls = getattr(self.fold.session.turn, "calls", ())
        mine = (call for call in calls if call.is_open and call.plan.site is Site.CLIENT)
        return [shown_call_id(open_id, call.call.id) for call in mine]


def _encoded(event: Json) -> bytes:
    return b"data: %b\n\n" % _json(event)


def refusal(thread: str, run_id: str, code: str, message: str, *, at: float) -> list[bytes]:
    """Return the events of a refused run, whose input does not fit the state of the thread."""
    names = {"threadId": thread, "runId": run_id, "timestamp": int(at * 1000)}
    error = {"type": "RUN_ERROR", "message": message, "code": code}
    return [_encoded({"type": "RUN_STARTED", **names}), _encoded(error)]


def empty_thread_events(thread: str, run_id: str, *, at: float) -> list[bytes]:
    """Return the events for a client that connects to a thread without messages."""
    names = {"threadId": thread, "runId": run_id}
    started = {"type": "RUN_STARTED", **names, "timestamp": int(at * 1000)}
    ended = {"type": "RUN_FINISHED", **names, "outcome": {"type": "success"}}
    return [_encoded(each) for each in (started, {"type": "MESSAGES_SNAPSHOT", "messages": []}, ended)]
