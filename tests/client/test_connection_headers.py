"""The headers of a client's connections: given ones, a function's, and none for a program in the server's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream.client.connection_headers import ConnectionHeaders
from midstream.errors import ConnectionLostError, UnauthorizedError, UsageError
from midstream.local_keys import prove_server, read_or_make_key
from tests.spec import spec
from tests.test_local_keys import proving

GIVEN = {"Authorization": "Bearer mine"}


async def test_given_headers_are_sent_and_a_function_is_called_for_each_connection() -> None:
    assert await ConnectionHeaders("http://127.0.0.1:1", GIVEN)() == GIVEN
    numbers = iter(range(9))
    headers = ConnectionHeaders("http://127.0.0.1:1", lambda: {"authorization": f"Bearer {next(numbers)}"})
    assert [(await headers())["authorization"] for _ in range(2)] == ["Bearer 0", "Bearer 1"]


async def test_what_no_request_can_carry_is_refused() -> None:
    with pytest.raises(UsageError):
        ConnectionHeaders("http://127.0.0.1:1", {"x-a": "b\r\nc"})
    with pytest.raises(UsageError):
        await ConnectionHeaders("http://127.0.0.1:1", lambda: {"x-a": "b\r\nc"})()


@spec("SEC-12")
async def test_after_a_proof_nothing_is_sent_to_a_program_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    monkeypatch.delenv("MIDSTREAM_TOKEN", raising=False)
    key, answers = read_or_make_key(tmp_path), ["good"]

    def prove(nonce: str, address: str) -> Any:  # noqa: ANN401 - JSON
        if answers[-1] == "none":
            return None
        known = key if answers[-1] == "good" else "another"
        return {"start": "start-1", "proof": prove_server(known, address, "start-1", nonce)}

    with proving(prove) as (url, _):
        answers.append("wrong")
        headers = ConnectionHeaders(url, {})
        with pytest.raises(UnauthorizedError):
            await headers()
        answers.append("good")
        assert "authorization" in await headers()
        for answer in ("none", "wrong"):
            answers.append(answer)
            with pytest.raises(ConnectionLostError):
                await headers()
        answers.append("good")
        assert "authorization" in await headers()
