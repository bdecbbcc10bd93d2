"""The 19 rules of access, at least one test each: limits for strangers, neighbours and foreign pages.

The numbers are those of `docs/guides/security.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import websockets
from starlette.routing import Route

from midstream.history.messages import Usage, UserMessage
from midstream.models.model import Finished
from midstream.protocol.frames import FRAME_BYTES_MAX
from midstream.server.app import App
from midstream.server.auth.principals import Principal
from midstream.server.limits import Limits
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import SessionInfo, StoredRecord
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import Stall, calls, text
from midstream.tools.function_tools import tool
from tests.server.known_people import (
    ADA,
    BOB,
    EVE,
    KNOWN,
    OPERATOR,
    TENANTS,
    Later,
    guarded_app,
    post_message,
    status_and_code,
)
from tests.server.serving import KEYS, Socket, abort, asgi_client, command, make_app, opening, served
from tests.spec import spec

EVENTS = "/v1/sessions/s1/events"


def session_routes(app: App) -> list[tuple[str, str]]:
    """Return every method and path below a session of this app, from its router."""
    found = []
    for route in app._router.routes:
        if isinstance(route, Route) and "{session_id}" in route.path:
            path = (
                route.path.replace("{session_id}", "s1")
                .replace("{digest}", "0" * 64)
                .replace("{reader}", "x")
            )
            found += [(method, path) for method in sorted(route.methods or {"GET"}) if method != "HEAD"]
    return found


# --- 1. ids are names, not secrets ----------------------------------------------------------------


@spec("STREAM-69")
async def test_rule_1_knowledge_of_every_foreign_id_gives_access_on_no_route() -> None:
    app = guarded_app()
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        routes = session_routes(app)
        assert len(routes) >= 15
        for method, path in routes:
            foreign = await client.request(method, path, headers={**KEYS, **BOB}, json=command())
            assert status_and_code(foreign) == (404, "session_not_found"), (method, path)
            if path.rpartition("/")[2] in {"commands", "events", "poll", "tickets"}:
                continue  # A session begins with these.
            missing = await client.request(method, path.replace("s1", "s2"), headers={**KEYS, **BOB})
            assert status_and_code(missing) == (404, "session_not_found"), (method, path)
        listed = [
            (await client.get("/v1/sessions", headers=who)).json()["sessions"] for who in (ADA, BOB, OPERATOR)
        ]
        assert [[line["id"] for line in lines] for lines in listed] == [["s1"], [], ["s1"]]


@spec("STREAM-69")
async def test_rule_1_neither_a_resume_nor_a_replay_of_a_foreign_stream_reveals_that_it_exists() -> None:
    async with served(guarded_app()) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        shown = await server.http.get(EVENTS, headers={**KEYS, **ADA, "last-event-id": "0-0"})
        assert shown.status_code == 200
        again = await server.http.get(EVENTS, headers={**KEYS, **BOB, "last-event-id": "1-1"})
        assert status_and_code(again) == (404, "session_not_found")
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(headers=BOB):
                pass
        assert refused.value.response.status_code == 404
        async with Socket(server.socket(headers=ADA)) as owner:
            await owner.send(opening(event_id="0-0", next_seqno=1))
            assert (await owner.receive())["type"] == "welcome"


@pytest.mark.parametrize("end", ["%0A", "%0a%0a", "%00", "%0D", "/", "//", "%2F", "%20", "%E2%80%A8"])
async def test_rule_1_no_spelling_of_a_path_bypasses_authentication(end: str) -> None:
    async with asgi_client(guarded_app()) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        for what in ("", "/records", "/events", "/owner", "/cancel"):
            for method in ("GET", "POST"):
                path = f"/v1/sessions/s1{what}{end}"
                answer = await client.request(method, path, headers={**BOB, "x-midstream": "test"})
                assert answer.status_code in {400, 404, 405}, (method, path)
                assert "Hello" not in answer.text
        assert (await client.get(f"/v1/sessions{end}", headers=BOB)).status_code in {404, 405}


# --- 2. tenants -----------------------------------------------------------------------------------


class RequestRecordingStore(MemoryStore):
    """A store that records every requested session."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        self.asked.append(session)
        return await super().read(session, after=after, limit=limit)

    async def find(self, session: str) -> SessionInfo | None:
        self.asked.append(session)
        return await super().find(session)

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        self.asked.append(session)
        return await super().claim(session, at=at, is_free=is_free)

    async def blob(self, session: str, digest: str) -> bytes | None:
        self.asked.append(session)
        return await super().blob(session, digest)


async def test_rule_2_a_tenant_gets_no_row_of_another_for_any_request() -> None:
    store = RequestRecordingStore()
    app = guarded_app(known=TENANTS, store=store)
    async with asgi_client(app) as client:
        for session in ("s1", "s2", "acme:s3"):
            assert (await post_message(client, session, ADA)).status_code == 200
        parts = ["acme:", "other:", "s1", "s2", "s3", "::", "1.1.0", "%2e%2e", "..", ":", "x"]
        store.asked.clear()
        chance = random.Random(7)
        for _ in range(150):
            name = "".join(chance.choices(parts, k=chance.randint(1, 4)))
            what = chance.choice(["", "/records", f"/blobs/{'0' * 64}", "/owner"])
            answer = await client.get(f"/v1/sessions/{name}{what}", headers=EVE)
            assert answer.status_code in {400, 404}, name
        assert store.asked
        assert [name for name in store.asked if not name.startswith("other:")] == []
        assert (await client.get("/v1/sessions", headers=EVE)).json()["sessions"] == []

        # Each tenant has its own names, and receives them without the tenant's prefix.
        assert (await post_message(client, "s1", EVE)).status_code == 200
        for who, names in ((EVE, ["s1"]), (ADA, ["s1", "s2", "s3"]), (BOB, [])):
            lines = (await client.get("/v1/sessions", headers=who)).json()["sessions"]
            assert sorted(line["id"] for line in lines) == names
        assert (await client.get("/v1/sessions/acme:s1", headers=ADA)).json()["session"] == "s1"
        begun = await client.get("/v1/sessions/s1/poll?snapshots=begin", headers=ADA)
        [snapshot] = [frame for frame in begun.json()["frames"] if frame["type"] == "snapshot"]
        assert snapshot["session"]["session"] == "s1"


async def test_rule_2_no_hook_grants_access_across_tenants() -> None:
    app = guarded_app(known=TENANTS, authorize=lambda *_: True)
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        assert (await client.get("/v1/sessions/s1", headers=BOB)).status_code == 200
        for name in ("s1", "acme:s1", "other:acme:s1"):
            assert status_and_code(await client.get(f"/v1/sessions/{name}", headers=EVE)) == (
                404,
                "session_not_found",
            )


# --- 3. ended permission --------------------------------------------------------------------------


async def _until_closed(socket: Socket) -> tuple[str, int]:
    received = await socket.receive_until("error")
    return received[-1]["code"], (await socket.receive_close())[0]


@spec("STREAM-70")
@pytest.mark.parametrize("end", ["locked out", "token withdrawn", "expired", "reader removed"])
async def test_rule_3_a_stream_ends_when_its_permission_does(end: str) -> None:
    known, world = {**KNOWN}, Later()
    app = guarded_app(known=known, world=world, recheck_s=0.05 if end == "token withdrawn" else 300.0)
    async with served(app) as server:
        assert (
            await post_message(server.http, "s1", BOB if end == "reader removed" else ADA)
        ).status_code == 200
        if end == "reader removed":
            assert (await server.http.put("/v1/sessions/s1/readers/ada", headers=BOB)).status_code == 200
        if end == "expired":
            known["the-token-of-ada"] = Principal("ada", expires_at=world.now() + 1000.0)
        async with Socket(server.socket(headers=ADA)) as reader:
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
            if end == "locked out":
                await app.auth.lock_out(Principal("ada"))
            elif end == "expired":
                world.ahead_s = 1000.0
                app.auth.recheck()
            elif end == "token withdrawn":
                del known["the-token-of-ada"]
            elif end == "reader removed":
                assert (
                    await server.http.delete("/v1/sessions/s1/readers/ada", headers=BOB)
                ).status_code == 200
            assert await _until_closed(reader) == ("unauthorized", 1008)


@spec("STREAM-70")
async def test_rule_3_http_events_end_with_the_permission_and_not_as_an_end_of_the_turn() -> None:
    app = guarded_app([[Stall()]])
    async with served(app) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        async with server.http.stream("GET", EVENTS, headers={**KEYS, **ADA}) as events:
            lines = events.aiter_lines()
            assert [await anext(lines), await anext(lines)] == ["retry: 1000", ""]
            await app.auth.lock_out(Principal("ada"))
            received: list[str] = []
            with pytest.raises(
                httpx2.RemoteProtocolError
            ):  # Cut: a clean end would mean the end of the turn.
                await _read_lines(lines, received)
        assert any('"unauthorized"' in line for line in received)


async def _read_lines(lines: AsyncIterator[str], received: list[str]) -> None:
    async for line in lines:
        received.append(line)  # noqa: PERF401 - the part before the cut is kept


# --- 4. credentials in addresses ------------------------------------------------------------------


PAGE = {"origin": "https://app.example"}


@contextlib.asynccontextmanager
async def _ticketing() -> AsyncIterator[tuple[App, Later, httpx2.AsyncClient]]:
    world = Later()
    app = guarded_app(world=world, allowed_origins=[PAGE["origin"]])
    async with asgi_client(app) as client:
        for session in ("s1", "s2"):
            assert (await post_message(client, session, ADA)).status_code == 200
        yield app, world, client


async def _ticket(client: httpx2.AsyncClient, session: str = "s1", action: str = "read") -> str:
    asked = await client.post(
        f"/v1/sessions/{session}/tickets", json={"action": action}, headers={**ADA, **PAGE}
    )
    assert (asked.status_code, asked.json()["for_s"]) == (201, 30)
    token: str = asked.json()["token"]
    assert len(token.removeprefix("ticket-")) == 32  # 128 bits
    return token


async def _opens(client: httpx2.AsyncClient, path: str, **headers: str) -> tuple[int, str]:
    """Request the events of an ended turn, as a browser does."""
    answer = await client.get(path, headers={**PAGE, **KEYS, "last-event-id": "0-0", **headers})
    return (200, "") if answer.status_code == 200 else status_and_code(answer)


@spec("STREAM-71")
async def test_rule_4_a_ticket_opens_one_stream_of_its_session_once_and_soon() -> None:
    async with _ticketing() as (_, world, client):
        refused = (401, "unauthorized")
        used = await _ticket(client, action="send")
        assert await _opens(client, f"{EVENTS}?ticket={used}") == (200, "")
        assert await _opens(client, f"{EVENTS}?ticket={used}") == refused  # twice
        polled = await _ticket(client, action="send")
        poll = EVENTS.replace("/events", "/poll")
        assert await _opens(client, f"{poll}?n=0&ticket={polled}") == (200, "")
        other = await _ticket(client, "s2", action="send")
        assert await _opens(client, f"{EVENTS}?ticket={other}") == refused  # for another session
        foreign = await _ticket(client, action="send")
        page = {"origin": "http://testserver"}
        assert await _opens(client, f"{EVENTS}?ticket={foreign}", **page) == refused  # of another page
        look = await _ticket(client, action="read")
        assert await _opens(client, f"{EVENTS}?ticket={look}") == (
            403,
            "access",
        )  # A stream can send commands.
        late = await _ticket(client, action="send")
        world.ahead_s = 30.0
        assert await _opens(client, f"{EVENTS}?ticket={late}") == refused
        for_else = await _ticket(client)
        assert (
            status_and_code(await client.get(f"/v1/sessions/s1?ticket={for_else}", headers=PAGE)) == refused
        )


@pytest.mark.parametrize("name", ["token", "access_token", "ticket", "authorization", "api_key"])
async def test_rule_4_no_long_lived_token_is_accepted_in_an_address(name: str) -> None:
    async with _ticketing() as (_, _, client):
        path = f"{EVENTS}?{name}=the-token-of-ada"
        assert await _opens(client, path) == (401, "unauthorized")


async def test_rule_4_a_ticket_of_a_cookie_ends_with_the_cookie() -> None:
    app = guarded_app()
    async with served(app) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        cookie = (await server.http.post("/v1/login", headers=ADA, json={})).headers["set-cookie"]
        name, _, attributes = cookie.partition("; ")
        assert {each.lower() for each in attributes.split("; ")} >= {"httponly", "samesite=strict", "path=/"}
        browser = {"cookie": name, "origin": server.url}
        asked = await server.http.post("/v1/sessions/s1/tickets", headers=browser, json={})
        url = f"{server.url.replace('http', 'ws')}/v1/sessions/s1/stream?ticket={asked.json()['token']}"
        origin = websockets.Origin(server.url)
        async with Socket(websockets.connect(url, origin=origin)) as reader:
            await reader.send({"type": "open"})
            assert (await reader.receive())["type"] == "welcome"
            out = await server.http.post("/v1/logout", headers={**browser, "x-midstream": "page"})
            assert out.status_code == 204
            assert await _until_closed(reader) == ("unauthorized", 1008)
        assert status_and_code(await server.http.get("/v1/sessions", headers={"cookie": name})) == (
            401,
            "unauthorized",
        )


@spec("STREAM-72")
async def test_rule_4_a_viewers_pass_permits_reading_one_session_until_it_expires() -> None:
    world = Later()
    async with asgi_client(guarded_app(world=world)) as client:
        for session in ("s1", "s2"):
            assert (await post_message(client, session, ADA)).status_code == 200
        issued = await client.post("/v1/sessions/s1/viewers", headers=ADA, json={"for_s": 60})
        viewer = {"authorization": f"Bearer {issued.json()['token']}"}
        assert (await client.get("/v1/sessions/s1", headers=viewer)).status_code == 200
        assert status_and_code(await client.get("/v1/sessions/s2", headers=viewer)) == (
            404,
            "session_not_found",
        )
        assert status_and_code(await post_message(client, "s1", viewer)) == (403, "access")
        assert status_and_code(await client.delete("/v1/sessions/s1", headers=viewer)) == (403, "access")
        assert status_and_code(await client.post("/v1/sessions/s1/viewers", headers=viewer, json={})) == (
            403,
            "access",
        )
        assert status_and_code(await client.post("/v1/login-links", headers=viewer, json={})) == (
            403,
            "access",
        )
        lines = (await client.get("/v1/sessions", headers=viewer)).json()["sessions"]
        assert [line["id"] for line in lines] == ["s1"]
        kept = (
            (await client.post("/v1/login", headers=viewer, json={})).headers["set-cookie"].partition(";")[0]
        )
        by_cookie = {"cookie": kept, "x-midstream": "page"}
        # A cookie adds no rights.
        assert status_and_code(await post_message(client, "s1", by_cookie)) == (
            403,
            "access",
        )
        world.ahead_s = 61.0
        for shown in (viewer, by_cookie):
            assert status_and_code(await client.get("/v1/sessions/s1", headers=shown)) == (
                401,
                "unauthorized",
            )


@spec("STREAM-70", "STREAM-106")
async def test_rule_3_revoking_a_viewers_pass_revokes_all_that_was_issued_for_it() -> None:
    app = guarded_app()
    async with served(app) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        viewer = await _viewer_of_s1(server.http)
        login = await server.http.post("/v1/login", headers=viewer, json={})
        by_cookie = {"cookie": login.headers["set-cookie"].partition(";")[0], "x-midstream": "page"}
        server.http.cookies.clear()
        tickets = [
            (await server.http.post("/v1/sessions/s1/tickets", headers=shown, json={})).json()["token"]
            for shown in (viewer, by_cookie, by_cookie)
        ]
        async with (
            Socket(server.socket(headers=by_cookie)) as reader,
            Socket(server.socket(query=f"?ticket={tickets.pop()}")) as ticketed,
        ):
            for socket in (reader, ticketed):
                await socket.send({"type": "open"})
                assert (await socket.receive())["type"] == "welcome"
            assert (await server.http.delete("/v1/sessions/s1/viewers", headers=ADA)).status_code == 204
            assert await _until_closed(reader) == await _until_closed(ticketed) == ("unauthorized", 1008)
        for shown in (viewer, by_cookie):
            answer = await server.http.get("/v1/sessions/s1", headers=shown)
            assert status_and_code(answer) == (401, "unauthorized")
        for ticket in tickets:
            assert await _opens(server.http, f"{EVENTS}?ticket={ticket}", origin="") == (401, "unauthorized")


@spec("STREAM-106")
async def test_rule_3_a_viewers_pass_shows_no_later_session_of_the_same_name() -> None:
    async with asgi_client(guarded_app()) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        await client.get(EVENTS, headers={**ADA, **KEYS})
        viewer = await _viewer_of_s1(client)
        assert (await client.get("/v1/sessions/s1", headers=viewer)).status_code == 200
        assert (await client.delete("/v1/sessions/s1", headers=ADA)).status_code == 204
        assert (await post_message(client, "s1", BOB)).status_code == 200
        for path in ("", "/records", "/events", "/poll"):
            answer = await client.get(f"/v1/sessions/s1{path}", headers=viewer)
            assert status_and_code(answer) == (404, "session_not_found")
        assert (await client.get("/v1/sessions", headers=viewer)).json()["sessions"] == []


@spec("STREAM-106")
async def test_rule_3_neither_a_logout_nor_a_lock_out_leaves_a_way_back_in() -> None:
    app = guarded_app()
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        cookie = (await client.post("/v1/login", headers=ADA, json={})).headers["set-cookie"]
        client.cookies.clear()
        browser = {"cookie": cookie.partition(";")[0], "x-midstream": "page"}
        ticket = (await client.post("/v1/sessions/s1/tickets", headers=browser, json={})).json()["token"]
        link = (await client.post("/v1/login-links", headers=ADA)).json()["token"]
        assert (await client.post("/v1/logout", headers=browser)).status_code == 204
        client.cookies.clear()
        assert await _opens(client, f"{EVENTS}?ticket={ticket}", origin="") == (401, "unauthorized")
        await app.auth.lock_out(Principal("ada"))
        assert status_and_code(await client.post("/v1/login", json={"login": link})) == (401, "unauthorized")


async def _viewer_of_s1(client: httpx2.AsyncClient) -> dict[str, str]:
    issued = await client.post("/v1/sessions/s1/viewers", headers=ADA, json={})
    assert issued.status_code == 201
    return {"authorization": f"Bearer {issued.json()['token']}"}


# --- 5. foreign pages -----------------------------------------------------------------------------


async def test_rule_5_a_page_of_another_site_is_refused_on_every_route_with_any_credentials() -> None:
    app = guarded_app()
    async with asgi_client(app) as client:
        for method, path in [
            *session_routes(app),
            ("GET", "/v1/sessions"),
            ("POST", "/v1/login"),
            ("GET", "/"),
        ]:
            answer = await client.request(
                method, path, headers={**KEYS, **ADA, "origin": "https://evil.example"}, json=command()
            )
            assert status_and_code(answer) == (403, "foreign_origin"), (method, path)
            assert [name for name in answer.headers if name.startswith("access-control")] == []


@spec("STREAM-73")
async def test_rule_5_credentials_that_browsers_send_automatically_permit_no_change_and_no_stream() -> None:
    app = guarded_app()
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        cookie = (
            (await client.post("/v1/login", headers=ADA, json={})).headers["set-cookie"].partition(";")[0]
        )
        client.cookies.clear()
        browser = {"cookie": cookie}
        form = {**browser, "content-type": "application/x-www-form-urlencoded"}
        assert status_and_code(await client.post("/v1/sessions/s1/cancel", headers=form)) == (
            403,
            "foreign_origin",
        )
        assert status_and_code(await client.delete("/v1/sessions/s1", headers=browser)) == (
            403,
            "foreign_origin",
        )
        meant = {**browser, "x-midstream": "page"}
        assert (await client.post("/v1/sessions/s1/cancel", headers=meant)).status_code == 202
        bare = {**browser, "last-event-id": "0-0"}
        assert status_and_code(await client.get(EVENTS, headers=bare)) == (403, "foreign_origin")
        assert (await client.get("/v1/sessions/s1", headers=browser)).status_code == 200


async def test_rule_5_without_authentication_a_form_of_a_foreign_page_changes_nothing() -> None:
    async with asgi_client(make_app([text("Hello.")])) as client:
        assert (await post_message(client, "s1", {})).status_code == 200
        form = {"origin": "http://testserver", "content-type": "text/plain"}
        assert status_and_code(await client.post("/v1/sessions/s1/cancel", headers=form)) == (
            403,
            "foreign_origin",
        )
        simple = {"sec-fetch-site": "cross-site"}
        assert status_and_code(await client.post("/v1/sessions/s1/cancel", headers=simple)) == (
            403,
            "foreign_origin",
        )
        assert (await client.post("/v1/sessions/s1/cancel")).status_code == 202  # A program.


# --- 6. a local server ----------------------------------------------------------------------------


async def test_rule_6_a_local_server_refuses_another_host_name_or_a_missing_token() -> None:
    async with served(guarded_app()) as server:
        evil = await server.http.get("/v1/sessions", headers={**ADA, "host": "evil.example"})
        assert status_and_code(evil) == (403, "foreign_origin")
        assert status_and_code(await server.http.get("/v1/sessions")) == (401, "unauthorized")
        assert (await server.http.get("/v1/sessions")).headers["www-authenticate"] == "Bearer"
        assert (await server.http.get("/v1/sessions", headers=ADA)).status_code == 200


# --- 7. idempotency -------------------------------------------------------------------------------


async def test_rule_7_a_key_has_four_answers_and_never_a_second_run() -> None:
    app = guarded_app(lambda _: text("Hello."))
    async with asgi_client(app) as client:
        first = await post_message(client, "s1", ADA)
        again = await post_message(client, "s1", ADA)
        assert (first.content, first.status_code) == (again.content, again.status_code)
        assert again.headers["x-midstream-replayed"] == "true"
        other = await client.post(
            "/v1/sessions/s1/commands", json=command(words="else"), headers={**KEYS, **ADA}
        )
        assert status_and_code(other) == (422, "stream_reused")
        bare = await client.post("/v1/sessions/s1/commands", json=command(), headers=ADA)
        assert status_and_code(bare) == (400, "malformed_frame")
        unknown = {**KEYS, **ADA, "x-idempotency-key": "never-seen"}
        late = await client.post("/v1/sessions/s1/commands", json=abort(3), headers=unknown)
        assert status_and_code(late)[0] in {404, 409}
        # The same key of another principal is another key: it is scoped to the session, which belongs to its
        # owner.
        assert (await post_message(client, "s2", BOB)).headers.get("x-midstream-replayed") is None
        assert (await client.get("/v1/sessions/s1", headers=ADA)).json()["turns"] == 1


# --- 8. frames out of order -----------------------------------------------------------------------


async def test_rule_8_commands_in_any_order_and_number_are_accepted_once_each_in_order() -> None:
    seed = 20261122
    chance = random.Random(seed)
    async with asgi_client(guarded_app(lambda _: text("Hello."))) as client:
        for story in range(5):
            session, taken = f"s{story}", 0
            for _ in range(40):
                seqno = chance.randint(0, 6)
                body = (
                    command()
                    if seqno == 0
                    else {"type": "command", "seqno": seqno, "payload": {"type": "cancel"}}
                )
                answer = await client.post(
                    f"/v1/sessions/{session}/commands", json=body, headers={**KEYS, **ADA}
                )
                if seqno <= taken:
                    assert answer.status_code == 200, (seed, story, seqno, taken)
                    taken = max(taken, seqno + 1)
                else:
                    problem = answer.json()
                    known = taken > 0  # An unknown session gets the same response as a foreign one.
                    expected = (409, "seqno_gap") if known else (404, "session_not_found")
                    assert status_and_code(answer) == expected, (seed, story, seqno, taken)
                    assert not known or problem["expected"] == taken
            if taken:
                lines = (await client.get(f"/v1/sessions/{session}/records", headers=ADA)).text.splitlines()
                accepted = [
                    each for each in map(json.loads, lines) if each["record"]["type"] == "command_accepted"
                ]
                assert [each["record"]["seqno"] for each in accepted] == list(range(taken))


@spec("STREAM-57", "STREAM-69")
async def test_rule_8_an_early_command_is_refused_as_a_gap_where_the_session_exists() -> None:
    early = {"type": "command", "seqno": 3, "payload": {"type": "cancel"}}
    async with asgi_client(guarded_app(lambda _: text("Hello."))) as client:
        url = "/v1/sessions/s1"
        assert (await client.get(f"{url}/poll?n=0", headers={**KEYS, **ADA})).status_code == 200
        answers = {
            who: await client.post(f"{url}/commands", json=early, headers={**KEYS, **shown})
            for who, shown in (("ada", ADA), ("bob", BOB))
        }
        missing = await client.post("/v1/sessions/s2/commands", json=early, headers={**KEYS, **BOB})
    assert (status_and_code(answers["ada"]), answers["ada"].json()["expected"]) == ((409, "seqno_gap"), 0)
    assert status_and_code(answers["bob"]) == status_and_code(missing) == (404, "session_not_found")


# --- 9. limits ------------------------------------------------------------------------------------


@spec("STREAM-74")
@pytest.mark.parametrize(
    ("limits", "what", "expected"),
    [
        (Limits(header_bytes_max=1000), "a long header", (431, "request_header_fields_too_large")),
        (Limits(requests_per_minute=2), "many requests", (429, "limit_reached")),
        (Limits(sessions_begun_per_minute=1), "new sessions", (429, "limit_reached")),
        (Limits(turns_per_principal_max=1), "turns at once", (429, "limit_reached")),
        (Limits(streams_per_principal_max=1), "streams at once", (429, "limit_reached")),
        (Limits(connections_max=1), "streams of all", (503, "overloaded")),
        (Limits(), "a large command", (413, "frame_too_large")),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
async def test_rule_9_each_limit_is_reported_in_a_problem(
    limits: Limits, what: str, expected: tuple[int, str]
) -> None:
    async with served(guarded_app([[Stall()], [Stall()], [Stall()]], limits=limits)) as server:
        client = server.http
        if what == "a long header":
            answer = await client.get("/v1/sessions", headers={**ADA, "x-long": "x" * 1000})
        elif what == "a large command":
            answer = await client.post(
                "/v1/sessions/s1/commands", content=b"x" * (FRAME_BYTES_MAX + 1), headers={**KEYS, **ADA}
            )
        elif what == "many requests":
            answer = [await client.get("/v1/sessions", headers=ADA) for _ in range(3)][-1]
        elif what.startswith("streams"):
            assert (await post_message(client, "s1", ADA)).status_code == 200
            async with client.stream("GET", EVENTS, headers={**KEYS, **ADA}) as first:
                assert first.status_code == 200
                answer = await client.get(EVENTS, headers=ADA)
        else:
            assert (await post_message(client, "s1", ADA)).status_code == 200
            answer = await post_message(client, "s2", ADA)
        assert status_and_code(answer) == expected
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert not problem["next"].startswith(("Do not repeat", "Try again at once"))
        assert any(figure in problem["detail"] for figure in ("1", "2")), "how much is allowed"
        assert expected[0] == 431 or expected[0] == 413 or int(answer.headers["retry-after"]) >= 1


async def test_rule_9_an_address_has_its_own_limits_and_the_local_machine_has_none() -> None:
    limits = Limits(connections_per_address_max=1, refusals_per_minute=3, requests_per_minute=100)
    app = guarded_app(limits=limits)
    far = httpx2.ASGITransport(app=app, client=("198.51.100.7", 4711), raise_app_exceptions=False)
    async with (
        asgi_client(app) as client,
        httpx2.AsyncClient(transport=far, base_url="http://testserver") as guesser,
    ):
        wrong = {"authorization": "Bearer a-guess-of-somebody"}
        answers = [status_and_code(await guesser.get("/v1/sessions", headers=wrong)) for _ in range(4)]
        assert answers == [*3 * [(401, "unauthorized")], (429, "limit_reached")]
        # Guessing locks out only the guesser's own address.
        assert status_and_code(await guesser.get("/v1/sessions", headers=ADA)) == (429, "limit_reached")
        for _ in range(10):
            assert status_and_code(await client.get("/v1/sessions", headers=wrong)) == (401, "unauthorized")


@spec("STREAM-74")
async def test_rule_9_streams_are_limited_for_each_address() -> None:
    app = guarded_app([[Stall()]], limits=Limits(connections_per_address_max=1))
    async with served(app, trusted_proxies=["127.0.0.1"]) as server:
        assert (await post_message(server.http, "s1", ADA)).status_code == 200
        here = {**ADA, "x-forwarded-for": "198.51.100.7"}
        async with server.http.stream("GET", EVENTS, headers=here) as first:
            assert first.status_code == 200
            more = await server.http.get(EVENTS, headers=here)
            assert status_and_code(more) == (429, "limit_reached")
            assert "1 connections of this address" in more.json()["detail"]
            assert more.json()["next"].startswith("Send fewer requests")
            neighbour = {**ADA, "x-forwarded-for": "198.51.100.8"}
            async with server.http.stream("GET", EVENTS, headers=neighbour) as other:
                assert other.status_code == 200


@spec("STREAM-75")
async def test_rule_9_frames_over_a_websocket_are_counted_like_requests() -> None:
    app = guarded_app(limits=Limits(requests_per_minute=8))
    async with served(app) as server:
        async with Socket(server.socket(headers=ADA)) as socket:
            await socket.send(opening())
            assert (await socket.receive())["type"] == "welcome"
            for _ in range(20):
                await socket.send({"type": "ping"})
            last = (await socket.receive_until("error"))[-1]
            assert (last["code"], last["retry"], last["retry_after_s"] > 0) == (
                "limit_reached",
                "later",
                True,
            )
            assert (await socket.receive_close())[0] == 1013
        async with Socket(server.socket("s2", headers=BOB)) as other:  # The budget of another principal.
            await other.send(opening())
            assert (await other.receive())["type"] == "welcome"
        assert status_and_code(await server.http.get("/v1/sessions", headers=ADA)) == (429, "limit_reached")


# --- 10. cost -------------------------------------------------------------------------------------


@spec("STREAM-74")
async def test_rule_10_a_principal_without_token_budget_opens_no_further_turn_for_a_while() -> None:
    world = Later()
    response = [*text("Hello.")[:-1], Finished(usage=Usage(900, 200))]
    app = guarded_app(lambda _: response, limits=Limits(tokens_per_principal_hour_max=1000), world=world)
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        assert "turn_ended" in (await client.get(EVENTS, headers={**KEYS, **ADA})).text
        assert status_and_code(await post_message(client, "s2", ADA)) == (429, "limit_reached")
        assert (await post_message(client, "s1", ADA)).status_code == 200  # Accepted before: no cost.
        assert (await post_message(client, "s3", BOB)).status_code == 200  # The budget of another principal.
        world.ahead_s = 3600.0
        assert (await post_message(client, "s2", ADA)).status_code == 200


async def test_rule_10_a_tool_that_kills_its_server_is_restarted_only_a_few_times(tmp_path: Path) -> None:
    store = tmp_path / "sessions.db"
    world = Later()
    started = 0
    begun = asyncio.Event()

    async def work() -> None:
        nonlocal started
        started += 1
        begun.set()
        await asyncio.Event().wait()

    for life in range(6):
        begun.clear()
        opened = SQLiteStore(store, world=world)
        app = guarded_app(lambda _: calls(("work", "{}")), tools=[tool(work)], store=opened, world=world)
        await app.start()
        if life == 0:
            runner = await app.host.session("s1", create=True)
            await runner.submit(SendMessage(UserMessage.of("hi")))
        await app.host.wait_for_recovery()
        runner = await app.host.session("s1")
        if runner.state.is_live:
            async with asyncio.timeout(60):
                await begun.wait()
        # As a kill: the store is gone at once, and nothing is handed over.
        await app.host.store.close()
        await app.stop(grace_s=0)
    assert started <= 4
