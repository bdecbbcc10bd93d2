"""Each error has one status, a stable code and a next step, and exposes nothing else."""

from __future__ import annotations

import msgspec
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Scope

from midstream import errors
from midstream.errors import (
    DrainingError,
    EventGoneError,
    FrameTooLargeError,
    MalformedFrameError,
    MidstreamError,
    SeqnoGapError,
    SessionNotFoundError,
    StoreDamagedError,
    WrongSecretError,
)
from midstream.server.api.problems import (
    Problem,
    internal_problem,
    problem_of,
    problem_of_http,
    refuse,
    response_of,
    status_of,
)

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MidstreamError)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_a_code_and_a_next_step(kind: type[MidstreamError]) -> None:
    error = kind("it", expected=3) if issubclass(kind, SeqnoGapError) else kind("it")
    problem = problem_of(error)
    assert 400 <= problem.status <= 503
    assert (problem.code, problem.retry, problem.detail) == (kind.code, kind.retry, "it")
    assert problem.next.endswith(".")
    assert ("retry-after" in problem.headers) == (kind.retry == "later")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MalformedFrameError(""), 400),
        (WrongSecretError(""), 403),
        (SessionNotFoundError(""), 404),
        (SeqnoGapError("", expected=0), 409),
        (EventGoneError(""), 410),
        (FrameTooLargeError(""), 413),
        (StoreDamagedError(""), 500),
        (DrainingError(""), 503),
    ],
)
def test_the_nearest_class_in_the_hierarchy_decides_the_status(error: MidstreamError, status: int) -> None:
    assert status_of(type(error)) == status


def test_a_problem_has_exactly_these_fields() -> None:
    error = SeqnoGapError("command 5 came before command 3", expected=3)
    assert msgspec.to_builtins(problem_of(error)) == {
        "type": "urn:midstream:error:seqno_gap",
        "title": "Seqno gap",
        "status": 409,
        "detail": "command 5 came before command 3",
        "code": "seqno_gap",
        "next": "Play back your commands from number `expected`.",
        "expected": 3,
    }


def test_a_problem_with_a_known_delay_has_a_retry_after_header() -> None:
    response = response_of(problem_of(DrainingError("soon", retry_after_s=7.4)))
    assert (response.headers["retry-after"], response.media_type) == ("7", "application/problem+json")


def test_an_internal_error_exposes_no_detail() -> None:
    problem = internal_problem()
    assert (problem.status, problem.code, problem.retry) == (500, "internal", "never")


def test_a_request_without_endpoint_gets_a_problem_too() -> None:
    assert problem_of_http(HTTPException(404)).code == "not_found"
    assert problem_of_http(HTTPException(405)).code == "method_not_allowed"


@pytest.mark.parametrize(
    ("extensions", "expected"),
    [
        ({"websocket.http.response": {}}, ["websocket.http.response.start", "websocket.http.response.body"]),
        ({}, ["websocket.close"]),
    ],
)
async def test_a_handshake_is_refused_with_a_response_where_the_server_supports_it(
    extensions: Scope, expected: list[str]
) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    problem: Problem = internal_problem()
    await refuse(problem, {"type": "websocket", "extensions": extensions}, receive, send)
    assert [message["type"] for message in sent] == expected
