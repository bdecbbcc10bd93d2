"""The facts a journal may hold: one tagged union, its codec, and how hard each must be synced.

A record is a fact: it is never refused and never changed. Its JSON is both what the store keeps and what every
reader is sent, encoded once. Old journals fold for ever: fields may be added with a default, never removed,
renamed or given another meaning; a new kind of record is a new tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from midstream.errors import RecordUndecodableError
from midstream.history.messages import (
    Entry,
    Response,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    UserMessage,
)
from midstream.session.application_request import ApplicationRequest
from midstream.session.calls import APPROVERS_MAX, CallPlan, Choice, OnDoubt, QuestionKind
from midstream.timing import WAIT_S_MAX, StalledOn

VERSION = 1
"""Version of the record format, written into every `EpochStarted`."""


class Sync(StrEnum):
    """How durable an append is when it returns."""

    FULL = "full"
    """On the disk: survives a power cut."""
    NORMAL = "normal"
    """With the operating system: survives the death of the process; a power cut may lose the tail."""


class TurnStatus(StrEnum):
    """How a turn ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """It was not resumed in time, or it kept killing its node; finished work was kept."""


class SessionStatus(StrEnum):
    """The state of a session: the words of listings, snapshots, welcomes, commands and the page."""

    NEW = ""
    """No turn has begun."""
    RUNNING = "running"
    """A turn is open."""
    WAITING = "waiting"
    """A turn is open and waits for people only."""
    LOCKED = "locked"
    """A turn is open and waits for its client to bring the session's secret."""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The last four: how the last turn ended, see `TurnStatus`."""


OPEN_STATUSES = frozenset((SessionStatus.RUNNING, SessionStatus.WAITING, SessionStatus.LOCKED))
"""Those of a session with an open turn."""


# `SendPayload` verifies the bounds, here they are for schemas: a journal of before may have other numbers.
LimitS = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": WAIT_S_MAX})]


class ClientTool(Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool that the client of this turn runs itself.

    Args:
        spec: The tool as the model receives it.
        has_effects: It changes something: it runs alone, in order.
        on_doubt: What is done about a call that may have happened (TURN-13).
        timeout_s: Seconds until a running call is given up; 0 for no limit.
    """

    spec: ToolSpec
    has_effects: bool = True
    on_doubt: OnDoubt = OnDoubt.UNKNOWN
    timeout_s: LimitS = 0.0
    needs_approval: bool = False
    """A person must allow each call before the client may run it."""
    answer_s: LimitS = 0.0
    """Seconds a person has to allow it; 0 for no limit."""
    approvers: Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": APPROVERS_MAX})] = 1
    """How many different people must allow each call that needs approval."""


class Parent(Struct, frozen=True, gc=False):
    """The call whose work a session does.

    Args:
        session, turn, response, call_id: Where the call stands.
        path: Names of the sub-agents from the host's agent down to the one of this session.
    """

    session: str
    turn: int
    response: int
    call_id: str
    path: tuple[str, ...]


class EpochStarted(Struct, frozen=True, gc=False, tag="epoch_started", tag_field="type"):
    """A new node took the session. What older epochs were doing is in doubt from here on.

    `is_handover`: the node before had given it up on purpose and did not die on it. `agent` and `agent_version` are
    those that the new node serves; "" in older journals. `suspected`: how many deaths of its nodes this turn may
    have caused, where the last one was such a death.
    """

    epoch: int
    node: str
    at: float
    version: int = VERSION
    is_handover: bool = False
    agent: str = ""
    agent_version: str = ""
    suspected: int = 0


class JournalPruned(Struct, frozen=True, gc=False, tag="journal_pruned", tag_field="type"):
    """Stands in the place of a record and of all before it: the session that they folded to.

    It is not an event: no reader receives it. See `session.prune_session` and `session.restore_session`.
    """

    state: msgspec.Raw
    at: float
    version: int = VERSION


class StreamOpened(Struct, frozen=True, gc=False, tag="stream_opened", tag_field="type", omit_defaults=True):
    """A client's stream sent its first command. `secret_digest` commits to the secret it must show again.

    With `cancel_after_s` its turn is stopped when its client was gone for so many seconds (STREAM-55). `connection` is
    the number of the connection that brought the command; 0 where the client does not count.
    """

    stream: str
    secret_digest: str
    cancel_after_s: float | None = None
    connection: int = 0


class StreamTaken(Struct, frozen=True, gc=False, tag="stream_taken", tag_field="type"):
    """A newer connection has the stream: from here on no node accepts commands of older ones, and they receive no
    later event (STREAM-101).
    """

    stream: str
    connection: int


class CommandAccepted(Struct, frozen=True, gc=False, tag="command_accepted", tag_field="type"):
    """The command `seqno` of a stream was taken, once. What it did follows in the same append."""

    stream: str
    seqno: int
    digest: str


class MessageAccepted(
    Struct, frozen=True, gc=False, tag="message_accepted", tag_field="type", omit_defaults=True
):
    """A user's message opened turn number `turn`."""

    turn: int
    message: UserMessage
    at: float
    tools: tuple[ClientTool, ...] = ()
    stream: str = ""
    """The stream that carried it; empty where a host spoke without one."""
    queued: int = 0
    """Its number in the queue, where it waited there."""
    timeout_s: float = 0.0
    """Seconds the whole turn may take, people's answers not counted; 0 for no limit."""
    responses_max: int = 0
    """Responses it may take before it is asked once more to hand in what it has; 0 for the general limit."""
    parent: Parent | None = None
    driver: str = ""
    """Whose loop runs this turn, such as `pydantic-ai`; empty for our own. Only the driver goes on with it."""
    keep: int | None = None
    """How many entries of the history before it stay, where its client changed the conversation; None for all."""
    before: tuple[Entry, ...] = ()
    """Entries that follow those, before the message."""


class MessageQueued(
    Struct, frozen=True, gc=False, tag="message_queued", tag_field="type", omit_defaults=True
):
    """A user's message came while a turn ran; it waits its turn. `number` counts a session's queued messages from 1."""

    number: int
    message: UserMessage
    at: float
    tools: tuple[ClientTool, ...] = ()
    stream: str = ""
    timeout_s: float = 0.0
    responses_max: int = 0


class MessageWithdrawn(
    Struct, frozen=True, gc=False, tag="message_withdrawn", tag_field="type", omit_defaults=True
):
    """A queued message was withdrawn before its turn came; it never entered history."""

    number: int
    at: float
    stream: str = ""


class TranscriptAccepted(
    Struct, frozen=True, gc=False, tag="transcript_accepted", tag_field="type", omit_defaults=True
):
    """A client application sent its whole conversation again and requests the next response.

    The history is what the application sent: the first `keep` entries of what the session had, then `tail`. What was
    open is closed before it: by the results of the application's tools, or by a cancellation.

    Args:
        turn, response: The response's first response. The turn goes on where the application brought its calls'
        results. instructions, tools: As the application sent them; None where they are those of the request before.
    """

    turn: int
    response: int
    at: float
    request: ApplicationRequest
    keep: int = 0
    tail: tuple[Entry, ...] = ()
    instructions: str | None = None
    tools: tuple[ToolSpec, ...] | None = None

    @property
    def message(self) -> UserMessage:
        """The newest message of a user in what is new; an empty one where there is none."""
        said = (entry for entry in reversed(self.tail) if isinstance(entry, UserMessage))
        return next(said, UserMessage(()))


class TurnResumed(Struct, frozen=True, gc=False, tag="turn_resumed", tag_field="type", omit_defaults=True):
    """A turn that was interrupted or had failed goes on, on request; `response` is the one that comes next."""

    turn: int
    response: int
    at: float
    stream: str = ""
    """The stream that asked for it, and whose turn it is from here on."""


class AttemptStarted(
    Struct, frozen=True, gc=False, tag="attempt_started", tag_field="type", omit_defaults=True
):
    """The model is called for response `response`; text of earlier attempts at it is void for readers."""

    turn: int
    response: int
    attempt: int
    at: float
    not_before: float = 0.0
    """Seconds since 1970 before which it is not sent: the backoff after a failed attempt."""
    is_last: bool = False
    """A limit was reached: the model is shown no tools and asked to hand in what it has."""


class Delta(Struct, frozen=True, gc=False, tag="delta", tag_field="type", omit_defaults=True):
    """Words of a response that is being made. `part` counts the parts of the response from 0.

    A part that is a tool run by the upstream has `call`: when it starts, when its arguments change while it runs, and
    once more, whole, when it has ended. Then `kind` is `thinking` and `text` empty, so that a reader without support
    for `call` shows nothing. So is it with `requested` and `signature`, which only the response to a client application
    has.
    """

    turn: int
    response: int
    attempt: int
    part: int
    kind: Literal["text", "thinking"]
    text: str
    call: UpstreamCall | None = None
    requested: ToolCall | None = None
    """A tool call that the model requests, as soon as it is whole."""
    signature: str = ""
    """The provider's signature of this part, which ends it."""


class AttemptFailed(
    Struct, frozen=True, gc=False, tag="attempt_failed", tag_field="type", omit_defaults=True
):
    """The attempt gave no usable response."""

    turn: int
    response: int
    attempt: int
    code: str
    message: str
    at: float
    retry_after_s: float | None = None
    """Seconds after which the provider takes another request; only in the response to a client application."""


class AttemptResumable(Struct, frozen=True, gc=False, tag="attempt_resumable", tag_field="type"):
    """The provider keeps this attempt's response without a connection; `token` resumes it."""

    turn: int
    response: int
    attempt: int
    token: str


class AttemptContinued(
    Struct, frozen=True, gc=False, tag="attempt_continued", tag_field="type", omit_defaults=True
):
    """A cut attempt goes on where it stopped: what readers were shown of it stands, and only what is new follows.

    `number` counts the continuations of this attempt from 1.
    """

    turn: int
    response: int
    attempt: int
    number: int
    at: float
    not_before: float = 0.0


class StallNoticed(Struct, frozen=True, gc=False, tag="stall_noticed", tag_field="type", omit_defaults=True):
    """Nothing came for longer than usual, and it is still waited for. For readers: nothing follows from it.

    Before the first token there is one more each time the silence is twice as long; otherwise one for each silence.

    Args:
        waiting_for: `first_token` or `between_tokens` of a model, or a `tool`.
        silent_s: Seconds since the last sign of progress.
        call_id: The call, for a tool.
    """

    turn: int
    response: int
    waiting_for: StalledOn
    silent_s: float
    at: float
    call_id: str = ""


class StallEnded(Struct, frozen=True, gc=False, tag="stall_ended", tag_field="type", omit_defaults=True):
    """Progress again, after `silent_s` seconds in all. What ended otherwise (cut, cancelled) has no such record."""

    turn: int
    response: int
    waiting_for: StalledOn
    silent_s: float
    at: float
    call_id: str = ""


class HistoryCompacted(Struct, frozen=True, gc=False, tag="history_compacted", tag_field="type"):
    """From this model call on, the model is shown nothing of the first `cut` entries of the history.

    The conversation was longer than it can read. The history itself stays whole.
    """

    turn: int
    response: int
    cut: int
    at: float


class ToolsChanged(Struct, frozen=True, gc=False, tag="tools_changed", tag_field="type", omit_defaults=True):
    """The set of dynamic tools has changed since the last such record.

    `unreachable` names all sources that could not be asked now; their tools are among the removed.
    """

    turn: int
    at: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


class ReuseDecision(Struct, frozen=True, gc=False, omit_defaults=True):
    """ReuseDecision of a pool about a request, and how it continues. No words of the conversation.

    Args:
        kind: What the request is to the conversation that the upstream's agent remembers (docs/spec/reuse.md).
        why: What was decisive, for people.
        way: How the agent was got: resumed, forked, fresh, or aside (fresh, and leaving no trace).
        field, index: What differs first, or where the new begins, and in which user message, counted from 0.
        common, new: User messages that the agent had, and the others.
        rebuilt: Why a fresh agent had to take the place of one that should have known: an error's code, "phase" (a run
            died), "stale", or "".
    """

    kind: str
    why: str
    way: str
    field: str = ""
    index: int | None = None
    common: int = 0
    new: int = 0
    rebuilt: str = ""


class ReuseDecided(Struct, frozen=True, gc=False, tag="reuse_decided", tag_field="type"):
    """How this attempt stands to what an upstream remembers. For readers: nothing follows from it.

    One attempt has several where an agent failed and a fresh one took its place.
    """

    turn: int
    response: int
    attempt: int
    judgement: ReuseDecision
    at: float


class PromptHead(Struct, frozen=True, gc=False):
    """Digests of what a provider reads before the first message; equal ones mean equal bytes."""

    system: str
    tools: str


class ResponseCompleted(
    Struct, frozen=True, gc=False, tag="response_completed", tag_field="type", omit_defaults=True
):
    """The response is whole; none of its calls had started before this record."""

    turn: int
    response: int
    attempt: int
    body: Response
    at: float
    plans: tuple[CallPlan, ...] = ()
    native: str = ""
    """The response in the JSON of the turn's driver, where `body` cannot hold all of it."""
    prompt: PromptHead | None = None
    """What stood before the messages it answers; None where the request was made elsewhere."""


class CallStarted(Struct, frozen=True, gc=False, tag="call_started", tag_field="type", omit_defaults=True):
    """The intent to run a call, the `run`-th time. Written before the tool is touched."""

    turn: int
    response: int
    call_id: str
    run: int
    at: float
    has_effects: bool = True
    """Whether it may do something that could be there without this record, so that this must reach the disk first."""
    arguments: str | None = None
    """The arguments to run with (JSON text), where a person changed the model's; in a turn that another loop drives,
    also where a person allowed this run."""


class CallProgressed(Struct, frozen=True, gc=False, tag="call_progressed", tag_field="type"):
    """A running tool reported its progress. For readers: nothing follows from it."""

    turn: int
    response: int
    call_id: str
    run: int
    text: str
    at: float


class ChildDelta(Struct, frozen=True, gc=False, tag="child_delta", tag_field="type"):
    """A record of the session that does the work of a call, for the readers of this one.

    `position` is its place there; of nested sub-agents the record is again a `child_delta`.
    """

    turn: int
    response: int
    call_id: str
    child: str
    position: int
    record: msgspec.Raw


class CallInDoubt(Struct, frozen=True, gc=False, tag="call_in_doubt", tag_field="type"):
    """The node that ran a call died without its outcome, and a person or a probe is asked whether it happened."""

    turn: int
    response: int
    call_id: str
    at: float


class QuestionAsked(
    Struct, frozen=True, gc=False, tag="question_asked", tag_field="type", omit_defaults=True
):
    """A person must decide about a call; or, where `attempt` is set, about a permission that an upstream agent
    requests.

    Such an agent waits in the middle of its answer. Its question has an id of its own as `call_id`, and all that is to
    be shown of it stands here.

    Args:
        digest: Digest of the call's name and arguments; an answer must repeat it.
        text: What to show them beside the call.
        expires_at: When it is too late (seconds since 1970); 0 for never.
        attempt: The attempt at the response whose agent waits; 0 for a call of the response.
        name, arguments: The act that the agent requests; the arguments are JSON text. "" for a call of the response.
        is_fixed: The arguments cannot be changed by the answer.
        repeats: The earlier question whose answer was given and not used: it is this one's, too. The question's own
            id, where one of several people allowed it and the others are asked.
        approvers: With an agent's question, how many different people must allow it.
    """

    turn: int
    response: int
    call_id: str
    kind: QuestionKind
    digest: str
    at: float
    text: str = ""
    expires_at: float = 0.0
    attempt: int = 0
    name: str = ""
    arguments: str = ""
    is_fixed: bool = False
    repeats: str = ""
    approvers: int = 1


class QuestionAnswered(
    Struct, frozen=True, gc=False, tag="question_answered", tag_field="type", omit_defaults=True
):
    """A person decided; what follows from it is in the same append. The fields are those of `answer`."""

    turn: int
    response: int
    call_id: str
    kind: QuestionKind
    digest: str
    choice: Choice
    at: float
    text: str = ""
    arguments: str | None = None
    by: str = ""


class CloseReason(StrEnum):
    """Why a question needs no answer any more."""

    EXPIRED = "expired"
    """Its time is over."""
    WITHDRAWN = "withdrawn"
    """The agent does not wait any more: its answer was cut, stopped, or continued without it."""


class QuestionClosed(Struct, frozen=True, gc=False, tag="question_closed", tag_field="type"):
    """A question of an upstream agent was closed without an answer."""

    turn: int
    response: int
    call_id: str
    why: CloseReason
    at: float


class AnswerUsed(Struct, frozen=True, gc=False, tag="answer_used", tag_field="type"):
    """The decision about a permission is used up. Written before the upstream agent receives it."""

    turn: int
    response: int
    attempt: int
    call_id: str
    at: float


class CallEnded(Struct, frozen=True, gc=False, tag="call_ended", tag_field="type", omit_defaults=True):
    """The one outcome of a call."""

    turn: int
    response: int
    result: ToolResult
    at: float
    native: str = ""
    """The outcome in the JSON of the turn's driver, where `result` cannot hold all of it."""


class ResultArrivedLate(Struct, frozen=True, gc=False, tag="result_arrived_late", tag_field="type"):
    """Outcome of a call that had been closed as `unknown`. Kept for people; the history stays as it was."""

    turn: int
    response: int
    result: ToolResult
    at: float


class OutcomeDamaged(Struct, frozen=True, gc=False, tag="outcome_damaged", tag_field="type"):
    """Placeholder for the outcome of a call whose record cannot be read any more. It is never written."""

    turn: int
    response: int
    call_id: str


class StepCommitted(Struct, frozen=True, gc=False, tag="step_committed", tag_field="type"):
    """The response and all its results entered history together."""

    turn: int
    response: int


class CancelRequested(
    Struct, frozen=True, gc=False, tag="cancel_requested", tag_field="type", omit_defaults=True
):
    """The turn is stopped. Running tools have until `deadline_at` (seconds since 1970) to end.

    `status` is how it will end: `cancelled` on request, `failed` by its own time limit.
    """

    turn: int
    at: float
    deadline_at: float
    status: TurnStatus = TurnStatus.CANCELLED


class TurnEnded(Struct, frozen=True, gc=False, tag="turn_ended", tag_field="type", omit_defaults=True):
    """The turn is over; the next message may come."""

    turn: int
    status: TurnStatus
    at: float
    code: str = ""
    message: str = ""


Record = (
    EpochStarted
    | JournalPruned
    | StreamOpened
    | StreamTaken
    | CommandAccepted
    | MessageAccepted
    | MessageQueued
    | MessageWithdrawn
    | TranscriptAccepted
    | TurnResumed
    | AttemptStarted
    | Delta
    | AttemptFailed
    | AttemptResumable
    | AttemptContinued
    | StallNoticed
    | StallEnded
    | HistoryCompacted
    | ToolsChanged
    | ReuseDecided
    | ResponseCompleted
    | CallStarted
    | CallProgressed
    | ChildDelta
    | CallInDoubt
    | QuestionAsked
    | QuestionAnswered
    | QuestionClosed
    | AnswerUsed
    | CallEnded
    | ResultArrivedLate
    | OutcomeDamaged
    | StepCommitted
    | CancelRequested
    | TurnEnded
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """Return the record's JSON: what is stored and what is sent."""
    return _encoder.encode(record)


def decode(body: bytes) -> Record:
    """Read one stored record.

    Raises:
        RecordUndecodableError: It is not a record of this version. Nothing had changed.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordUndecodableError(f"a journal record cannot be read: {error}") from error


class _Typed(Struct, frozen=True, gc=False):
    type: str


_typed: msgspec.json.Decoder[_Typed] = msgspec.json.Decoder(_Typed)
_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Record))


def is_of_unknown_type(body: bytes) -> bool:
    """Return whether a body is a record of a type that this version does not have (STREAM-34)."""
    try:
        return _typed.decode(body).type not in _TYPES
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


_PRUNED = b'{"type":"journal_pruned",'


def is_pruned(body: bytes) -> bool:
    """Return whether a stored body is a `JournalPruned`, without decoding it."""
    return body.startswith(_PRUNED)


def decode_all(bodies: Iterable[bytes]) -> tuple[Record, ...]:
    """Read stored records in order; raises like `decode`."""
    return tuple(decode(body) for body in bodies)


ON_DISK_FIRST: frozenset[type[Struct]] = frozenset(
    {
        EpochStarted,
        StreamOpened,
        CommandAccepted,
        MessageAccepted,
        MessageQueued,
        MessageWithdrawn,
        TranscriptAccepted,
        TurnResumed,
        QuestionAnswered,
        AnswerUsed,
        CancelRequested,
        TurnEnded,
    }
)
"""Kinds that are on the disk before one is published, whatever it holds (see `is_durable`)."""


def is_durable(record: Record) -> bool:
    """Whether a record is on the disk before it is published (see `sync_of`)."""
    return type(record) in ON_DISK_FIRST or (isinstance(record, CallStarted) and record.has_effects)


def sync_of(records: Sequence[Record]) -> Sync:
    """Return how hard one append of these records must be synced (design.md section 6, the table of appends).

    A client's command, the end of a turn, a new epoch, the start of a call with effects and the use of a permission
    reach the disk before they have any effect. Tokens, outcomes and read-only starts need only survive the process:
    after a power cut a lost outcome shows as a call in doubt, never as silence.
    """
    return Sync.FULL if any(map(is_durable, records)) else Sync.NORMAL
