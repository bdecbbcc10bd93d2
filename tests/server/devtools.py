"""Chromium controlled by its DevTools protocol alone.

Playwright keeps every page visible and focused, and such a page cannot be frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import websockets

from midstream.environment import World

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A page that the test serves counts as remote, and may not connect to this machine.
    "--disable-features=LocalNetworkAccessChecks",
]
WAIT_S = 60.0
CRASH_S = 0.2
"""Seconds to wait for a crash: a crashed page sends no event."""
LISTENING = re.compile(rb"DevTools listening on (ws://\S+)")
MESSAGE_BYTES_MAX = 64 * 2**20


class BrowserRefusedError(Exception):
    """The browser's error response to a command."""


class DevTools:
    """One connection to a browser, for all its tabs."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._targets: list[str] = []

    async def listen(self) -> None:
        """Receive responses until the browser has gone."""
        async for message in self._socket:
            answer = json.loads(message)
            if asked := self._asked.pop(answer.get("id", 0), None):
                asked.set_result(answer)

    async def send(self, method: str, *, session: str = "", **params: object) -> dict[str, Any]:
        """Send one command.

        Raises:
            BrowserRefusedError: It was not done.
        """
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        of_session = {"sessionId": session} if session else {}
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params, **of_session}))
        answer = await asyncio.wait_for(answered, WAIT_S)
        if "error" in answer:
            raise BrowserRefusedError(answer["error"]["message"])
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> Tab:
        """Open a tab, and wait until its page is loaded."""
        target = await self.send("Target.createTarget", url=url)
        self._targets.append(target["targetId"])
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        await tab.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return tab

    async def close_tabs(self) -> None:
        """Close all opened tabs; some may have gone."""
        while self._targets:
            with contextlib.suppress(BrowserRefusedError):
                await self.send("Target.closeTarget", targetId=self._targets.pop())


class Tab:
    """One page."""

    def __init__(self, browser: DevTools, session: str) -> None:
        self._browser = browser
        self._session = session

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """Return the value of an expression, or of its promise."""
        answer = await self._browser.send(
            "Runtime.evaluate",
            session=self._session,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def call(self, function: str, *arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Return the value of a function for these arguments."""
        return await self.evaluate(f"({function})({', '.join(map(json.dumps, arguments))})")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(WAIT_S):
            while True:
                # The first page of a site has a process of its own (COOP), which is not there yet.
                with contextlib.suppress(BrowserRefusedError):
                    if await self.evaluate(expression):
                        return
                await World().sleep(0.02)

    async def reload(self) -> None:
        """Reload the page, and wait for the next one."""
        await self.evaluate("globalThis.isOld = true")
        await self._browser.send("Page.reload", session=self._session)
        async with asyncio.timeout(WAIT_S):
            while True:
                # One page goes, and the other is not there yet.
                with contextlib.suppress(BrowserRefusedError):
                    if await self.evaluate("!globalThis.isOld && document.readyState === 'complete'"):
                        return
                await World().sleep(0.01)

    async def crash(self) -> None:
        """Kill the page's process, as when its memory runs out; after that the page sends no response."""
        with contextlib.suppress(BrowserRefusedError, TimeoutError):
            await asyncio.wait_for(self._browser.send("Page.crash", session=self._session), CRASH_S)

    async def clear_site_data(self, origin: str) -> None:
        """Clear all data of a site, as its user can."""
        await self._browser.send(
            "Storage.clearDataForOrigin", session=self._session, origin=origin, storageTypes="all"
        )

    async def follow_link(self, url: str) -> None:
        """Follow a link to another page: the one before may be kept for the back button."""
        at, _ = await self._history()
        await self._browser.send("Page.navigate", session=self._session, url=url)
        await self._arrives(at + 1)

    async def back(self) -> None:
        """Press the back button."""
        at, entries = await self._history()
        former = entries[at - 1]["id"]
        await self._browser.send("Page.navigateToHistoryEntry", session=self._session, entryId=former)
        await self._arrives(at - 1)

    async def _arrives(self, at: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                # One page goes, and the other is not there yet.
                with contextlib.suppress(BrowserRefusedError):
                    # A closing page may leave a request unanswered: the browser itself is asked first.
                    is_there = (await self._history())[0] == at
                    if is_there and await self.evaluate("document.readyState === 'complete'"):
                        return
                await World().sleep(0.01)

    async def _history(self) -> tuple[int, list[dict[str, Any]]]:
        history = await self._browser.send("Page.getNavigationHistory", session=self._session)
        return history["currentIndex"], history["entries"]

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """Freeze the page, as a browser does with tabs in the background, until the end of the block."""
        await self._browser.send("Page.setWebLifecycleState", session=self._session, state="frozen")
        yield
        await self._browser.send("Page.setWebLifecycleState", session=self._session, state="active")


@contextlib.asynccontextmanager
async def devtools(chromium: str, flags: Sequence[str], profile: Path) -> AsyncIterator[DevTools]:
    """Launch a browser with an empty profile."""
    process = await asyncio.create_subprocess_exec(
        chromium,
        *flags,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with contextlib.AsyncExitStack() as over:
        over.push_async_callback(process.communicate)
        over.callback(process.kill)
        output = b""
        while (found := LISTENING.search(output)) is None:
            output += await asyncio.wait_for(process.stderr.readline(), WAIT_S)
        over.callback(asyncio.create_task(process.stderr.read()).cancel)
        connecting = websockets.connect(found[1].decode(), max_size=MESSAGE_BYTES_MAX)
        browser = DevTools(await over.enter_async_context(connecting))
        over.callback(asyncio.create_task(browser.listen()).cancel)
        yield browser
