"""Retrying: what to do when an agent failed before anything of its answer was shown.

Three decisions are possible: the message is sent to the same agent once more, a fresh agent gets the whole
transcript, or the caller gets the error. The first is only for a message that was not taken, or is taken once
however often it is sent: see the contract of `midstream.agents.upstreams`. The second needs an agent that had a
    memory before this turn, which may be what failed (or a silent one, of which it is unknown what it took), and is
    done once in a turn. After the first
shown word there is only the third.

When in doubt it is a fresh agent: that costs one full replay and neither loses nor doubles a message.
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
"""Seconds of silence from which an agent's "unauthenticated" may only mean that it is dead: some drop their session in
memory after about five minutes and then say so."""


class FailureCause(StrEnum):
    """Cause of a failure, as far as it concerns the agent."""

    GONE = "gone"
    """It does not remember, or another one answered."""
    BUSY = "busy"
    """It is in another run and has taken nothing."""
    UNAVAILABLE = "unavailable"
    """The way to it failed; it may be as well as ever."""
    STALLED = "stalled"
    """It is silent."""
    CREDENTIAL = "credential"
    """The key is not accepted, or it looks like that."""
    REJECTED = "rejected"
    """The provider refuses the request: because of the new message, or of what is in the memory."""
    UNKNOWN = "unknown"
    """Anything else that a fresh agent might not suffer from."""
    HOPELESS = "hopeless"
    """A fresh agent would suffer the same."""


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
"""Every class of error, by its meaning (a test looks for missing ones)."""


class FailureSituation(Struct, frozen=True):
    """Position of a turn when its agent fails.

    Args:
        is_remembering: The agent had a memory before this turn: it was resumed, or forked.
        is_taken: The upstream has confirmed that it took this message (`MessageTaken`).
        has_spoken: Something of the answer was shown.
        repeats: How often this message was sent again to this agent because it could not be reached.
        is_forced: It was sent again by force.
        is_anew: This agent was opened because another one had failed in this turn.
        is_retried: The caller retries by itself, such as a client application behind the gateway. Retries here would
            multiply those: an SDK with two sends nine messages to a provider that is down.
        was_whole: The answer before this turn came to its end: its provider accepted all that the agent had then.
        idle_s: How long the agent had been silent before this turn, in seconds.
    """

    is_remembering: bool
    is_taken: bool = False
    has_spoken: bool = False
    repeats: int = 0
    is_forced: bool = False
    is_anew: bool = False
    is_retried: bool = False
    was_whole: bool = False
    idle_s: float = 0.0


class Repeat(Struct, frozen=True):
    """Send the same message to the same agent with the same key, after so many seconds."""

    after_s: float = 0.0
    is_forced: bool = False


class BeginAnew(Struct, frozen=True):
    """Release this agent, open a fresh one, send it the whole transcript.

    Args:
        if_verified: Only if the upstream confirms that the credential is accepted.
    """

    if_verified: bool = False


class Fail(Struct, frozen=True):
    """Raise the error."""


Remedy = Repeat | BeginAnew | Fail


def cause_of(error: ModelError) -> FailureCause:
    """Return the cause of an error; that of an unknown class is the one of its base class."""
    return next(CAUSES[kind] for kind in type(error).__mro__ if kind in CAUSES)


def remedy(error: ModelError, situation: FailureSituation) -> Remedy:
    """Return what to do about an error. Total."""
    if situation.has_spoken:
        return Fail()
    match cause_of(error):
        case FailureCause.GONE | FailureCause.UNKNOWN:
            return _anew(situation)
        case FailureCause.BUSY:
            is_over = situation.is_taken or situation.is_forced
            return _anew(situation) if is_over else Repeat(is_forced=True)
        case FailureCause.UNAVAILABLE:
            return _decide_unreached(error, situation)
        case FailureCause.STALLED:
            return _decide_stalled(situation)
        case FailureCause.CREDENTIAL:
            is_doubtful = situation.idle_s >= DOUBTFUL_AFTER_S and _anew(situation) == BeginAnew()
            return BeginAnew(if_verified=True) if is_doubtful else Fail()
        case FailureCause.REJECTED:
            # One prompt that a provider refuses must not make a whole conversation unusable. But it accepted the memory
            # in the last answer: then the new message is the reason, and a fresh agent would have it too.
            return Fail() if situation.was_whole else _anew(situation)
        case FailureCause.HOPELESS:
            return Fail()


def is_refusal(error: ModelError, *, is_taken: bool) -> bool:
    """Whether the agent certainly has no more than before this try: it refused the message.

    A lost connection refuses nothing: what went over it may have arrived.
    """
    cause = cause_of(error)
    is_rate_limit = cause is FailureCause.UNAVAILABLE and error.retry_after_s is not None
    refusals = (FailureCause.BUSY, FailureCause.CREDENTIAL, FailureCause.REJECTED)
    return not is_taken and (is_rate_limit or cause in refusals)


def _anew(situation: FailureSituation) -> Remedy:
    return BeginAnew() if situation.is_remembering and not situation.is_anew else Fail()


def _decide_unreached(error: ModelError, situation: FailureSituation) -> Remedy:
    asked_s = error.retry_after_s or 0.0
    if asked_s > ATTEMPT_PAUSE_MAX_S or situation.is_retried:
        return Fail()
    if not situation.is_taken and situation.repeats < len(AGENT_REPEAT_AFTER_S):
        return Repeat(max(AGENT_REPEAT_AFTER_S[situation.repeats], asked_s))
    # With a time to retry after, no larger request is sent than before. An agent that took the message has a provider
    # that fails: it fails a fresh agent, too, and the larger request costs all its retries once more.
    return _anew(situation) if error.retry_after_s is None and not situation.is_taken else Fail()


def _decide_stalled(situation: FailureSituation) -> Remedy:
    """Decide after silence: one more try with a fresh agent, which may be the second. A silent agent may have taken
    the message.
    """
    return Fail() if situation.is_anew else BeginAnew()
