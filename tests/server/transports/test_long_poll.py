"""The stream protocol in long polls: the content of one poll, and of the next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx2
import pytest

from midstream.models.responses import TextDelta
from midstream.protocol.frames import EVENTS_PER_FRAME_MAX
from midstream.protocol.stream_settings import HEARTBEAT_S_MAX, HEARTBEAT_S_MIN, StreamSettings
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Gate, text
from tests.server.serving import (
    KEYS,
    WAIT_S,
    Json,
    Served,
    abort,
    asgi_client,
    command,
    make_app,
    opening,
    records_of,
    served,
    words_of,
)
from tests.spec import spec

URL = "/v1/sessions/s1/poll"
NAMED = {**KEYS, "x-midstream-connection": "one"}


async def poll(
    client: httpx2.AsyncClient, number: int, after: str | None = None, **headers: str
) -> httpx2.Response:
    query = {"n": str(number)} | ({} if after is None else {"after": after})
    return await client.get(URL, params=query, headers={**NAMED, **headers})


async def as_reader(client: httpx2.AsyncClient, number: int, after: str) -> httpx2.Response:
    named = {"x-midstream-connection": "reader"}
    return await client.get(URL, params={"n": str(number), "after": after}, headers=named)


async def post(client: httpx2.AsyncClient, frame: Json, **headers: str) -> httpx2.Response:
    return await client.post("/v1/sessions/s1/commands", json=frame, headers={**NAMED, **headers})


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - the awaited state has no event
            await asyncio.sleep(0)


def kinds_of(body: Json) -> list[str]:
    return [frame["type"] for frame in body["frames"]]


async def until_the_end(client: httpx2.AsyncClient, after: str) -> tuple[list[Json], bool]:
    """Poll on from an event; return all records, and whether the last response announces more."""
    events: list[Json] = []
    number = 1
    while True:
        body = (await poll(client, number, after)).json()
        events += records_of(body["frames"])
        after, number = events[-1]["id"], number + 1
        if events[-1]["record"]["type"] == "turn_ended":
            return events, body["more"]


@spec("STREAM-41")
async def test_polls_deliver_a_turn_to_its_end() -> None:
    async with served(make_app([text("one two three")])) as server, asyncio.timeout(WAIT_S):
        first = await poll(server.http, 0)
        body = first.json()
        assert (kinds_of(body), body["more"]) == (["welcome"], True)
        assert first.headers["cache-control"] == "no-store, no-transform"
        waiting = asyncio.create_task(until_the_end(server.http, body["frames"][0]["resume_from"]))
        assert (await post(server.http, command())).json() == {"type": "ack", "seqno": 0}
        events, has_more = await waiting
        assert words_of(events) == "one two three"
        positions = [int(event["id"].partition("-")[2]) for event in events]
        assert positions == list(range(1, len(events) + 1))
        assert not has_more, "the end is an event, and the last answer says that it was"


@spec("STREAM-41")
async def test_a_poll_waits_for_events_and_returns_a_heartbeat_where_none_come() -> None:
    app = make_app([[TextDelta("half a"), Gate(asyncio.Event())]])
    async with served(app) as server, asyncio.timeout(WAIT_S):
        await post(server.http, command())
        runner = await app.host.session("s1")
        while runner.state.position < 5:
            await runner.wait(runner.newest.position)
        newest = str(runner.newest)
        query = {"n": "1", "after": newest, "wait": "1"}
        body = (await server.http.get(URL, params=query, headers=NAMED)).json()
        assert body == {
            "frames": [{"type": "heartbeat", "event_id": newest, "waiting_on": "model"}],
            "more": True,
        }


@spec("STREAM-56")
async def test_the_polls_of_one_connection_keep_the_settings_of_its_welcome() -> None:
    app = make_app([text("one")])
    async with served(app) as server, asyncio.timeout(WAIT_S):
        await post(server.http, command())
        end, _ = await until_the_end(server.http, "0-0")
        app.settings = StreamSettings(heartbeat_s=HEARTBEAT_S_MIN)
        newest = end[-1]["id"]
        welcome, *_ = (await as_reader(server.http, 0, newest)).json()["frames"]
        app.settings = StreamSettings(heartbeat_s=HEARTBEAT_S_MAX)
        assert welcome["heartbeat_s"] == HEARTBEAT_S_MIN
        assert kinds_of((await as_reader(server.http, 1, newest)).json()) == ["heartbeat"]


@spec("STREAM-37")
async def test_the_next_poll_repeats_a_lost_response() -> None:
    async with served(make_app([text("one")])) as server:
        await post(server.http, command())
        body = (await poll(server.http, 0, "7-3")).json()
        assert kinds_of(body) == ["welcome", "gone"]
        assert kinds_of((await poll(server.http, 1, "7-3")).json())[0] == "gone"


async def test_a_second_poll_may_come_before_the_first_command() -> None:
    app = make_app([text("one")])
    async with served(app) as server, asyncio.timeout(WAIT_S):
        waiting = asyncio.create_task(poll(server.http, 1, "0-0"))
        await _until(lambda: server.app.open_streams > 0)
        await post(server.http, command())
        assert set(kinds_of((await waiting).json())) == {"events"}


@spec("STREAM-49", "STREAM-57")
async def test_a_command_that_overtakes_the_first_one_is_refused_and_leaves_nothing_behind() -> None:
    app = make_app([text("hello")])
    async with asgi_client(app) as client, asyncio.timeout(WAIT_S):
        early = await post(client, abort(1))
        assert (early.status_code, early.json()["code"], early.json()["expected"]) == (409, "seqno_gap", 0)
        assert (await client.get("/v1/sessions")).json()["sessions"] == []
        assert (await client.get("/v1/sessions/s1")).status_code == 404
        for frame in (command(), abort(1)):
            assert (await post(client, frame)).json() == {"type": "ack", "seqno": frame["seqno"]}


@spec("STREAM-37")
async def test_an_open_may_be_the_body_of_a_post() -> None:
    async with asgi_client(make_app([text("one")])) as client, asyncio.timeout(WAIT_S):
        await post(client, command())
        named = {"x-midstream-connection": "one"}
        first = await client.post(f"{URL}?n=0", json=opening(event_id="7-3"), headers=named)
        assert kinds_of(first.json()) == ["welcome", "gone"]
        answer = await client.post(
            "/v1/sessions/s1/events", json=opening(event_id="0-0", next_seqno=1), headers=named
        )
        assert answer.text.count("event: record") > 5
        for body in (command(), {"type": "ping"}, opening(version=0)):
            refused = await client.post(f"{URL}?n=0", json=body)
            assert (refused.status_code, refused.json()["code"]) == (400, "malformed_frame")


@spec("STREAM-37", "STREAM-110")
@pytest.mark.parametrize("path", ["poll", "events"])
async def test_values_in_headers_may_be_missing_in_the_body_and_must_not_contradict_it(path: str) -> None:
    url = f"/v1/sessions/s1/{path}"
    async with asgi_client(make_app([text("one")])) as client, asyncio.timeout(WAIT_S):
        await post(client, command())
        await until_the_end(client, "0-0")
        body = {"type": "open", "stream": "k1", "event_id": "0-0"}
        answer = await client.post(url, json=body, headers=KEYS)
        assert '"stream":"k1"' in answer.text
        assert '"acked":1' in answer.text
        others = {"x-idempotency-key": "k2", "x-idempotent-encryption-key": "t" * 43, "last-event-id": "1-2"}
        for name, value in others.items():
            refused = await client.post(url, json=opening(event_id="0-0"), headers={name: value})
            assert (refused.status_code, refused.json()["code"]) == (400, "malformed_frame")


@spec("STREAM-6", "STREAM-37")
async def test_a_lost_stream_is_recognised_by_the_number_in_the_header() -> None:
    async with asgi_client(make_app([text("one")])) as client:
        await post(client, command(), **{"x-idempotency-key": "another"})
        response = await poll(client, 0, "1-1", **{"x-idempotency-next-seqno": "1"})
        assert (response.status_code, response.json()["code"]) == (404, "stream_not_found")
        wrong = await poll(client, 0, **{"x-idempotency-next-seqno": "many"})
        assert (wrong.status_code, wrong.json()["code"]) == (400, "malformed_frame")


# --- fencing
# ----------------------------------------------------------------------------------------------------


async def _waiting(
    server: Served, number: int, after: str | None, name: str
) -> asyncio.Task[httpx2.Response]:
    waiting = asyncio.create_task(poll(server.http, number, after, **{"x-midstream-connection": name}))
    await _until(lambda: server.app.open_streams > 0)
    return waiting


@spec("STREAM-40")
async def test_a_newer_connection_ends_the_polls_of_an_older_one_also_between_two_of_them() -> None:
    gate = asyncio.Event()
    async with served(make_app([[Gate(gate), *text("one")]])) as server, asyncio.timeout(WAIT_S):
        after = (await poll(server.http, 0)).json()["frames"][0]["resume_from"]
        await post(server.http, command())
        after = (await poll(server.http, 1, after)).json()["frames"][-1]["events"][-1]["id"]
        pending = await _waiting(server, 2, after, "one")
        assert (await poll(server.http, 0, after, **{"x-midstream-connection": "two"})).is_success
        body = (await pending).json()
        assert (kinds_of(body), body["frames"][0]["code"], body["more"]) == (
            ["error"],
            "stream_fenced",
            False,
        )
        late = await poll(server.http, 3, after)
        assert (late.status_code, late.json()["code"]) == (409, "stream_fenced")
        stale = await post(server.http, abort(1))
        assert (stale.status_code, stale.json()["code"]) == (409, "stream_fenced")
        gate.set()
        assert (await poll(server.http, 1, after, **{"x-midstream-connection": "two"})).is_success


@spec("STREAM-40")
async def test_a_websocket_ends_the_earlier_polls() -> None:
    async with served(make_app([[Gate(asyncio.Event())]])) as server, asyncio.timeout(WAIT_S):
        await poll(server.http, 0)
        async with server.socket() as socket:
            await socket.send(json.dumps(opening()))
            await socket.recv()
            refused = await poll(server.http, 1, "0-0")
            assert refused.json()["code"] == "stream_fenced"


@spec("STREAM-50")
async def test_a_poll_duplicated_by_the_network_ends_no_other() -> None:
    gate = asyncio.Event()
    async with served(make_app([[Gate(gate), *text("one")]])) as server, asyncio.timeout(WAIT_S):
        after = (await poll(server.http, 0)).json()["frames"][0]["resume_from"]
        await post(server.http, command())
        after = (await poll(server.http, 1, after)).json()["frames"][-1]["events"][-1]["id"]
        first = await _waiting(server, 2, after, "one")
        again = asyncio.create_task(poll(server.http, 2, after))
        await _until(lambda: server.app.open_streams == 2)
        gate.set()
        assert kinds_of((await first).json()) == kinds_of((await again).json()) == ["events"]


@spec("STREAM-50")
async def test_an_older_connection_between_two_polls_of_the_newer_one_is_ended() -> None:
    async with served(make_app([text("one")])) as server, asyncio.timeout(WAIT_S):
        newer, older = {"x-idempotency-connection": "2"}, {"x-idempotency-connection": "1"}
        after = (await poll(server.http, 0, **newer)).json()["frames"][0]["resume_from"]
        late = await poll(server.http, 0, **older, **{"x-midstream-connection": "late"})
        assert (late.status_code, late.json()["code"]) == (409, "stream_fenced")
        async with server.socket() as socket:
            await socket.send(json.dumps(opening(connection=1)))
            assert "stream_fenced" in [json.loads(await socket.recv()).get("code") for _ in range(2)]
        assert (await post(server.http, command(), **newer)).is_success
        assert kinds_of((await poll(server.http, 1, after, **newer)).json()) == ["events"]


@spec("STREAM-50")
async def test_names_distinguish_two_connections_with_equal_numbers() -> None:
    async with served(make_app([text("one")])) as server, asyncio.timeout(WAIT_S):
        copy = {"x-midstream-connection": "copy"}
        for _ in range(2):  # The second time as a repetition by the network.
            assert (await poll(server.http, 0, **{"x-idempotency-connection": "7"})).is_success
        assert (await poll(server.http, 0, **{"x-idempotency-connection": "7"}, **copy)).is_success
        refused = await post(server.http, command())
        assert (refused.status_code, refused.json()["code"]) == (409, "stream_fenced")
        assert (await post(server.http, command(), **copy)).is_success


@spec("STREAM-50", "STREAM-103")
async def test_a_command_without_a_name_is_judged_by_its_number() -> None:
    async with served(make_app([text("one")])) as server, asyncio.timeout(WAIT_S), server.socket() as socket:
        await socket.send(json.dumps(opening(connection=2)))
        await socket.recv()
        sender = {**KEYS, "x-idempotency-connection": "1"}
        path = "/v1/sessions/s1/commands"
        stale = await server.http.post(path, json=command(), headers=sender)
        assert (stale.status_code, stale.json()["code"]) == (409, "stream_fenced")
        sender["x-idempotency-connection"] = "2"
        assert (await server.http.post(path, json=command(), headers=sender)).is_success


async def test_a_connection_without_a_name_is_not_judged_by_names() -> None:
    async with asgi_client(make_app([text("one")])) as client:
        await poll(client, 0)
        unnamed = await client.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        assert unnamed.is_success


# --- frames of the client
# ---------------------------------------------------------------------------------------


@spec("STREAM-39")
async def test_a_ping_gets_a_heartbeat_and_a_close_ends_waiting_polls() -> None:
    async with served(make_app([[TextDelta("a"), Gate(asyncio.Event())]])) as server, asyncio.timeout(WAIT_S):
        await post(server.http, command())
        runner = await server.app.host.session("s1")
        while runner.state.position < 5:
            await runner.wait(runner.newest.position)
        newest = str(runner.newest)
        heartbeat = (await post(server.http, {"type": "ping"})).json()
        assert heartbeat == {"type": "heartbeat", "event_id": newest, "waiting_on": "model"}
        await poll(server.http, 0, newest)
        pending = await _waiting(server, 1, newest, "one")
        repeated = asyncio.create_task(poll(server.http, 1, newest))
        await _until(lambda: server.app.open_streams == 2)
        other = await post(server.http, {"type": "close"}, **{"x-midstream-connection": "two"})
        assert (other.status_code, pending.done()) == (204, False)
        assert (await post(server.http, {"type": "close"})).status_code == 204
        assert (await pending).json() == (await repeated).json() == {"frames": [], "more": False}


@spec("STREAM-31", "STREAM-39")
async def test_a_stream_in_an_empty_session_has_heartbeats_too() -> None:
    async with served(make_app()) as server:
        url, ping = "/v1/sessions/s1/commands", {"type": "ping"}
        answer = await server.http.post(url, json=ping, headers=KEYS)
        assert answer.json() == {"type": "heartbeat", "event_id": "0-0", "waiting_on": "nothing"}
        assert (await server.http.post(url, json=ping)).status_code == 404
        assert (await server.http.get("/v1/sessions")).json()["sessions"] == []


@spec("STREAM-39")
async def test_an_open_is_refused_as_a_command() -> None:
    async with asgi_client(make_app()) as client:
        refused = await post(client, opening())
        assert (refused.status_code, refused.json()["code"]) == (400, "malformed_frame")
        long = await post(client, {"type": "close"}, **{"x-midstream-connection": "x" * 300})
        assert long.json()["code"] == "malformed_frame"


# --- cost of a poll
# ---------------------------------------------------------------------------------------------


async def test_a_response_has_one_page_of_a_long_journal() -> None:
    words = " ".join("word" for _ in range(3 * EVENTS_PER_FRAME_MAX))
    async with asgi_client(make_app([text(words)])) as client, asyncio.timeout(WAIT_S):
        await post(client, command())
        events, _ = await until_the_end(client, "0-0")
        count, after = len(events), "0-0"
        body = (await poll(client, 0, after)).json()
        for number in range(1, count):
            body = (await poll(client, number, after)).json()
            page = records_of(body["frames"])
            assert len(page) <= EVENTS_PER_FRAME_MAX
            after = page[-1]["id"]
            if not body["more"]:
                break
        assert (after, number >= count // EVENTS_PER_FRAME_MAX) == (events[-1]["id"], True)


async def test_a_disconnected_poll_releases_its_slot() -> None:
    async with served(make_app([text("one")])) as server, asyncio.timeout(WAIT_S):
        after = (await poll(server.http, 0)).json()["frames"][0]["resume_from"]
        pending = await _waiting(server, 1, after, "one")
        pending.cancel()
        await asyncio.wait((pending,))
        await _until(lambda: server.app.open_streams == 0)


async def test_a_poll_waits_for_the_configured_heartbeat() -> None:
    async with served(make_app([text("one")])) as server, asyncio.timeout(WAIT_S):
        server.app.settings = StreamSettings(heartbeat_s=HEARTBEAT_S_MIN)
        welcome = (await poll(server.http, 0)).json()["frames"][0]
        assert welcome["heartbeat_s"] == HEARTBEAT_S_MIN
        assert kinds_of((await poll(server.http, 1, welcome["resume_from"])).json()) == ["heartbeat"]


async def test_a_draining_server_answers_waiting_polls_and_refuses_new_ones() -> None:
    async with served(make_app([text("one")], store=MemoryStore())) as server, asyncio.timeout(WAIT_S):
        after = (await poll(server.http, 0)).json()["frames"][0]["resume_from"]
        pending = await _waiting(server, 1, after, "one")
        server.app.drain()
        body = (await pending).json()
        assert (body["frames"][0]["code"], body["more"]) == ("draining", False)
        assert (await poll(server.http, 2, after)).status_code == 503


async def test_a_wrong_secret_and_a_head_request_are_refused() -> None:
    async with asgi_client(make_app([text("one")])) as client:
        await post(client, command())
        wrong = await poll(client, 0, **{"x-idempotent-encryption-key": "x" * 43})
        assert (wrong.status_code, wrong.json()["code"]) == (403, "wrong_secret")
        assert (await client.head(URL)).status_code == 405
