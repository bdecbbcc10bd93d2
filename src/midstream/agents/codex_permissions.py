"""Permission requests of Codex during a turn.

The package answers such requests at once, in its reading thread, and allows them by default. Waiting for a person there
would block all threads of the app server. So this client answers them in tasks of their own.

Sources: `openai_codex.client` (0.163.0); the app server's own description of its approvals: a request for a command or
a change has `itemId`, `threadId`, `turnId`, and the answer has a `decision`: accept, decline or cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from midstream.agents.child_processes import has_exited
from midstream.agents.permission_rules import Asking, Rules, decide_permission
from midstream.agents.tool_value_json import json_text
from midstream.environment import World
from midstream.extras import extra
from midstream.session.permissions import Allowed, Permission, Person

with extra("codex"):
    import openai_codex as sdk
    from openai_codex.client import CodexClient
    from openai_codex.generated import v2_all as wire

COMMAND = "item/commandExecution/requestApproval"
CHANGE = "item/fileChange/requestApproval"
ITEM_S = 2.0
"""Seconds to wait for the changes that a request refers to: they come in a separate notification."""

Json = dict[str, Any]
Decide = Callable[[str, Json], Awaitable[str]]
"""Returns the decision about a request, given its method and parameters. Never raises."""

_LATER: Json = {}
_log = logging.getLogger(__name__)


class OnceClient(CodexClient):
    """A client of one app server: after a stop, the package's own client would start another one."""

    def __init__(self, config: sdk.CodexConfig) -> None:
        super().__init__(config=config)
        self._turning = threading.Lock()
        self._is_stopped = False

    def start(self) -> None:
        """Start the app server, unless it was stopped.

        Raises:
            TransportClosedError: It was stopped. Nothing was started.
        """
        with self._turning:
            if self._is_stopped:
                raise sdk.TransportClosedError("the app server was stopped")
            super().start()

    @property
    def has_exited(self) -> bool:
        """Whether the app server has ended by itself."""
        return self._proc is not None and has_exited(self._proc.pid)

    def close(self) -> None:
        """Stop the app server for ever. A second call, or a call before the start, has no effect."""
        with self._turning:
            self._is_stopped = True
            super().close()


class AskingClient(OnceClient):
    """A client of the app server that continues to read while a person decides."""

    def __init__(self, config: sdk.CodexConfig, decide: Decide) -> None:
        super().__init__(config)
        self._decide = decide
        self._loop = asyncio.get_running_loop()

    def _handle_server_request(self, msg: Json) -> Json:
        method, params = msg["method"], msg.get("params")
        if method not in (COMMAND, CHANGE) or not isinstance(params, dict):
            handled: Json = super()._handle_server_request(msg)
            return handled
        asyncio.run_coroutine_threadsafe(self._answer(msg["id"], method, params), self._loop)
        return _LATER

    def _write_message(self, payload: Json) -> None:
        if payload.get("result") is not _LATER:
            super()._write_message(payload)

    async def _answer(self, request_id: object, method: str, params: Json) -> None:
        decision = await self._decide(method, params)
        try:
            await asyncio.to_thread(self._write_message, {"id": request_id, "result": {"decision": decision}})
        except (sdk.TransportClosedError, OSError, ValueError):  # the app server no longer waits
            _log.debug("an answer came too late for the app server of codex")


class CodexPermissions:
    """The permission requests of one thread's agent in one answer."""

    def __init__(self, permissions: Rules | Asking, thread: str, person: Person | None, world: World) -> None:
        self.refusals: dict[str, str] = {}
        """Reasons for refused permissions, by item id."""
        self._permissions = permissions
        self._thread = thread
        self._person = person
        self._world = world
        self._changes: dict[str, Sequence[wire.FileUpdateChange]] = {}
        self._noticed = asyncio.Event()
        self._asking: set[asyncio.Task[Any]] = set()

    def notice(self, payload: object) -> None:
        """Store the changes of a notification, because a permission request may refer to them."""
        match payload:
            case wire.ItemStartedNotification() if isinstance(payload.item.root, wire.FileChangeThreadItem):
                self._changes[payload.item.root.id] = payload.item.root.changes
                self._noticed.set()

    async def decide(self, method: str, params: Mapping[str, Any]) -> str:
        """Return the decision about a request."""
        deciding = self._world.spawn(self._decide(method, params), name="codex: permission is requested")
        self._asking.add(deciding)
        try:
            await asyncio.wait({deciding})
        finally:
            self._asking.discard(deciding)
            deciding.cancel()
        if deciding.cancelled():
            return "cancel"
        if (error := deciding.exception()) is not None:
            _log.error("a decision failed, so the permission is refused", exc_info=error)
            return "decline"
        answer = deciding.result()
        if isinstance(answer, Allowed):
            return "accept"
        self.refusals[str(params.get("itemId"))] = answer
        return "decline"

    def cancel_requests(self) -> None:
        """Answer all open requests as cancelled."""
        for deciding in self._asking:
            deciding.cancel()

    async def _decide(self, method: str, params: Mapping[str, Any]) -> Allowed | str:
        reason = {"reason": params["reason"]} if params.get("reason") else {}
        if method == COMMAND:
            shown = {name: params[name] for name in ("command", "cwd") if params.get(name)}
            permission = self._permission(
                "shell", "execute", {**shown, **reason}, is_vague="command" not in shown
            )
        else:
            changes = await self._changes_of(str(params.get("itemId")))
            shown = {"changes": [{"path": change.path, "diff": change.diff} for change in changes]}
            more = {"grantRoot": params["grantRoot"]} if params.get("grantRoot") else {}
            permission = self._permission(
                "apply_patch", "edit", {**shown, **more, **reason}, is_vague=not changes
            )
        return await decide_permission(self._permissions, permission, self._person)

    def _permission(self, tool: str, kind: Any, shown: Json, *, is_vague: bool) -> Permission:  # noqa: ANN401 - a Literal
        return Permission(self._thread, tool, kind, json_text(shown), is_fixed=True, is_vague=is_vague)

    async def _changes_of(self, item: str) -> Sequence[wire.FileUpdateChange]:
        """Return the changes of an item, after waiting for their notification; none if it does not come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ITEM_S):
                while item not in self._changes:
                    self._noticed.clear()
                    await self._noticed.wait()
        return self._changes.get(item, ())
