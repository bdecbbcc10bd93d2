"""Notifications of Codex's app server, in their wire format, read as one turn."""

from __future__ import annotations

import pytest

from midstream.agents.upstreams import ResponseRestarted
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelOverloadedError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelUnavailableError,
)
from midstream.history.messages import Usage

pytest.importorskip("openai_codex", reason="openai-codex is not installed")

from openai_codex.generated import v2_all as wire

from midstream.agents.codex import CodexTurn

IDS = {"threadId": "thread", "turnId": "turn"}


def failed_turn(info: object) -> wire.TurnCompletedNotification:
    error = {"message": "last status: 429 Too Many Requests", "codexErrorInfo": info}
    turn = {"id": "turn", "items": [], "status": "failed", "error": error}
    return wire.TurnCompletedNotification.model_validate({"threadId": "thread", "turn": turn})


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({"httpConnectionFailed": {"httpStatusCode": 401}}, ModelAccessError),
        ({"responseTooManyFailedAttempts": {"httpStatusCode": 400}}, ModelRejectedError),
        ({"responseStreamDisconnected": {"httpStatusCode": 529}}, ModelOverloadedError),
        ({"httpConnectionFailed": {}}, ModelUnavailableError),
        ("unauthorized", ModelAccessError),
        ("other", ModelRateLimitedError),
    ],
)
def test_the_status_of_the_provider_takes_precedence_over_the_kind_of_error(
    info: object, kind: type[ModelError]
) -> None:
    turn = CodexTurn()
    turn.read(failed_turn(info), "turn/completed")
    assert type(turn.failure) is kind


def tokens(given: int, written: int) -> dict[str, int]:
    return {
        "inputTokens": given,
        "outputTokens": written,
        "cachedInputTokens": 0,
        "reasoningOutputTokens": 0,
        "totalTokens": given + written,
    }


def test_the_tokens_of_all_model_calls_of_a_turn_are_counted() -> None:
    turn = CodexTurn()
    for last, total in (((10, 1), (110, 11)), ((20, 2), (130, 13)), ((20, 2), (130, 13))):
        usage = {"last": tokens(*last), "total": tokens(*total)}
        reported = wire.ThreadTokenUsageUpdatedNotification.model_validate({**IDS, "tokenUsage": usage})
        turn.read(reported, "thread/tokenUsage/updated")
    assert turn.finish().usage == Usage(30, 3)


def test_a_retry_of_codex_restarts_the_response() -> None:
    body = {**IDS, "willRetry": True, "error": {"message": "stream disconnected"}}
    assert CodexTurn().read(wire.ErrorNotification.model_validate(body), "error") == [ResponseRestarted()]
