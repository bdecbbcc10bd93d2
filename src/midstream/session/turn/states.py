"""States of a turn, and their limits. A state contains only what is not yet in the history."""

from __future__ import annotations

from msgspec import Struct, field

from midstream.history.messages import Response
from midstream.session.application_request import ApplicationRequest
from midstream.session.call_references import AttemptRef
from midstream.session.calls import CallState, Choice
from midstream.session.records import ClientTool, TurnStatus

MODEL_CALLS_MAX = 1000
"""Responses in one turn: a limit for an agent that loops."""
MODEL_CALLS_MAX_CODE = "model_calls_max"
"""The code of a turn that reached this limit. It cannot be resumed: the next message opens a turn of its own."""
TURN_TIMEOUT_CODE = "turn_timeout"
"""The code of a turn that exceeded its time limit."""
SUSPECTED_MAX = 2
"""Deaths of nodes that a turn may be suspected of and still be resumed; the next one interrupts it. The first makes it
a suspect, the others count if it was the only suspect."""
SUSPECTED_CODE = "server_died"
"""The code of a turn that was interrupted because its tools have probably killed the server."""
SUSPECTED_MESSAGE = "the server died again and again while a tool of this turn ran"
LOOK_BACK_S = 2 * 60 * 60.0
"""A new node ends a turn that was not changed for longer as `interrupted`."""
CANCEL_GRACE_S = 5.0
"""Seconds for a running tool to end after a cancellation, before its call is closed without it."""
CHILD_GRACE_S = 2.0
"""Additional seconds for a sub-agent, which has to stop its own tools first."""
HANDED_IN_CODE = "handed_in"
"""The code of a turn that completed because a limit was reached: its last response is the model's result by then."""
HANDED_IN_CONTENT = "This tool was not started: the turn had reached its limit."
CLIENT_CALL_S = 2 * 60 * 60.0
"""Seconds that a call waits for an absent client: the resume window; longer if its tool takes longer."""


HAND_IN_S = 60.0
"""Seconds for the hand-in of a turn whose time is over."""


class Terms(Struct, frozen=True, gc=False):
    """Terms of a turn, which apply until its end."""

    tools: tuple[ClientTool, ...] = ()
    timeout_s: float = 0.0
    """Seconds for the whole turn, without the time that people need to answer; 0 for no limit."""
    responses_max: int = 0
    """Responses before the model must hand in its result; 0 for the general limit."""
    request: ApplicationRequest | None = None
    """The request that the turn answers, if a client application resends its conversation."""

    @property
    def has_grace(self) -> bool:
        """Whether the model may hand in its result after a limit is reached."""
        return self.responses_max > 0

    def deadline(self, at: float) -> float:
        """Return the latest end of a turn that begins at `at`; 0 without a limit."""
        return at + self.timeout_s if self.timeout_s else 0.0


class UnfinishedTurn(Struct, frozen=True, gc=False):
    """A turn that ended before its work was done, and can be resumed on request."""

    turn: int
    response_no: int
    """The number of the next response."""
    terms: Terms = Terms()


class Idle(Struct, frozen=True, gc=False, tag="idle"):
    """No turn is open. No work is pending: everything is in the history."""

    left: UnfinishedTurn | None = None
    """The place at which the last turn stopped, if it was interrupted or failed."""


class AgentQuestion(Struct, frozen=True, gc=False):
    """A permission request of an upstream's agent during its answer; see `QuestionAsked` for the fields.

    An answered question is kept until the agent receives the answer. If the attempt is cut before, the answer applies
    to the first equal question of a later attempt.
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
    """The decision of a person; None before it."""
    words: str = ""
    edited: str | None = None
    """The arguments after that person's change."""
    by: str = ""
    approvers: int = 1
    """Number of different people who must allow it."""
    approved_by: tuple[str, ...] = ()
    """The principals that have allowed it, if several must."""

    @property
    def is_open(self) -> bool:
        """Whether a person may answer it."""
        return self.choice is None and not self.is_expired


class AwaitingModel(Struct, frozen=True, gc=False, tag="awaiting_model"):
    """A model call is pending. Its response enters history as a whole or not at all.

    `deltas` is a linked list of the attempt's deltas, newest first, so that the cost of a token does not grow with the
    response.
    """

    turn: int
    response_no: int
    terms: Terms = Terms()
    attempt: int = 0
    """0 before the first announcement."""
    epoch: int = 0
    """The epoch of the announcement; an attempt of an older one was cut."""
    failures: int = 0
    is_compacted: bool = False
    """Whether older steps were already omitted for this model call."""
    not_before: float = 0.0
    touched_at: float = 0.0
    deadline_at: float = 0.0
    """The latest end of the turn (seconds since 1970); 0 without a limit."""
    is_last: bool = False
    """Whether the model was requested to hand in its result; the turn ends with this response."""
    deltas: tuple[object, ...] = field(default=(), name="said")  # `said` is its name in stored sessions
    token: str = ""
    """The provider's token for resuming this attempt's response; "" if that is not possible."""
    continued: int = 0
    """Number of continuations of this attempt."""
    is_mute: bool = False
    """Whether it was continued and has produced nothing new since."""
    questions: tuple[AgentQuestion, ...] = ()
    """The agent's open questions, and answers that no agent has received."""
    waits_since: float = 0.0
    """Time of the first open question; 0 if there is none."""
    is_upstream: bool = False
    """Whether a stateful agent answers this attempt: the next attempt must not repeat its acts."""

    @property
    def ref(self) -> AttemptRef:
        """The attempt that was announced last."""
        return AttemptRef(self.turn, self.response_no, self.attempt)

    @property
    def is_waiting_for_person(self) -> bool:
        """Whether a question to a person is open; the turn's time does not count meanwhile."""
        return any(question.is_open for question in self.questions)


class Cut(Struct, frozen=True, gc=False):
    """Parts of cut attempts that become parts of the response."""

    failures: int = 0
    questions: tuple[AgentQuestion, ...] = ()


class RunningCalls(Struct, frozen=True, gc=False, tag="running_calls"):
    """The model requested tools; some outcomes may exist. Nothing of this step is in the history yet.

    A call may run, wait for earlier calls, or wait for a person: see `CallState`.
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
        """Whether the calls belong to a client application, which may send their results at any time, or never."""
        return self.terms.request is not None

    @property
    def is_waiting_for_person(self) -> bool:
        """Whether a question to a person is open; the turn's time does not count meanwhile."""
        for call in self.calls:  # noqa: SIM110 - called after each record: a generator takes three times as long
            if call.asked is not None and call.result is None:
                return True
        return False


class Cancelling(Struct, frozen=True, gc=False, tag="cancelling"):
    """The turn was cancelled while tools ran. The step is not in the history yet, and no more calls start."""

    turn: int
    response_no: int
    response: Response
    calls: tuple[CallState, ...]
    deadline_at: float
    terms: Terms = Terms()
    touched_at: float = 0.0
    status: TurnStatus = TurnStatus.CANCELLED
    """The status at the end of the turn: `failed` if its own deadline stopped it."""


TurnState = Idle | AwaitingModel | RunningCalls | Cancelling
