"""The action of a request on its session, and refusal of unauthenticated callers."""

from __future__ import annotations

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from midstream.server.auth.middleware import action_of
from midstream.server.auth.principals import Action
from tests.server.known_people import ADA, BOB, guarded_app, post_message, status_and_code
from tests.server.serving import asgi_client


@pytest.mark.parametrize(
    ("method", "what", "action"),
    [
        ("GET", "", Action.READ),
        ("DELETE", "", Action.OWN),
        ("GET", "/records", Action.READ),
        ("GET", "/blobs/abc", Action.READ),
        ("POST", "/commands", Action.READ),
        ("POST", "/cancel", Action.SEND),
        ("POST", "/poll", Action.READ),
        ("POST", "/withdraw", Action.SEND),
        ("PUT", "/readers/bob", Action.OWN),
        ("GET", "/what-comes-next-year", Action.OWN),
        ("GET", "/blobs/a/b", Action.OWN),
    ],
)
def test_each_operation_has_its_action_and_unknown_ones_are_the_owners(
    method: str, what: str, action: Action
) -> None:
    assert action_of(method, what) is action


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/questions", "/v1/me", "/v1/logout", "/v2", "/metrics"])
async def test_an_unauthenticated_caller_receives_only_the_way_to_authenticate(path: str) -> None:
    async with asgi_client(guarded_app()) as client:
        for method in ("GET", "POST", "OPTIONS"):
            answer = await client.request(method, path, headers={"x-midstream": "test"})
            assert status_and_code(answer) == (401, "unauthorized")
        for open_to_all in ("/", "/health", "/ready", "/static/app.js"):
            assert (await client.get(open_to_all)).status_code in {200, 503}


async def test_a_mounted_app_has_the_same_middleware() -> None:
    app = guarded_app()
    outer = Starlette(routes=[Mount("/agents/v1", app)])
    transport = httpx2.ASGITransport(app=outer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://testserver/agents/v1") as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        assert (await client.get("/v1/sessions/s1", headers=ADA)).status_code == 200
        assert status_and_code(await client.get("/v1/sessions/s1", headers=BOB)) == (404, "session_not_found")
        assert status_and_code(await client.get("/v1/sessions/s1")) == (401, "unauthorized")
    await app.stop(grace_s=0)
