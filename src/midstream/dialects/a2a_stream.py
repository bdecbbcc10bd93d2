"""Converts the records of one turn to the events of an A2A task, and to the task as a snapshot.

A snapshot is the fold of the events, so that both agree for every reader, on every server. The text of a response is
one artifact. After an interrupted attempt, the next attempt replaces the text: its first event does not append.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

from msgspec import Struct
from typing_extensions import override

from midstream.dialects.a2a_messages import (
    STREAM_PREFIX,
    artifact_part,
    instant,
    parts_of,
    question_parts,
    task_id,
)
from midstream.dialects.record_events import RecordEvents
from midstream.dialects.run_fold import (
    AnswerCompleted,
    AnswerVoided,
    Fact,
    Run,
    RunBegan,
    RunEnded,
    RunFold,
    ToolFinished,
    WordsCame,
)
from midstream.history.messages import Outcome, Step, UserMessage
from midstream.session.records import MessageAccepted, Record, StreamOpened
from midstream.session.session import GO_ON

Json = dict[str, Any]

WORKING, COMPLETED, FAILED, CANCELED, INPUT_REQUIRED = (
    f"TASK_STATE_{name}" for name in ("WORKING", "COMPLETED", "FAILED", "CANCELED", "INPUT_REQUIRED")
)
_STATES = {
    "running": WORKING,
    "paused": INPUT_REQUIRED,
    "interrupted": CANCELED,
    "success": COMPLETED,
    "error": FAILED,
}
STATES = (*_STATES.values(), *(f"TASK_STATE_{name}" for name in ("SUBMITTED", "REJECTED", "AUTH_REQUIRED")))
TERMINAL = frozenset({COMPLETED, FAILED, CANCELED})


class A2aFold(RunFold):
    """Converts the records of a session to facts about its tasks."""

    @override
    def ids_in(self, stream: str) -> tuple[str, str]:
        name = stream.removeprefix(STREAM_PREFIX)
        return "", "" if name == stream else name.partition(" ")[0]


class _Artifact(Struct):
    """An artifact so far: pieces of text, or a part of another kind."""

    name: str
    words: list[str]
    part: Json | None = None

    def parts(self) -> list[Json]:
        return [self.part if self.part is not None else {"text": "".join(self.words)}]


class TaskEvents:
    """Converts the records of a session to the events of one task, in order, for one reader.

    Args:
        fold: Session before the turn.
        turn: Number of the turn.
        artifacts: Tools whose results become artifacts.
    """

    def __init__(self, fold: A2aFold, turn: int, artifacts: Collection[str] = ()) -> None:
        self.fold = fold
        self.turn = turn
        self.state = ""
        """The state of the task; "" before its beginning."""
        self.changed_at = 0.0
        """Time of the last state change, in seconds since 1970."""
        self._tools = artifacts
        self._names = {"taskId": task_id(fold.thread, turn), "contextId": fold.thread}
        self._status: Json = {}
        self._history: list[Json] = []
        self._artifacts: dict[str, _Artifact] = {}
        self._void = ""
        """The artifact with text of an interrupted attempt, until that text is replaced."""
        self._opened = ""
        """Id of the message with the newest stream."""
        self._events: list[Json] = []

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""
        return self.state in TERMINAL

    @property
    def is_stopped(self) -> bool:
        """Whether the task has ended, or waits for its client."""
        return self.is_over or self.state == INPUT_REQUIRED

    @property
    def text(self) -> str:
        """The text of the last response."""
        texts = ["".join(each.words) for each in self._artifacts.values() if each.part is None]
        return texts[-1] if texts else ""

    def task(self) -> Json:
        """Return the current task, which is the fold of all events so far."""
        shown = [self._shown(name, each.name, each.parts()) for name, each in self._artifacts.items()]
        more = {"artifacts": shown} if shown else {}
        place = {"id": self._names["taskId"], "contextId": self._names["contextId"]}
        return {**place, "status": self._status, **more, "history": [*self._history]}

    def begin(self) -> list[Json]:
        """Return the first events of a task whose first records were pruned: its known contents."""
        run = self.fold.run
        if run is None or run.turn != self.turn:
            return []
        self._events = []
        entries = self.fold.session.history.entries
        users = (n for n, each in enumerate(entries) if isinstance(each, UserMessage) and each != GO_ON)
        first = max(users, default=0)
        for name, entry in zip(self.fold.ids[first:], entries[first:], strict=True):
            if isinstance(entry, Step):
                if entry.response.text:
                    self._artifacts[_artifact_id(name)] = _Artifact("answer", [entry.response.text])
                for call, result in zip(entry.response.calls, entry.results, strict=True):
                    if call.name in self._tools and result.outcome is Outcome.OK:
                        part = artifact_part(result.content)
                        self._artifacts[_artifact_id(name, call.id)] = _Artifact(call.name, [], part)
            elif entry != GO_ON:
                self._history = [self._user_message(name, entry)]
        self._change(run)
        self._events = [{"task": self.task()}]
        return self._events

    def take(self, record: Record, *, epoch: int) -> list[Json]:
        """Return the events of the next record."""
        self._events = []
        if isinstance(record, StreamOpened):
            self._opened = self.fold.ids_in(record.stream)[1]
        answers = self.fold.answers
        for fact in self.fold.take(record, epoch=epoch):
            if not self.is_over:
                self._take(fact, record)
        if self.fold.answers is not answers and self.state and self.fold.session.turns == self.turn:
            name, given = self._opened or f"answer-{self.fold.session.position}", self.fold.answers[-1].record
            message = {"messageId": name, "role": "ROLE_USER", **self._names}
            self._history.append({**message, "parts": [{"text": given.text or given.choice.value}]})
        return self._events

    # --- facts ------------------------------------------------------------------------------------------------

    def _take(self, fact: Fact, record: Record) -> None:
        if isinstance(fact, RunBegan) and fact.run.turn == self.turn:
            self._begin(fact.run, record)
        if not self.state:
            return
        match fact:
            case WordsCame(name, "text", words):
                self._write(_artifact_id(name), words)
            case AnswerVoided(name, _):
                self._void = _artifact_id(name) if _artifact_id(name) in self._artifacts else ""
            case AnswerCompleted(name, _):
                self._settle()
                self._finish(_artifact_id(name))
            case ToolFinished(name, call, result) if call.name in self._tools:
                if result.outcome is Outcome.OK:
                    artifact = _Artifact(call.name, [], artifact_part(result.content))
                    self._put_artifact(_artifact_id(name, call.id), artifact, append=False, is_last=True)
            case RunEnded(run):
                self._settle()
                self._change(run)
            case _:
                pass

    def _begin(self, run: Run, record: Record) -> None:
        if self.state:
            if self.state == INPUT_REQUIRED:
                self._history.append(self._status["message"])
            if self.state != WORKING:
                self._change(run)
            return
        if isinstance(record, MessageAccepted):
            self._history.append(self._user_message(self.fold.ids[-1], record.message))
        self._change(run)
        self._events = [{"task": self.task()}]

    def _change(self, run: Run) -> None:
        self.state, self.changed_at = _STATES[run.status], self.fold.at
        self._status = {"state": self.state, "timestamp": instant(self.changed_at)}
        if self.state == INPUT_REQUIRED:
            self._status["message"] = self._agent_message(question_parts(self.fold))
        elif self.state == FAILED:
            self._status["message"] = self._agent_message([{"text": run.message or run.error}])
        self._events.append({"statusUpdate": {**self._names, "status": self._status}})

    def _agent_message(self, parts: list[Json]) -> Json:
        name = f"{self._names['taskId']}-{self.fold.session.position}"
        return {"messageId": name, "role": "ROLE_AGENT", **self._names, "parts": parts}

    def _user_message(self, name: str, message: UserMessage) -> Json:
        return {"messageId": name, "role": "ROLE_USER", **self._names, "parts": parts_of(message)}

    # --- artifacts --------------------------------------------------------------------------------------------

    def _write(self, name: str, words: str) -> None:
        is_new = name not in self._artifacts or name == self._void
        self._void = "" if name == self._void else self._void
        self._put_artifact(name, _Artifact("answer", [words]), append=not is_new)

    def _settle(self) -> None:
        """Remove the text of an interrupted attempt, if no later text replaced it."""
        if self._void:
            self._put_artifact(self._void, _Artifact("answer", [""]), append=False)
            self._void = ""

    def _finish(self, name: str) -> None:
        """Mark the last text of a response."""
        if name not in self._artifacts:
            return
        update = self._events[-1].get("artifactUpdate") if self._events else None
        if update is not None and update["artifact"]["artifactId"] == name:
            update["lastChunk"] = True
        else:
            self._put_artifact(name, _Artifact("answer", [""]), append=True, is_last=True)

    def _put_artifact(self, name: str, artifact: _Artifact, *, append: bool, is_last: bool = False) -> None:
        update: Json = {**self._names, "artifact": self._shown(name, artifact.name, artifact.parts())}
        update |= {"append": append, "lastChunk": is_last}
        self._events.append({"artifactUpdate": update})
        if append:
            self._artifacts[name].words += artifact.words
        else:
            self._artifacts[name] = artifact

    def _shown(self, name: str, title: str, parts: list[Json]) -> Json:
        return {"artifactId": name, "name": title, "parts": parts}


AnswerForm = Literal["events", "task", "message"]


class TaskReading(RecordEvents):
    """The answer to one client about a task.

    Args:
        task: Task before its records.
        encode: Function that encodes a `StreamResponse` for the answer.
        form: `task` sends the task when it has ended, or waits for its client. `message` does the same, but sends a
            message if the task completes.
        follows: Whether the answer continues while the task waits for its client.
        since: Position of the snapshot of the task that the client gets first; events follow it.
    """

    def __init__(
        self,
        task: TaskEvents,
        encode: Callable[[Json], bytes],
        *,
        form: AnswerForm = "events",
        follows: bool = False,
        since: int = 0,
    ) -> None:
        self._task = task
        self._encode = encode
        self._form = form
        self._follows = follows
        self._since = since
        self._is_there = not since

    @override
    def begin(self) -> list[bytes]:
        return self._step(self._task.begin())

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        return [] if self.is_over else self._step(self._task.take(record, epoch=epoch))

    @override
    def rest(self) -> list[bytes]:
        return self._end() if self._is_there and self._task.is_stopped and not self._follows else []

    def _step(self, found: list[Json]) -> list[bytes]:
        task = self._task
        if not self._is_there:
            self._is_there = task.fold.session.position >= self._since and bool(task.state)
            found = [{"task": task.task()}] if self._is_there else []
        events = [self._encode(each) for each in found] if self._form == "events" else []
        return events + self._end() if self._is_there and task.is_over else events

    def _end(self) -> list[bytes]:
        self.is_over = True
        if self._form == "events":
            return []
        task = self._task.task()
        if self._form == "task" or self._task.state != COMPLETED:
            return [self._encode({"task": task})]
        message = {"messageId": f"{task['id']}-answer", "contextId": task["contextId"], "role": "ROLE_AGENT"}
        return [self._encode({"message": {**message, "parts": [{"text": self._task.text}]}})]


def _artifact_id(name: str, call_id: str = "") -> str:
    """Return the id of an artifact. All attempts at a response share one id."""
    response = name.partition(".")[0]
    return f"{response}.{call_id}" if call_id else response
