from __future__ import annotations

import msgspec
import pytest

from midstream import errors
from midstream.dialects.api_errors import ApiError, refusal_of
from midstream.dialects.dialect_registry import CHAT, DIALECTS, MESSAGES
from midstream.errors import MidstreamError, ModelUnavailableError, OverloadedError, SeqnoGapError
from tests.spec import spec

EVERY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MidstreamError) and kind is not SeqnoGapError
]
RETRIED_BY_SDKS = {408, 409, 429}


@spec("REUSE-68")
@pytest.mark.parametrize("kind", EVERY)
def test_every_error_has_a_status_and_a_retry_flag(kind: type[MidstreamError]) -> None:
    refusal = refusal_of(kind("what happened"))
    assert 400 <= refusal.status < 600
    is_final = kind.retry in ("never", "ask")
    assert refusal.is_final is is_final
    assert refusal.headers()["x-should-retry"] == ("false" if is_final else "true")
    for dialect in DIALECTS:
        assert msgspec.json.decode(dialect.error_body(refusal)) == dialect.error(refusal)


def test_a_retry_delay_is_whole_seconds_and_never_zero() -> None:
    assert refusal_of(ModelUnavailableError("x", retry_after_s=0.2)).headers()["retry-after"] == "1"
    assert refusal_of(ModelUnavailableError("x", retry_after_s=2.6)).headers()["retry-after"] == "3"
    assert refusal_of(OverloadedError("x")).headers()["retry-after"] == "1"


def test_each_api_has_its_own_error_names_and_anthropics_its_own_overload_status() -> None:
    refusal = ApiError(503, "overloaded", "come back")
    assert [dialect.status(refusal) for dialect in DIALECTS] == [503, 503, 529]
    assert CHAT.error(refusal)["error"]["type"] == "server_error"
    assert MESSAGES.error(refusal)["error"]["type"] == "overloaded_error"
    bad = ApiError(422, "reused", "no", param="n")
    assert CHAT.error(bad)["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "n",
        "code": "reused",
    }
    assert MESSAGES.error(bad)["error"]["type"] == "invalid_request_error"
