"""`/metrics`: served where it is enabled, and to an operator only where callers are authenticated."""

from __future__ import annotations

import pytest

from midstream.engine.agent import Agent
from midstream.observability.prometheus import Prometheus
from midstream.server.app import asgi
from midstream.server.auth.access import Access, bearer
from midstream.server.auth.principals import Principal
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, text
from tests.server.known_people import ADA, KNOWN, OPERATOR, post_message, status_and_code
from tests.server.serving import asgi_client, make_app
from tests.spec import spec


async def test_metrics_are_served_to_the_operator_only() -> None:
    app = asgi(
        Agent(ScriptedModel(lambda _: text("Hello."))),
        store=MemoryStore(),
        access=Access(authenticate=bearer(KNOWN.get)),
        observers=[Prometheus()],
    )
    async with asgi_client(app) as client:
        assert (await post_message(client, "s1", ADA)).status_code == 200
        assert status_and_code(await client.get("/metrics")) == (401, "unauthorized")
        assert status_and_code(await client.get("/metrics", headers=ADA)) == (403, "access")
        page = await client.get("/metrics", headers=OPERATOR)
        assert page.headers["content-type"].startswith("text/plain; version=")
        lines = page.text.splitlines()
        assert {"midstream_streams 0.0", "midstream_sessions_awake 1.0", "midstream_is_draining 0.0"} <= {
            *lines
        }


@spec("SEC-19")
@pytest.mark.parametrize("path", ["/metrics", "/v1/nodes"])
async def test_an_operator_of_one_tenant_gets_no_figures_of_all_tenants(path: str) -> None:
    known = {
        "the-token-of-ada": Principal("ada", tenant="acme", is_operator=True),
        "the-token-of-the-operator": Principal("root", is_operator=True),
    }
    app = asgi(
        Agent(ScriptedModel(lambda _: text("Hello."))),
        store=MemoryStore(),
        access=Access(authenticate=bearer(known.get)),
        observers=[Prometheus()],
    )
    async with asgi_client(app) as client:
        assert status_and_code(await client.get(path, headers=ADA)) == (403, "access")
        assert (await client.get(path, headers=OPERATOR)).status_code == 200


async def test_without_a_counting_observer_there_is_no_metrics_page() -> None:
    async with asgi_client(make_app()) as client:
        assert status_and_code(await client.get("/metrics")) == (404, "not_found")
