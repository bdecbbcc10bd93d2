"""Error messages of agents, as they print them, and their classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.agents.upstream_errors import NAMES, SIGNS, kind_of, upstream_error
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
)
from midstream.models.provider_errors import REASON_CHARS_MAX

ID = "979cab47-a5b0-45fa-9cfa-13a3a4678ae1"
PRINTED: list[tuple[str, type[ModelError]]] = [
    (f"No conversation found with session ID: {ID}", UpstreamGoneError),
    ('--resume requires a valid session ID. Provided value "x" is not a UUID', UpstreamGoneError),
    (f"No message found with message.uuid of: {ID}", UpstreamGoneError),
    (f"Session not found: {ID}", UpstreamGoneError),
    ("Internal error: Session not found: Session not found", UpstreamGoneError),
    (f"no rollout found for thread id {ID}", UpstreamGoneError),
    ("rollout /some/where.jsonl is empty", UpstreamGoneError),
    ("Previous response with id 'resp_1' not found.", UpstreamGoneError),
    ("Session abc has expired", UpstreamGoneError),
    (f"Session {ID} is currently running as a background agent (bg). Use `claude agents`", UpstreamBusyError),
    (f"Session {ID} is running as a background session (979cab47). Run `claude attach`", UpstreamBusyError),
    (f"Error: Session ID {ID} is already in use.", UpstreamBusyError),
    ("Agent is already processing a prompt; wait for it", UpstreamBusyError),
    ("Another process is currently operating on this conversation. Please retry", UpstreamBusyError),
    ("Invalid API key · Please run /login", ModelAccessError),
    ("Credit balance is too low", ModelQuotaError),
    ("OAuth token has expired. Please obtain a new token", ModelAccessError),
    ("Authentication required", ModelAccessError),
    ("Prompt is too long", ContextOverflowError),
    ("API Error: 400 messages.3: `tool_use` ids were found", UpstreamFailedError),
    (
        'API Error: 400 {"type":"error","error":{"type":"invalid_request_error","message":"no"}}',
        ModelRejectedError,
    ),
    ("unexpected status 401 Unauthorized: no, url: http://127.0.0.1/v1/responses", ModelAccessError),
    ("exceeded retry limit, last status: 429 Too Many Requests", ModelRateLimitedError),
    (
        '{"error": {"message": "no", "type": "invalid_request_error", "code": "invalid_value"}}',
        ModelRejectedError,
    ),
    ("Resume rejected by --resume-drops-turn: the range holds more", ModelRejectedError),
    ("Claude AI usage limit reached|1764000000", ModelRateLimitedError),
    ("API Error: Overloaded", ModelOverloadedError),
    ("connect ECONNREFUSED 127.0.0.1:443", ModelUnavailableError),
    ("Request timed out.", ModelStalledError),
]


@pytest.mark.parametrize(("words", "kind"), PRINTED)
def test_printed_errors_are_classified(words: str, kind: type[ModelError]) -> None:
    error = upstream_error("claude", words)
    assert type(error) is kind
    assert words[:40].split(":", maxsplit=1)[0] in str(error)


@pytest.mark.parametrize(("words", "kind"), PRINTED)
def test_text_around_an_error_its_case_and_its_line_breaks_do_not_matter(
    words: str, kind: type[ModelError]
) -> None:
    if kind is UpstreamFailedError:
        return
    shouted = (
        f"npm warn something\n\nError:  {words.upper().replace(' ', chr(10) + '  ')}\n    at process (node:1)"
    )
    assert kind_of(shouted) is kind


def test_every_sign_matches_its_own_row() -> None:
    for kind, signs in SIGNS:
        for sign in signs:
            assert sign == sign.lower()
            assert kind_of(sign.replace("&", "x")) is kind, sign


def test_every_name_matches_its_own_row_whatever_its_case() -> None:
    for name, kind in NAMES.items():
        assert name == name.lower()
        assert kind_of("", names=[name.upper()]) is kind


def test_a_name_takes_precedence_over_text_and_a_gone_conversation_over_a_status() -> None:
    assert kind_of("rate limit", names=["agent_busy"]) is UpstreamBusyError
    assert kind_of("Session not found", status=401) is UpstreamGoneError
    assert kind_of("something", status=401) is ModelAccessError
    assert kind_of("something", names=[None, "RESOURCE_EXHAUSTED"], status=400) is ModelRateLimitedError
    assert kind_of("unauthorized", status=529) is ModelOverloadedError


def test_an_unknown_error_is_a_failed_run() -> None:
    assert kind_of("exit code 1") is None
    error = upstream_error("claude", "", retry_after_s=3.0)
    assert (type(error), str(error), error.retry_after_s) == (
        UpstreamFailedError,
        "claude failed: no reason was given",
        3.0,
    )
    assert type(upstream_error("x", "?", unknown=UpstreamGoneError)) is UpstreamGoneError


def test_an_error_quotes_only_its_beginning() -> None:
    error = upstream_error("claude", "word " * 1000)
    assert len(str(error)) < REASON_CHARS_MAX + 50


@given(st.text(), st.lists(st.one_of(st.none(), st.text(), st.integers())), st.none() | st.integers())
def test_any_text_has_an_error_class(words: str, names: list[object], status: int | None) -> None:
    assert isinstance(upstream_error("x", words, names=names, status=status), ModelError)
