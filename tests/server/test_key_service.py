from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path

import httpx2
import pytest

from midstream.errors import StoreBusyError
from midstream.server import key_app
from midstream.store.encryption.ciphers import FileKeys, OperatorKeys
from tests.key_endpoint import TOKEN, Accepted
from tests.spec import spec
from tests.store.keys import keys_in

BEARER = {"authorization": f"Bearer {TOKEN}"}
CONTEXT = b64encode(b"c").decode()


def _client(keys: OperatorKeys) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=key_app(keys, authorize=Accepted()))
    return httpx2.AsyncClient(transport=transport, base_url="https://keys.example")


def _message(*keys: bytes) -> dict[str, list[dict[str, str]]]:
    return {"keys": [{"key": b64encode(key).decode(), "context": CONTEXT} for key in keys]}


@spec("SEC-61")
async def test_a_key_is_wrapped_and_unwrapped_by_the_keys_of_the_application(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    async with _client(keys) as client:
        wrapped = await client.post("/wrap", json=_message(b"k" * 32), headers=BEARER)
        assert wrapped.headers["cache-control"] == "no-store"
        assert wrapped.json()["generation"] == "1"
        key = b64decode(wrapped.json()["keys"][0]["key"])
        assert await keys.unwrap(key, context=b"c") == b"k" * 32
        unwrapped = await client.post("/unwrap", json=_message(key), headers=BEARER)
        assert unwrapped.json() == {"keys": [{"key": b64encode(b"k" * 32).decode()}], "generation": "1"}


@spec("SEC-61")
@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, b"?" * 99, 401, "unauthorized"),
        ({"authorization": f"Basic {TOKEN}"}, b"{}", 401, "unauthorized"),
        ({"authorization": "Bearer another"}, b"{}", 401, "unauthorized"),
        (BEARER, b"{}", 400, "malformed"),
        (BEARER, b"[" * 60_000, 400, "malformed"),
        (BEARER, b" " * 65_537, 413, "malformed"),
        (BEARER, json.dumps(_message(*[b"?"] * 65)).encode(), 400, "malformed"),
    ],
)
async def test_a_refused_request_gets_a_reason(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    async with _client(keys_in(tmp_path)) as client:
        refused = await client.post("/unwrap", content=body, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (status, code)


@spec("SEC-61")
async def test_a_key_that_cannot_be_unwrapped_affects_no_other_one(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    wrapped = await keys.wrap(b"k" * 32, context=b"c")
    async with _client(keys) as client:
        answer = await client.post("/unwrap", json=_message(b"?" * 99, wrapped), headers=BEARER)
    refused, unwrapped = answer.json()["keys"]
    assert (refused["code"], "key" in refused) == ("key_missing", False)
    assert unwrapped == {"key": b64encode(b"k" * 32).decode()}


@spec("SEC-62")
async def test_unavailable_keys_get_a_retryable_refusal(tmp_path: Path) -> None:
    class Away(FileKeys):
        async def wrap(self, key: bytes, *, context: bytes) -> bytes:
            raise StoreBusyError(f"no {len(key)} bytes for {len(context)} now")

    keys_in(tmp_path)
    async with _client(Away(tmp_path / "keys")) as client:
        refused = await client.post("/wrap", json=_message(b"k"), headers=BEARER)
    assert (refused.status_code, refused.json()["code"]) == (503, "store_busy")
