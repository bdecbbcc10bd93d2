"""Converts the records of a session to the runs of a LangGraph thread, and to facts about them.

A run is the part of a turn between two answers of people. It ends with the turn, or when the turn only waits for
people; the answer begins the next run. Runs, messages and ids are derived from the records, so that they are equal on
each server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from midstream.dialects.langgraph_messages import (
    default_id,
    interrupt_id_of,
    interrupts_of,
    messages_of,
    step_id,
)
from midstream.dialects.open_questions import ShownSubAgents, is_turn_waiting, open_questions, take_record
from midstream.dialects.sent_text import Words, merge, part_of, rest_of, words_of
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    Step,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)
from midstream.session.questions import Question
from midstream.session.records import (
    AnswerUsed,
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallProgressed,
    CallStarted,
    CancelRequested,
    Delta,
    MessageAccepted,
    QuestionAnswered,
    QuestionClosed,
    Record,
    ResponseCompleted,
    StepCommitted,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.session.session import GO_ON, Session, evolve
from midstream.session.turn.commands import Answer
from midstream.session.turn.states import Idle

Json = dict[str, Any]

STREAM_PREFIX = "langgraph-"
"""Prefix of the names of streams that runs open in their sessions."""
ANSWERS_KEPT_MAX = 64
"""Number of newest answers of a thread whose repetition is recognized."""
RUNS_KEPT_MAX = 1000
"""Number of newest runs of a thread that can be listed."""
USER_INTERRUPT = "UserInterrupt"
"""The error of a cancelled run."""
_CUT = "The attempt was cut while this ran."
_STATUSES = {
    TurnStatus.COMPLETED: "success",
    TurnStatus.CANCELLED: "interrupted",
    TurnStatus.FAILED: "error",
    TurnStatus.INTERRUPTED: "error",
}
_GOING_ON = (
    AnswerUsed
    | AttemptStarted
    | CallEnded
    | CallInDoubt
    | CallStarted
    | CancelRequested
    | Delta
    | QuestionAnswered
    | QuestionClosed
    | ResponseCompleted
    | StepCommitted
    | TurnEnded
    | TurnResumed
)
"""Records that begin the next run of a turn that waited."""


class Run(Struct, frozen=True):
    """A run.

    Args:
        turn: Number of its turn.
        number: Number of the run in the turn, from 0.
        id: Id for clients.
        after: Position before its first record.
        created_at, updated_at: Seconds since 1970.
        status: running, success, error, interrupted (cancelled), or paused (it waited for people).
        error, message: Reason for its end.
        attempt: Number of the attempt, from 1; grows when an interrupted attempt made text void.
    """

    turn: int
    number: int
    id: str
    after: int
    created_at: float
    updated_at: float
    status: str = "running"
    error: str = ""
    message: str = ""
    attempt: int = 1


class GivenAnswer(Struct, frozen=True):
    """An accepted answer of a thread."""

    interrupt: str
    question: Question
    record: QuestionAnswered

    def is_of(self, answer: Answer) -> bool:
        """Return whether the record has this answer."""
        recorded = (self.record.choice, self.record.text, self.record.arguments)
        return recorded == (answer.choice, answer.text, answer.arguments)


class RunBegan(Struct, frozen=True):
    """A run began."""

    run: Run


class AnswerVoided(Struct, frozen=True):
    """The text of a message is void: its attempt was interrupted, and the next one begins.

    Args:
        message_id: Id of the message.
        shown: Text so far.
    """

    message_id: str
    shown: Response


class WordsCame(Struct, frozen=True):
    """More text of a message arrived."""

    message_id: str
    kind: str
    words: str


class AnswerCompleted(Struct, frozen=True):
    """A response is complete; all its text was sent before."""

    message_id: str
    response: Response


class ToolBegan(Struct, frozen=True):
    """A call began. `message_id` is the id of the response with the call."""

    message_id: str
    call: ToolCall


class ToolReported(Struct, frozen=True):
    """A running tool reported progress."""

    message_id: str
    call_id: str
    text: str


class ToolFinished(Struct, frozen=True):
    """A call has its result. A call of the upstream has no message in the thread."""

    message_id: str
    call: ToolCall
    result: ToolResult
    is_upstream: bool = False


class ResultsCommitted(Struct, frozen=True):
    """All calls of a response have results."""

    message_id: str
    step: Step


class StateChanged(Struct, frozen=True):
    """The messages of the thread changed; `values` returns them."""

    session: Session
    ids: tuple[str, ...]
    open_id: str

    def values(self) -> Json:
        """Return the state of the thread."""
        return {"messages": messages_of(self.session, self.ids, self.open_id)}

    @property
    def step(self) -> int:
        """A number that never decreases from one state to the next."""
        return self.session.turns + len(self.session.history.entries)


class RunPaused(Struct, frozen=True):
    """The run ended since it waits for people, whose answers begin the next run."""

    interrupts: tuple[Json, ...]


class RunEnded(Struct, frozen=True):
    """The run ended."""

    run: Run


Fact = (
    RunBegan
    | AnswerVoided
    | WordsCame
    | AnswerCompleted
    | ToolBegan
    | ToolReported
    | ToolFinished
    | ResultsCommitted
    | StateChanged
    | RunPaused
    | RunEnded
)


def uuid_of(seed: bytes) -> str:
    """Derive a UUID: clients and applications accept no other ids."""
    found = hashlib.blake2b(seed, digest_size=16, person=b"midstream-graph").hexdigest()
    variant = "89ab"[int(found[16], 16) % 4]
    return f"{found[:8]}-{found[8:12]}-4{found[13:16]}-{variant}{found[17:20]}-{found[20:]}"


def derived_run_id(thread: str, turn: int, number: int) -> str:
    """Return the id of a run that was not begun by a LangGraph client."""
    return uuid_of(f"run {thread} {turn} {number}".encode())


def stream_name(run_id: str, message_id: str) -> str:
    """Return the stream name of a message, which contains the ids of its run and of the message."""
    return f"{STREAM_PREFIX}{run_id}.{message_id}"


def ids_in(stream: str) -> tuple[str, str]:
    """Return the ids of the run and of the message that a stream has in its name; "" for none."""
    if not stream.startswith(STREAM_PREFIX):
        return "", ""
    run_id, _, message_id = stream.removeprefix(STREAM_PREFIX).partition(".")
    return run_id, message_id


class RunFold:
    """Converts the records of a session to runs and facts about them, in order.

    Args:
        thread: Id of the thread for clients.
        session: State at the beginning of the journal.
    """

    rests_on_clients = False
    """Whether a run also ends when its turn waits for client tools."""

    def __init__(self, thread: str, session: Session | None = None) -> None:
        self.thread = thread
        self.session = session = session or Session()
        self.ids = _ids_of(session, self.ids_in)
        """The id of each entry of the history."""
        self.runs: tuple[Run, ...] = _newest_run(thread, session, self.ids_in)
        self.answers: tuple[GivenAnswer, ...] = ()
        self.at = session.started_at
        """Time of the last record that has a time."""
        self._open_id = ""
        """The id of the response that is unfinished, or whose calls run."""
        self._shown: list[tuple[str, list[str]]] = []
        self._began: frozenset[str] = frozenset()
        """Calls of that response that were reported as running."""
        self._upstream: dict[str, ToolCall] = {}
        """Unfinished calls that the upstream runs itself."""
        self._sub_agents: ShownSubAgents = {}

    def ids_in(self, stream: str) -> tuple[str, str]:
        """Return the ids of the run and of the message that a stream has in its name; "" for none."""
        return ids_in(stream)

    def copy(self) -> Self:
        """Return an independent copy."""
        made = type(self)(self.thread)
        shown = [(kind, [*words]) for kind, words in self._shown]
        made.__dict__.update(self.__dict__, _upstream={**self._upstream}, _shown=shown)
        return made

    @property
    def run(self) -> Run | None:
        """The newest run."""
        return self.runs[-1] if self.runs else None

    def find(self, run_id: str) -> Run | None:
        """Return the newest run of an id. Several answers of one request may each have begun a run of the same id."""
        return next((run for run in reversed(self.runs) if run.id == run_id), None)

    def of_turn(self, turn: int) -> Run | None:
        """Return the first run of a turn."""
        return next((run for run in self.runs if run.turn == turn), None)

    @property
    def open_words(self) -> tuple[str, list[Words]]:
        """The id of the unfinished response, and its text so far."""
        return self._open_id, merge((kind, "".join(words)) for kind, words in self._shown)

    @property
    def is_running(self) -> bool:
        """Whether the newest run is in progress."""
        return bool(self.runs) and self.runs[-1].status == "running"

    @property
    def is_waiting(self) -> bool:
        """Whether the open turn, including its sub-agents, only waits for people."""
        return is_turn_waiting(self.session.turn, self._sub_agents, on_clients=self.rests_on_clients)

    @property
    def questions(self) -> tuple[Question, ...]:
        """The open questions; a question of a sub-agent names its session."""
        return open_questions(self.session, self._sub_agents)

    @property
    def state(self) -> StateChanged:
        """The current state."""
        return StateChanged(self.session, self.ids, self._open_id)

    def take(self, record: Record, *, epoch: int) -> list[Fact]:
        """Return the facts of the next record."""
        before = self.session
        self.session = evolve(before, record, epoch=epoch)
        self.at = getattr(record, "at", 0.0) or self.at
        if getattr(record, "turn", 0) != self.session.turns:
            return []
        if isinstance(record, Delta):
            return [*self._begin_if_waiting(before, record), *self._add_words(record)]
        self._name_entries(before, record)
        known = self._sub_agents
        self._sub_agents, where, done = take_record(known, self.session.turn, record, epoch=epoch)
        self.at = getattr(done, "at", 0.0) or self.at
        if isinstance(done, QuestionAnswered):
            self._keep_answer(open_questions(before, known), where, done)
        facts: list[Fact] = []
        if isinstance(record, MessageAccepted | TranscriptAccepted):
            run_id, _ = self.ids_in(getattr(record, "stream", ""))
            number = 0 if record.turn > before.turns else self._next_number()
            facts = self._begin(before.position, record.turn, number, run_id)
        elif isinstance(done, _GOING_ON):
            facts = self._begin_if_waiting(before, record)
        facts += self._write(before, record)
        if isinstance(record, TurnEnded):
            facts += self._end(_STATUSES[record.status], record)
        elif self.is_running and self.is_waiting:
            facts += [RunPaused(tuple(interrupts_of(self.questions))), *self._end("paused")]
        return facts

    # --- runs -------------------------------------------------------------------------------------------------

    def _begin_if_waiting(self, before: Session, record: Record) -> list[Fact]:
        if self.is_running:
            return []
        turn = getattr(record, "turn", 0)
        return self._begin(before.position, turn, self._next_number(), self._next_id(before))

    def _next_id(self, before: Session) -> str:  # noqa: ARG002 - for dialects whose clients name runs
        """Return the id of the run that continues a turn; "" to derive it from the journal."""
        return ""

    def _next_number(self) -> int:
        return self.runs[-1].number + 1 if self.runs and self.runs[-1].turn == self.session.turns else 0

    def _begin(self, after: int, turn: int, number: int, run_id: str = "") -> list[Fact]:
        name = run_id or derived_run_id(self.thread, turn, number)
        run = Run(turn, number, name, after, self.at, self.at)
        self.runs = (*self.runs[-(RUNS_KEPT_MAX - 1) :], run)
        return [RunBegan(run), self.state]

    def _end(self, status: str, record: TurnEnded | None = None) -> list[Fact]:
        if not self.is_running:
            return []
        error = message = ""
        if record is not None and record.status is TurnStatus.CANCELLED:
            error, message = USER_INTERRUPT, "User interrupted the run"
        elif record is not None and record.status is not TurnStatus.COMPLETED:
            error = record.code or record.status.value
            message = record.message or "the turn was interrupted; a run without input resumes it"
        run = replace(self.runs[-1], status=status, error=error, message=message, updated_at=self.at)
        self.runs = (*self.runs[:-1], run)
        return [RunEnded(run)]

    def _keep_answer(self, questions: Iterable[Question], session: str, record: QuestionAnswered) -> None:
        for question in questions:
            place = (question.session, question.call_id, question.digest)
            if place == (session, record.call_id, record.digest):
                given = GivenAnswer(interrupt_id_of(question), question, record)
                self.answers = (*self.answers[-(ANSWERS_KEPT_MAX - 1) :], given)

    # --- messages ---------------------------------------------------------------------------------------------

    def _name_entries(self, before: Session, record: Record) -> None:
        entries = self.session.history.entries
        if entries is before.history.entries:
            return
        keep = getattr(record, "keep", None)
        ids = [*self.ids[: len(self.ids) if keep is None else keep]][: len(entries)]
        for number in range(len(ids), len(entries)):
            name = default_id(number, entries[number])
            if isinstance(record, StepCommitted) and self._open_id:
                name = self._open_id
            ids.append(name)
        if isinstance(record, MessageAccepted):
            ids[-1] = self.ids_in(record.stream)[1] or ids[-1]
        self.ids = tuple(ids)

    def _write(self, before: Session, record: Record) -> list[Fact]:
        match record:
            case AttemptStarted():
                return self._begin_attempt(record)
            case ResponseCompleted():
                return self._complete(record)
            case CallStarted():
                return self._start_call(record.call_id, record.arguments)
            case CallProgressed():
                return [ToolReported(self._open_id, record.call_id, record.text)]
            case CallEnded():
                return self._end_call(before, record)
            case StepCommitted():
                return self._commit()
            case _:
                return []

    def _begin_attempt(self, record: AttemptStarted) -> list[Fact]:
        name, old = step_id(len(self.session.history.entries), record.attempt), self._open_id
        is_shown = bool(self._shown or self._upstream)
        facts = self._void(old) if is_shown else []
        self._open_id, self._shown, self._began = name, [], frozenset()
        return facts

    def _void(self, name: str) -> list[Fact]:
        lost = [
            ToolFinished(name, call, ToolResult(call.id, _CUT, Outcome.UNKNOWN), is_upstream=True)
            for call in self._upstream.values()
        ]
        self._upstream = {}
        run = replace(self.runs[-1], attempt=self.runs[-1].attempt + 1)
        self.runs = (*self.runs[:-1], run)
        shown = (part_of(kind, "".join(words)) for kind, words in self._shown)
        voided = AnswerVoided(name, Response(tuple(shown), Finish.INTERRUPTED))
        return [*lost, voided, RunBegan(run), self.state]

    def _add_words(self, delta: Delta) -> list[Fact]:
        if delta.call is not None:
            return self._show_upstream(delta.call)
        if not delta.text or delta.requested is not None or delta.signature:
            return []
        self._note_words(delta.kind, delta.text)
        return [WordsCame(self._open_id, delta.kind, delta.text)]

    def _note_words(self, kind: str, words: str) -> None:
        if not self._shown or self._shown[-1][0] != kind:
            self._shown.append((kind, []))
        self._shown[-1][1].append(words)

    def _show_upstream(self, done: UpstreamCall) -> list[Fact]:
        """Report a tool that the upstream runs itself as running and as finished, without a message."""
        call = ToolCall(done.id, done.name or "tool", done.arguments)
        facts: list[Fact] = [] if done.id in self._began else [ToolBegan(self._open_id, call)]
        self._began |= {done.id}
        self._upstream[done.id] = call
        if done.outcome is not None:
            del self._upstream[done.id]
            result = ToolResult(done.id, done.content, done.outcome)
            facts.append(ToolFinished(self._open_id, call, result, is_upstream=True))
        return facts

    def _complete(self, record: ResponseCompleted) -> list[Fact]:
        whole = merge(words_of(record.body))
        rest = rest_of(whole, merge((kind, "".join(words)) for kind, words in self._shown))
        facts: list[Fact] = []
        if rest is None:  # the text so far is no prefix of the response, which becomes another message
            old, self._open_id = self._open_id, f"{self._open_id}.whole"
            facts, rest = self._void(old), whole
        facts += [WordsCame(self._open_id, kind, words) for kind, words in rest]
        facts.append(AnswerCompleted(self._open_id, record.body))
        self._shown, self._began = [], frozenset()
        return [*facts, self.state] if record.body.calls else facts

    def _start_call(self, call_id: str, arguments: str | None) -> list[Fact]:
        call = self._call(self.session, call_id)
        if call is None or call_id in self._began:
            return []
        self._began |= {call_id}
        shown = call if arguments is None else replace(call, arguments=arguments)
        return [ToolBegan(self._open_id, shown)]

    def _end_call(self, before: Session, record: CallEnded) -> list[Fact]:
        call = self._call(before, record.result.call_id)
        if call is None:
            return []
        facts = self._start_call(call.id, None)
        return [*facts, ToolFinished(self._open_id, call, record.result)]

    def _call(self, session: Session, call_id: str) -> ToolCall | None:
        calls = getattr(session.turn, "calls", ())
        return next((call.call for call in calls if call.call.id == call_id), None)

    def _commit(self) -> list[Fact]:
        entries = self.session.history.entries
        last, name = (entries[-1], self.ids[-1]) if entries else (None, "")
        facts: list[Fact] = []
        if isinstance(last, Step) and last.results:
            facts.append(ResultsCommitted(name, last))
        self._shown, self._began, self._open_id = [], frozenset(), ""
        return [*facts, self.state]


def _ids_of(session: Session, ids_in: Callable[[str], tuple[str, str]]) -> tuple[str, ...]:
    """Return the ids of a history whose records were pruned; stream names contain those of user messages."""
    entries = session.history.entries
    ids = [default_id(*each) for each in enumerate(entries)]
    names = {stream.turn: ids_in(name)[1] for name, stream in session.streams.items() if stream.turn}
    turn = session.turns
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        if isinstance(entry, UserMessage) and entry != GO_ON:
            ids[number] = names.get(turn) or ids[number]
            turn -= 1
    return tuple(ids)


def _newest_run(thread: str, session: Session, ids_in: Callable[[str], tuple[str, str]]) -> tuple[Run, ...]:
    """Return the run of the newest turn of a pruned journal."""
    if not session.turns:
        return ()
    names = (ids_in(name)[0] for name, stream in session.streams.items() if stream.turn == session.turns)
    name = next((each for each in names if each), "") or derived_run_id(thread, session.turns, 0)
    ended = session.last_turn
    run = Run(session.turns, 0, name, session.position, session.started_at, session.started_at)
    if not isinstance(session.turn, Idle) or ended is None:
        return (run,)
    return (replace(run, status=_STATUSES[ended.status], message=ended.message, updated_at=ended.at),)


def is_error(result: ToolResult) -> bool:
    """Return whether a call failed to give a result."""
    return result.outcome is not Outcome.OK
