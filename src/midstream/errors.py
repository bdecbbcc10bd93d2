"""Every error midstream raises, grouped by what the caller can do about it.

MidstreamError
├── UsageError            the program that calls us must change
│   ├── ToolDefinitionError    a function cannot be offered as a tool
│   ├── AgentNotFoundError     `module:attribute` is not an agent
│   ├── MissingExtraError      packages of an extra are not installed
│   └── InvalidHistoryError    messages that can never form a history
│       ├── HistoryRefusedError    a provider would refuse them (`repair` in mode `strict`)
│       └── UnreadableHistoryError a file holds no history that can be read
├── ProtocolError         the peer violated the wire protocol
│   ├── MalformedFrameError
│   └── FrameTooLargeError
├── NotFoundError         the named thing does not exist, or the caller may not see it
│   ├── SessionNotFoundError
│   ├── StreamNotFoundError
│   └── EventGoneError         the event id is not in the journal: take a snapshot
├── ConflictError         another writer was first: read again, then decide again
│   ├── JournalMovedError
│   ├── EntryMovedError
│   ├── LeaseHeldError
│   ├── AgentMismatchError     the open turn belongs to another agent
│   ├── LeaseLostError
│   ├── SessionBusyError
│   ├── SeqnoGapError
│   ├── SeqnoReusedError
│   │   └── StreamReusedError      the stream began with another message
│   ├── NothingToResumeError
│   ├── QuestionClosedError    it was answered before, or the turn ended
│   ├── CallNotStartedError    the outcome came before the call was started
│   ├── AnswerMismatchError    the answer is about other arguments, or none the question takes
│   ├── CallReusedError        a call id was used again with other arguments
│   ├── OtherLoginError        another principal is logged in by this browser
│   └── StreamFencedError
├── AccessError           the caller may not do this
│   ├── UnauthorizedError      the caller is not, or no longer, authenticated: send a credential
│   ├── WrongSecretError
│   ├── SessionLockedError     it is encrypted under its client's secret, which the server does not have
│   └── ForeignOriginError
├── TransactionError      a statement of a tool failed in the transaction of its outcome
├── InternalError         a defect in the server: its log has the details
├── UnavailableError      the request is valid: try again later
│   ├── RecoveringError
│   ├── DrainingError
│   ├── OverloadedError
│   ├── LimitReachedError      a limit for one caller was reached
│   ├── StoreBusyError
│   ├── StoreFullError
│   ├── KeysUnavailableError   the application that keeps the keys of the store does not give them now
│   ├── PortTakenError
│   ├── ToolsUnavailableError
│   └── ConnectionLostError
├── StoreDamagedError     the data on disk cannot be trusted: a person must examine it
│   ├── RecordUndecodableError
│   ├── EntryDamagedError      another program changed a small value beside the journals
│   ├── EventsLostError        records are missing that were acknowledged as durable
│   └── KeyMissingError        it is encrypted under a key that this process does not have
├── TurnFailedError       a turn ended without an answer: read `status`, then resume it or send a message
└── ModelError            the model did not answer (each class has its own `retry`)
    ├── ModelUnavailableError  network, 5xx, timeout: retried
    │   ├── ModelOverloadedError   503, 529: the provider has no capacity
    │   ├── ModelRateLimitedError  429: too many requests
    │   ├── ModelCutError          the provider continues the response: resumed where it was cut
    │   ├── ModelRestartedError    an upstream agent begins its response again
    │   ├── UpstreamBusyError      the agent is in another run
    │   └── UpstreamFailedError    its run failed for an unknown reason
    ├── UpstreamGoneError      the agent does not exist any more: a fresh one gets the whole transcript
    │   └── UpstreamMismatchError  another conversation was opened than the one that was named
    ├── ModelStalledError      silence past the budget: retried
    ├── ModelEmptyError        nothing but whitespace came: retried
    ├── ModelForgotError       a cut response cannot be resumed: requested again
    ├── ModelRejectedError     the request will never be accepted as it is
    │   ├── ContextOverflowError   it is longer than the model can read: retried once, shortened
    │   ├── ModelFilteredError     a content filter withheld the response, or refused the request
    │   └── ModelAccessError       key, account or name of the model: a person must act, then the turn can be resumed
    │       ├── ModelQuotaError        the account has no credit left
    │       └── ModelNotFoundError     the provider has no such model
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
        """Seconds to wait before a retry, if the other side sent a time."""
        self.is_foreign = False
        """Whether an intermediary refused, such as a proxy, and not a midstream server."""

    def again(self) -> Self:
        """Return a copy of this error without its traceback, to be stored or raised again.

        A traceback refers to the frames that raised the error. An object that stores an error which it raises would
        keep itself alive.
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
    """`module:attribute` could not be imported or is not an `Agent`."""

    code = "agent_not_found"


class MissingExtraError(UsageError, ImportError):
    """A package of an extra is not installed; the message names the command that installs it."""

    code = "missing_extra"

    def __init__(self, message: str, *, retry_after_s: float | None = None, package: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.name = package


class InvalidHistoryError(UsageError):
    """These values cannot form a history: no list of messages, or a `Step` whose calls and results do not match."""

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
    """A file or a list is not a history of one format; `reason` has the cause. Nothing was changed."""

    code = "unreadable_history"

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason
        """A stable code: `not-json`, `cut-json`, `binary`, `too-deep`, `too-large`, `wrong-format`,
        `mixed-formats`, `no-history`, `no-permission`, `not-a-file`, `not-found`, `busy`, `damaged`, `encrypted`; or
        nothing where the error came over a wire."""


class ProtocolError(MidstreamError):
    """The peer violated the wire protocol; the connection is closed, the stream continues."""

    code = "protocol"


class MalformedFrameError(ProtocolError):
    """A frame that is not JSON of a known shape. It had no effect."""

    code = "malformed_frame"


class FrameTooLargeError(ProtocolError):
    """A frame above the limit named in the welcome. It had no effect."""

    code = "frame_too_large"


class NotFoundError(MidstreamError):
    """The named thing does not exist, or the caller may not see it."""

    code = "not_found"


class SessionNotFoundError(NotFoundError):
    """No journal has this session id."""

    code = "session_not_found"


class StreamNotFoundError(NotFoundError):
    """The session has no such stream: it is too old, or its first command never arrived."""

    code = "stream_not_found"


class EventGoneError(NotFoundError):
    """The event id is not in this journal (pruned, or lost in a power cut): take a snapshot.

    `oldest` is the position of the oldest event that can be replayed.
    """

    code = "event_gone"

    def __init__(self, message: str, *, oldest: int = 1, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.oldest = oldest


class TransactionError(MidstreamError):
    """A statement of a tool failed in the transaction of its outcome.

    `is_over` shows the state of the transaction: False, and what the tool wrote before still stands; True, and
    everything that it wrote was undone and nothing more can be written. If a tool raises the error, nothing is kept.
    """

    code = "transaction"

    def __init__(self, message: str, *, is_over: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_over = is_over


class ConflictError(MidstreamError):
    """Another writer was first. Nothing was written."""

    code = "conflict"


class JournalMovedError(ConflictError):
    """Another writer appended first: read its records and decide again. Nothing was written."""

    code = "journal_moved"
    retry = "now"


class EntryMovedError(ConflictError):
    """Another writer changed this key-value entry first: read it and decide again. Nothing was written."""

    code = "entry_moved"
    retry = "now"


class LeaseHeldError(ConflictError):
    """Another node has the lease of this session. Nothing was written. `session` is its id, if known."""

    code = "lease_held"
    retry = "later"

    def __init__(self, message: str, *, session: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.session = session


class AgentMismatchError(ConflictError):
    """The open turn belongs to another agent, or another version of this one. Nothing was written.

    Serve that agent on this store, cancel the turn, or resume it on purpose: then this agent continues it.
    """

    code = "agent_mismatch"
    retry = "ask"


class LeaseLostError(ConflictError):
    """Another node has the lease now, or a crash of the database lost the session's last records. Nothing was written.
    The process stops its work on the session at once; a client may retry.
    """

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
    """This question was already answered, or its turn ended: read the session again. Nothing was written."""

    code = "question_closed"


class AnswerMismatchError(ConflictError):
    """The answer does not fit the question: other arguments, or a choice it does not offer. Nothing was written."""

    code = "answer_mismatch"


class CallNotStartedError(ConflictError):
    """A client sent the outcome of a call that was not started: send it again later. Nothing was written."""

    code = "call_not_started"
    retry = "later"


class SeqnoGapError(ConflictError):
    """A command arrived before its predecessors. `expected` is the number to send next."""

    code = "seqno_gap"

    def __init__(self, message: str, *, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class SeqnoReusedError(ConflictError):
    """This number was accepted before with another payload. The first payload remains valid."""

    code = "seqno_reused"


class StreamReusedError(SeqnoReusedError):
    """The stream key was used for another first message. Nothing was written; open a new stream."""

    code = "stream_reused"


class CallReusedError(ConflictError):
    """A call id was used again with another tool or other arguments than the recorded call."""

    code = "call_reused"


class StreamFencedError(ConflictError):
    """A newer connection took this stream over; this one is closed."""

    code = "stream_fenced"


class OtherLoginError(ConflictError):
    """A login link is for another principal than the one who is logged in. The link stays valid."""

    code = "other_login"
    retry = "ask"


class AccessError(MidstreamError):
    """The caller may not do this."""

    code = "access"


class UnauthorizedError(AccessError):
    """No credential was sent, or it is not (or no longer) valid. Nothing was done."""

    code = "unauthorized"


class WrongSecretError(AccessError):
    """The secret does not open this stream or session, or there is no such stream or session."""

    code = "wrong_secret"


class SessionLockedError(AccessError):
    """The session is encrypted under its client's secret, which the server does not have. Nothing was changed."""

    code = "session_locked"
    retry = "ask"


class ForeignOriginError(AccessError):
    """The request came from a page of another site, or under a host name that is not permitted. Nothing was done."""

    code = "foreign_origin"


class InternalError(MidstreamError):
    """A defect in the server: its log has the details. What was acknowledged stays in the journal."""

    code = "internal"


class UnavailableError(MidstreamError):
    """The server cannot do this now. Nothing was written; the same call may be repeated."""

    code = "unavailable"
    retry: ClassVar[Retry] = "later"


class KeysUnavailableError(UnavailableError):
    """The application that keeps the keys of this store does not answer, or refuses the token. Nothing was written."""

    code = "keys_unavailable"


class RecoveringError(UnavailableError):
    """The server is still recovering interrupted sessions."""

    code = "recovering"


class DrainingError(UnavailableError):
    """The server is shutting down: reconnect; this server or another one continues."""

    code = "draining"


class OverloadedError(UnavailableError):
    """The server has reached its limit of open connections: retry, or use another server."""

    code = "overloaded"


class LimitReachedError(UnavailableError):
    """A limit for one caller was reached. Nothing was done."""

    code = "limit_reached"


class StoreBusyError(UnavailableError):
    """The database stayed locked by another process, or its server cannot be reached. Nothing was written."""

    code = "store_busy"


class StoreFullError(UnavailableError):
    """The disk is full. Nothing was written; free some space, and the session continues."""

    code = "store_full"


class PortTakenError(UnavailableError):
    """Another program listens on this port: choose another one or stop it."""

    code = "port_taken"
    retry = "never"


class ToolsUnavailableError(UnavailableError):
    """A source of tools is not available (its server is down, or does not answer). Its tools are left out."""

    code = "tools_unavailable"


class ConnectionLostError(UnavailableError):
    """The connection to the server was lost, and reconnecting failed within the limit."""

    code = "connection_lost"


class StoreDamagedError(MidstreamError):
    """The file is not an intact database. Nothing was written: restore a copy, or run `midstream doctor FILE --fix`."""

    code = "store_damaged"


class RecordUndecodableError(StoreDamagedError):
    """A journal contains a record that this version cannot read."""

    code = "record_undecodable"


class EntryDamagedError(StoreDamagedError):
    """A small value beside the journals, such as a login, was changed by another program. It can be replaced.

    `version` is the one that a write replaces.
    """

    code = "entry_damaged"

    def __init__(self, message: str, *, retry_after_s: float | None = None, version: int = 0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.version = version


class EventsLostError(StoreDamagedError):
    """Records that were acknowledged as durable are missing: removed, or the store is an older copy.

    Nothing was changed. A power cut does not cause this; an operator must examine the store before work continues.
    """

    code = "events_lost"


class KeyMissingError(StoreDamagedError):
    """The stored data is encrypted under a key that this process does not have. Nothing was changed."""

    code = "key_missing"
    retry = "ask"


class TurnFailedError(MidstreamError):
    """A turn ended without a complete answer. Its finished parts stay in the session, and the next message may be sent.

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
    """Network fault, timeout, or a fault of the provider. A retry may succeed."""

    code = "model_unavailable"
    retry = "later"


class ModelOverloadedError(ModelUnavailableError):
    """The provider has no capacity now. A retry may succeed, and another model may have some."""

    code = "model_overloaded"


class ModelRateLimitedError(ModelUnavailableError):
    """The provider has had too many requests of this account. A retry after the pause that it names may succeed."""

    code = "model_rate_limited"


class ModelCutError(ModelUnavailableError):
    """The connection was lost, and the provider continues the response: a session resumes it where it was cut."""

    code = "model_cut"


class ModelRestartedError(ModelUnavailableError):
    """An upstream agent lost its provider, and begins its response again. Its text so far is no part of the answer."""

    code = "model_restarted"


class UpstreamBusyError(ModelUnavailableError):
    """The agent is in another run, perhaps one that a crash left behind. A pool tries once to cancel that run."""

    code = "upstream_busy"


class UpstreamFailedError(ModelUnavailableError):
    """The agent's run failed for an unknown reason: the agent may be dead. A fresh one may succeed."""

    code = "upstream_failed"


class UpstreamGoneError(ModelError):
    """The upstream no longer has this agent (expired, deleted, another folder): start a fresh one."""

    code = "upstream_gone"
    retry = "now"


class UpstreamMismatchError(UpstreamGoneError):
    """The upstream opened another conversation than the named one. The other one may have received the message."""

    code = "upstream_mismatch"


class ModelStalledError(ModelError):
    """The model was silent for longer than the budget allows. A retry may succeed."""

    code = "model_stalled"
    retry = "later"


class ModelEmptyError(ModelError):
    """The model ended its response without text and calls. A retry may succeed."""

    code = "model_empty"
    retry = "later"


class ModelForgotError(ModelError):
    """The provider no longer has the started response, or has another one: the model is called again."""

    code = "model_forgot"
    retry = "now"


class ModelRejectedError(ModelError):
    """The provider will never accept this request as it is."""

    code = "model_rejected"


class ContextOverflowError(ModelRejectedError):
    """The conversation is longer than the model can read. A session itself leaves out older steps and retries once."""

    code = "context_overflow"


class ModelFilteredError(ModelRejectedError):
    """A content filter refused the request or withheld the whole response. Repeating the same request does not help."""

    code = "model_filtered"


class ModelAccessError(ModelRejectedError):
    """The provider refuses the key, the account or the address. Correct it, then resume the turn."""

    code = "model_access"
    retry = "ask"


class ModelQuotaError(ModelAccessError):
    """The account at the provider has no credit left, or its budget is used up. Pay, then resume the turn."""

    code = "model_quota"


class ModelNotFoundError(ModelAccessError):
    """The provider has no model of this name, or not for this account. Correct the name, then resume the turn."""

    code = "model_not_found"


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
