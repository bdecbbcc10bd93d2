"""Retries after an agent's failure before any part of its answer was shown.

There are three decisions: send the message to the same agent again, send the whole transcript to a fresh agent, or
raise the error. The first requires that the message was not taken, or is taken only once however often it is sent: see
the contract of `midstream.agents.upstreams`. The second requires an agent with a memory from before this turn, which
may be the cause, or a silent agent. It is made once in a turn. After the first shown text only the third is possible.

In doubt, the decision is a fresh agent: it costs one full replay, and neither loses nor repeats a message.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelCutError,
    ModelEmptyError,
    ModelError,
    ModelFilteredError,
    ModelForgotError,
    ModelMissingError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelRestartedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UpstreamMismatchError,
)
from midstream.retries import AGENT_REPEAT_AFTER_S, ATTEMPT_PAUSE_MAX_S

DOUBTFUL_AFTER_S = 300.0
"""Seconds of silence after which an agent's "unauthenticated" may only mean that it is dead: some lose their session
after about five minutes, and then report this error."""


class FailureCause(StrEnum):
    """Cause of a failure, as far as the decision depends on it."""

    GONE = "gone"
    """The agent has lost the conversation, or another agent answered."""
    BUSY = "busy"
    """The agent is in another run and has taken nothing."""
    UNAVAILABLE = "unavailable"
    """The connection failed; the agent may be intact."""
    STALLED = "stalled"
    """The agent is silent."""
    CREDENTIAL = "credential"
    """The key is refused, or seems to be."""
    REJECTED = "rejected"
    """The provider refuses the request: because of the new message or of the memory."""
    UNKNOWN = "unknown"
    """Any other cause that a fresh agent may not have."""
    HOPELESS = "hopeless"
    """A cause that a fresh agent would have, too."""


CAUSES: dict[type[ModelError], FailureCause] = {
    ModelError: FailureCause.UNKNOWN,
    ModelUnavailableError: FailureCause.UNAVAILABLE,
    ModelOverloadedError: FailureCause.UNAVAILABLE,
    ModelRateLimitedError: FailureCause.UNAVAILABLE,
    ModelCutError: FailureCause.UNKNOWN,
    ModelRestartedError: FailureCause.UNAVAILABLE,
    UpstreamBusyError: FailureCause.BUSY,
    UpstreamFailedError: FailureCause.UNKNOWN,
    UpstreamGoneError: FailureCause.GONE,
    UpstreamMismatchError: FailureCause.GONE,
    ModelStalledError: FailureCause.STALLED,
    ModelEmptyError: FailureCause.UNKNOWN,
    ModelForgotError: FailureCause.UNKNOWN,
    ModelRejectedError: FailureCause.REJECTED,
    ContextOverflowError: FailureCause.HOPELESS,
    ModelFilteredError: FailureCause.HOPELESS,
    ModelAccessError: FailureCause.CREDENTIAL,
    ModelQuotaError: FailureCause.CREDENTIAL,
    ModelNotFoundError: FailureCause.CREDENTIAL,
    ModelMissingError: FailureCause.HOPELESS,
}
"""The cause for every class of error; a test checks that it is complete."""


class FailureSituation(Struct, frozen=True):
    """State of a turn when its agent fails.

    Args:
        is_remembering: The agent had a memory before this turn: it was resumed, or forked.
        is_taken: The upstream has confirmed that it took this message (`MessageTaken`).
        has_spoken: A part of the answer was shown.
        repeats: How often this message was sent again because the agent could not be reached.
        is_forced: It was sent again with `is_forced`.
        is_replacement: This agent replaces one that had failed in this turn.
        is_retried: The caller retries itself, such as a client application behind the gateway. Retries here would
            multiply those: with two retries each, a failing provider gets nine messages.
        was_whole: The answer before this turn was complete, so the provider accepted the agent's memory.
        idle_s: How long the agent had been silent before this turn, in seconds.
    """

    is_remembering: bool
    is_taken: bool = False
    has_spoken: bool = False
    repeats: int = 0
    is_forced: bool = False
    is_replacement: bool = False
    is_retried: bool = False
    was_whole: bool = False
    idle_s: float = 0.0


class Repeat(Struct, frozen=True):
    """Send the same message to the same agent with the same key, after so many seconds."""

    after_s: float = 0.0
    is_forced: bool = False


class StartFresh(Struct, frozen=True):
    """Release this agent, open a fresh one, and send it the whole transcript.

    Args:
        if_verified: Only if the upstream confirms that the credential is accepted.
    """

    if_verified: bool = False


class Fail(Struct, frozen=True):
    """Raise the error."""


Remedy = Repeat | StartFresh | Fail


def cause_of(error: ModelError) -> FailureCause:
    """Return the cause of an error; a class without an entry has that of its base class."""
    return next(CAUSES[kind] for kind in type(error).__mro__ if kind in CAUSES)


def remedy(error: ModelError, situation: FailureSituation) -> Remedy:
    """Return the decision about an error. Total."""
    if situation.has_spoken:
        return Fail()
    match cause_of(error):
        case FailureCause.GONE | FailureCause.UNKNOWN:
            return _start_fresh_or_fail(situation)
        case FailureCause.BUSY:
            is_over = situation.is_taken or situation.is_forced
            return _start_fresh_or_fail(situation) if is_over else Repeat(is_forced=True)
        case FailureCause.UNAVAILABLE:
            return _decide_unreached(error, situation)
        case FailureCause.STALLED:
            return _decide_stalled(situation)
        case FailureCause.CREDENTIAL:
            is_doubtful = (
                situation.idle_s >= DOUBTFUL_AFTER_S and _start_fresh_or_fail(situation) == StartFresh()
            )
            return StartFresh(if_verified=True) if is_doubtful else Fail()
        case FailureCause.REJECTED:
            # One refused message must not make a whole conversation unusable. But if the provider accepted the memory
            # in the last answer, the new message is the cause, and a fresh agent would fail, too.
            return Fail() if situation.was_whole else _start_fresh_or_fail(situation)
        case FailureCause.HOPELESS:
            return Fail()


def is_refusal(error: ModelError, *, is_taken: bool) -> bool:
    """Whether the agent certainly has the same memory as before this try, because it refused the message.

    A lost connection is no refusal: the message may have arrived.
    """
    cause = cause_of(error)
    is_rate_limit = cause is FailureCause.UNAVAILABLE and error.retry_after_s is not None
    refusals = (FailureCause.BUSY, FailureCause.CREDENTIAL, FailureCause.REJECTED)
    return not is_taken and (is_rate_limit or cause in refusals)


def is_in_doubt(error: ModelError) -> bool:
    """Whether an agent that was sent a message may have received it and acted on it before this error."""
    return cause_of(error) in {FailureCause.UNKNOWN, FailureCause.STALLED}


def _start_fresh_or_fail(situation: FailureSituation) -> Remedy:
    return StartFresh() if situation.is_remembering and not situation.is_replacement else Fail()


def _decide_unreached(error: ModelError, situation: FailureSituation) -> Remedy:
    retry_after_s = error.retry_after_s or 0.0
    if retry_after_s > ATTEMPT_PAUSE_MAX_S or situation.is_retried:
        return Fail()
    if not situation.is_taken and situation.repeats < len(AGENT_REPEAT_AFTER_S):
        return Repeat(max(AGENT_REPEAT_AFTER_S[situation.repeats], retry_after_s))
    # With a time to retry after, no larger request is sent. If the agent took the message, its provider failed: a fresh
    # agent would fail, too, at the cost of a larger request.
    return (
        _start_fresh_or_fail(situation) if error.retry_after_s is None and not situation.is_taken else Fail()
    )


def _decide_stalled(situation: FailureSituation) -> Remedy:
    """Decide after a silence: one more try with a fresh agent, even a second. The silent one may have the message."""
    return Fail() if situation.is_replacement else StartFresh()
