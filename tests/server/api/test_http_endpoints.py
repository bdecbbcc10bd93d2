"""Sessions as JSON, commands by POST, events by server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager

import httpx2
import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import (
    MidstreamError,
    ModelRejectedError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
)
from midstream.protocol.sse import ServerSentEvent, SseDecoder
from midstream.session.records import SessionStatus, Sync
from midstream.store.contract import Batch, ListPlace, SessionInfo, SessionListing, StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import Gate, Script, Stall, calls, text
from midstream.testing.store_fakes import FailingStore, StoreInFront
from midstream.testing.turns import records_until_end
from midstream.tools.function_tools import tool
from tests.house.source import ROOT
from tests.server.serving import (
    KEYS,
    WAIT_S,
    Served,
    Socket,
    abort,
    asgi_client,
    command,
    make_app,
    opening,
    post,
    send_payload,
    served,
)
from tests.spec import spec


@tool(has_effects=False)
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def events_of(response: httpx2.Response) -> AsyncIterator[ServerSentEvent]:
    decoder = SseDecoder()
    async for piece in response.aiter_bytes():
        for event in decoder.feed(piece):
            yield event


def following(
    server: Served, query: str = "", **headers: str
) -> AbstractAsyncContextManager[httpx2.Response]:
    return server.http.stream("GET", f"/v1/sessions/s1/events{query}", headers=headers)


def kinds_of(events: list[ServerSentEvent]) -> list[str]:
    return [json.loads(event.data)["type"] for event in events if event.event == "record"]


# --- commands and events ------------------------------------------------------------------------------------------


@spec("STREAM-27", "STREAM-112")
async def test_an_event_stream_over_http_sends_the_whole_turn_and_ends_with_it() -> None:
    async with served(make_app([text("hello world")])) as server:
        acked = await post(server.http, command())
        async with asyncio.timeout(WAIT_S), following(server, **KEYS) as response:
            events = [event async for event in events_of(response)]

    assert (acked.status_code, acked.json()) == (200, {"type": "ack", "seqno": 0})
    assert "x-midstream-replayed" not in acked.headers
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert [event.id for event in events] == [f"1-{place}" for place in range(1, len(events) + 1)]
    assert [event.event for event in events] == ["welcome", *["record"] * (len(events) - 1)]
    assert kinds_of(events)[-1] == "turn_ended"


@pytest.mark.parametrize("how", ["last-event-id", "x-idempotency-event-id", "?after="])
async def test_a_reconnecting_reader_continues_after_its_event_id(how: str) -> None:
    async with served(make_app([text("hello world")])) as server:
        await post(server.http, command())
        query, headers = (f"{how}1-3", {}) if how.startswith("?") else ("", {how: "1-3"})
        async with asyncio.timeout(WAIT_S), following(server, query, **KEYS, **headers) as response:
            events = [event async for event in events_of(response)]
    assert (events[0].event, events[0].id, events[1].id) == ("welcome", "1-3", "1-4")


async def test_the_last_event_id_header_outranks_the_address() -> None:
    async with served(make_app([text("hello world")])) as server:
        await post(server.http, command())
        headers = {**KEYS, "last-event-id": "1-5"}
        async with asyncio.timeout(WAIT_S), following(server, "?after=1-2", **headers) as response:
            events = [event async for event in events_of(response)]
    assert events[0].id == "1-5"


async def test_a_reader_without_a_stream_key_follows_beyond_the_turn() -> None:
    async with served(make_app([text("one")])) as server:
        await post(server.http, command())
        async with asyncio.timeout(WAIT_S), following(server, "?after=0-0") as response:
            ends = 0
            async for event in events_of(response):
                if event.event == "record" and json.loads(event.data)["type"] == "turn_ended":
                    ends += 1
                    if ends == 2:
                        break
                    await post(server.http, command(), **{"x-idempotency-key": "k2"})
    assert ends == 2


async def test_an_event_stream_can_start_before_its_message() -> None:
    async with (
        served(make_app([text("one")])) as server,
        asyncio.timeout(WAIT_S),
        following(server, **KEYS) as response,
    ):
        events = events_of(response)
        welcome = await anext(events)
        await post(server.http, command())
        rest = [event async for event in events]
    assert welcome.event == "welcome"
    assert kinds_of(rest)[-1] == "turn_ended"


async def test_an_event_id_of_another_epoch_gets_a_gone_event() -> None:
    async with served(make_app([text("hi")])) as server:
        await post(server.http, command())
        headers = {**KEYS, "last-event-id": "9-3"}
        async with asyncio.timeout(WAIT_S), following(server, **headers) as response:
            events = [event async for event in events_of(response)]
    assert [(event.event, event.id) for event in events[:3]] == [
        ("welcome", "1-1"),
        ("gone", "1-1"),
        ("record", "1-2"),
    ]


async def test_a_browser_is_instructed_to_reconnect_within_a_second() -> None:
    async with served(make_app([text("hi")])) as server:
        await post(server.http, command())
        async with asyncio.timeout(WAIT_S), following(server, **KEYS) as response:
            decoder = SseDecoder()
            decoder.feed(await response.aread())
    assert decoder.retry_ms == 1000


async def test_a_refused_event_stream_releases_its_slot() -> None:
    async with served(make_app([[Stall()]], connections_max=1)) as server:
        await post(server.http, command())
        wrong = {**KEYS, "x-idempotent-encryption-key": "t" * 43}
        for _ in range(2):
            refused = await server.http.get("/v1/sessions/s1/events", headers=wrong)
            assert refused.status_code == 403
        runner = await server.app.host.session("s1")
        assert (len(server.app.connections), runner.readers) == (0, 0)

        async with asyncio.timeout(WAIT_S), following(server) as response:
            await anext(events_of(response))
            full = await server.http.get("/v1/sessions/s1/events")
    assert (full.status_code, full.json()["code"], full.headers["retry-after"]) == (503, "overloaded", "5")


async def test_a_wrong_secret_is_refused_for_commands_and_for_events() -> None:
    wrong = {**KEYS, "x-idempotent-encryption-key": "t" * 43}
    async with served(make_app([[Stall()]])) as server:
        await post(server.http, command())
        up = await post(server.http, abort(1), **wrong)
        down = await server.http.get("/v1/sessions/s1/events", headers=wrong)
    assert [(answer.status_code, answer.json()["code"]) for answer in (up, down)] == [
        (403, "wrong_secret")
    ] * 2


STORE_ERRORS = [
    (StoreBusyError("locked"), 503, "later"),
    (StoreFullError("full"), 503, "later"),
    (StoreDamagedError("broken"), 500, "never"),
]


@pytest.mark.parametrize(("error", "status", "retry"), STORE_ERRORS)
async def test_each_failure_of_the_store_has_its_own_problem(
    error: MidstreamError, status: int, retry: str
) -> None:
    store = FailingStore(MemoryStore())
    async with asgi_client(make_app([text("hi")], store=store)) as client:
        await client.get("/health")
        store.outage = error
        answer = await post(client, command())
        store.outage = None
        assert (answer.status_code, answer.json()["code"]) == (status, error.code)
        assert answer.json().get("retry", "never") == retry
        assert ("retry-after" in answer.headers) == (retry == "later")
        assert (await post(client, command())).status_code == 200


@pytest.mark.parametrize("query", ["?after=seven", "?after=-1", "?after=1-"])
async def test_a_malformed_event_id_is_refused(query: str) -> None:
    async with served(make_app([text("hi")])) as server:
        await post(server.http, command())
        answer = await server.http.get(f"/v1/sessions/s1/events{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_frame")


async def test_events_of_an_unknown_session_are_not_found() -> None:
    async with served(make_app()) as server:
        answer = await server.http.get("/v1/sessions/nobody/events")
    assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")


async def test_a_head_request_opens_no_stream() -> None:
    async with served(make_app([text("hi")])) as server:
        await post(server.http, command())
        answer = await server.http.head("/v1/sessions/s1/events")
        assert (answer.status_code, len(server.app.connections)) == (405, 0)
        assert answer.headers["allow"] == "GET, POST"


# --- sessions ---------------------------------------------------------------------------------------------------


async def test_health_is_always_ok_and_ready_reports_recovery_and_draining() -> None:
    app = make_app()
    async with asgi_client(app) as client:
        assert (await client.get("/health")).json()["status"] == "ok"
        await app.host.wait_for_recovery()
        assert (await client.get("/ready")).json() == {"status": "ready", "failed": 0, "streams": 0}

        app.host.recovery.is_done = False
        app.host.recovery.total = 3
        recovering = await client.get("/ready")
        assert (recovering.status_code, recovering.headers["retry-after"]) == (503, "1")
        assert (recovering.json()["code"], recovering.json()["recovering"]) == (
            "recovering",
            {"done": 0, "total": 3},
        )

        app.drain()
        draining = await client.get("/ready")
        assert (draining.status_code, draining.json()["code"]) == (503, "draining")
        assert {each.headers["content-type"] for each in (recovering, draining)} == {
            "application/problem+json"
        }


async def test_sessions_are_listed_last_changed_first_in_pages() -> None:
    async with asgi_client(make_app(lambda _: text("hi"))) as client:
        for name in ("a", "b", "c"):
            await post(client, command(words=f"I am {name}"), session=name)
        first = (await client.get("/v1/sessions?limit=2")).json()
        second = (await client.get("/v1/sessions" + first["next"])).json()
    assert [line["id"] for line in first["sessions"] + second["sessions"]] == ["c", "b", "a"]
    assert second["next"] is None
    assert first["sessions"][0]["title"] == "I am c"
    assert set(first["sessions"][0]) == {"id", "title", "status", "turns", "created_at", "updated_at"}


async def at_rest(client: httpx2.AsyncClient) -> None:
    """Wait until every turn has ended, since its end changes the order of the list."""
    async with asyncio.timeout(WAIT_S):
        while any(
            line["status"] == "running" for line in (await client.get("/v1/sessions")).json()["sessions"]
        ):
            await World().sleep(0.01)


async def test_a_page_starts_after_its_cursor_despite_changes_in_between() -> None:
    """A session that changes moves to the front of the list; no other session is left out or listed twice."""
    async with asgi_client(make_app(lambda _: text("hi"))) as client:
        for name in ("a", "b", "c", "d"):
            await post(client, command(words=f"I am {name}"), session=name)
            await at_rest(client)
        first = (await client.get("/v1/sessions?limit=2")).json()
        await post(client, command(words="again"), session="a", **{"x-idempotency-key": "k2"})
        second = (await client.get("/v1/sessions" + first["next"])).json()
    assert [line["id"] for line in first["sessions"]] == ["d", "c"]
    assert ([line["id"] for line in second["sessions"]], second["next"]) == (["b"], None)


async def test_a_search_finds_sessions_by_title_or_id_on_every_page() -> None:
    async with asgi_client(make_app(lambda _: text("hi"))) as client:
        for name in ("river-1", "s2", "s3", "s4"):
            words = "Tell me of a RIVER & sea" if name in ("s2", "s4") else "hello"
            await post(client, command(words=words), session=name)
            await at_rest(client)
        first = (await client.get("/v1/sessions?limit=2&q=River")).json()
        second = (await client.get("/v1/sessions" + first["next"])).json()
        none = (await client.get("/v1/sessions?q=lake")).json()
    assert [line["id"] for line in first["sessions"]] == ["s4", "s2"]
    assert ([line["id"] for line in second["sessions"]], second["next"]) == (["river-1"], None)
    assert none == {"sessions": [], "next": None}


@spec("SEC-59")
async def test_a_page_reads_the_store_only_from_its_cursor_on() -> None:
    class Counting(StoreInFront):
        listed: list[str] = []  # noqa: RUF012 - of this test

        async def list(
            self,
            *,
            live: bool | None = None,
            of: Collection[str] | None = None,
            after: ListPlace | None = None,
            limit: int | None = None,
        ) -> AsyncIterator[SessionInfo]:
            async for each in self.store.list(live=live, of=of, after=after, limit=limit):
                self.listed.append(each.session)
                yield each

    memory = MemoryStore()
    await memory.open()
    for number in range(450):
        await memory.claim(f"s{number:03}", at=float(number))
        epoch = memory._memory.sessions[f"s{number:03}"].epoch
        batch = Batch([b"{}"], 0, epoch, Sync.FULL, SessionListing(is_live=False, at=float(number)))
        await memory.append(f"s{number:03}", batch)
    store = Counting(memory)
    async with asgi_client(make_app(store=store)) as client:
        first = (await client.get("/v1/sessions?limit=50&after=100.0~s100")).json()
    assert [line["id"] for line in first["sessions"]] == [f"s{number:03}" for number in range(99, 49, -1)]
    assert "s100" not in store.listed


class Stopped(World):
    """A world whose calendar stands still."""

    def now(self) -> float:
        return 1000.0


async def test_sessions_created_at_the_same_instant_are_each_listed_once() -> None:
    """No session is lost between two pages."""
    async with asgi_client(make_app(lambda _: text("hi"), world=Stopped())) as client:
        for name in ("a", "b", "c"):
            await post(client, command(words="hi"), session=name)
        query: str | None = "?limit=1"
        found: list[str] = []
        while query is not None:
            page = (await client.get("/v1/sessions" + query)).json()
            found += [line["id"] for line in page["sessions"]]
            query = page["next"]
    assert found == ["c", "b", "a"]


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=201", "limit=-1", "limit=x", "children=2", "after=x", "after=1.5", "after=nan~a"],
)
async def test_numeric_query_parameters_have_bounds(query: str) -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.get(f"/v1/sessions?{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, "usage")


async def test_a_transcript_has_the_whole_history_and_the_event_id_to_follow_from() -> None:
    script = [calls(("double", '{"number": 21}')), text("forty-two")]
    async with served(make_app(script, tools=[double])) as server:
        await post(server.http, command(words="double 21"))
        async with asyncio.timeout(WAIT_S), following(server, **KEYS) as response:
            events = [event async for event in events_of(response)]
        transcript = (await server.http.get("/v1/sessions/s1")).json()

    assert transcript["event_id"] == events[-1].id
    assert (transcript["status"], transcript["running"], transcript["last"]) == (
        "completed",
        None,
        "completed",
    )
    user, step, answer = transcript["history"]
    assert user == {"type": "user", "parts": send_payload("double 21")["parts"]}
    assert step["response"]["parts"][0]["name"] == "double"
    assert step["results"] == [{"call_id": "c1", "content": "42"}]
    assert answer["response"]["parts"] == [{"type": "text", "text": "forty-two"}]


async def test_a_transcript_of_a_running_turn_includes_the_partial_response() -> None:
    gate = asyncio.Event()
    async with served(make_app([[*text("half of")[:2], Gate(gate)]])) as server:
        await post(server.http, command())
        async with asyncio.timeout(WAIT_S), following(server, "?after=0-0") as response:
            async for event in events_of(response):
                if event.event == "record" and json.loads(event.data)["type"] == "delta":
                    break
        transcript = (await server.http.get("/v1/sessions/s1")).json()
    assert (transcript["status"], transcript["waiting_on"]) == ("running", "model")
    assert transcript["running"]["turn"] == transcript["running"]["attempt"] == 1
    assert transcript["running"]["output"]["parts"][0]["text"].startswith("half")
    assert transcript["event_id"] == event.id


async def test_records_are_exported_one_per_line() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command())
        everything = (await client.get("/v1/sessions/s1/records")).text.splitlines()
        some = await client.get("/v1/sessions/s1/records?after=1&limit=2")
    assert [json.loads(line)["id"] for line in everything] == [f"1-{place}" for place in range(1, 6)]
    assert some.headers["content-type"].startswith("application/x-ndjson")
    assert some.text.splitlines() == everything[1:3]


@tool(has_effects=False)
def dump() -> str:
    """Return more than fits a record."""
    return LARGE


LARGE = "<script>alert(1)</script>\n" * 5000


@spec("TURN-70", "TURN-71")
async def test_a_large_result_is_fetched_by_its_digest_and_never_served_as_a_page() -> None:
    app = make_app([calls(("dump", "{}")), text("long")], tools=[dump])
    async with asgi_client(app) as client:
        await post(client, command())
        await records_until_end(await app.host.session("s1"), after=0)
        transcript = (await client.get("/v1/sessions/s1")).json()
        (result,) = transcript["history"][1]["results"]
        whole = await client.get(f"/v1/sessions/s1/blobs/{result['blob']}")
        records = await client.get("/v1/sessions/s1/records")
        missing = [
            await client.get(f"/v1/sessions/{session}/blobs/{digest}")
            for session, digest in (("s1", "a" * 64), ("nobody", result["blob"]), ("s1", "..%2f" + "a" * 61))
        ]
        await client.delete("/v1/sessions/s1")
        gone = await client.get(f"/v1/sessions/s1/blobs/{result['blob']}")
    assert len(result["content"]) < 3000
    assert (whole.text, result["size"]) == (LARGE, len(LARGE))
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert whole.headers["cache-control"] == "private, max-age=86400, immutable"
    assert len(records.content) < len(LARGE)
    assert [answer.status_code for answer in (*missing, gone)] == [404] * 4


@spec("TURN-72")
async def test_a_damaged_record_costs_one_line_of_an_export() -> None:
    memory = Memory()
    script = [calls(("double", '{"number":2}')), text("four")]
    app = make_app(script, store=MemoryStore(memory), tools=[double])
    async with asgi_client(app) as client:
        await post(client, command())
        await records_until_end(await app.host.session("s1"), after=0)
        stored = memory.sessions["s1"].records
        at = next(at for at, each in enumerate(stored) if b"call_ended" in each.body)
        stored[at] = StoredRecord(stored[at].position, stored[at].epoch, stored[at].body[:-1])
        stored[at - 1] = StoredRecord(stored[at - 1].position, stored[at - 1].epoch, b"\xff\n")
        lines = (await client.get("/v1/sessions/s1/records")).text.splitlines()
    assert len(lines) == len(stored)
    assert json.loads(lines[at])["record"] == {
        "type": "outcome_damaged",
        "turn": 1,
        "response": 1,
        "call_id": "c1",
    }
    assert json.loads(lines[at - 1])["record"] is None


async def test_a_session_can_be_deleted_only_when_no_turn_runs() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command())
        busy = await client.delete("/v1/sessions/s1")
        cancelled = await client.post("/v1/sessions/s1/cancel")
        gone = await client.delete("/v1/sessions/s1")
        again = await client.delete("/v1/sessions/s1")
    assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
    assert (cancelled.status_code, cancelled.json()["is_running"]) == (202, False)
    assert (gone.status_code, gone.content) == (204, b"")
    assert (again.status_code, again.json()["code"]) == (404, "session_not_found")


async def test_cancelling_another_turn_or_none_changes_nothing() -> None:
    async with asgi_client(make_app([[Stall()]])) as client:
        await post(client, command())
        other = await client.post("/v1/sessions/s1/cancel?turn=2")
        this = await client.post("/v1/sessions/s1/cancel?turn=1")
        again = await client.post("/v1/sessions/s1/cancel")
    assert [answer.json()["is_running"] for answer in (other, this, again)] == [True, False, False]
    assert again.json() == this.json()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/sessions/nobody"),
        ("GET", "/v1/sessions/nobody/records"),
        ("DELETE", "/v1/sessions/nobody"),
        ("POST", "/v1/sessions/nobody/cancel"),
    ],
)
async def test_a_missing_session_is_not_found_and_not_created(method: str, path: str) -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
        assert (await client.get("/v1/sessions")).json()["sessions"] == []


@pytest.mark.parametrize("session", ["no%20spaces", "a" * 129, "caf%C3%A9"])
async def test_a_malformed_session_id_is_refused(session: str) -> None:
    async with asgi_client(make_app()) as client:
        answer = await client.get(f"/v1/sessions/{session}")
    assert (answer.status_code, answer.json()["code"]) == (400, "usage")


@spec("STREAM-116")
@pytest.mark.parametrize(
    ("script", "until", "status"),
    [
        ([[Stall()]], "attempt_started", "running"),
        ([calls(("double", '{"number": 21}'))], "question_asked", "waiting"),
        ([text("done")], "turn_ended", "completed"),
        ([[ModelRejectedError("no")]], "turn_ended", "failed"),
    ],
)
async def test_listing_transcript_and_welcome_agree_on_the_status_of_a_session(
    script: Script, until: str, status: str
) -> None:
    asking = replace(double, needs_approval=status == "waiting")
    async with served(make_app(script, tools=[asking])) as server:
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            await socket.send(command())
            frames = await socket.receive_until(until)
            [line] = (await server.http.get("/v1/sessions")).json()["sessions"]
            transcript = (await server.http.get("/v1/sessions/s1")).json()
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            [welcome] = await socket.receive_until("welcome")
    assert frames[0]["status"] == ""
    assert [line["status"], transcript["status"], welcome["status"]] == [status] * 3


def test_the_browser_client_and_the_reference_have_every_status() -> None:
    words = {status.value for status in SessionStatus}
    declared = (ROOT / "src/midstream/server/static/client/midstream.d.ts").read_text()
    union = declared.partition("export type SessionStatus =")[2].partition(";")[0]
    assert {*re.findall(r'"(\w*)"', union)} == words
    section = (ROOT / "docs/reference/http.md").read_text().partition("## The status of a session")[2]
    rows = [
        row.split("|")[1] for row in section.partition("What an")[0].splitlines() if row.startswith("| `")
    ]
    assert {*re.findall(r'`"?(\w*)"?`', "".join(rows))} == words
