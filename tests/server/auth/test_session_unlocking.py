"""Opening of an encrypted session, on every route and over every transport."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import websockets

from midstream.engine import escrow_locks
from midstream.environment import World
from midstream.server.auth.access import Access, tokens
from midstream.server.auth.principals import Principal
from midstream.server.auth.session_unlocking import REFUSAL_S, PresentedSecrets
from midstream.store.contract import SessionInfo
from midstream.store.encryption.escrow import EscrowedStore
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import calls, text
from midstream.tools.function_tools import tool
from tests.server.escrowing import OTHER, SHOWN, WRONG, escrowed_app, follow_to_end, send_message, until
from tests.server.serving import SECRET, Served, Socket, abort, asgi_client, command, opening, served
from tests.spec import spec

ROUTES = [
    ("GET", ""),
    ("DELETE", ""),
    ("GET", "/records"),
    ("GET", f"/blobs/{'d' * 64}"),
    ("POST", "/cancel"),
    ("POST", "/answer"),
    ("POST", "/resume"),
    ("POST", "/withdraw"),
    ("POST", "/viewers"),
    ("DELETE", "/viewers"),
    ("GET", "/events?after=1-1"),
    ("GET", "/poll?after=1-1"),
    ("GET", "/nothing/of/ours"),
]
PING = {"type": "ping"}
SHOWS = [{}, WRONG, {"x-idempotent-encryption-key": "short"}, {"authorization": "Bearer viewer-" + "0" * 32}]


def test_presented_secrets_are_not_in_their_repr() -> None:
    assert SECRET not in repr(PresentedSecrets(SECRET, SECRET))


@spec("STREAM-85")
@pytest.mark.parametrize(("method", "what"), ROUTES)
async def test_without_the_secret_every_route_responds_as_for_a_missing_session(
    tmp_path: Path, method: str, what: str
) -> None:
    async with asgi_client(escrowed_app(tmp_path, [text("a canary")], world=Ticking())) as http:
        await send_message(http)
        await follow_to_end(http)
        given = []
        for session in ("s1", "none"):
            for headers in SHOWS:  # Also while another connection has the session open.
                answer = await http.request(method, f"/v1/sessions/{session}{what}", headers=headers)
                seen = {name: value for name, value in answer.headers.items() if name != "date"}
                given.append((answer.status_code, answer.content, seen))
    assert given == [given[0]] * len(given)
    assert given[0][0] == 403
    assert json.loads(given[0][1])["code"] == "wrong_secret"


class Ticking(World):
    """A frozen clock, advanced only by the delay of a refusal and by the work of the store."""

    def __init__(self) -> None:
        self.time = 1000.0

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        is_refusal = seconds <= REFUSAL_S  # All other sleeps belong to periodic tasks.
        self.time += seconds if is_refusal else 0.0
        await super().sleep(0.0 if is_refusal else seconds)


class SlowLookupStore(MemoryStore):
    """A store whose lookups take longer the more they find."""

    def __init__(self, memory: Memory, world: Ticking) -> None:
        super().__init__(memory, world=world)
        self.time_of = world

    async def find(self, session: str) -> SessionInfo | None:
        found = await super().find(session)
        self.time_of.time += 0.001 if found is None else 0.007
        return found


@spec("STREAM-85")
async def test_the_time_of_a_refusal_does_not_reveal_whether_a_session_exists(tmp_path: Path) -> None:
    """Checked on every route that needs the secret: only work advances the clock."""
    world = Ticking()
    app = escrowed_app(tmp_path, [text("a canary")], inner=SlowLookupStore(Memory(), world), world=world)
    async with asgi_client(app) as http:
        await send_message(http)
        await follow_to_end(http)
        for method, what in [*ROUTES, ("POST", "/commands")]:
            for session in ("s1", "none"):
                began_at = world.time
                body, path = PING if what == "/commands" else None, f"/v1/sessions/{session}{what}"
                answer = await http.request(method, path, headers=WRONG, json=body)
                assert answer.status_code == 403
                assert world.time - began_at == pytest.approx(REFUSAL_S), (method, what, session)


@spec("STREAM-85")
async def test_a_refused_stream_does_not_reveal_whether_a_session_exists(tmp_path: Path) -> None:
    async with asgi_client(escrowed_app(tmp_path, [text("a canary")], world=Ticking())) as http:
        await send_message(http)
        await follow_to_end(http)
        given = []
        for session in ("s1", "none"):
            for key in ("k1", "k2"):  # Nor is the existence of the stream revealed.
                for frame in (abort(1), PING, {"type": "close"}):
                    headers = {"x-idempotency-key": key, **WRONG}
                    answer = await http.post(f"/v1/sessions/{session}/commands", json=frame, headers=headers)
                    given.append((answer.status_code, answer.content))
                resumed = {"stream": key, "secret": OTHER, "event_id": "1-1", "next_seqno": 1}
                for what in ("events", "poll"):
                    body = opening(**resumed)
                    answer = await http.post(f"/v1/sessions/{session}/{what}", json=body)
                    given.append((answer.status_code, answer.content))
    assert given == [given[0]] * len(given)
    assert given[0][0] == 403


async def _refused(server: Served, session: str, **fields: object) -> tuple[list[object], tuple[int, str]]:
    async with Socket(server.socket(session)) as socket:
        await socket.send({"type": "open", **fields})
        return [await socket.receive()], await socket.receive_close()


@spec("STREAM-85")
async def test_a_refused_websocket_does_not_reveal_whether_a_session_exists(tmp_path: Path) -> None:
    async with served(escrowed_app(tmp_path, [text("a canary")])) as server:
        await send_message(server.http)
        await follow_to_end(server.http)
        content = []
        for session in ("s1", "none"):
            content.append(await _refused(server, session))
            content.append(await _refused(server, session, secret=OTHER))
            for key in ("k1", "k2"):
                fields = {"stream": key, "secret": OTHER, "event_id": "1-1", "next_seqno": 1}
                content.append(await _refused(server, session, **fields))
        shaken = []
        for session in ("s1", "none"):
            headers = {"x-idempotency-key": "k1", "x-idempotency-event-id": "1-1", **WRONG}
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with server.socket(session, headers=headers):
                    pass
            response = refused.value.response
            shaken.append((response.status_code, response.body))
    assert content == [content[0]] * len(content)
    assert content[0][0][0]["code"] == "wrong_secret"  # type: ignore[index]
    assert shaken == [shaken[0]] * 2
    assert shaken[0][0] == 403


@spec("STREAM-85")
async def test_a_request_that_may_begin_a_session_is_refused_where_another_secret_owns_it(
    tmp_path: Path,
) -> None:
    async with asgi_client(escrowed_app(tmp_path, [text("one"), text("two")])) as http:
        assert (await send_message(http)).status_code == 200
        await follow_to_end(http)
        answer = await send_message(http, key="k2", secret=OTHER)
        assert (answer.status_code, answer.json()["code"]) == (403, "wrong_secret")
        assert (await send_message(http, "s2", key="k2", secret=OTHER)).status_code == 200
        for session in ("s1", "new"):  # A value that is no secret of 32 bytes is refused before any lookup.
            answer = await send_message(http, session, key="k3", secret="guess")
            assert (answer.status_code, answer.json()["code"]) == (400, "usage")


@spec("STREAM-84")
async def test_with_the_secret_every_route_works_as_usual(tmp_path: Path) -> None:
    async with asgi_client(escrowed_app(tmp_path, [text("one"), text("two")])) as http:
        await send_message(http)
        assert "turn_ended" in await follow_to_end(http)
        await send_message(http, key="k2", words="again")
        await follow_to_end(http, key="k2")
        shown = await http.get("/v1/sessions/s1", headers=SHOWN)
        assert shown.json()["turns"] == 2
        records = await http.get("/v1/sessions/s1/records", headers=SHOWN)
        assert records.status_code == 200
        assert SECRET not in records.text
        repeated = await send_message(http)
        assert repeated.headers["x-midstream-replayed"] == "true"
        assert (await http.delete("/v1/sessions/s1", headers=SHOWN)).status_code == 204
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).status_code == 403


async def test_lists_contain_no_content_of_encrypted_sessions(tmp_path: Path) -> None:
    @tool(needs_approval=True)
    async def ask() -> str:
        """Ask."""
        return "done"

    app = escrowed_app(tmp_path, [calls(("ask", "{}"))], tools=[ask])
    async with asgi_client(app) as http:
        await send_message(http, words="a canary")

        async def has_question() -> bool:
            page = await http.get("/v1/questions?session=s1", headers=SHOWN)
            return bool(page.json()["questions"])

        await until(has_question)
        for headers in ({}, WRONG):
            page = await http.get("/v1/questions", headers=headers)
            assert page.json() == {"questions": [], "is_complete": True}
            named = await http.get("/v1/questions?session=s1", headers=headers)
            assert named.json() == page.json()
        assert [info async for info in app.host.store.list()] != []
        assert (await http.get("/v1/sessions", headers=SHOWN)).json()[
            "sessions"
        ] == []  # No caller is authenticated.


async def test_an_authenticated_caller_lists_ids_without_titles(tmp_path: Path) -> None:
    access = Access(authenticate=tokens({"t" * 20: Principal("ann")}))
    async with asgi_client(escrowed_app(tmp_path, [text("one")], access=access)) as http:
        http.headers["authorization"] = f"Bearer {'t' * 20}"
        await send_message(http, words="a canary")
        await follow_to_end(http)
        [line] = (await http.get("/v1/sessions")).json()["sessions"]
        assert (line["id"], line["title"], line["status"], line["turns"]) == ("s1", "", "completed", 1)
        assert (await http.get("/v1/sessions/s1")).status_code == 403
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).status_code == 200


# --- a change of the secret


@spec("STREAM-88")
async def test_presenting_the_old_and_a_new_secret_changes_it(tmp_path: Path) -> None:
    async with asgi_client(escrowed_app(tmp_path, [text("one")])) as http:
        await send_message(http)
        await follow_to_end(http)
        both = {**WRONG, "x-idempotent-encryption-key-old": SECRET}
        assert (await http.get("/v1/sessions/s1", headers=both)).status_code == 200
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).status_code == 403
        assert (await http.get("/v1/sessions/s1", headers=WRONG)).status_code == 200
        assert (await http.get("/v1/sessions/s1", headers=both)).status_code == 200
        resumed = {"x-idempotency-key": "k1", **both}  # A stream that began under the old secret.
        answer = await http.get("/v1/sessions/s1/events", headers=resumed)
        assert "turn_ended" in answer.text
        late = await http.post(
            "/v1/sessions/s1/commands", json=command(), headers={"x-idempotency-key": "k1", **WRONG}
        )
        assert late.headers["x-midstream-replayed"] == "true"


# --- after the client has left


@spec("STREAM-92")
async def test_keys_are_dropped_when_the_last_client_has_left_an_idle_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escrow_locks, "LINGER_S", 0.0)
    app = escrowed_app(tmp_path, [text("one")])
    store = app.host.store
    assert isinstance(store, EscrowedStore)

    async def is_locked() -> bool:
        return not (len(app.host.awake) or store.keys._roots or store._known or store._writing)

    async with asgi_client(app) as http:
        await send_message(http)
        await follow_to_end(http)
        await until(is_locked)
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).status_code == 200


@spec("STREAM-89")
async def test_a_viewer_follows_until_its_token_is_revoked(tmp_path: Path) -> None:
    async with served(escrowed_app(tmp_path, [text("one")])) as server:
        await send_message(server.http)
        await follow_to_end(server.http)
        wish = {"for_s": 600}
        issued = await server.http.post("/v1/sessions/s1/viewers", json=wish, headers=SHOWN)
        token = issued.json()["token"]
        async with Socket(server.socket()) as socket:
            await socket.send({"type": "open", "secret": token, "event_id": "0-0"})
            assert (await socket.receive())["type"] == "welcome"
            assert (await server.http.delete("/v1/sessions/s1/viewers", headers=SHOWN)).status_code == 204
            received = await socket.receive_until("error")
            assert received[-1]["code"] == "unauthorized"
        bearer = {"authorization": f"Bearer {token}"}
        assert (await server.http.get("/v1/sessions/s1", headers=bearer)).status_code == 403


@spec("STREAM-89")
async def test_a_viewer_cannot_send(tmp_path: Path) -> None:
    async with asgi_client(escrowed_app(tmp_path, [text("one")])) as http:
        await send_message(http)
        await follow_to_end(http)
        token = (await http.post("/v1/sessions/s1/viewers", headers=SHOWN)).json()["token"]
        for headers in ({"x-idempotent-encryption-key": token}, {"authorization": f"Bearer {token}"}):
            for what in ("", "/records"):
                assert (await http.get(f"/v1/sessions/s1{what}", headers=headers)).status_code == 200
            for what in ("cancel", "resume", "withdraw", "answer", "viewers"):
                answer = await http.post(f"/v1/sessions/s1/{what}", headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (403, "access")
            assert (await http.delete("/v1/sessions/s1", headers=headers)).status_code == 403
            keys = {"x-idempotency-key": "k2", "x-idempotent-encryption-key": token}
            for number in (0, 1):
                answer = await http.post("/v1/sessions/s1/commands", json=abort(number), headers=keys)
                assert (answer.status_code, answer.json()["code"]) == (403, "access")
            for event_id in ("1-1", "0-0"):  # the second one may begin a session
                opened = await http.post(
                    "/v1/sessions/s1/events", json=opening(stream="k2", secret=token, event_id=event_id)
                )
                assert (opened.status_code, opened.json()["code"]) == (403, "access")
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).json()["turns"] == 1


@spec("STREAM-93")
async def test_a_viewer_does_not_start_work_that_waits_for_its_client(tmp_path: Path) -> None:
    memory = Memory()
    began = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait for ever."""
        began.set()
        await asyncio.Event().wait()
        return "never"

    first = escrowed_app(tmp_path, [calls(("wait", "{}"))], memory=memory, tools=[wait])
    async with asgi_client(first) as http:
        await send_message(http)
        await asyncio.wait_for(began.wait(), 60)
        token = (await http.post("/v1/sessions/s1/viewers", headers=SHOWN)).json()["token"]
    # It was stopped: its tool was cut. The next one has no keys.
    second = escrowed_app(tmp_path, [text("the end")], memory=memory, tools=[wait])
    async with asgi_client(second) as http:
        await second.start()
        await second.host.wait_for_recovery()
        assert (second.host.recovery.total, second.host.recovery.locked) == (1, 1)

        async def is_locked() -> bool:
            return [second.host.is_locked(info) async for info in second.host.store.list()] == [True]

        await until(is_locked)
        bearer = {"authorization": f"Bearer {token}"}
        shown = await http.get("/v1/sessions/s1", headers=bearer)
        assert (shown.status_code, shown.json()["status"]) == (200, "running")
        assert second.host.awake.turns_running == 1
        runner = second.host.awake.get("s1")
        assert runner is not None

        async def is_followed() -> bool:
            return runner.is_following  # As if another server worked on it.

        await until(is_followed)
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).status_code == 200

        async def has_continued() -> bool:
            return bool((await http.get("/v1/sessions/s1", headers=SHOWN)).json()["status"] != "running")

        await until(has_continued)


@spec("STREAM-87")
async def test_two_servers_share_a_session_after_both_received_its_secret(tmp_path: Path) -> None:
    memory = Memory()
    one = escrowed_app(tmp_path, [text("one")], memory=memory)
    other = escrowed_app(tmp_path, [text("two")], memory=memory)
    async with asgi_client(one) as http, asgi_client(other) as elsewhere:
        await send_message(http)
        await follow_to_end(http)
        assert (await elsewhere.get("/v1/sessions/s1", headers=WRONG)).status_code == 403
        assert (await elsewhere.get("/v1/sessions/s1", headers=SHOWN)).json()["turns"] == 1
        await send_message(elsewhere, key="k2")
        assert "k2" in await follow_to_end(elsewhere, key="k2")
        assert (await http.get("/v1/sessions/s1", headers=SHOWN)).json()["turns"] == 2
