from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from midstream.agents.agent_failures import (
    CAUSES,
    DOUBTFUL_AFTER_S,
    Fail,
    FailureCause,
    FailureSituation,
    Remedy,
    Repeat,
    StartFresh,
    cause_of,
    is_refusal,
    remedy,
)
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelCutError,
    ModelEmptyError,
    ModelError,
    ModelFilteredError,
    ModelForgotError,
    ModelMissingError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UpstreamMismatchError,
)
from midstream.retries import AGENT_REPEAT_AFTER_S, ATTEMPT_PAUSE_MAX_S

RESUMED = FailureSituation(is_remembering=True)
FRESH = FailureSituation(is_remembering=False)
AFTER_REPLACEMENT = FailureSituation(is_remembering=False, is_replacement=True)

SITUATIONS = [
    FailureSituation(
        is_remembering,
        is_taken,
        has_spoken,
        repeats,
        is_forced,
        is_replacement,
        was_whole=was_whole,
        idle_s=idle_s,
    )
    for is_remembering, is_taken, has_spoken, is_forced, is_replacement, was_whole in itertools.product(
        *[(False, True)] * 6
    )
    for repeats in range(3)
    for idle_s in (0.0, DOUBTFUL_AFTER_S)
]


def _errors_of(kind: type[ModelError]) -> list[type[ModelError]]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _errors_of(sub))]


def test_every_error_class_has_a_cause() -> None:
    ours = {kind for kind in _errors_of(ModelError) if kind.__module__ == "midstream.errors"}
    assert {*CAUSES} == ours


def test_a_subclass_has_the_cause_of_its_base_class() -> None:
    class OddError(UpstreamBusyError):
        pass

    assert cause_of(OddError("odd")) is FailureCause.BUSY


@pytest.mark.parametrize(
    ("kind", "resumed", "fresh"),
    [
        (UpstreamGoneError, StartFresh(), Fail()),
        (UpstreamMismatchError, StartFresh(), Fail()),
        (UpstreamFailedError, StartFresh(), Fail()),
        (ModelError, StartFresh(), Fail()),
        (ModelCutError, StartFresh(), Fail()),
        (ModelEmptyError, StartFresh(), Fail()),
        (ModelForgotError, StartFresh(), Fail()),
        (ModelRejectedError, StartFresh(), Fail()),
        (UpstreamBusyError, Repeat(is_forced=True), Repeat(is_forced=True)),
        (ModelStalledError, StartFresh(), StartFresh()),
        (ModelUnavailableError, Repeat(0.5), Repeat(0.5)),
        (ModelAccessError, Fail(), Fail()),
        (ContextOverflowError, Fail(), Fail()),
        (ModelFilteredError, Fail(), Fail()),
        (ModelMissingError, Fail(), Fail()),
    ],
)
def test_the_remedy_of_the_first_failure_before_the_message_was_taken(
    kind: type[ModelError], resumed: Remedy, fresh: Remedy
) -> None:
    assert remedy(kind("x"), RESUMED) == resumed
    assert remedy(kind("x"), FRESH) == fresh


@pytest.mark.parametrize("kind", CAUSES)
def test_nothing_is_retried_after_the_first_shown_text(kind: type[ModelError]) -> None:
    for situation in SITUATIONS:
        assert remedy(kind("x"), replace(situation, has_spoken=True)) == Fail()


@pytest.mark.parametrize("kind", CAUSES)
def test_a_second_fresh_agent_is_never_started_in_one_turn(kind: type[ModelError]) -> None:
    for situation in SITUATIONS:
        assert not isinstance(remedy(kind("x"), replace(situation, is_replacement=True)), StartFresh)


@pytest.mark.parametrize("kind", CAUSES)
def test_a_taken_message_is_never_sent_again_to_the_same_agent(kind: type[ModelError]) -> None:
    for situation in SITUATIONS:
        assert not isinstance(remedy(kind("x"), replace(situation, is_taken=True)), Repeat)


@pytest.mark.parametrize("kind", CAUSES)
def test_retries_are_limited(kind: type[ModelError]) -> None:
    for start in (RESUMED, FRESH):
        situation = start
        for _ in range(10):
            match remedy(kind("x"), situation):
                case Repeat(is_forced=True):
                    situation = replace(situation, is_forced=True)
                case Repeat():
                    situation = replace(situation, repeats=situation.repeats + 1)
                case StartFresh():
                    situation = AFTER_REPLACEMENT
                case Fail():
                    break
        else:
            pytest.fail("it is tried for ever")


def test_a_refusal_after_a_whole_answer_concerns_the_message_and_not_the_conversation() -> None:
    assert remedy(ModelRejectedError("x"), replace(RESUMED, was_whole=True)) == Fail()
    assert remedy(ModelRejectedError("x"), replace(RESUMED, is_taken=True)) == StartFresh()
    assert is_refusal(ModelRejectedError("x"), is_taken=False)


def test_a_network_failure_is_retried_twice_then_a_fresh_agent_is_started() -> None:
    error = ModelUnavailableError("x")
    assert [remedy(error, replace(RESUMED, repeats=count)) for count in range(3)] == [
        Repeat(0.5),
        Repeat(1.5),
        StartFresh(),
    ]
    assert remedy(error, replace(FRESH, repeats=2)) == Fail()


def test_a_rate_limit_is_waited_for_and_never_causes_a_full_transcript() -> None:
    soon = ModelUnavailableError("x", retry_after_s=7.0)
    assert remedy(soon, RESUMED) == Repeat(7.0)
    assert remedy(soon, replace(RESUMED, repeats=len(AGENT_REPEAT_AFTER_S))) == Fail()
    assert remedy(ModelUnavailableError("x", retry_after_s=0.1), RESUMED) == Repeat(0.5)
    assert remedy(ModelUnavailableError("x", retry_after_s=ATTEMPT_PAUSE_MAX_S + 1), RESUMED) == Fail()


def test_a_busy_agent_is_forced_once_then_the_turn_fails() -> None:
    forced = replace(RESUMED, is_forced=True)
    assert remedy(UpstreamBusyError("x"), forced) == StartFresh()
    assert remedy(UpstreamBusyError("x"), replace(FRESH, is_forced=True)) == Fail()


def test_the_second_stall_of_a_turn_ends_it() -> None:
    stall = ModelStalledError("x")
    assert remedy(stall, replace(RESUMED, is_forced=True)) == StartFresh()
    assert remedy(stall, replace(RESUMED, is_taken=True)) == StartFresh()
    assert remedy(stall, replace(FRESH, is_taken=True)) == StartFresh()
    assert remedy(stall, replace(AFTER_REPLACEMENT, is_taken=True)) == Fail()


def test_an_access_error_is_verified_only_for_an_agent_that_was_idle_for_long() -> None:
    old = replace(RESUMED, idle_s=DOUBTFUL_AFTER_S)
    assert remedy(ModelAccessError("x"), old) == StartFresh(if_verified=True)
    assert remedy(ModelAccessError("x"), replace(RESUMED, idle_s=DOUBTFUL_AFTER_S - 1)) == Fail()
    assert remedy(ModelAccessError("x"), replace(FRESH, idle_s=DOUBTFUL_AFTER_S)) == Fail()


def test_a_refusal_leaves_the_agent_unchanged_and_a_lost_connection_may_not() -> None:
    limit = ModelUnavailableError("x", retry_after_s=1.0)
    assert [is_refusal(error, is_taken=False) for error in (limit, UpstreamBusyError("x"))] == [True, True]
    assert is_refusal(ModelAccessError("x"), is_taken=False)
    assert not is_refusal(ModelUnavailableError("x"), is_taken=False)
    assert not is_refusal(UpstreamFailedError("x"), is_taken=False)
    assert not is_refusal(limit, is_taken=True)
