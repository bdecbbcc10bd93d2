from __future__ import annotations

import pytest

from midstream.dialects.request_repeats import KeyReused, KnownRun, Request, find_repeated, request_of
from tests.spec import spec


def request(
    body: bytes = b"x", *, key: str = "", retries: str = "0", session: str = "", is_named: bool = False
) -> Request:
    headers = {"x-stainless-retry-count": retries, "idempotency-key": key, "x-midstream-session": session}
    return request_of(
        "/chat", {name: value for name, value in headers.items() if value}, body, is_named=is_named
    )


LEFT = {"is_left": True, "has_readers": False}
READ = {"is_left": False, "has_readers": True}
OVER = {"is_left": False, "has_readers": False}


@spec("REUSE-70")
@spec("REUSE-71")
@pytest.mark.parametrize(
    ("state", "plain", "retry", "named"),
    [(LEFT, True, True, True), (READ, False, True, True), (OVER, False, True, False)],
)
def test_the_runs_that_a_request_joins(
    state: dict[str, bool], *, plain: bool, retry: bool, named: bool
) -> None:
    run = KnownRun(request(), at=1.0, **state)
    assert (find_repeated(request(), [run]) is run) is plain
    assert (find_repeated(request(retries="1"), [run]) is run) is retry
    assert (find_repeated(request(is_named=True), [run]) is run) is named


def test_another_body_path_or_session_is_another_request() -> None:
    run = KnownRun(request(), at=1.0, **LEFT)
    for other in (request(b"y"), request(session="s"), request_of("/messages", {}, b"x", is_named=False)):
        assert find_repeated(other, [run]) is None


@spec("REUSE-70")
def test_a_key_is_one_run_and_no_other() -> None:
    run = KnownRun(request(key="k"), at=1.0, **OVER)
    assert find_repeated(request(key="k"), [run]) is run
    assert find_repeated(request(b"y", key="k"), [run]) == KeyReused()
    assert find_repeated(request(key="other"), [run]) is None
    assert find_repeated(request(retries="3"), [run]) is None


def test_each_retry_of_several_equal_requests_finds_an_abandoned_run() -> None:
    runs = [
        KnownRun(request(), at=1.0, **LEFT),
        KnownRun(request(), at=3.0, **OVER),
        KnownRun(request(), at=2.0, **READ),
    ]
    assert find_repeated(request(retries="1"), runs) is runs[0]
    assert find_repeated(request(retries="1"), runs[1:]) is runs[2]


@pytest.mark.parametrize("count", ["", "x", "-1", "٣", "0"])
def test_an_invalid_retry_count_is_not_a_retry(count: str) -> None:
    assert not request_of("/chat", {"x-stainless-retry-count": count}, b"", is_named=False).is_retry
