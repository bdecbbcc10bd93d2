"""The client scripts against `midstream.js` in a real browser, over each of its transports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from midstream.client.transport_selection import TransportKind
from midstream.server.pages import FOLDER
from midstream.testing.conformance.client_wire import ClientState, WireTrial
from midstream.testing.conformance.scripted_server import ScriptedServer
from midstream.testing.conformance.scripts import Json, scripts
from midstream.testing.conformance.server_side import ScriptOutcome
from tests.server.devtools import CHROMIUM, DevTools, Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: apt-get install --no-install-recommends chromium"
    ),
]
TRIAL = Path(__file__).with_name("trial.js")
FILES = {
    "/trial/": b"<!doctype html>",
    "/trial/trial.js": TRIAL.read_bytes(),
    **{f"/trial/client/{path.name}": path.read_bytes() for path in (FOLDER / "client").glob("*.js")},
}
BEGIN = """async (session, transport) => {
  const { Trial } = await import("/trial/trial.js");
  globalThis.trial = new Trial();
  await globalThis.trial.begin(session, transport);
}"""


class PageSubject:
    """A page that runs `trial.js`, at the address of the scripted server."""

    def __init__(self, page: Tab) -> None:
        self._page = page
        self._begun: tuple[str, TransportKind] | None = None

    async def begin(self, session: str, transport: TransportKind) -> None:
        self._begun = (session, transport)
        await self._page.call(BEGIN, session, transport)

    async def submit(self, payload: Json) -> None:
        await self._page.call("(payload) => trial.submit(payload)", payload)

    async def detach(self) -> None:
        await self._page.evaluate("trial.detach()")

    async def mark_handled(self, event_id: str) -> None:
        await self._page.call("(id) => trial.markHandled(id)", event_id)

    async def restart(self) -> None:
        assert self._begun is not None
        await self._page.evaluate("trial.die()")
        await self._page.reload()
        await self._page.call(BEGIN, *self._begun)
        await self._page.evaluate("trial.resume()")

    async def advance_clock(self) -> None:
        await self._page.evaluate("trial.advanceClock()")

    async def read_state(self) -> ClientState:
        return msgspec.convert(await self._page.evaluate("trial.readState()"), ClientState)

    async def end(self) -> None:
        await self._page.evaluate("trial.end()")


@pytest.mark.long
async def test_the_browser_client_passes_every_script(chromium: DevTools) -> None:
    """Run each transport at once, in a page of its own."""
    found = await asyncio.gather(*(_play_scripts(chromium, transport) for transport in TransportKind))
    assert [outcome for outcomes in found for outcome in outcomes if not outcome.has_passed] == []


async def _play_scripts(chromium: DevTools, transport: TransportKind) -> list[ScriptOutcome]:
    async with ScriptedServer(FILES).listening() as server:
        trial = WireTrial(server, PageSubject(await chromium.open(f"{server.url}/trial/")))
        return [await trial.run(script, transport) for script in scripts("client")]


async def test_a_browser_client_that_breaks_a_rule_is_detected(chromium: DevTools) -> None:
    core = "/trial/client/link.js"
    broken = FILES[core].replace(b"this.number += 1;", b"")
    assert broken != FILES[core]
    [script] = [each for each in scripts("client") if each.clauses == ("STREAM-50",)]
    async with ScriptedServer({**FILES, core: broken}).listening() as server:
        trial = WireTrial(server, PageSubject(await chromium.open(f"{server.url}/trial/")))
        outcome = await trial.run(script, TransportKind.WEBSOCKET)
    assert (outcome.step, outcome.problem) == (8, "frame 0: connection is 0, not above 0")
