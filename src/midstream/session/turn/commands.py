"""Commands to a turn: one type for each kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from midstream.errors import MidstreamError
from midstream.history.messages import Entry, Response, ToolResult, ToolSpec, UserMessage
from midstream.session.application_request import ApplicationRequest
from midstream.session.calls import CallPlan, Choice
from midstream.session.records import ClientTool, Delta, Parent, PromptHead, ReuseDecision
from midstream.session.references import AttemptRef, CallRef
from midstream.session.turn.states import LOOK_BACK_S
from midstream.timing import StalledOn


class Refused(Exception):  # noqa: N818 - not an error of ours but the wrapped answer to a command
    """A command that cannot be taken now; `error` is the reason. Nothing was decided."""

    def __init__(self, error: MidstreamError) -> None:
        super().__init__(error.message)
        self.error = error


class WhenBusy(StrEnum):
    """Outcome of a message that comes while a turn runs."""

    QUEUE = "queue"
    """It waits in the journal and opens a turn of its own when those before it have ended."""
    REFUSE = "refuse"
    """It is refused with `session_busy`; nothing of it is kept."""


WhenBusyName = Literal["queue", "refuse"]
"""The values of `WhenBusy` as a program writes them."""


class SendMessage(Struct, frozen=True, gc=False):
    """A user speaks. `timeout_s` bounds the whole turn, people's answers not counted (0: no bound)."""

    message: UserMessage
    tools: tuple[ClientTool, ...] = ()
    stream: str = ""
    when_busy: WhenBusy = WhenBusy.REFUSE
    timeout_s: float = 0.0
    responses_max: int = 0
    """Responses before the model is asked to hand in what it has; 0 for the general limit."""
    parent: Parent | None = None
    keep: int | None = None
    """Entries of the history that stay, where the client changed the conversation; None for all. Only where no turn
    runs: such a message is not queued."""
    before: tuple[Entry, ...] = ()
    """Entries that follow those, before the message."""
    turns: int | None = None
    """How many turns the session had when `keep` was found; with another number it is refused. None for any."""


class SendTranscript(Struct, frozen=True, gc=False):
    """A client application sends its whole conversation again and requests the next response.

    Args:
        request: The request, without the conversation.
        count: How many transcripts the session had accepted when `keep` was found; another number is refused.
        keep: How many entries of the history the transcript begins with, those of `results` included.
        tail: The entries that follow them.
        instructions, tools: The system prompt and the application's tools.
        results: The results of all open calls, where the transcript answers them.
    """

    request: ApplicationRequest
    count: int
    keep: int = 0
    tail: tuple[Entry, ...] = ()
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    results: tuple[ToolResult, ...] = ()


class Withdraw(Struct, frozen=True, gc=False):
    """Take a queued message back; `number` None takes back all that wait."""

    number: int | None = None


class ModelStreamed(Struct, frozen=True, gc=False):
    """The model produced more of a response."""

    ref: AttemptRef
    deltas: tuple[Delta, ...]


class ModelResumable(Struct, frozen=True, gc=False):
    """The provider keeps the response it is making, under `token`."""

    ref: AttemptRef
    token: str


class ModelReuseDecided(Struct, frozen=True, gc=False):
    """A pool decided whether the upstream agent still has the conversation."""

    ref: AttemptRef
    judgement: ReuseDecision


class ModelResponded(Struct, frozen=True, gc=False):
    """The model ended its response. `plans` has one entry per call, in order."""

    ref: AttemptRef
    response: Response
    plans: tuple[CallPlan, ...] = ()
    prompt: PromptHead | None = None


class ModelFailed(Struct, frozen=True, gc=False):
    """The attempt gave no usable response. `chance` in [0, 1) spreads the next try.

    Where the conversation was too long, `cut` is how many entries to leave out, or None where none can be. With
    `is_cut` only the connection ended, or our time limit: the provider may have the response.
    """

    ref: AttemptRef
    code: str
    message: str
    is_retriable: bool
    retry_after_s: float | None = None
    chance: float = 0.0
    cut: int | None = None
    is_cut: bool = False


class Stalled(Struct, frozen=True, gc=False):
    """A model (`call_id` is empty) or a tool has been silent for `silent_s` seconds, and is still waited for."""

    turn: int
    response_no: int
    waiting_for: StalledOn
    silent_s: float
    call_id: str = ""


class StallFinished(Struct, frozen=True, gc=False):
    """End of a stall: the silent part continues, after `silent_s` seconds."""

    turn: int
    response_no: int
    waiting_for: StalledOn
    silent_s: float
    call_id: str = ""


class CallProgress(Struct, frozen=True, gc=False):
    """A running tool reports its progress."""

    ref: CallRef
    run: int
    text: str


class ChildStreamed(Struct, frozen=True, gc=False):
    """The session that does the work of a call has new records, each with its position there."""

    ref: CallRef
    child: str
    records: tuple[tuple[int, bytes], ...]


class CallFinished(Struct, frozen=True, gc=False):
    """A tool ended, here or at a client.

    `is_suspect`: it was a sub-agent that was interrupted because its server died again and again (TURN-87).
    """

    turn: int
    response_no: int
    result: ToolResult
    is_suspect: bool = False

    @property
    def ref(self) -> CallRef:
        """The call that ended."""
        return CallRef(self.turn, self.response_no, self.result.call_id)


class CallExpired(Struct, frozen=True, gc=False):
    """No client answered a call within its time."""

    ref: CallRef


class CallProbed(Struct, frozen=True, gc=False):
    """The outside world was asked about a call in doubt.

    `result` is what the call gave if it is known to have happened; `may_run` is True where it certainly did not happen.
    """

    ref: CallRef
    result: ToolResult | None = None
    may_run: bool = False


class Answer(Struct, frozen=True, gc=False):
    """A person answers the open question of a call.

    Args:
        digest: Digest of the arguments the person was shown; an answer to others is refused.
        choice: What they decided.
        text: Their words: the answer to a question, the reason of a denial, the outcome of what happened.
        arguments: For an approval, the arguments to run instead (JSON text); None leaves them.
        by: The principal who answered.
    """

    ref: CallRef
    digest: str
    choice: Choice
    text: str = ""
    arguments: str | None = None
    by: str = ""


class QuestionExpired(Struct, frozen=True, gc=False):
    """A question was not answered within its time."""

    ref: CallRef


class PermissionRequested(Struct, frozen=True, gc=False):
    """An upstream agent requests a permission in the middle of its answer, and waits.

    Args:
        question_id: A new id of the question.
        name, arguments: The requested act; the arguments are JSON text.
        text: What to show beside it.
        answer_s: Seconds a person has to answer; 0 for no limit.
        is_fixed: The arguments cannot be changed by the answer.
        is_vague: The agent does not show what it is about to do, so that no answer to another question fits this one.
        approvers: How many different people must allow it.
    """

    ref: AttemptRef
    question_id: str
    name: str
    arguments: str
    text: str = ""
    answer_s: float = 0.0
    is_fixed: bool = False
    is_vague: bool = False
    approvers: int = 1


class PermissionWithdrawn(Struct, frozen=True, gc=False):
    """An upstream's agent waits no more for the answer to its question, and goes on."""

    ref: AttemptRef
    question_id: str


class UseAnswer(Struct, frozen=True, gc=False):
    """The agent is about to receive the decision about its question: from here on the decision is used up. Refused
    with `question_closed` where its attempt has ended.
    """

    ref: AttemptRef
    question_id: str


class Cancel(Struct, frozen=True, gc=False):
    """Stop the turn `turn`, or whichever runs where it is None."""

    turn: int | None = None


class CancelExpired(Struct, frozen=True, gc=False):
    """The grace of a cancel is over: close the step without the tools that still run."""

    turn: int


class TurnExpired(Struct, frozen=True, gc=False):
    """The turn took longer than it may."""

    turn: int


class Resume(Struct, frozen=True, gc=False):
    """Go on with the last turn, which was interrupted or failed; `turn` guards against resuming another."""

    turn: int | None = None
    stream: str = ""


class Recover(Struct, frozen=True, gc=False):
    """A new node takes up what an older one left, in the epoch it just started."""

    look_back_s: float = LOOK_BACK_S
    is_suspect: bool = False
    """Whether the turn is suspected of too many deaths of its nodes to be resumed."""


Command = (
    SendMessage
    | SendTranscript
    | Withdraw
    | ModelStreamed
    | ModelResumable
    | ModelReuseDecided
    | ModelResponded
    | ModelFailed
    | Stalled
    | StallFinished
    | CallProgress
    | ChildStreamed
    | CallFinished
    | CallExpired
    | CallProbed
    | Answer
    | QuestionExpired
    | PermissionRequested
    | PermissionWithdrawn
    | UseAnswer
    | Cancel
    | CancelExpired
    | TurnExpired
    | Resume
    | Recover
)
