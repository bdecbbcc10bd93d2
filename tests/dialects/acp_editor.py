"""An editor for tests: the client side of the `agent-client-protocol` package with `midstream acp` as its program."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

from acp import connect_to_agent
from acp.core import ClientSideConnection
from acp.interfaces import Client
from acp.schema import (
    AllowedOutcome,
    ClientCapabilities,
    DeniedOutcome,
    Implementation,
    PermissionOption,
    PromptResponse,
    RequestPermissionResponse,
    TextContentBlock,
    ToolCallUpdate,
)
from pydantic import BaseModel

from tests.forked import AsyncForked

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
LINE_BYTES_MAX = 2**24


class Editor:
    """Starts the agent, and stores its updates. Use it as an async context manager.


    Args:
        folder: Its working folder, with the store and the log.     agent: The name of the agent.     options:
            Options of `midstream acp`.     variables: Added to the environment.
    """

    def __init__(
        self, folder: Path, agent: str, *options: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.shown: list[Json] = []
        """The updates of all sessions, in order."""
        self.permissions: list[Json] = []
        """The received permission requests."""
        self.choices: list[str] = []
        """The options to select, in order; without one, the request is left open."""
        self.connection: ClientSideConnection
        self._folder = folder
        self._command = ("midstream", "acp", agent, *options)
        self._variables = dict(variables or {})
        self.process: AsyncForked | None = None
        self._came = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the agent, and initialize the connection."""
        with (self._folder / "agent.log").open("ab") as log:
            self.process = await AsyncForked.started(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, **self._variables},
                limit=LINE_BYTES_MAX,
            )
        self.connection = connect_to_agent(
            cast("Client", self), self.process.stdin, self.process.stdout, use_unstable_protocol=True
        )
        about = Implementation(name="tests", version="1")
        greeting = self.connection.initialize(1, ClientCapabilities(), about)
        self.greeting = await asyncio.wait_for(greeting, WAIT_S)

    async def kill(self) -> None:
        """Kill the agent: its process ends at once, without a message."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()
        await self.connection.close()

    async def close(self) -> None:
        """Close the agent's stdin, as a closing editor does, and wait for its end."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), WAIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await self.connection.close()

    async def new(self) -> str:
        """Create a session and return its id."""
        begun = self.connection.new_session(cwd=str(self._folder), mcp_servers=[])
        return (await asyncio.wait_for(begun, WAIT_S)).session_id

    async def load(self, session_id: str) -> None:
        """Load a session: earlier updates are deleted, as in a window that is opened again."""
        self.shown = []
        loading = self.connection.load_session(cwd=str(self._folder), session_id=session_id, mcp_servers=[])
        await asyncio.wait_for(loading, WAIT_S)

    async def prompt(self, session_id: str, words: str | list[Any], **meta: object) -> PromptResponse:
        """Send a message and wait for the end of its turn."""
        blocks = [TextContentBlock(type="text", text=words)] if isinstance(words, str) else words
        asking = self.connection.prompt(session_id=session_id, prompt=blocks, **meta)
        return await asyncio.wait_for(asking, WAIT_S)

    async def wait_for_updates(self, count: int) -> None:
        """Wait until this many updates have arrived."""
        await self.wait_until(lambda: len(self.shown) >= count)

    async def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Wait until a condition on the updates holds."""
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(is_there)

    def text(self, kind: str = "agent_message_chunk") -> str:
        """Return the text of all updates of a kind."""
        return "".join(each["content"]["text"] for each in self.shown if each["sessionUpdate"] == kind)

    def results(self) -> list[str]:
        """Return the outcome of each call."""
        ended = (each for each in self.shown if each.get("status") in ("completed", "failed"))
        return [each["content"][0]["content"]["text"] for each in ended]

    # --- messages of the agent --------------------------------------------------------------------------------

    def on_connect(self, conn: object) -> None:
        """Do nothing: no preparation is needed."""

    async def session_update(self, session_id: str, update: BaseModel, **_: object) -> None:
        """Store an update."""
        self.shown.append(update.model_dump(mode="json", by_alias=True, exclude_none=True))
        async with self._came:
            self._came.notify_all()

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **_: object
    ) -> RequestPermissionResponse:
        """Decide as the test has set."""
        asked = tool_call.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.permissions.append({**asked, "options": [each.option_id for each in options]})
        async with self._came:
            self._came.notify_all()
        if not self.choices:
            await asyncio.get_running_loop().create_future()
        choice = self.choices.pop(0)
        if choice == "cancelled":
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=choice))
