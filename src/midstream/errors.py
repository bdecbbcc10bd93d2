"""Every error midstream raises, grouped by what the caller can do about it.

MidstreamError
├── UsageError            the program that calls us must change
│   ├── ToolDefinitionError    a function cannot be offered as a tool
│   ├── AgentNotFoundError     `module:attribute` names no agent
│   ├── MissingExtraError      packages of an extra are not installed
│   └── InvalidHistoryError    messages that can never form a history
│       ├── HistoryRefusedError    a provider would refuse them (`repair` in mode `strict`)
│       └── UnreadableHistoryError a file holds no history that can be read
├── ProtocolError         the peer broke the wire protocol
│   ├── MalformedFrameError
│   └── FrameTooLargeError
├── NotFoundError         there is no such thing (or it is not yours to see)
│   ├── SessionNotFoundError
│   ├── StreamNotFoundError
│   └── EventGoneError         the journal does not have the event id: take a snapshot
├── ConflictError         another writer was first: read again, then decide again
│   ├── JournalMovedError
│   ├── EntryMovedError
│   ├── LeaseHeldError
│   ├── AgentMismatchError     the open turn belongs to another agent
│   ├── LeaseLostError
│   ├── SessionBusyError
│   ├── NothingToResumeError
│   ├── QuestionClosedError
│   ├── AnswerMismatchError
│   ├── SeqnoGapError
│   ├── SeqnoReusedError
│   │   └── StreamReusedError      the stream began with another message
│   ├── NothingToResumeError
│   ├── QuestionClosedError    it was answered before, or the turn ended
│   ├── AnswerMismatchError    the answer is about other arguments, or none the question takes
│   ├── CallReusedError        a call id came again with other arguments
│   └── StreamFencedError
├── AccessError           the caller may not do this
│   ├── UnauthorizedError      the caller is not authenticated, or not any more: send a credential
│   ├── WrongSecretError
│   ├── SessionLockedError     it is encrypted under its client's secret, which is not here
│   └── ForeignOriginError
├── TransactionError      a statement of a tool failed in the transaction of its outcome
├── InternalError         a defect in the server: its log has the details
├── UnavailableError      nothing is wrong with the request: try again later
│   ├── RecoveringError
│   ├── DrainingError
│   ├── OverloadedError
│   ├── LimitReachedError      this caller has or does as much as it may
│   ├── StoreBusyError
│   ├── StoreFullError
│   ├── PortTakenError
│   ├── ToolsUnavailableError
│   └── ConnectionLostError
├── StoreDamagedError     the data on disk cannot be trusted: a person must look
│   ├── RecordUndecodableError
│   ├── EventsLostError        records are gone that were promised to stay
│   └── KeyMissingError        it is encrypted under a key that is not here
├── TurnFailedError       a turn ended without an answer: look at `status`, resume it or speak again
└── ModelError            the model did not answer (see each class for whether to ask again)
    ├── ModelUnavailableError  network, 429, 5xx, timeout: asked again
    │   ├── ModelCutError          the provider goes on with the response: taken up where it was cut
    │   ├── UpstreamBusyError      the agent is in another run
    │   └── UpstreamFailedError    its run failed for an unknown reason
    ├── UpstreamGoneError      the agent does not exist any more: a fresh one gets the whole transcript
    │   └── UpstreamMismatchError  another conversation was opened than the one that was named
    ├── ModelStalledError      silence past the budget: asked again
    ├── ModelEmptyError        nothing but whitespace came: asked again
    ├── ModelForgotError       a cut response cannot be taken up: asked anew
    ├── ModelRejectedError     the request will never be accepted as it is
    │   ├── ContextOverflowError   it is longer than the model can read: asked again once, shortened
    │   ├── ModelFilteredError     a content filter withheld the response, or refused the request
    │   └── ModelAccessError       key, account or name of the model: a person must act, then the turn can be resumed
    └── ModelMissingError      the model's software is not installed

`code` is stable and safe to match on, `retry` is when the same call may be tried again (`ask`: after a person has
changed something that only a person can). Messages name ids and never carry what a user or a model wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

Retry = Literal["never", "later", "now", "ask"]


class MidstreamError(Exception):
    """Anything midstream refuses or fails to do. Catch this to catch them all."""

    code: ClassVar[str] = "midstream"
    retry: ClassVar[Retry] = "never"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        """Seconds to wait before trying again, where somebody said so."""

    def again(self) -> Self:
        """Return this error to be kept, or to be raised once more: without the traceback of where it was raised.

        A traceback holds all that raised it. What keeps an error that it raises would keep itself alive with it.
        """
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__)
        return error


class UsageError(MidstreamError):
    """The calling program must change; nothing was done."""

    code = "usage"


class ToolDefinitionError(UsageError):
    """A function cannot become a tool: an annotation is missing or has no JSON form."""

    code = "tool_definition"


class AgentNotFoundError(UsageError):
    """`module:attribute` could not be imported or is no `Agent`."""

    code = "agent_not_found"


class MissingExtraError(UsageError, ImportError):
    """A package of an extra is not installed; the message names the command that installs it."""

    code = "missing_extra"

    def __init__(self, message: str, *, retry_after_s: float | None = None, package: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.name = package


class InvalidHistoryError(UsageError):
    """These messages can never be a history: a call without its result, or the reverse."""

    code = "invalid_history"


class HistoryRefusedError(InvalidHistoryError):
    """A provider would refuse this history. Nothing was changed; `findings` lists what and where."""

    code = "history_refused"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, findings: Sequence[object] = ()
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.findings = tuple(findings)
        """A `midstream.history.operations.Finding` for each refusal."""


class UnreadableHistoryError(InvalidHistoryError):
    """A file holds no history that can be read; `reason` has the cause. Nothing was changed."""

    code = "unreadable_history"

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason
        """A stable code: `not-json`, `cut-json`, `binary`, `too-deep`, `too-large`, `wrong-format`,
        `mixed-formats`, `no-history`, `no-permission`, `not-a-file`, `not-found`, `busy`, `damaged`, `encrypted`; or
        nothing where the error came over a wire."""


class ProtocolError(MidstreamError):
    """The peer broke the wire protocol; the connection is closed, the stream lives on."""

    code = "protocol"


class MalformedFrameError(ProtocolError):
    """A frame that is not JSON of a known shape. It had no effect."""

    code = "malformed_frame"


class FrameTooLargeError(ProtocolError):
    """A frame above the limit named in the welcome. It had no effect."""

    code = "frame_too_large"


class NotFoundError(MidstreamError):
    """It does not exist, or it belongs to another principal: both give the same error."""

    code = "not_found"


class SessionNotFoundError(NotFoundError):
    """No journal has this session id."""

    code = "session_not_found"


class StreamNotFoundError(NotFoundError):
    """The session has no such stream: it is too old, or never reached the server."""

    code = "stream_not_found"


class EventGoneError(NotFoundError):
    """This journal does not have the event id (pruned, or lost in a power cut): take a snapshot.

    `oldest` is the position of the oldest event that can be replayed.
    """

    code = "event_gone"

    def __init__(self, message: str, *, oldest: int = 1, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.oldest = oldest


class TransactionError(MidstreamError):
    """A statement of a tool failed in the transaction of its outcome.

    `is_over` shows the state of the transaction: False, and what the tool wrote before still stands; True, and
    everything that it wrote was undone and nothing more can be written. A tool that lets the error through has
    written nothing.
    """

    code = "transaction"

    def __init__(self, message: str, *, is_over: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_over = is_over


class ConflictError(MidstreamError):
    """Another writer was first. Nothing was written."""

    code = "conflict"


class JournalMovedError(ConflictError):
    """Another writer appended first: fold the rest and decide again. Nothing was written."""

    code = "journal_moved"
    retry = "now"


class EntryMovedError(ConflictError):
    """Another writer changed this key-value entry first: read it and decide again. Nothing was written."""

    code = "entry_moved"
    retry = "now"


class LeaseHeldError(ConflictError):
    """Another process has this session's lease. `session` is its id, if known. Nothing was written."""

    code = "lease_held"
    retry = "later"

    def __init__(self, message: str, *, session: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.session = session


class AgentMismatchError(ConflictError):
    """The open turn belongs to another agent, or another version of this one. Nothing was written.

    Serve that agent on this store, cancel the turn, or resume it on purpose: then this agent goes on with it.
    """

    code = "agent_mismatch"
    retry = "ask"


class LeaseLostError(ConflictError):
    """Another process has a newer lease: stop at once; a client may try again. Nothing was written."""

    code = "lease_lost"
    retry = "now"


class SessionBusyError(ConflictError):
    """A turn is running in this session: wait for its end, or cancel it. Nothing was written."""

    code = "session_busy"
    retry = "later"


class NothingToResumeError(ConflictError):
    """The last turn ended well, or is not the one that was named: nothing is left to do. Nothing was written."""

    code = "nothing_to_resume"


class QuestionClosedError(ConflictError):
    """This question was answered already, or its turn ended: look at the session again. Nothing was written."""

    code = "question_closed"


class AnswerMismatchError(ConflictError):
    """The answer does not fit the question: other arguments, or a choice it does not offer. Nothing was written."""

    code = "answer_mismatch"


class SeqnoGapError(ConflictError):
    """A command came before the ones it follows. `expected` is the number to send next."""

    code = "seqno_gap"

    def __init__(self, message: str, *, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class SeqnoReusedError(ConflictError):
    """This number was accepted before with another payload. The first one stands."""

    code = "seqno_reused"


class StreamReusedError(SeqnoReusedError):
    """The stream's key was used for another first message. Nothing was written; open a new stream."""

    code = "stream_reused"


class CallReusedError(ConflictError):
    """A call id came again with another tool or other arguments: it is not the call that was recorded."""

    code = "call_reused"


class StreamFencedError(ConflictError):
    """A newer connection took this stream over; this one is closed."""

    code = "stream_fenced"


class AccessError(MidstreamError):
    """The caller may not do this."""

    code = "access"


class UnauthorizedError(AccessError):
    """No credential was shown, or the credential is invalid or expired. Nothing was done."""

    code = "unauthorized"


class WrongSecretError(AccessError):
    """The secret does not match this stream or session, or an encrypted session does not exist."""

    code = "wrong_secret"


class SessionLockedError(AccessError):
    """The session is encrypted under its client's secret, which is not here. Nothing had changed."""

    code = "session_locked"
    retry = "ask"


class ForeignOriginError(AccessError):
    """The request came from a page of another site, or under an unknown host name. Nothing was done."""

    code = "foreign_origin"


class InternalError(MidstreamError):
    """A defect in the server: its log has the details. What was acknowledged stays in the journal."""

    code = "internal"


class UnavailableError(MidstreamError):
    """Not now. Nothing was written; the same call may be repeated."""

    code = "unavailable"
    retry: ClassVar[Retry] = "later"


class RecoveringError(UnavailableError):
    """The server is still recovering interrupted sessions."""

    code = "recovering"


class DrainingError(UnavailableError):
    """The server is shutting down: reconnect. It continues after its restart, or another server continues."""

    code = "draining"


class OverloadedError(UnavailableError):
    """The server has as many open connections as it allows: come back, or try another one."""

    code = "overloaded"


class LimitReachedError(UnavailableError):
    """This caller reached a limit that the server has for one caller. Nothing was done."""

    code = "limit_reached"


class StoreBusyError(UnavailableError):
    """The database stayed locked by another process past the limit. Nothing was written."""

    code = "store_busy"


class StoreFullError(UnavailableError):
    """The disk is full. Nothing was written; free some space and the session carries on."""

    code = "store_full"


class PortTakenError(UnavailableError):
    """Another program listens on this port: choose another one or stop it."""

    code = "port_taken"
    retry = "never"


class ToolsUnavailableError(UnavailableError):
    """A source of tools does not answer now, such as a server that is down. Its tools are left out."""

    code = "tools_unavailable"


class ConnectionLostError(UnavailableError):
    """The connection to the server broke and could not be made again in time."""

    code = "connection_lost"


class StoreDamagedError(MidstreamError):
    """The file is no intact database. Nothing was written: restore a copy, or run `midstream doctor`."""

    code = "store_damaged"


class RecordUndecodableError(StoreDamagedError):
    """A journal holds a record this version cannot read."""

    code = "record_undecodable"


class EventsLostError(StoreDamagedError):
    """Acknowledged durable records are missing: cut out, or the store was restored from an older copy.

    Nothing had changed. A power cut does not do this; an operator must look before anything is built on what is left.
    """

    code = "events_lost"


class KeyMissingError(StoreDamagedError):
    """The stored data is encrypted under a key that this process was not given. Nothing had changed."""

    code = "key_missing"
    retry = "ask"


class TurnFailedError(MidstreamError):
    """A turn ended without a whole answer. What had finished is kept in the session, and the next message may come.

    `status` is failed, cancelled, interrupted or withdrawn; `cause` the code of the error that ended it, or "";
    `transcript` the text that had come.
    """

    code = "turn_failed"

    def __init__(
        self,
        message: str,
        *,
        status: str = "failed",
        cause: str = "",
        transcript: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status
        self.cause = cause
        self.transcript = transcript


class ModelError(MidstreamError):
    """The model did not give a usable response."""

    code = "model"


class ModelUnavailableError(ModelError):
    """Network fault, rate limit, overload or timeout. A retry may help."""

    code = "model_unavailable"
    retry = "later"


class ModelCutError(ModelUnavailableError):
    """The connection broke, but the provider continues the response. midstream resumes it at the cut."""

    code = "model_cut"


class UpstreamBusyError(ModelUnavailableError):
    """The agent is in another run, perhaps of a crashed process. One more request can cancel that run first."""

    code = "upstream_busy"


class UpstreamFailedError(ModelUnavailableError):
    """The agent's run failed for an unknown reason: the agent may be dead. A fresh one may do better."""

    code = "upstream_failed"


class UpstreamGoneError(ModelError):
    """The upstream does not have this agent any more (expired, deleted, another folder): begin a fresh one."""

    code = "upstream_gone"
    retry = "now"


class UpstreamMismatchError(UpstreamGoneError):
    """The upstream opened another conversation than the one that was named. Nothing was sent in it."""

    code = "upstream_mismatch"


class ModelStalledError(ModelError):
    """Nothing came for longer than the budget allows. A retry may help."""

    code = "model_stalled"
    retry = "later"


class ModelEmptyError(ModelError):
    """The model ended its response without text or a call. A retry may help."""

    code = "model_empty"
    retry = "later"


class ModelForgotError(ModelError):
    """The provider does not have the response it had begun, or has another one: the model is called again."""

    code = "model_forgot"
    retry = "now"


class ModelRejectedError(ModelError):
    """The provider will never accept this request as it is."""

    code = "model_rejected"


class ContextOverflowError(ModelRejectedError):
    """The conversation is longer than the model can read. A session leaves older steps out and retries once."""

    code = "context_overflow"


class ModelFilteredError(ModelRejectedError):
    """A content filter refused the request or withheld the whole response. The same request would fail again."""

    code = "model_filtered"


class ModelAccessError(ModelRejectedError):
    """The key, the account or the model's name is not accepted. Put it right, then resume the turn."""

    code = "model_access"
    retry = "ask"


class ModelMissingError(ModelError):
    """The software or the weights of this model are not installed; the message has the command that installs them."""

    code = "model_missing"


def error_of(code: str, message: str, retry_after_s: float | None = None) -> MidstreamError:
    """Return the error of a code, as a journal or another process names it; `UnavailableError` for an unknown one."""
    kind = next((each for each in _kinds(MidstreamError) if each.code == code), UnavailableError)
    return kind(message, retry_after_s=retry_after_s)


def _kinds(kind: type[MidstreamError]) -> Iterator[type[MidstreamError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)
