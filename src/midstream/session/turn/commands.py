"""Commands to a turn: one type for each kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from midstream.errors import MidstreamError
from midstream.history.messages import Entry, Response, ToolResult, ToolSpec, UserMessage
from midstream.session.application_request import ApplicationRequest
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import CallPlan, Choice
from midstream.session.records import ClientTool, Delta, Parent, PromptHead, ReuseDecision
from midstream.session.turn.states import LOOK_BACK_S
from midstream.timing import StalledOn


class Refused(Exception):  # noqa: N818 - not an error of ours but the wrapped answer to a command
    """A command that is not possible now; `error` is the reason. No record was decided."""

    def __init__(self, error: MidstreamError) -> None:
        super().__init__(error.message)
        self.error = error


class WhenBusy(StrEnum):
    """The handling of a message that arrives while a turn is running."""

    QUEUE = "queue"
    """It waits in the journal and opens a turn of its own after the earlier ones."""
    REFUSE = "refuse"
    """It is refused with `session_busy`, and not stored."""


WhenBusyName = Literal["queue", "refuse"]
"""The values of `WhenBusy` as literals."""


class SendMessage(Struct, frozen=True, gc=False):
    """A user sends a message. `timeout_s` limits the turn, without the time for people's answers (0: no limit)."""

    message: UserMessage
    tools: tuple[ClientTool, ...] = ()
    stream: str = ""
    when_busy: WhenBusy = WhenBusy.REFUSE
    timeout_s: float = 0.0
    responses_max: int = 0
    """Responses before the model is requested to hand in its result; 0 for the general limit."""
    parent: Parent | None = None
    keep: int | None = None
    """Number of the history's entries that stay, if the client changed the conversation; None for all. Only without a
    running turn: such a message is not queued."""
    before: tuple[Entry, ...] = ()
    """Entries after those, before the message."""
    turns: int | None = None
    """Number of the session's turns when `keep` was computed; with another number it is refused. None for any."""


class SendTranscript(Struct, frozen=True, gc=False):
    """A client application sends its whole conversation again and requests the next response.

    Args:
        request: The request, without the conversation.
        count: Number of accepted transcripts when `keep` was computed; with another number it is refused.
        keep: Number of the history's entries at the beginning of the transcript, including that of `results`.
        tail: The entries that follow them.
        instructions, tools: The system prompt and the application's tools.
        results: The results of all open calls, if the transcript has them.
        agent, agent_version: The agent that must answer; a node with another one refuses. Any agent if empty.
    """

    request: ApplicationRequest
    count: int
    keep: int = 0
    tail: tuple[Entry, ...] = ()
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    results: tuple[ToolResult, ...] = ()
    agent: str = ""
    agent_version: str = ""


class Withdraw(Struct, frozen=True, gc=False):
    """Withdraw a queued message; `number` None withdraws all."""

    number: int | None = None


class ModelStreamed(Struct, frozen=True, gc=False):
    """The model produced more of a response."""

    ref: AttemptRef
    deltas: tuple[Delta, ...]


class ModelResumable(Struct, frozen=True, gc=False):
    """The provider keeps the running response, under `token`."""

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
    """The attempt gave no usable response. `chance` in [0, 1) is the jitter of the next try.

    If the conversation was too long, `cut` is the number of entries to omit, or None if none can be omitted. With
    `is_cut` only the connection ended, or midstream's time limit: the provider may have the response.
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
    """A model (`call_id` is empty) or a tool has been silent for `silent_s` seconds, and still runs."""

    turn: int
    response_no: int
    waiting_for: StalledOn
    silent_s: float
    call_id: str = ""


class StallFinished(Struct, frozen=True, gc=False):
    """A stall has ended: the model or tool continues, after `silent_s` seconds."""

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
    """The child session of a call has new records, each with its position there."""

    ref: CallRef
    child: str
    records: tuple[tuple[int, bytes], ...]


class CallFinished(Struct, frozen=True, gc=False):
    """A tool ended, here or at a client.

    `is_suspect`: it was a sub-agent that was interrupted because its servers died repeatedly (TURN-87).
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
    """The probe of a call in doubt has ended.

    `result` is the call's result if it took effect; `may_run` is True if it certainly did not.
    """

    ref: CallRef
    result: ToolResult | None = None
    may_run: bool = False


class Answer(Struct, frozen=True, gc=False):
    """A person answers the open question of a call.

    Args:
        digest: Digest of the shown arguments; an answer for others is refused.
        choice: The decision.
        text: The answer to a question, the reason of a denial, or the outcome of a call that took effect.
        arguments: For an approval, other arguments (JSON text); None keeps the model's.
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
    """An upstream agent requests a permission during its answer, and waits.

    Args:
        question_id: A new id of the question.
        name, arguments: The requested act; the arguments are JSON text.
        text: The text beside it.
        answer_s: Seconds for the answer; 0 for no limit.
        is_fixed: Whether the answer cannot change the arguments.
        is_vague: Whether the request does not describe the act, so that no earlier answer applies.
        approvers: Number of different people who must allow it.
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
    """An upstream's agent no longer waits for the answer to its question, and continues."""

    ref: AttemptRef
    question_id: str


class UseAnswer(Struct, frozen=True, gc=False):
    """The agent is about to receive the decision about its question, which is then used up. Refused with
    `question_closed` if its attempt has ended.
    """

    ref: AttemptRef
    question_id: str


class Cancel(Struct, frozen=True, gc=False):
    """Stop the turn `turn`; None: whichever is running."""

    turn: int | None = None


class CancelExpired(Struct, frozen=True, gc=False):
    """The grace of a cancellation has ended: close the step without the tools that still run."""

    turn: int


class TurnExpired(Struct, frozen=True, gc=False):
    """The turn has exceeded its time limit."""

    turn: int


class Resume(Struct, frozen=True, gc=False):
    """Continue the last turn, which was interrupted or failed; `turn` protects from resuming another one."""

    turn: int | None = None
    stream: str = ""


class Recover(Struct, frozen=True, gc=False):
    """A new node continues the work of an older one, in the epoch that it has just begun."""

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
