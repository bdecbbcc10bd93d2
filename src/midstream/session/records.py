"""The records of journals: one tagged union, its codec, and the required sync of each.

A record is a fact: it is never refused and never changed. It is encoded once; the same JSON is stored and sent to
readers. Old journals can always be folded: fields may be added with a default, never removed, renamed or given another
meaning; a new kind of record is a new tag.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from midstream.number_checks import WAIT_S_MAX
from midstream.session.application_request import ApplicationRequest
from midstream.session.calls import APPROVERS_MAX, CallPlan, Choice, OnDoubt, QuestionKind
from midstream.timing import StalledOn

VERSION = 1
"""Version of the record format, written into every `EpochStarted`."""


class Sync(StrEnum):
    """Durability of an append when it returns."""

    FULL = "full"
    """On the disk: survives a power cut."""
    NORMAL = "normal"
    """With the operating system: survives the death of the process; a power cut may lose the tail."""


class TurnStatus(StrEnum):
    """The end of a turn."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The turn was not resumed in time, or repeatedly killed its node; finished work was kept."""


class SessionStatus(StrEnum):
    """The state of a session in listings, snapshots, welcomes, commands and the page."""

    NEW = ""
    """No turn has begun."""
    RUNNING = "running"
    """A turn is open."""
    WAITING = "waiting"
    """A turn is open and waits only for people."""
    LOCKED = "locked"
    """A turn is open and waits for its client to bring the session's secret."""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The last four are ends of the last turn, see `TurnStatus`."""


OPEN_STATUSES = frozenset((SessionStatus.RUNNING, SessionStatus.WAITING, SessionStatus.LOCKED))
"""States with an open turn."""


# `SendPayload` checks the bounds; these are only for schemas, because old journals may have other numbers.
LimitS = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": WAIT_S_MAX})]


class ClientTool(Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool that the client of this turn runs itself.

    Args:
        spec: The tool as the model receives it.
        has_effects: Whether it has effects: then it runs alone, in order.
        on_doubt: The policy for a call in doubt (TURN-13).
        timeout_s: Seconds after which the client stops a running call (STREAM-18); 0 for no limit.
    """

    spec: ToolSpec
    has_effects: bool = True
    on_doubt: OnDoubt = OnDoubt.UNKNOWN
    timeout_s: LimitS = 0.0
    needs_approval: bool = False
    """Whether a person must allow each call before the client may run it."""
    answer_s: LimitS = 0.0
    """Seconds for a person to allow it; 0 for no limit."""
    approvers: Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": APPROVERS_MAX})] = 1
    """Number of different people who must allow each call that needs approval."""


class Parent(Struct, frozen=True, gc=False):
    """The call of a child session.

    Args:
        session, turn, response, call_id: The place of the call.
        path: Names of the sub-agents from the host's agent down to the one of this session.
    """

    session: str
    turn: int
    response: int
    call_id: str
    path: tuple[str, ...]


class EpochStarted(Struct, frozen=True, gc=False, tag="epoch_started", tag_field="type"):
    """A new node claimed the session. Running work of older epochs is in doubt from here on.

    `is_handover`: the previous node had released it and did not die with it. `agent` and `agent_version` are those that
    the new node serves; "" in older journals. `suspected`: number of deaths of nodes that this turn may have caused, if
    the last one was such a death.
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
    """Replaces a record and all before it by the session that they folded to.

    It is not an event: no reader receives it. See `session.prune_session` and `session.restore_session`.
    """

    state: msgspec.Raw
    at: float
    version: int = VERSION


class StreamOpened(Struct, frozen=True, gc=False, tag="stream_opened", tag_field="type", omit_defaults=True):
    """A client's stream sent its first command. `secret_digest` commits to the secret it must show again.

    With `cancel_after_s` its turn is stopped when its client has been away for so many seconds (STREAM-55).
    `connection` is the number of the command's connection; 0 if the client does not number connections.
    """

    stream: str
    secret_digest: str
    cancel_after_s: float | None = None
    connection: int = 0


class StreamTaken(Struct, frozen=True, gc=False, tag="stream_taken", tag_field="type"):
    """A newer connection has the stream. After it, older ones cannot send commands or receive events (STREAM-101)."""

    stream: str
    connection: int


class CommandAccepted(Struct, frozen=True, gc=False, tag="command_accepted", tag_field="type"):
    """The command `seqno` of a stream was accepted, once. The records that it caused follow in the same append."""

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
    """Its stream; empty if a host sent it without one."""
    queued: int = 0
    """Its number in the queue, if it waited there."""
    timeout_s: float = 0.0
    """Seconds for the whole turn, without the time that people need to answer; 0 for no limit."""
    responses_max: int = 0
    """Responses before the model is requested to hand in its result; 0 for the general limit."""
    parent: Parent | None = None
    driver: str = ""
    """The framework whose loop drives this turn, such as `pydantic-ai`; empty for midstream's own."""
    keep: int | None = None
    """Number of entries of the earlier history that stay, if the client changed the conversation; None for all."""
    before: tuple[Entry, ...] = ()
    """Entries after those, before the message."""


class MessageQueued(
    Struct, frozen=True, gc=False, tag="message_queued", tag_field="type", omit_defaults=True
):
    """A user's message waits in the queue while a turn runs. `number` counts a session's queued messages from 1."""

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
    """A queued message was withdrawn before its turn; it never entered history."""

    number: int
    at: float
    stream: str = ""


class TranscriptAccepted(
    Struct, frozen=True, gc=False, tag="transcript_accepted", tag_field="type", omit_defaults=True
):
    """A client application sent its whole conversation again and requests the next response.

    The new history is the first `keep` entries of the session's history, then `tail`. Earlier records close the open
    calls: with the results of the application's tools, or by a cancellation.

    Args:
        turn, response: The numbers of the first model response. The turn continues if the application sent its calls'
            results.
        instructions, tools: As the application sent them; None if they are unchanged since the previous request.
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
        """The newest user message of the new part; an empty one if there is none."""
        messages = (entry for entry in reversed(self.tail) if isinstance(entry, UserMessage))
        return next(messages, UserMessage(()))


class TurnResumed(Struct, frozen=True, gc=False, tag="turn_resumed", tag_field="type", omit_defaults=True):
    """An interrupted or failed turn continues on request; `response` is the next one."""

    turn: int
    response: int
    at: float
    stream: str = ""
    """The stream of the request, which has the turn from here on."""


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
    """Whether a limit was reached: the model gets no tools, and is requested to hand in its result."""


class Delta(Struct, frozen=True, gc=False, tag="delta", tag_field="type", omit_defaults=True):
    """A part of a running response. `part` counts the parts of the response from 0.

    A tool that the upstream runs is a part with `call`: at its start, when its arguments change, and complete at its
    end. Then `kind` is `thinking` and `text` is empty, so that a reader without support for `call` shows nothing. The
    same applies to `requested` and `signature`, which only the response to a client application has.
    """

    turn: int
    response: int
    attempt: int
    part: int
    kind: Literal["text", "thinking"]
    text: str
    call: UpstreamCall | None = None
    requested: ToolCall | None = None
    """A tool call that the model requests, once it is complete."""
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
    """Seconds after which the provider accepts another request; only in the response to a client application."""


class AttemptResumable(Struct, frozen=True, gc=False, tag="attempt_resumable", tag_field="type"):
    """The provider keeps this attempt's response without a connection; `token` resumes it."""

    turn: int
    response: int
    attempt: int
    token: str


class AttemptContinued(
    Struct, frozen=True, gc=False, tag="attempt_continued", tag_field="type", omit_defaults=True
):
    """A cut attempt continues where it stopped: the text that readers have stays valid, and only new text follows.

    `number` counts the continuations of this attempt from 1.
    """

    turn: int
    response: int
    attempt: int
    number: int
    at: float
    not_before: float = 0.0


class StallNoticed(Struct, frozen=True, gc=False, tag="stall_noticed", tag_field="type", omit_defaults=True):
    """A silence is longer than usual, and the work still continues. For readers only.

    Before the first token there is another one each time that the silence has doubled; otherwise one for each silence.

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
    """Progress again, after `silent_s` seconds of silence. A cut or cancelled silence has no such record."""

    turn: int
    response: int
    waiting_for: StalledOn
    silent_s: float
    at: float
    call_id: str = ""


class HistoryCompacted(Struct, frozen=True, gc=False, tag="history_compacted", tag_field="type"):
    """From this model call on, the model does not get the first `cut` entries of the history. No summary replaces them.

    The conversation was longer than the model can read. The history itself is not changed.
    """

    turn: int
    response: int
    cut: int
    at: float


class ToolsChanged(Struct, frozen=True, gc=False, tag="tools_changed", tag_field="type", omit_defaults=True):
    """The set of dynamic tools (those of tool servers) has changed since the last such record.

    `unreachable` names all sources that do not answer now; their tools are among the removed ones.
    """

    turn: int
    at: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


class ReuseDecision(Struct, frozen=True, gc=False, omit_defaults=True):
    """Decision of a pool about a request, without content of the conversation.

    Args:
        kind: Relation of the request to the conversation of the upstream's agent (docs/spec/reuse.md).
        why: The reason, for people.
        way: Origin of the agent: resumed, forked, fresh, or aside (fresh, and without a record).
        field, index: The first difference, or the beginning of the new part, and the number of its user message from 0.
        common, new: User messages that the agent had, and the others.
        rebuilt: Why a fresh agent replaced an older one: an error's code, "phase" (a run died), "stale", or "".
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
    """How this attempt uses an upstream agent's memory. For readers only.

    An attempt has several if an agent failed and a fresh one replaced it.
    """

    turn: int
    response: int
    attempt: int
    judgement: ReuseDecision
    at: float


class PromptHead(Struct, frozen=True, gc=False):
    """Digests of what a provider reads before the first message; equal digests mean equal bytes."""

    system: str
    tools: str


class ResponseCompleted(
    Struct, frozen=True, gc=False, tag="response_completed", tag_field="type", omit_defaults=True
):
    """The response is complete; none of its calls had started before this record."""

    turn: int
    response: int
    attempt: int
    body: Response
    at: float
    plans: tuple[CallPlan, ...] = ()
    native: str = ""
    """The response in the JSON of the turn's driver, if `body` cannot contain all of it."""
    prompt: PromptHead | None = None
    """The beginning of its prompt, before the messages; None if the request was made elsewhere."""


class CallStarted(Struct, frozen=True, gc=False, tag="call_started", tag_field="type", omit_defaults=True):
    """The intent to run a call, the `run`-th time. Written before the tool is called."""

    turn: int
    response: int
    call_id: str
    run: int
    at: float
    has_effects: bool = True
    """Whether it may have effects, so that this record must be synced first."""
    arguments: str | None = None
    """The arguments of the run (JSON), if a person changed the model's; in a driven turn, also if one allowed it."""


class CallProgressed(Struct, frozen=True, gc=False, tag="call_progressed", tag_field="type"):
    """A running tool reported its progress. For readers only."""

    turn: int
    response: int
    call_id: str
    run: int
    text: str
    at: float


class ChildDelta(Struct, frozen=True, gc=False, tag="child_delta", tag_field="type"):
    """A record of the child session of a call, for the readers of this session.

    `position` is its position there; for nested sub-agents the record is again a `child_delta`.
    """

    turn: int
    response: int
    call_id: str
    child: str
    position: int
    record: msgspec.Raw


class CallInDoubt(Struct, frozen=True, gc=False, tag="call_in_doubt", tag_field="type"):
    """The node of a call died before its outcome; a person or a probe finds out whether the call took effect."""

    turn: int
    response: int
    call_id: str
    at: float


class QuestionAsked(
    Struct, frozen=True, gc=False, tag="question_asked", tag_field="type", omit_defaults=True
):
    """A person must decide about a call; or, if `attempt` is set, about a permission that an upstream agent requests.

    Such an agent waits during its answer. Its question has an id of its own as `call_id`, and this record has all its
    data.

    Args:
        digest: Digest of the call's name and arguments; an answer must repeat it.
        text: The text beside the call.
        expires_at: Time of its expiry (seconds since 1970); 0 for never.
        attempt: The attempt at the response whose agent waits; 0 for a call of the response.
        name, arguments: The act that the agent requests; the arguments are JSON text. "" for a call of the response.
        is_fixed: Whether the answer cannot change the arguments.
        repeats: An earlier equal question with an unused answer, which applies to this one, too. The question's own id
            if one of several people allowed it and the others are asked.
        approvers: For an agent's question, the number of different people who must allow it.
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
    """A person decided; the consequences are in the same append. The fields are those of `answer`."""

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
    """The agent does not wait any more: its answer was cut or stopped, or continues without the answer."""


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
    """The outcome in the JSON of the turn's driver, if `result` cannot contain all of it."""


class ResultArrivedLate(Struct, frozen=True, gc=False, tag="result_arrived_late", tag_field="type"):
    """A late outcome of a call that had been closed as `unknown`. Stored for people; the history is not changed."""

    turn: int
    response: int
    result: ToolResult
    at: float


class OutcomeDamaged(Struct, frozen=True, gc=False, tag="outcome_damaged", tag_field="type"):
    """Placeholder for the outcome of a call whose record cannot be read. It is never written."""

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
    """The turn has ended; the next message may come."""

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
    """Return the record's JSON, for the store and for readers."""
    return _encoder.encode(record)


def decode(body: bytes) -> Record:
    """Decode one stored record.

    Raises:
        RecordUndecodableError: It is not a record of this version.
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
    """Whether a body is a record of a type that this version does not have (STREAM-34)."""
    try:
        return _typed.decode(body).type not in _TYPES
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


_PRUNED = b'{"type":"journal_pruned",'


def is_pruned(body: bytes) -> bool:
    """Whether a stored body is a `JournalPruned`, without decoding it."""
    return body.startswith(_PRUNED)


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
"""Kinds of records that are always on the disk before one is published (see `is_durable`)."""


def is_durable(record: Record) -> bool:
    """Whether a record is on the disk before it is published (see `sync_of`)."""
    return type(record) in ON_DISK_FIRST or (isinstance(record, CallStarted) and record.has_effects)


def sync_of(records: Sequence[Record]) -> Sync:
    """Return the required sync of one append of these records.

    A client's command, the end of a turn, a new epoch, the start of a call with effects and the use of a permission
    reach the disk before they have any effect. Tokens, outcomes and starts without effects need only survive the
    process: after a power cut, a call with a lost outcome is in doubt.
    """
    return Sync.FULL if any(map(is_durable, records)) else Sync.NORMAL
