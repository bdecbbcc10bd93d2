"""Every known refusal, and its typed error."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.models.provider_errors import CODES, OVERFLOW_WORDS, STATUSES, TYPES, error_of
from tests.spec import spec


@spec("TURN-59")
@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (429, {"message": "slow down", "type": "requests"}, ModelRateLimitedError),
        (429, {"message": "pay first", "code": "insufficient_quota"}, ModelQuotaError),
        (429, {"message": "pay first", "type": "insufficient_quota", "code": None}, ModelQuotaError),
        (429, {"code": "rate_limit_exceeded", "type": "tokens"}, ModelRateLimitedError),
        (500, None, ModelUnavailableError),
        (503, "loading", ModelOverloadedError),
        (408, {}, ModelUnavailableError),
        (529, {"type": "overloaded_error", "message": "Overloaded"}, ModelOverloadedError),
        (400, {"message": "bad", "type": "invalid_request_error"}, ModelRejectedError),
        (401, {"message": "bad key"}, ModelAccessError),
        (402, {"type": "billing_error"}, ModelQuotaError),
        (403, {}, ModelAccessError),
        (404, {"message": "no such model", "type": "invalid_request_error"}, ModelAccessError),
        (404, {"type": "not_found_error", "message": "model: x"}, ModelNotFoundError),
        (302, None, ModelAccessError),
        (499, None, ModelUnavailableError),
        (477, None, ModelRejectedError),
        (577, None, ModelUnavailableError),
        (400, {"code": "context_length_exceeded"}, ContextOverflowError),
        (500, {"message": "the prompt exceeds the context size"}, ContextOverflowError),
        (400, {"message": "prompt is too long: 210000 tokens > 200000 maximum"}, ContextOverflowError),
        (413, {"type": "request_too_large", "message": "Request exceeds the size"}, ContextOverflowError),
        (413, None, ContextOverflowError),
        (
            400,
            {"message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."},
            ContextOverflowError,
        ),
        (400, {"code": "content_filter", "message": "no"}, ModelFilteredError),
        (400, {"code": "x", "innererror": {"code": "ResponsibleAIPolicyViolation"}}, ModelFilteredError),
        (
            403,
            {"type": "permission_error", "details": {"error_code": "enforced_spend_limit_reached"}},
            ModelQuotaError,
        ),
        (429, {"code": 429, "status": "RESOURCE_EXHAUSTED"}, ModelRateLimitedError),
        (400, {"code": 400, "status": "FAILED_PRECONDITION"}, ModelAccessError),
        (504, {"type": "timeout_error"}, ModelStalledError),
        (None, {"message": "no reason"}, ModelUnavailableError),
        (None, {"message": "slow down", "code": 429}, ModelRateLimitedError),
        (None, {"message": "bad", "code": 400}, ModelRejectedError),
        (None, {"type": "overloaded_error"}, ModelOverloadedError),
        (None, {"type": "invalid_request_error"}, ModelRejectedError),
        (None, {"type": "authentication_error"}, ModelAccessError),
    ],
)
def test_only_temporary_failures_are_retryable(
    status: int | None, error: object, kind: type[ModelError]
) -> None:
    assert type(error_of(error, status=status)) is kind


@spec("TURN-59")
@pytest.mark.parametrize("code", CODES)
def test_every_known_code_outranks_its_status(code: str) -> None:
    for status in (None, 400, 500):
        assert type(error_of({"code": code, "message": "x"}, status=status)) is CODES[code]
        assert type(error_of({"type": code, "message": "x"}, status=status)) is CODES[code]


@spec("TURN-59")
@pytest.mark.parametrize("status", STATUSES)
def test_every_known_status_decides_where_no_code_is_known(status: int) -> None:
    assert type(error_of({"code": "unheard_of", "message": "x"}, status=status)) is STATUSES[status]


@pytest.mark.parametrize("words", OVERFLOW_WORDS)
def test_error_texts_about_the_length_are_recognised(words: str) -> None:
    assert type(error_of({"message": f"Sorry: {words.upper()} 5"}, status=400)) is ContextOverflowError


@spec("TURN-59")
def test_each_error_type_of_the_tables_is_retried_or_not_or_needs_a_person() -> None:
    found: dict[str, set[str]] = {}
    for kind in {*STATUSES.values(), *CODES.values(), *TYPES.values()}:
        found.setdefault(kind.retry, set()).add(kind.__name__)
    assert found == {
        "later": {
            "ModelUnavailableError",
            "ModelOverloadedError",
            "ModelRateLimitedError",
            "ModelStalledError",
        },
        "never": {"ModelRejectedError", "ModelFilteredError", "ContextOverflowError"},
        "ask": {"ModelAccessError", "ModelQuotaError", "ModelNotFoundError"},
    }


def test_every_code_of_the_providers_own_sdks_is_in_the_tables() -> None:
    anthropic = pytest.importorskip("anthropic.types.shared.error_type")
    responses = pytest.importorskip("openai.types.responses.response_error")
    theirs = {
        *typing.get_args(anthropic.ErrorType),
        *typing.get_args(responses.ResponseError.model_fields["code"].annotation),
    }
    assert theirs - CODES.keys() - TYPES.keys() == set()


def test_an_error_contains_advice() -> None:
    assert "API key" in error_of({"message": "no"}, status=401).message
    assert "resume the turn" in error_of({"message": "no"}, status=402).message
    assert "longer than the model can read" in error_of({"type": "exceed_context_size_error"}).message
    waiting = error_of({"message": "slow down"}, status=429, retry_after_s=3.5)
    assert waiting.retry_after_s == 3.5


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["code", "type", "status", "message", "details", "innererror", "error_code"]),
            inner,
        )
    ),
    max_leaves=5,
)


@given(_json, st.none() | st.integers(0, 1000))
def test_any_response_of_a_server_gives_a_typed_error(error: object, status: int | None) -> None:
    assert isinstance(error_of(error, status=status), ModelError)
