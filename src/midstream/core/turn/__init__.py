"""The turn: decide, evolve, owed.

All rules of a turn stand in this package, and nothing here acts. Theory of operation: `decide` judges a command and
returns the records to append; `evolve` folds a record that is in the journal; `owed` says what the world owes the
state. The runner appends what is decided, folds it, and starts or stops whatever `owed` gained or lost. A new owner
does the same after one `Recover`, so recovery is no special path; and neither is cancelling: what is no longer owed
is stopped.

    Idle ──message──▶ AwaitingModel ──reply──▶ RunningCalls ──last outcome──▶ AwaitingModel (next reply)
                          │    ▲                   │                               │
                          │    └─attempt n+1       └──cancel──▶ Cancelling         └─ a reply without calls
                          └────── cancel, failure, end ──────────────┴──────────────▶ Idle

A call of `RunningCalls` may wait for a person; the turn waits with it, across restarts and for days. So may an
upstream's agent in the middle of `AwaitingModel`; but its wait ends with the process, and its next attempt asks anew.

A command that is late, repeated or about something else decides to no record at all (TURN-9): that happens
whenever an owner died or a cancel was faster, and it is no error.

Where things stand: `states` (and limits), `commands`, `deciding`, `batches` (the calls of one reply), `asking`
(what an upstream's agent wants leave for), `folding`, `owing`.
"""

from __future__ import annotations

from midstream.core.turn.commands import (
    Answer,
    CallExpired,
    CallFinished,
    CallProbed,
    CallProgress,
    Cancel,
    CancelExpired,
    ChildSpoke,
    Command,
    ModelFailed,
    ModelHeld,
    ModelRemembered,
    ModelReplied,
    ModelSaid,
    PermissionAsked,
    PermissionDropped,
    QuestionExpired,
    Recover,
    Refused,
    Resume,
    SendMessage,
    SendTranscript,
    Stalled,
    StallOver,
    TurnExpired,
    UseAnswer,
    WhenBusy,
    WhenBusyName,
    Withdraw,
)
from midstream.core.turn.deciding import (
    decide,
    is_open,
    opening,
    partial_reply,
    reply_so_far,
    words_said,
)
from midstream.core.turn.folding import (
    evolve,
    exchange_of,
)
from midstream.core.turn.owing import (
    AskModel,
    AwaitCancelled,
    AwaitClient,
    AwaitEnd,
    AwaitPerson,
    Obligation,
    ProbeCall,
    RunCall,
    RunChild,
    TellAgent,
    is_owed_by_client,
    owed,
)
from midstream.core.turn.states import (
    ATTEMPTS_MAX,
    CANCEL_GRACE_S,
    CHILD_GRACE_S,
    CLIENT_CALL_S,
    HAND_IN_S,
    HANDED_IN_CODE,
    HANDED_IN_CONTENT,
    LOOK_BACK_S,
    MODEL_CALLS_MAX,
    MODEL_CALLS_MAX_CODE,
    RETRY_AFTER_MAX_S,
    SUSPECTED_CODE,
    SUSPECTED_MAX,
    SUSPECTED_MESSAGE,
    TURN_TIMEOUT_CODE,
    AgentQuestion,
    AwaitingModel,
    Cancelling,
    Idle,
    Left,
    RunningCalls,
    Terms,
    TurnState,
)

__all__ = [
    "ATTEMPTS_MAX",
    "CANCEL_GRACE_S",
    "CHILD_GRACE_S",
    "CLIENT_CALL_S",
    "HANDED_IN_CODE",
    "HANDED_IN_CONTENT",
    "HAND_IN_S",
    "LOOK_BACK_S",
    "MODEL_CALLS_MAX",
    "MODEL_CALLS_MAX_CODE",
    "RETRY_AFTER_MAX_S",
    "SUSPECTED_CODE",
    "SUSPECTED_MAX",
    "SUSPECTED_MESSAGE",
    "TURN_TIMEOUT_CODE",
    "AgentQuestion",
    "Answer",
    "AskModel",
    "AwaitCancelled",
    "AwaitClient",
    "AwaitEnd",
    "AwaitPerson",
    "AwaitingModel",
    "CallExpired",
    "CallFinished",
    "CallProbed",
    "CallProgress",
    "Cancel",
    "CancelExpired",
    "Cancelling",
    "ChildSpoke",
    "Command",
    "Idle",
    "Left",
    "ModelFailed",
    "ModelHeld",
    "ModelRemembered",
    "ModelReplied",
    "ModelSaid",
    "Obligation",
    "PermissionAsked",
    "PermissionDropped",
    "ProbeCall",
    "QuestionExpired",
    "Recover",
    "Refused",
    "Resume",
    "RunCall",
    "RunChild",
    "RunningCalls",
    "SendMessage",
    "SendTranscript",
    "StallOver",
    "Stalled",
    "TellAgent",
    "Terms",
    "TurnExpired",
    "TurnState",
    "UseAnswer",
    "WhenBusy",
    "WhenBusyName",
    "Withdraw",
    "decide",
    "evolve",
    "exchange_of",
    "is_open",
    "is_owed_by_client",
    "opening",
    "owed",
    "partial_reply",
    "reply_so_far",
    "words_said",
]
