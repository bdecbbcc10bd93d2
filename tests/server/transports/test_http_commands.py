"""One frame of a client by POST, and its response."""

from __future__ import annotations

import asyncio

import pytest

from midstream.protocol.stream_settings import StreamSettings
from midstream.store.contract import Batch
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Stall, text
from midstream.testing.turns import records_until_end
from tests.server.serving import KEYS, WAIT_S, Json, abort, asgi_client, command, make_app, post
from tests.spec import spec


async def test_a_repeated_command_is_acknowledged_again_and_marked() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        first = await post(client, command())
        again = await post(client, command())
        turns = (await client.get("/v1/sessions/s1")).json()["turns"]
    assert first.json() == again.json() == {"type": "ack", "seqno": 0}
    assert again.headers["x-midstream-replayed"] == "true"
    assert turns == 1


async def test_the_standard_name_of_the_key_header_is_accepted() -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.post(
            "/v1/sessions/s1/commands",
            json=command(),
            headers={
                "idempotency-key": "k9",
                "x-idempotent-encryption-key": KEYS["x-idempotent-encryption-key"],
            },
        )
    assert answer.status_code == 200


BAD_COMMANDS: list[tuple[object, dict[str, str], int, str]] = [
    (abort(0), {}, 404, "session_not_found"),
    (abort(1), {}, 409, "seqno_gap"),
    (command(), {"x-idempotency-key": ""}, 400, "malformed_frame"),
    (command(), {"x-idempotent-encryption-key": ""}, 400, "malformed_frame"),
    (command(), {"x-idempotency-key": "k" * 257}, 400, "malformed_frame"),
    (command(-1), {}, 400, "malformed_frame"),
    ({"type": "open"}, {}, 400, "malformed_frame"),
    ({"type": "ping"}, {"x-idempotency-key": ""}, 404, "session_not_found"),
    ({"type": "ping"}, {"x-idempotency-cancel-after": "soon"}, 400, "malformed_frame"),
    ({"type": "close"}, {"x-idempotency-cancel-after": "soon"}, 400, "malformed_frame"),
    ({"type": "command", "seqno": 0, "payload": {"type": "sing"}}, {}, 400, "malformed_frame"),
    ([], {}, 400, "malformed_frame"),
]


@pytest.mark.parametrize(("frame", "headers", "status", "code"), BAD_COMMANDS)
async def test_a_refused_command_leaves_no_session_behind(
    frame: Json, headers: dict[str, str], status: int, code: str
) -> None:
    async with asgi_client(make_app()) as client:
        answer = await post(client, frame, **headers)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/problem+json"
        assert (await client.get("/v1/sessions")).json() == {"sessions": [], "next": None}


async def test_a_gap_reports_the_expected_number() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command())
        answer = await post(client, abort(5))
        unknown = await post(client, abort(5), **{"x-idempotency-key": "k7"})
    assert (answer.status_code, answer.json()["code"], answer.json()["expected"]) == (409, "seqno_gap", 1)
    assert (unknown.status_code, unknown.json()["expected"]) == (409, 0)


async def test_another_payload_under_a_used_number_is_a_conflict() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command(words="one"))
        await post(client, abort(1))
        answer = await post(client, {**abort(1), "payload": {"type": "cancel", "turn": 7}})
    assert (answer.status_code, answer.json()["code"]) == (409, "seqno_reused")


@spec("STREAM-52")
async def test_the_same_key_with_another_first_message_is_unprocessable() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command(words="one"))
        answer = await post(client, command(words="two"))
    assert (answer.status_code, answer.json()["code"]) == (422, "stream_reused")


class _Held(MemoryStore):
    """A store with appends that wait while the test holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_continue = asyncio.Event()
        self.may_continue.set()
        self.has_begun = asyncio.Event()

    async def append(self, session: str, batch: Batch) -> int:
        if not self.may_continue.is_set():
            self.has_begun.set()
            await self.may_continue.wait()
        return await super().append(session, batch)


def withdrawal(seqno: int) -> Json:
    return {"type": "command", "seqno": seqno, "payload": {"type": "withdraw"}}


@spec("STREAM-56")
async def test_a_command_above_the_in_flight_limit_is_refused_and_may_be_retried() -> None:
    store = _Held()
    app = make_app([text("hello")], store=store)
    app.settings = StreamSettings(in_flight_max=1)
    other = {"x-idempotency-key": "k2"}
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        assert (await post(client, command())).is_success
        await records_until_end(await app.host.session("s1"), after=0)
        store.may_continue.clear()
        first = group.create_task(post(client, withdrawal(0), **other))
        await store.has_begun.wait()
        refused = await post(client, withdrawal(1), **other)
        assert (refused.status_code, refused.json()["code"]) == (400, "protocol")
        again = group.create_task(post(client, withdrawal(0), **other))
        store.may_continue.set()
        assert (await first).json() == (await again).json() == {"type": "ack", "seqno": 0}
        assert (await post(client, withdrawal(1), **other)).json() == {"type": "ack", "seqno": 1}


async def test_a_second_message_during_a_turn_is_refused_as_busy() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command())
        answer = await post(client, command(when_busy="refuse"), **{"x-idempotency-key": "k2"})
    assert (answer.status_code, answer.json()["code"], answer.json()["retry"]) == (
        409,
        "session_busy",
        "later",
    )
