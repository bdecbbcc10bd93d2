"""An agent for editors: sessions of a store over the Agent Client Protocol.

A session of the protocol is a session of the store. A prompt is a turn. The updates of a session come from its journal,
so a session that is loaded again shows the same updates. A turn of a dead process continues.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from midstream.dialects.opaque_tokens import pack, unpack
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import MidstreamError, NotFoundError, ProtocolError, SessionNotFoundError, UsageError
from midstream.extras import extra
from midstream.server.acp_session import AcpClient, AcpSession
from midstream.server.api.langgraph_threads import ThreadNotes
from midstream.server.api.turn_requests import stop_turn
from midstream.session.child_names import PART_MARK
from midstream.store.contract import ListPlace, Store, is_session
from midstream.tools.function_tools import ToolSource
from midstream.version import __version__

with extra("acp"):
    from acp import PROTOCOL_VERSION, RequestError, schema

Json = dict[str, Any]

LIST_PAGE = 50
"""Sessions of one page of `session/list`."""
KEY_META = "midstream/key"
"""Member of a prompt's `_meta`: the idempotency key. Two prompts with the same key are one prompt."""
_NOT_FOUND = -32002
_INVALID = -32602
_INTERNAL = -32603
_log = logging.getLogger(__name__)
_Act = Callable[[Any, Json], Awaitable[Json | None]]


class AcpServer:
    """Agent Client Protocol for one editor.

    Args:
        agent: The agent that answers prompts.
        store: Keeps the sessions. It is opened with the first session.
        cwd: The working folder of sessions that no editor has begun.
    """

    def __init__(
        self, agent: Agent, store: Store | str | Path, *, cwd: str, world: World | None = None
    ) -> None:
        self.host = Host(agent, store, world=world)
        self._cwd = cwd
        self._notes = ThreadNotes(self.host)
        self._client: AcpClient | None = None
        self._starting = asyncio.Lock()
        self._sessions: dict[str, AcpSession] = {}
        self._served: set[str] = set()
        """Sessions that have the editor's MCP servers already."""
        self._methods: dict[str, tuple[type[Any], _Act]] = {
            "initialize": (schema.InitializeRequest, self._initialize),
            "session/new": (schema.NewSessionRequest, self._new),
            "session/load": (schema.LoadSessionRequest, self._load),
            "session/resume": (schema.ResumeSessionRequest, self._resume),
            "session/list": (schema.ListSessionsRequest, self._list),
            "session/close": (schema.CloseSessionRequest, self._close),
            "session/delete": (schema.DeleteSessionRequest, self._delete),
            "session/prompt": (schema.PromptRequest, self._prompt),
            "session/cancel": (schema.CancelNotification, self._cancel),
        }

    def connect(self, client: AcpClient) -> None:
        """Send updates and requests to this client."""
        self._client = client

    async def handle(self, method: str, params: Any | None, is_notification: bool) -> Any:  # noqa: ANN401, FBT001 - the SDK's
        """Handle a request or a notification of the editor.

        Raises:
            RequestError: The request is refused.
            pydantic.ValidationError: The parameters are invalid.
        """
        found = self._methods.get(method)
        if found is None:
            if is_notification:
                return None
            raise RequestError.method_not_found(method)
        form, act = found
        try:
            return await act(form.model_validate(params or {}), params or {})
        except MidstreamError as error:
            if is_notification:  # no caller waits for an answer
                _log.info("%s was refused: %s", method, error.message)
                return None
            raise _refusal(error) from error

    async def stop(self) -> None:
        """Stop the host. Running tools have a few seconds; turns continue in the next process on this store."""
        for session in self._sessions.values():
            session.stop()
        await self.host.stop()

    # --- methods ----------------------------------------------------------------------------------------------

    async def _initialize(self, _: schema.InitializeRequest, __: Json) -> Json:
        can: Json = {"list": {}, "resume": {}, "close": {}, "delete": {}}
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "agentInfo": {"name": self.host.agent.name, "version": __version__},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True, "audio": True, "embeddedContext": True},
                "mcpCapabilities": {"http": find_spec("mcp") is not None, "sse": False},
                "sessionCapabilities": can,
            },
            "authMethods": [],
        }

    async def _new(self, request: schema.NewSessionRequest, _: Json) -> Json:
        session_id = self.host.world.new_id("acp")
        await self._use_servers(session_id, request.mcp_servers)
        await self._start()
        await self._notes.sweep()
        await self._notes.change(session_id, {"cwd": request.cwd})
        await self._open(session_id)
        return {"sessionId": session_id}

    async def _load(self, request: schema.LoadSessionRequest, _: Json) -> Json:
        await (await self._reopen(request)).show(with_past=True)
        return {}

    async def _resume(self, request: schema.ResumeSessionRequest, _: Json) -> Json:
        await (await self._reopen(request)).show(with_past=False)
        return {}

    async def _reopen(self, request: schema.LoadSessionRequest | schema.ResumeSessionRequest) -> AcpSession:
        session_id = request.session_id
        if (old := self._sessions.pop(session_id, None)) is not None:
            old.stop()
        await self._use_servers(session_id, request.mcp_servers)
        await self._start()
        if await self.host.store.find(session_id) is None and await self._notes.find(session_id) is None:
            raise SessionNotFoundError(f"no session {session_id!r} in this store")
        if (
            self.host.awake.get(session_id) is not None
        ):  # begun by start-up recovery, without the editor's servers
            await self.host.put_to_sleep(session_id)
        return await self._open(session_id)

    async def _list(self, request: schema.ListSessionsRequest, _: Json) -> Json:
        await self._start()
        after, lines = unpack(request.cursor, ListPlace), list[Json]()
        if request.cursor is not None and after is None:
            raise UsageError("`cursor` is the `nextCursor` of a page of this list")
        while True:
            count = 0
            async for info in self.host.store.list(after=after, limit=LIST_PAGE):
                count, after = count + 1, ListPlace(info.mark.at, info.session)
                if not is_session(info.session) or PART_MARK in info.session:
                    continue
                note = await self._notes.find(info.session)
                cwd = str(note.metadata.get("cwd") or self._cwd) if note else self._cwd
                if request.cwd in (None, cwd):
                    at = datetime.fromtimestamp(info.mark.at, UTC).isoformat(timespec="milliseconds")
                    line = {"sessionId": info.session, "cwd": cwd, "updatedAt": at}
                    lines.append({**line, "title": info.mark.title} if info.mark.title else line)
                if len(lines) == LIST_PAGE:
                    return {"sessions": lines, "nextCursor": pack(after)}
            if count < LIST_PAGE:
                return {"sessions": lines}

    async def _close(self, request: schema.CloseSessionRequest, _: Json) -> Json:
        session = self._session(request.session_id)
        await session.cancel()
        await self._forget(request.session_id)
        return {}

    async def _delete(self, request: schema.DeleteSessionRequest, _: Json) -> Json:
        await self._start()
        try:
            runner = await self.host.session(request.session_id)
            if runner.state.is_live:
                await stop_turn(runner)
            await self._forget(request.session_id)
            await self.host.delete(request.session_id)
        except SessionNotFoundError:
            await self._forget(request.session_id)
        await self._notes.delete(request.session_id)
        return {}

    async def _prompt(self, request: schema.PromptRequest, params: Json) -> Json:
        key = (request.field_meta or {}).get(KEY_META)
        return await self._session(request.session_id).prompt(
            params["prompt"], key if isinstance(key, str) else ""
        )

    async def _cancel(self, request: schema.CancelNotification, _: Json) -> None:
        await self._session(request.session_id).cancel()

    # --- sessions ---------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._starting:
            await self.host.start()

    async def _open(self, session_id: str) -> AcpSession:
        assert self._client is not None
        session = AcpSession(self.host, session_id, self._client)
        await session.open()
        self._sessions[session_id] = session
        return session

    def _session(self, session_id: str) -> AcpSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(f"no session {session_id!r} is open here: load it first")
        return session

    async def _forget(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.stop()
        self._served.discard(session_id)
        await self.host.set_sources(session_id, ())

    async def _use_servers(self, session_id: str, descriptions: Sequence[Any] | None) -> None:
        """Add the tools of the editor's MCP servers to a session.

        Raises:
            UsageError: A server cannot be used; the message contains the reason.
        """
        if session_id in self._served:
            return
        names = {source.name for source in self.host.agent.sources}
        servers: list[ToolSource] = []
        for each in descriptions or ():
            name = _server_name(each.name, names)
            names.add(name)
            servers.append(_server(each, name))
        self._served.add(session_id)
        await self.host.set_sources(session_id, servers)


def _server_name(name: str, taken: set[str]) -> str:
    """Return a valid, unused server name for the name that the editor uses."""
    base = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:28] or "server"
    base = base if base[0].isalpha() else f"s{base}"
    return next(
        each for each in (base, *(f"{base}_{number}" for number in range(2, 1000))) if each not in taken
    )


def _server(description: Any, name: str) -> ToolSource:  # noqa: ANN401 - one of the SDK's four types
    if isinstance(description, schema.SseMcpServer | schema.AcpMcpServer):
        raise UsageError(
            f"the MCP server {description.name!r} uses a transport that is not supported: use stdio or http"
        )
    try:
        from midstream.tools.mcp import McpServer  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise UsageError("MCP servers need an extra: pip install 'midstream[mcp]'") from error
    if isinstance(description, schema.HttpMcpServer):
        return McpServer.http(
            description.url, name=name, headers={each.name: each.value for each in description.headers}
        )
    env = {each.name: each.value for each in description.env}
    return McpServer.stdio(description.command, description.args, name=name, env=env)


def _refusal(error: MidstreamError) -> RequestError:
    code = _NOT_FOUND if isinstance(error, NotFoundError) else _INTERNAL
    code = _INVALID if isinstance(error, UsageError | ProtocolError) else code
    return RequestError(code, error.message, {"code": error.code})
