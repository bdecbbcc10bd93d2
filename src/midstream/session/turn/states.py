"""States of a turn, and the limits that hold there. Each state has what is *not yet* in the history."""

from __future__ import annotations

from msgspec import Struct

from midstream.history.messages import Response
from midstream.session.application_request import ApplicationRequest
from midstream.session.calls import CallState, Choice
from midstream.session.records import ClientTool, TurnStatus
from midstream.session.references import AttemptRef

MODEL_CALLS_MAX = 1000
"""Responses in one turn; an agent that loops ends here."""
MODEL_CALLS_MAX_CODE = "model_calls_max"
"""The code of a turn that ended there. It cannot be resumed: the next message opens a turn of its own."""
TURN_TIMEOUT_CODE = "turn_timeout"
"""The code of a turn that took longer than it may."""
SUSPECTED_MAX = 2
"""Deaths of its nodes that a turn may be suspected of and is still resumed; the next one interrupts it. The first
makes it a suspect, the others count where it was the only one."""
SUSPECTED_CODE = "server_died"
"""The code of a turn that was interrupted because its tools killed the server, as far as can be determined."""
SUSPECTED_MESSAGE = "the server died again and again while a tool of this turn ran"
LOOK_BACK_S = 2 * 60 * 60.0
"""A turn untouched for longer is ended as `interrupted` by a new node (the seed's two hours)."""
CANCEL_GRACE_S = 5.0
"""Seconds a running tool has to end after a cancel before its call is closed without it."""
CHILD_GRACE_S = 2.0
"""Seconds more where a sub-agent has to stop its own tools first."""
HANDED_IN_CODE = "handed_in"
"""The code of a turn that completed because a limit was reached: its last response is what the model had by then."""
HANDED_IN_CONTENT = "This tool was not started: the turn had reached its limit."
CLIENT_CALL_S = 2 * 60 * 60.0
"""Seconds a call waits for a client that is away: the resume window; longer where its tool takes longer."""


HAND_IN_S = 60.0
"""Seconds for the one response in which a model hands in what it has, after the time of its turn is over."""


class Terms(Struct, frozen=True, gc=False):
    """Terms that a turn was opened with, and keeps until its end."""

    tools: tuple[ClientTool, ...] = ()
    timeout_s: float = 0.0
    """Seconds the whole turn may take, people's answers not counted; 0 for no limit."""
    responses_max: int = 0
    """Responses before the model must hand in what it has; 0 where no own limit was set."""
    request: ApplicationRequest | None = None
    """The request that the turn answers, where a client application resends its conversation."""

    @property
    def has_grace(self) -> bool:
        """Whether a limit that is reached leaves one response to hand in."""
        return self.responses_max > 0

    def deadline(self, at: float) -> float:
        """Return when a turn that begins now must have ended; 0 where it has no limit."""
        return at + self.timeout_s if self.timeout_s else 0.0


class UnfinishedTurn(Struct, frozen=True, gc=False):
    """A turn that ended before its work was done, and where it can be taken up again on request."""

    turn: int
    response_no: int
    """The response that would come next."""
    terms: Terms = Terms()


class Idle(Struct, frozen=True, gc=False, tag="idle"):
    """No turn. No work is pending: everything is in the history."""

    left: UnfinishedTurn | None = None
    """Where the last turn stopped, if it was interrupted or failed."""


class AgentQuestion(Struct, frozen=True, gc=False):
    """Permission that an upstream's agent requests in the middle of its answer; see `QuestionAsked` for the fields.

    Once a person has answered, it is stored until the agent receives the answer. If the attempt is cut before, the
    answer holds for the first equal question of a later attempt.
    """

    id: str
    attempt: int
    name: str
    arguments: str
    digest: str
    asked_at: float
    text: str = ""
    expires_at: float = 0.0
    is_fixed: bool = False
    is_expired: bool = False
    choice: Choice | None = None
    """What a person decided; None before."""
    words: str = ""
    edited: str | None = None
    """The arguments as that person changed them."""
    by: str = ""
    approvers: int = 1
    """How many different people must allow it."""
    approved_by: tuple[str, ...] = ()
    """Who allowed it so far, where several must."""

    @property
    def is_open(self) -> bool:
        """Whether a person may answer it."""
        return self.choice is None and not self.is_expired


class AwaitingModel(Struct, frozen=True, gc=False, tag="awaiting_model"):
    """A response is owed. The response enters history whole or not at all.

    `said` is a linked list of the attempt's deltas, newest first, so that a long response costs the same per token
    as a short one.
    """

    turn: int
    response_no: int
    terms: Terms = Terms()
    attempt: int = 0
    """0: not yet announced."""
    epoch: int = 0
    """The epoch that announced it; an attempt of an older one was cut."""
    failures: int = 0
    is_compacted: bool = False
    """Whether older steps were left out for this model call already."""
    not_before: float = 0.0
    touched_at: float = 0.0
    deadline_at: float = 0.0
    """When the turn must have ended (seconds since 1970); 0 where it has no limit."""
    is_last: bool = False
    """It was asked to hand in what it has; the turn ends with this response."""
    said: tuple[object, ...] = ()
    token: str = ""
    """How to take this attempt's response up again at its provider; "" where it cannot be."""
    continued: int = 0
    """How often this attempt was taken up again."""
    is_mute: bool = False
    """It was taken up again and has produced nothing new since."""
    questions: tuple[AgentQuestion, ...] = ()
    """What the upstream's agent waits to be allowed, and answers that no agent received yet."""
    waits_since: float = 0.0
    """When the first of the open questions was asked; 0 while there is none."""
    is_upstream: bool = False
    """Whether a stateful agent answers this attempt: what it has done, the next attempt must not repeat."""

    @property
    def ref(self) -> AttemptRef:
        """The attempt that was announced last."""
        return AttemptRef(self.turn, self.response_no, self.attempt)

    @property
    def is_waiting_for_person(self) -> bool:
        """Whether a question to a person is open; time does not count against the turn meanwhile."""
        return any(question.is_open for question in self.questions)


class Cut(Struct, frozen=True, gc=False):
    """Parts that a response takes over from the attempts at one that was cut."""

    failures: int = 0
    questions: tuple[AgentQuestion, ...] = ()


class RunningCalls(Struct, frozen=True, gc=False, tag="running_calls"):
    """The model asked for tools; some outcomes may be in. Nothing of this step is in the history yet.

    A call may run, wait for its place in the order, or wait for a person: see `CallState`.
    """

    turn: int
    response_no: int
    response: Response
    calls: tuple[CallState, ...]
    terms: Terms = Terms()
    touched_at: float = 0.0
    deadline_at: float = 0.0
    is_last: bool = False
    cut: Cut = Cut()

    @property
    def is_waiting_for_application(self) -> bool:
        """Whether the calls are those of a client application, which brings their results when it likes, or never."""
        return self.terms.request is not None

    @property
    def is_waiting_for_person(self) -> bool:
        """Whether a question to a person is open; time does not count against the turn meanwhile."""
        for call in self.calls:  # noqa: SIM110 - called after each record: a generator takes three times as long
            if call.asked is not None and call.result is None:
                return True
        return False


class Cancelling(Struct, frozen=True, gc=False, tag="cancelling"):
    """The turn was cancelled while tools ran. The step is still out of the history; nothing more starts."""

    turn: int
    response_no: int
    response: Response
    calls: tuple[CallState, ...]
    deadline_at: float
    terms: Terms = Terms()
    touched_at: float = 0.0
    status: TurnStatus = TurnStatus.CANCELLED
    """How the turn will end: `failed` where its own deadline stopped it."""


TurnState = Idle | AwaitingModel | RunningCalls | Cancelling
