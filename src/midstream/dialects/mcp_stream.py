"""Converts one turn of a session to the messages of an MCP call: the same for every reader, and resumable at each.

Messages are derived from the records of the session; events are not stored. An event id contains the stream, the
position of the record in the journal, and the number of the event in the record.

The text of the answer is sent as progress. If an attempt was interrupted, only text that differs is sent again, after a
separating line.
"""

from __future__ import annotations

from typing import Any

import msgspec
from typing_extensions import override

from midstream.dialects.langgraph_messages import interrupt_id_of
from midstream.dialects.langgraph_runs import BEGINNING, place_of
from midstream.dialects.mcp_messages import (
    BAD_PARAMS,
    CANCELLED,
    INTERNAL,
    MODERN,
    RELATED_TASK,
    CallPlace,
    CallStream,
    McpClient,
    McpError,
    PauseState,
    complete,
    elicitation,
    task_of,
)
from midstream.dialects.opaque_tokens import pack, unpack
from midstream.dialects.record_events import RecordEvents
from midstream.dialects.run_fold import (
    AnswerCompleted,
    AnswerVoided,
    Fact,
    Run,
    RunBegan,
    RunEnded,
    RunFold,
    ToolBegan,
    ToolReported,
    WordsCame,
)
from midstream.dialects.sent_text import RepeatedWords, merge
from midstream.errors import ModelError
from midstream.history.messages import Step
from midstream.session.questions import Question
from midstream.session.records import Record, TurnStatus
from midstream.session.session import Session

Json = dict[str, Any]

STREAM_PREFIX = "mcp-"
"""Prefix of the names of streams that calls open in their sessions."""
AGAIN = "\n(The answer begins again.)\n"
"""The line before the text of another attempt, if it differs from the text that was sent."""
QUESTION_MARK = "midstream."
"""Prefix of the ids of requests to clients."""
_WAITING = "The agent waits until a person has decided, which this client cannot show:"
_json = msgspec.json.encode


def stream_name(call_id: str) -> str:
    """Return the name of the stream that carries a call."""
    return f"{STREAM_PREFIX}{call_id}"


class McpFold(RunFold):
    """Converts the records of a session to facts about its calls."""

    @override
    def ids_in(self, stream: str) -> tuple[str, str]:
        return (stream, "") if stream.startswith(STREAM_PREFIX) else ("", "")

    @override
    def _next_id(self, before: Session) -> str:
        run = self.run
        return run.id if run is not None and run.turn == before.turns else ""


def event_id(stream: CallStream, place: tuple[int, int]) -> str:
    """Return the id of an event, or of the beginning of a stream."""
    return f"{pack(stream)}.{place_text(place)}"


def place_text(place: tuple[int, int]) -> str:
    """Format a place for an event id."""
    return f"{place[0]}-{max(place[1], 0)}" if place > BEGINNING else "0"


def read_event_id(text: str) -> tuple[CallStream, tuple[int, int]] | None:
    """Parse the stream and the place from an event id; return None if the id is invalid."""
    name, _, place = text.partition(".")
    stream, after = unpack(name, CallStream), place_of(place)
    return None if stream is None or after is None else (stream, after)


def question_id(place: CallPlace, question: Question) -> str:
    """Return the id of the request that sends a client a question."""
    return f"{QUESTION_MARK}{pack(place)}.{interrupt_id_of(question)}"


def read_question_id(text: object) -> tuple[CallPlace, str] | None:
    """Parse the call and the question from the id of a response; return None if the id is invalid."""
    if not isinstance(text, str) or not text.startswith(QUESTION_MARK):
        return None
    name, _, interrupt = text.removeprefix(QUESTION_MARK).partition(".")
    place = unpack(name, CallPlace)
    return None if place is None else (place, interrupt)


def event(name: str, data: bytes, retry_s: float = 0.0) -> bytes:
    """Return a server-sent event."""
    retry = b"retry: %d\n" % (retry_s * 1000) if retry_s else b""
    return b"id: %b\n%bdata: %b\n\n" % (name.encode(), retry, data)


class McpCall:
    """The state of a call after the records that were read.

    Args:
        fold: Session before the turn of the call.
        place: Identity of the call.

    Raises:
        McpError: The records of the call were pruned.
    """

    def __init__(self, fold: McpFold, place: CallPlace) -> None:
        self.fold = fold
        self.place = place
        self.run: Run | None = None
        """The newest run of the turn."""
        self.text = ""
        """The answer, if the turn has completed."""
        self.created_at = 0.0
        if fold.session.turns > place.turn:
            raise McpError(BAD_PARAMS, "this call is no longer kept")
        if fold.run is not None and fold.run.turn == place.turn:  # its beginning was pruned
            self.take_fact(RunBegan(fold.run))
            if not fold.is_running:
                self.take_fact(RunEnded(fold.run))

    @property
    def is_over(self) -> bool:
        """Whether the turn has ended."""
        return self.run is not None and self.run.status not in ("running", "paused")

    @property
    def questions(self) -> tuple[Question, ...]:
        """The open questions, if nothing else of the turn runs."""
        is_paused = self.run is not None and self.run.status == "paused"
        return self.fold.questions if is_paused else ()

    def take(self, record: Record, *, epoch: int) -> list[Fact]:
        """Process the next record; return the facts of this call."""
        if self.is_over:
            return []
        return [fact for fact in self.fold.take(record, epoch=epoch) if self.take_fact(fact)]

    def take_fact(self, fact: Fact) -> bool:
        """Process a fact; return whether it belongs to this call."""
        if isinstance(fact, RunBegan | RunEnded) and fact.run.turn == self.place.turn and not self.is_over:
            self.run = fact.run
            self.created_at = self.created_at or fact.run.created_at
            entries = self.fold.session.history.entries
            last = entries[-1] if entries else None
            self.text = last.response.text if isinstance(last, Step) else ""
            return True
        return self.run is not None and not self.is_over

    def status(self) -> str:
        """Return the task status of this call."""
        run = self.run
        if run is None or run.status == "running":
            return "working"
        if run.status == "paused":
            return "input_required"
        if run.status == "interrupted":
            return "cancelled"
        ended = self.fold.session.last_turn
        is_interrupted = ended is not None and ended.status is TurnStatus.INTERRUPTED
        return "failed" if is_interrupted or run.error == ModelError.code else "completed"

    def result(self) -> Json:
        """Return the result of a call that has ended, or waits for people.

        Raises:
            McpError: The call was cancelled, or failed.
        """
        run, session = self.run, self.place.session
        assert run is not None
        meta = {"midstream/session": session}
        match self.status():
            case "cancelled":
                raise McpError(CANCELLED, "the call was cancelled")
            case "failed":
                raise McpError(INTERNAL, run.message or "the turn was interrupted")
            case "input_required":
                questions = [elicitation(each)["params"]["message"] for each in self.questions]
                last = (
                    f"Decide by another client of session {session!r}; then call `ask` with this session and an empty "
                    "message for the answer."
                )
                text = "\n".join([_WAITING, *questions, last])
                found: Json = {"answer": "", "session": session, "waiting": questions}
                return {"content": [_text(text)], "structuredContent": found, "isError": False, "_meta": meta}
        if run.status == "error":
            return {"content": [_text(run.message or run.error)], "isError": True, "_meta": meta}
        found = {"answer": self.text, "session": session}
        return {"content": [_text(self.text)], "structuredContent": found, "isError": False, "_meta": meta}

    def task(self, client: McpClient) -> Json:
        """Return this call as a task."""
        updated = self.run.updated_at if self.run is not None else 0.0
        status, times = self.status(), (self.created_at, max(updated, self.fold.at))
        return task_of(client, self.place, status, times)

    def detailed_task(self, client: McpClient) -> Json:
        """Return the task with its result, its error, or the requests that it waits for."""
        task = complete(client, self.task(client))
        if task["status"] == "input_required":
            task["inputRequests"] = self.input_requests()
        elif task["status"] == "completed":
            task["result"] = complete(client, self.result())
        elif task["status"] == "failed":
            try:
                self.result()
            except McpError as error:
                task |= {"error": error.body(), "statusMessage": str(error)}
        return task

    def input_requests(self) -> Json:
        """Return the forms of all open questions, by request id."""
        return {interrupt_id_of(each): elicitation(each) for each in self.questions}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


class CallEvents(RecordEvents):
    """Converts the records of a session to the messages of one stream, in order, for one reader.

    Args:
        state: Call before its records.
        stream: Stream that the client reads.
        after: Place of the last event that the reader has.
    """

    def __init__(self, state: McpCall, stream: CallStream, after: tuple[int, int] = BEGINNING) -> None:
        self.state = state
        self.stream = stream
        self.after = after
        self._name = pack(stream)
        self._place = BEGINNING
        self._events: list[bytes] = []
        self._progress = 0
        self._sent: list[str] = []
        """Text of the response that the reader has, including text of interrupted attempts."""
        self._repeated = RepeatedWords(())
        self._elicitation_ids: set[str] = set()
        self._is_there = not stream.since
        """Whether reading has reached the position at the time of the request."""

    @override
    def begin(self) -> list[bytes]:
        self._is_there = self.state.fold.session.position >= self.stream.since
        return self._take_end() if self.state.run is not None else []

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        self._events = []
        if self.is_over:
            return []
        facts = self.state.take(record, epoch=epoch)
        self._place = self.state.fold.session.position, -1
        for fact in facts:
            self._take(fact)
        if not self._is_there and self._place[0] >= self.stream.since:
            self._is_there = True
            self._take_end()
        return self._events

    def _take(self, fact: Fact) -> None:
        match fact:
            case WordsCame(_, kind, words) if kind == "text":
                self._write(words)
            case AnswerVoided():
                self._repeated = RepeatedWords(merge(("text", words) for words in self._sent))
            case AnswerCompleted():
                if not self._repeated.is_over:  # shorter than the interrupted attempt
                    self._show("".join(words for _, words in self._repeated.passed), is_again=True)
                self._sent, self._repeated = [], RepeatedWords(())
            case ToolBegan() | ToolReported():
                self._report("")
            case RunEnded():
                self._take_end()
            case _:
                pass

    def _write(self, words: str) -> None:
        if self._repeated.is_over:
            self._show(words)
            return
        more, is_again = self._repeated.take("text", words)
        for _, each in more:
            self._show(each, is_again=is_again)

    def _show(self, words: str, *, is_again: bool = False) -> None:
        if is_again:
            self._sent = []
        self._sent.append(words)
        self._report(AGAIN + words if is_again else words)

    def _report(self, words: str) -> None:
        self._progress += len(words) or 1
        if self.stream.token is not None and self._place[0] > self.stream.since:
            params: Json = {"progressToken": self.stream.token, "progress": self._progress}
            self._put(
                {
                    "method": "notifications/progress",
                    "params": {**params, **({"message": words} if words else {})},
                }
            )

    def _take_end(self) -> list[bytes]:
        state, stream = self.state, self.stream
        is_modern = stream.version == MODERN
        if not self._is_there and not state.is_over:
            return self._events
        if state.is_over or (state.questions and not stream.can_elicit and not stream.task):
            self._respond()
        elif state.questions and is_modern:
            pause = pack(PauseState(state.place, self._place[0]).with_check())
            requests = {"inputRequests": state.input_requests(), "requestState": pause}
            self._put({"id": stream.id, "result": {"resultType": "input_required", **requests}}, is_last=True)
        elif stream.can_elicit:
            for question in state.questions:
                name = question_id(state.place, question)
                if name not in self._elicitation_ids:
                    self._elicitation_ids.add(name)
                    form = elicitation(question)
                    params = {**form["params"], **self._related()}
                    self._put({"id": name, "method": form["method"], "params": params})
        return self._events

    def _respond(self) -> None:
        try:
            result = complete(McpClient(self.stream.version), self.state.result())
            meta = {**result["_meta"], **self._related().get("_meta", {})}
            self._put({"id": self.stream.id, "result": {**result, "_meta": meta}}, is_last=True)
        except McpError as error:
            self._put({"id": self.stream.id, "error": error.body()}, is_last=True)

    def _related(self) -> Json:
        related = {"taskId": pack(self.state.place)}
        return {"_meta": {RELATED_TASK: related}} if self.stream.task else {}

    def _put(self, message: Json, *, is_last: bool = False) -> None:
        self._place = self._place[0], self._place[1] + 1
        self.is_over = self.is_over or is_last
        if self._place > self.after or is_last:
            name = f"{self._name}.{place_text(self._place)}"
            self._events.append(event(name, _json({"jsonrpc": "2.0", **message})))
