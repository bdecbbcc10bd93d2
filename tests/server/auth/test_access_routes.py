"""Tickets, viewer tokens and links that are issued to authenticated principals."""

from __future__ import annotations

from midstream.server.auth.ownership import READERS_MAX
from midstream.server.auth.principals import Principal
from tests.server.known_people import ADA, BOB, EVE, OPERATOR, guarded_app, post_message, status_and_code
from tests.server.serving import KEYS, asgi_client, make_app
from tests.spec import spec


async def test_a_reader_has_access_until_the_owner_revokes_it() -> None:
    async with asgi_client(guarded_app()) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        assert (await client.get("/v1/sessions/s1/owner", headers=ADA)).json() == {
            "tenant": "",
            "principal": "ada",
            "readers": [],
        }
        shared = await client.put("/v1/sessions/s1/readers/bob", headers=ADA)
        assert shared.json()["readers"] == ["bob"]
        assert (await client.get("/v1/sessions/s1", headers=BOB)).status_code == 200
        commands = "/v1/sessions/s1/commands"
        ping = await client.post(commands, json={"type": "ping"}, headers=BOB)
        assert ping.json()["type"] == "heartbeat"  # A reader over plain HTTP requests a heartbeat this way.
        assert status_and_code(await post_message(client, "s1", BOB)) == (403, "access")
        close = await client.post(commands, json={"type": "close"}, headers={**KEYS, **BOB})
        assert status_and_code(close) == (403, "access")
        for method, path in (
            ("GET", "owner"),
            ("PUT", "readers/bob"),
            ("POST", "viewers"),
            ("POST", "cancel"),
        ):
            answer = await client.request(method, f"/v1/sessions/s1/{path}", headers=BOB)
            assert status_and_code(answer) == (403, "access")
        await client.delete("/v1/sessions/s1/readers/bob", headers=ADA)
        assert status_and_code(await client.get("/v1/sessions/s1", headers=BOB)) == (404, "session_not_found")


async def test_readers_of_a_session_are_limited_and_a_deleted_session_has_no_owner() -> None:
    async with asgi_client(guarded_app()) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        await client.get("/v1/sessions/s1/events", headers={**ADA, "x-idempotency-key": "k1", **_SECRET})
        for number in range(READERS_MAX):
            await client.put(f"/v1/sessions/s1/readers/reader{number}", headers=ADA)
        answer = await client.put("/v1/sessions/s1/readers/bob", headers=ADA)
        assert status_and_code(answer) == (429, "limit_reached")
        assert (await client.delete("/v1/sessions/s1", headers=ADA)).status_code == 204
        assert (await post_message(client, "s1", BOB)).status_code == 200
        assert status_and_code(await client.get("/v1/sessions/s1", headers=ADA)) == (404, "session_not_found")


async def test_a_login_link_logs_in_as_the_principal_that_requested_it() -> None:
    async with asgi_client(guarded_app()) as client:
        link = (await client.post("/v1/login-links", headers=BOB)).json()
        assert link["for_s"] == 3600
        logged_in = await client.post("/v1/login", json={"login": link["token"]})
        assert logged_in.json() == {
            "id": "bob",
            "tenant": "",
            "is_operator": False,
            "session": "",
            "is_approver": False,
            "scope": {"actions": ["read", "send", "approve", "own"], "sessions": "*"},
        }
        assert (await client.get("/v1/me")).json()["id"] == "bob"
        assert (await client.post("/v1/logout", headers={"x-midstream": "test"})).status_code == 204
        assert status_and_code(await client.get("/v1/me")) == (401, "unauthorized")
        assert (await client.get("/v1/me", headers=OPERATOR)).json()["is_operator"] is True


async def test_over_https_the_cookie_is_bound_to_its_host() -> None:
    async with asgi_client(guarded_app()) as client:
        cookie = (await client.post("https://testserver/v1/login", headers=ADA, json={})).headers[
            "set-cookie"
        ]
    assert cookie.startswith("__Host-midstream=cookie-")
    assert {"Secure", "HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert "Domain" not in cookie


async def test_without_authentication_no_credentials_are_issued() -> None:
    async with asgi_client(make_app()) as client:
        for path in ("/v1/login", "/v1/login-links", "/v1/sessions/s1/tickets", "/v1/sessions/s1/viewers"):
            assert status_and_code(await client.post(path, json={})) == (404, "not_found")


_SECRET = {"x-idempotent-encryption-key": "s" * 43}


@spec("SEC-6", "SEC-8")
async def test_a_principal_with_a_colon_is_a_tenant_or_a_part_of_an_id() -> None:
    known = {
        "the-token-of-ada": Principal("github:7"),
        "the-token-of-bob": Principal("bob"),
        "the-token-of-the-operator": Principal("root", is_operator=True),
    }
    async with asgi_client(guarded_app(known=known)) as client:
        for who in (ADA, BOB):
            assert (await client.post("/v1/login-links", headers=who)).status_code == 201
        gone = await client.delete("/v1/access?principal=github:7", headers=OPERATOR)
        assert gone.json() == {"count": 1}
        left = (await client.get("/v1/access", headers=OPERATOR)).json()["credentials"]
        assert [line["issued_by"] for line in left] == ["bob"]
        assert status_and_code(await client.delete("/v1/access?principal=github:7", headers=BOB)) == (
            403,
            "access",
        )
        assert (await client.delete("/v1/access?principal=*", headers=OPERATOR)).json() == {"count": 1}


@spec("SEC-8")
async def test_an_operator_of_a_tenant_manages_no_other_tenant() -> None:
    known = {
        "the-token-of-ada": Principal("ada", tenant="acme"),
        "the-token-of-eve": Principal("eve", tenant="other"),
        "the-token-of-the-operator": Principal("root", tenant="acme", is_operator=True),
    }
    async with asgi_client(guarded_app(known=known)) as client:
        for who in (ADA, EVE):
            assert (await client.post("/v1/login-links", headers=who)).status_code == 201
        seen = (await client.get("/v1/access", headers=OPERATOR)).json()["credentials"]
        assert [line["issued_by"] for line in seen] == ["acme:ada"]
        for name in ("other:eve", "*"):
            refused = await client.delete(f"/v1/access?principal={name}", headers=OPERATOR)
            assert status_and_code(refused) == (403, "access")
        assert (await client.delete("/v1/access?principal=acme:ada", headers=OPERATOR)).json() == {"count": 1}
