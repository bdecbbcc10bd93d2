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
ANEW = FailureSituation(is_remembering=False, is_replacement=True)

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


def _every_kind(kind: type[ModelError]) -> list[type[ModelError]]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _every_kind(sub))]


def test_every_class_of_error_has_its_cause() -> None:
    ours = {kind for kind in _every_kind(ModelError) if kind.__module__ == "midstream.errors"}
    assert {*CAUSES} == ours


def test_an_error_of_an_unknown_class_has_the_cause_of_what_it_is_made_of() -> None:
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
def test_the_first_failure_before_anything_was_taken(
    kind: type[ModelError], resumed: Remedy, fresh: Remedy
) -> None:
    assert remedy(kind("x"), RESUMED) == resumed
    assert remedy(kind("x"), FRESH) == fresh


@pytest.mark.parametrize("kind", CAUSES)
def test_after_the_first_shown_word_nothing_is_tried_again(kind: type[ModelError]) -> None:
    for situation in SITUATIONS:
        assert remedy(kind("x"), replace(situation, has_spoken=True)) == Fail()


@pytest.mark.parametrize("kind", CAUSES)
def test_a_fresh_agent_is_not_the_answer_twice_in_a_turn(kind: type[ModelError]) -> None:
    for situation in SITUATIONS:
        assert not isinstance(remedy(kind("x"), replace(situation, is_replacement=True)), StartFresh)


@pytest.mark.parametrize("kind", CAUSES)
def test_what_was_taken_is_never_said_again_to_the_same_agent(kind: type[ModelError]) -> None:
    for situation in SITUATIONS:
        assert not isinstance(remedy(kind("x"), replace(situation, is_taken=True)), Repeat)


@pytest.mark.parametrize("kind", CAUSES)
def test_tries_come_to_an_end(kind: type[ModelError]) -> None:
    for start in (RESUMED, FRESH):
        situation = start
        for _ in range(10):
            match remedy(kind("x"), situation):
                case Repeat(is_forced=True):
                    situation = replace(situation, is_forced=True)
                case Repeat():
                    situation = replace(situation, repeats=situation.repeats + 1)
                case StartFresh():
                    situation = ANEW
                case Fail():
                    break
        else:
            pytest.fail("it is tried for ever")


def test_a_refusal_behind_a_whole_answer_is_of_the_message_and_not_of_the_memory() -> None:
    assert remedy(ModelRejectedError("x"), replace(RESUMED, was_whole=True)) == Fail()
    assert remedy(ModelRejectedError("x"), replace(RESUMED, is_taken=True)) == StartFresh()
    assert is_refusal(ModelRejectedError("x"), is_taken=False)


def test_the_network_gets_two_more_tries_then_a_fresh_agent() -> None:
    error = ModelUnavailableError("x")
    assert [remedy(error, replace(RESUMED, repeats=count)) for count in range(3)] == [
        Repeat(0.5),
        Repeat(1.5),
        StartFresh(),
    ]
    assert remedy(error, replace(FRESH, repeats=2)) == Fail()


def test_a_rate_limit_is_waited_for_and_never_answered_with_a_longer_request() -> None:
    soon = ModelUnavailableError("x", retry_after_s=7.0)
    assert remedy(soon, RESUMED) == Repeat(7.0)
    assert remedy(soon, replace(RESUMED, repeats=len(AGENT_REPEAT_AFTER_S))) == Fail()
    assert remedy(ModelUnavailableError("x", retry_after_s=0.1), RESUMED) == Repeat(0.5)
    assert remedy(ModelUnavailableError("x", retry_after_s=ATTEMPT_PAUSE_MAX_S + 1), RESUMED) == Fail()


def test_a_busy_agent_is_forced_once_then_left() -> None:
    forced = replace(RESUMED, is_forced=True)
    assert remedy(UpstreamBusyError("x"), forced) == StartFresh()
    assert remedy(UpstreamBusyError("x"), replace(FRESH, is_forced=True)) == Fail()


def test_the_second_stall_of_a_turn_is_its_end() -> None:
    stall = ModelStalledError("x")
    assert remedy(stall, replace(RESUMED, is_forced=True)) == StartFresh()
    assert remedy(stall, replace(RESUMED, is_taken=True)) == StartFresh()
    assert remedy(stall, replace(FRESH, is_taken=True)) == StartFresh()
    assert remedy(stall, replace(ANEW, is_taken=True)) == Fail()


def test_only_an_agent_that_was_silent_for_long_is_doubted_when_it_calls_the_key_wrong() -> None:
    old = replace(RESUMED, idle_s=DOUBTFUL_AFTER_S)
    assert remedy(ModelAccessError("x"), old) == StartFresh(if_verified=True)
    assert remedy(ModelAccessError("x"), replace(RESUMED, idle_s=DOUBTFUL_AFTER_S - 1)) == Fail()
    assert remedy(ModelAccessError("x"), replace(FRESH, idle_s=DOUBTFUL_AFTER_S)) == Fail()


def test_a_refusal_leaves_the_agent_as_it_was_and_a_lost_connection_may_not() -> None:
    limit = ModelUnavailableError("x", retry_after_s=1.0)
    assert [is_refusal(error, is_taken=False) for error in (limit, UpstreamBusyError("x"))] == [True, True]
    assert is_refusal(ModelAccessError("x"), is_taken=False)
    assert not is_refusal(ModelUnavailableError("x"), is_taken=False)
    assert not is_refusal(UpstreamFailedError("x"), is_taken=False)
    assert not is_refusal(limit, is_taken=True)
