"""The table of operations equals the routes of the router."""

from __future__ import annotations

from starlette.routing import Route

from midstream.engine.agent import Agent
from midstream.observability.prometheus import Prometheus
from midstream.server.api.route_table import OPERATIONS
from midstream.server.app import asgi
from midstream.server.auth.access import Access, bearer
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel

NOT_OF_PROGRAMS = {"/"}
"""Routes outside the description: the page; WebSockets are no part of OpenAPI."""


def test_every_route_is_an_operation_and_every_operation_has_a_route() -> None:
    app = asgi(
        Agent(ScriptedModel([])),
        store=MemoryStore(),
        access=Access(authenticate=bearer(lambda _: None)),
        observers=[Prometheus()],
    )
    routes = {
        (method, route.path.replace("{stream:stream}", "{stream}"))
        for route in app._router.routes
        if isinstance(route, Route) and route.path not in NOT_OF_PROGRAMS
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert {(each.method, each.path) for each in OPERATIONS} == routes
