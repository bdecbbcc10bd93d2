"""Firefox controlled by WebDriver BiDi alone: it needs no driver program, and its hidden tabs are hidden."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import websockets

from midstream.environment import World

WAIT_S = 90.0
"""A browser takes long to start on a busy machine."""
LISTENING = re.compile(rb"WebDriver BiDi listening on (ws://\S+)")
MESSAGE_BYTES_MAX = 64 * 2**20
ENTER = "\ue007"
PREFERENCES = """
user_pref("app.update.disabledForTesting", true);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("network.captive-portal-service.enabled", false);
user_pref("network.connectivity-service.enabled", false);
user_pref("browser.shell.checkDefaultBrowser", false);
"""


class FirefoxRefusedError(Exception):
    """The browser's error response to a command."""


class Firefox:
    """One connection to a browser, for all its tabs."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Receive responses until the browser has gone."""
        async for message in self._socket:
            answer = json.loads(message)
            if asked := self._asked.pop(answer.get("id") or 0, None):
                asked.set_result(answer)

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """Run one command.

        Raises:
            FirefoxRefusedError: The browser refused it.
        """
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        answer = await asyncio.wait_for(answered, WAIT_S)
        if answer["type"] == "error":
            raise FirefoxRefusedError(f"{answer['error']}: {answer['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str, *, is_hidden: bool = False) -> FirefoxTab:
        """Open a tab, in the background for a hidden one, and wait until its page is loaded."""
        created = await self.send("browsingContext.create", type="tab", background=is_hidden)
        tab = FirefoxTab(self, created["context"])
        await self.send("browsingContext.navigate", context=created["context"], url=url, wait="complete")
        return tab


class FirefoxTab:
    """One page."""

    def __init__(self, browser: Firefox, context: str) -> None:
        self._browser = browser
        self._context = context

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """Return the value of an expression, or of its promise."""
        answer = await self._browser.send(
            "script.evaluate",
            expression=f"(async () => JSON.stringify((await ({expression})) ?? null))()",
            target={"context": self._context},
            awaitPromise=True,
        )
        assert answer["type"] == "success", answer
        return json.loads(answer["result"]["value"])

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(
                    FirefoxRefusedError
                ):  # The old page is gone, and the next one is not there yet.
                    if await self.evaluate(expression):
                        return
                await World().sleep(0.05)

    async def texts(self, selector: str) -> list[str]:
        """Return the text of each element."""
        found: list[str] = await self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)"
        )
        return found

    async def click(self, selector: str, *, times: int = 1) -> None:
        """Click the middle of an element with the mouse, `times` times in a row."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        box = await self.evaluate(
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
        )
        x, y = int(box["x"] + box["width"] / 2), int(box["y"] + box["height"] / 2)
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        moves = [{"type": "pointerMove", "x": x, "y": y}, *times * press]
        await self._act({"type": "pointer", "id": "mouse", "actions": moves})

    async def type(self, words: str) -> None:
        """Press the key of each character; `ENTER` is one."""
        keys = [{"type": kind, "value": each} for each in words for kind in ("keyDown", "keyUp")]
        await self._act({"type": "key", "id": "keys", "actions": keys})

    async def _act(self, source: dict[str, object]) -> None:
        await self._browser.send("input.performActions", context=self._context, actions=[source])

    async def reload(self) -> None:
        """Load the page again, and wait until it is there."""
        await self._browser.send("browsingContext.reload", context=self._context, wait="complete")

    async def close(self) -> None:
        await self._browser.send("browsingContext.close", context=self._context)

    async def screenshot(self) -> bytes:
        """Return a PNG of the tab."""
        taken = await self._browser.send("browsingContext.captureScreenshot", context=self._context)
        return base64.b64decode(taken["data"])


@contextlib.asynccontextmanager
async def firefox(program: str, profile: Path) -> AsyncIterator[Firefox]:
    """Launch a browser with an empty profile."""
    (profile / "user.js").write_text(PREFERENCES)
    flags = ("--headless", "--no-remote", "--remote-debugging-port", "0", "--profile", str(profile))
    process = await asyncio.create_subprocess_exec(
        program,
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    async with contextlib.AsyncExitStack() as over:
        over.push_async_callback(process.wait)
        over.callback(os.killpg, process.pid, signal.SIGKILL)
        output = b""
        while (found := LISTENING.search(output)) is None:
            output += await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        over.callback(asyncio.create_task(process.stdout.read()).cancel)
        connecting = websockets.connect(f"{found[1].decode()}/session", max_size=MESSAGE_BYTES_MAX)
        browser = Firefox(await over.enter_async_context(connecting))
        over.callback(asyncio.create_task(browser.listen()).cancel)
        await browser.send("session.new", capabilities={})
        yield browser
