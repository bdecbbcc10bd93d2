"""Shared parts of the tests of access: an app with authentication, and three users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx2
import msgspec

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.server.app import App, asgi
from midstream.server.audit_log import AuditLog
from midstream.server.auth.access import Access, Authorize, Verify, bearer
from midstream.server.auth.principals import Principal
from midstream.server.limits import Limits
from midstream.store.contract import Store
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Script, ScriptedModel, text
from midstream.tools.function_tools import Tool
from tests.server.serving import KEYS, Json, command

ADA = {"authorization": "Bearer the-token-of-ada"}
BOB = {"authorization": "Bearer the-token-of-bob"}
EVE = {"authorization": "Bearer the-token-of-eve"}
OPERATOR = {"authorization": "Bearer the-token-of-the-operator"}
KNOWN = {
    "the-token-of-ada": Principal("ada"),
    "the-token-of-bob": Principal("bob"),
    "the-token-of-the-operator": Principal("root", is_operator=True),
}
TENANTS = {
    "the-token-of-ada": Principal("ada", tenant="acme"),
    "the-token-of-bob": Principal("bob", tenant="acme"),
    "the-token-of-eve": Principal("ada", tenant="other"),
}


class Later(World):
    """The real world, with clocks that a test may advance."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def guarded_app(
    script: Script | None = None,
    *,
    known: Mapping[str, Principal] | Verify = KNOWN,
    store: Store | None = None,
    world: World | None = None,
    limits: Limits | None = None,
    authorize: Authorize | None = None,
    recheck_s: float = 300.0,
    allowed_origins: Sequence[str] = (),
    tools: Sequence[Tool] = (),
    audit: AuditLog | None = None,
) -> App:
    """Make an app that authenticates people by their tokens; a mapping may be changed while it runs."""
    verify = known if callable(known) else known.get
    access = Access(authenticate=bearer(verify), authorize=authorize, recheck_s=recheck_s)
    model = ScriptedModel(script or (lambda _: text("Hello.")))
    return asgi(
        Agent(model, tools=tools),
        store=store or MemoryStore(),
        world=world,
        access=access,
        limits=limits or Limits(),
        allowed_origins=allowed_origins,
        audit=audit,
    )


async def post_message(
    client: httpx2.AsyncClient, session: str, headers: Mapping[str, str], **more: str
) -> httpx2.Response:
    """Send a message by POST, as command 0 of a stream."""
    sent = {**KEYS, **headers, **more}
    return await client.post(f"/v1/sessions/{session}/commands", json=command(), headers=sent)


def status_and_code(answer: httpx2.Response) -> tuple[int, str]:
    """Return the status and the code of a problem."""
    problem: Json = msgspec.json.decode(answer.content)
    return answer.status_code, problem["code"]
