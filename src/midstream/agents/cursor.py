"""Cursor's agents as an upstream, through the `cursor-sdk` package and its bridge.

Sources: the package's own protocol files (`sdk_agent_service.proto`, `sdk_messages.proto` of 1.1.0), and the experience
of a plugin that pools these agents. A resumed agent that the server has dropped fails only in the run, with status
"error" and no text; images fail without a reason; a system prompt inside a message is treated as an injection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from midstream.agents.child_processes import has_exited
from midstream.agents.mcp_forwarding import Forwarding
from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.agents.process_guardian import prepare_to_start
from midstream.agents.single_flight import SingleFlight
from midstream.agents.tool_value_json import json_text
from midstream.agents.upstreams import (
    Abilities,
    MessageTaken,
    Setup,
    UpstreamEvent,
    UpstreamMessage,
    doubtful,
    is_never_sent,
)
from midstream.environment import World
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelMissingError,
    ModelNotFoundError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UpstreamMismatchError,
    UsageError,
)
from midstream.extras import extra
from midstream.file_safety import read_own, replace_own
from midstream.history.codecs.file_parts import file_words
from midstream.history.messages import Finish, Outcome, Text, Usage, UserMessage
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.retries import retry_after_s
from midstream.tools.forwarded_servers import ForwardedMcpServer

with extra("cursor"):
    import cursor_sdk as sdk
    from cursor_sdk._vendor import resolve_bridge_path
    from cursor_sdk.asyncio import AsyncAgent, AsyncClient, AsyncRun

LAUNCH_S = 30.0
"""Seconds for the bridge to start."""
STOP_S = 5.0
"""Seconds for stopping a run, or releasing an agent, that no task waits for."""
_log = logging.getLogger(__name__)

RULES_FILE = Path(".cursor/rules/midstream.mdc")
"""File for a client application's instructions, in the agent's working folder."""
RULES_SENTINEL = "<!-- written by midstream: it is replaced and removed without asking -->"

_ERRORS: tuple[tuple[type[Exception], type[ModelError]], ...] = (
    (sdk.AgentNotFoundError, UpstreamGoneError),
    (sdk.AgentBusyError, UpstreamBusyError),
    (sdk.AuthenticationError, ModelAccessError),
    (sdk.PermissionDeniedError, ModelAccessError),
    (sdk.RateLimitError, ModelRateLimitedError),
    (sdk.APITimeoutError, ModelStalledError),
    (sdk.NetworkError, ModelUnavailableError),
    (sdk.InternalServerError, ModelUnavailableError),
    (sdk.ConfigurationError, ModelAccessError),
    (sdk.BadRequestError, ModelRejectedError),
)
"""Error classes for the package's errors, the most exact first; any other error is unknown."""
_STATUSES: Mapping[str, type[ModelError]] = {
    "expired": UpstreamGoneError,
    "cancelled": UpstreamFailedError,
    "error": UpstreamFailedError,
}
_CODES: Mapping[str, type[ModelError]] = {
    "agent_not_found": UpstreamGoneError,
    "agent_busy": UpstreamBusyError,
    "unauthenticated": ModelAccessError,
    "unauthorized": ModelAccessError,
    "api_key_not_found": ModelAccessError,
    "permission_denied": ModelAccessError,
    "invalid_model": ModelNotFoundError,
    "rate_limit_exceeded": ModelRateLimitedError,
    "usage_limit_exceeded": ModelRateLimitedError,
    "timeout": ModelStalledError,
}
"""Error class for each `error_code` of a failed run; its text is for users."""
_NO_OUTPUT = {"system", "status", "request", "user", "task"}
"""Messages of a run that has not begun to answer: a run that fails after only these has produced no output."""


class Cursor:
    """An upstream of Cursor agents in a folder of this machine.

    Args:
        model: A name such as `composer-2`.
        cwd: The working folder; agents belong to their folder.
        api_key: The key; None for that in `CURSOR_API_KEY`.
        client: Your own `cursor_sdk.asyncio.AsyncClient`, which you close; without one the package's bridge is started
            with the first conversation. A client can stop a run only if it was created with
            `allow_api_key_env_fallback=True`.
        bridge: The command that starts the bridge; the one in the package by default.
        options: More `AgentOptions`, such as `mode`, `tools` or `disallowed_tools`.
        is_instructing: Whether a client application's instructions are written to `.cursor/rules/midstream.mdc` in
            `cwd` for the agent to read. Another program's file of that name is not changed. Otherwise they are not
            sent: inside a message they would be refused as an injection.

    Raises:
        UsageError: The folder `cwd` is missing.
    """

    def __init__(
        self,
        model: str,
        *,
        cwd: str | Path = ".",
        api_key: str | None = None,
        client: AsyncClient | None = None,
        bridge: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        is_instructing: bool = False,
        world: World = World(),
    ) -> None:
        folder = Path(cwd).resolve()
        if not folder.is_dir():
            raise UsageError(f"the working folder {str(folder)!r} does not exist")
        self.name = f"cursor:{model}"
        self.abilities = Abilities(
            takes_servers=True, can_reinstruct=is_instructing, can_oauth=True, can_secret=True
        )
        self._key = api_key or os.environ.get("CURSOR_API_KEY", "")
        self._model = model
        self._folder = folder
        self._options = dict(options or {})
        self._bridge = _Bridge(client, bridge, folder, world)
        self._forwarding = Forwarding(self.name, self.abilities)
        self._is_instructing = is_instructing
        self._world = world
        self.closings = 0
        """Number of calls of `aclose`: everything opened before is closed."""

    @property
    def identity(self) -> Mapping[str, str]:
        """The model, the folder, the account, and the options that limit an agent."""
        options = msgspec.json.encode(self._options, enc_hook=str, order="deterministic")
        return {
            "model": self._model,
            "cwd": str(self._folder),
            "account": hashlib.blake2b(self._key.encode(), digest_size=8).hexdigest(),
            "options": hashlib.blake2b(options, digest_size=8).hexdigest(),
        }

    async def open(self, setup: Setup, *, resume: str = "") -> CursorAgent:
        """Create an agent, or resume the one that `resume` names; see `midstream.agents.upstreams`.

        Raises:
            UpstreamMismatchError: The bridge opened another, empty agent.
        """
        closings = self.closings
        agent = await self.open_agent(setup, resume=resume)
        return CursorAgent(self, setup, agent, self._bridge, resume, closings)

    async def open_agent(self, setup: Setup, *, resume: str = "") -> AsyncAgent:
        """Return the package's agent; see `open`."""
        if self._is_instructing:
            write_rules(self._folder, setup.instructions)
        options = sdk.AgentOptions(
            model=self._model,
            api_key=self._key or None,
            local={"cwd": str(self._folder), "settingSources": ["project"] if self._is_instructing else []},
            mcp_servers={each.name: _server(each) for each in self._forwarding.select(setup.servers)} or None,
            **self._options,
        )
        async with self._bridge.client() as client:
            if not resume:
                return await self._bridge.openings.answer(client.create_agent(options), _close)
            agent = await self._bridge.openings.answer(client.resume_agent(resume, options), _close)
        if agent.agent_id != resume:
            await _wait_briefly(agent.close())
            raise UpstreamMismatchError(f"{self.name} resumed {agent.agent_id!r} instead of {resume!r}")
        return agent

    async def verify(self) -> bool:
        """Request the account of the key."""
        try:
            async with self._bridge.client() as client:
                await self._bridge.openings.answer(client.me(api_key=self._key))
        except ModelAccessError:
            return False
        return True

    async def delete(self, agent: str) -> None:
        """Delete an agent with all its data."""
        options = {"cwd": str(self._folder), "apiKey": self._key}
        with contextlib.suppress(ModelError, TimeoutError):
            async with asyncio.timeout(STOP_S), self._bridge.client() as client:
                await self._bridge.openings.answer(client.agents.delete(agent, options))

    async def aclose(self) -> None:
        """Stop the bridge, unless it is the user's."""
        self.closings += 1
        await self._bridge.aclose()


class CursorAgent:
    """One agent, created by `Cursor.open`."""

    def __init__(
        self,
        upstream: Cursor,
        setup: Setup,
        agent: AsyncAgent,
        bridge: _Bridge,
        resumed: str,
        closings: int,
    ) -> None:
        self._upstream = upstream
        self._setup = setup
        self._agent = agent
        self._bridge = bridge
        self._resumed = resumed
        self._is_begun = bool(resumed)
        """Whether it may have received a message."""
        self._closings = closings
        self._is_closed = False

    async def send(
        self, outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """Send a message; see `midstream.agents.upstreams` for the order of the events and the errors.

        `MessageTaken` comes with the first text, thought or tool: a run of an agent that the server has dropped names
        the agent and fails without other output.
        """
        options = sdk.SendOptions(
            local=sdk.LocalSendOptions(force=True) if is_forced else None,
            on_delta=_unread,  # requests streamed text, which is read from the run
        )
        await self._resume_if_lost()
        self._is_begun = True
        run: AsyncRun | None = None
        reading = _Reading()
        is_opened = is_over = False
        try:
            async with self._bridge.errors():
                opening = self._agent.send(_words(outgoing.message), options, idempotency_key=key)
                run = await self._bridge.openings.answer(opening, self._bridge.end)
                async for each in run.events():
                    events = reading.read(each)
                    if events and not is_opened:
                        is_opened = True
                        yield self._message_taken_of(run)
                    for event in events:
                        yield event
                result = await run.wait()
            is_over = True
        except ModelError as error:
            cause = error.__cause__
            is_refused = run is None and (isinstance(cause, sdk.RateLimitError) or _is_never_sent(cause))
            is_lost = isinstance(cause, sdk.NetworkError)  # the fault is of the bridge, not of the provider
            if (is_opened and not is_lost) or is_refused or cause is None:
                raise
            if run is not None and isinstance(error, ModelAccessError):
                yield self._message_taken_of(run)
            # The key is only for agents in the cloud.
            raise doubtful(error) from cause
        finally:
            if run is not None and not is_over and self._bridge.is_open(self._agent.client):
                await self._bridge.end(run)
        if not is_opened and reading.may_have_message(result):
            yield self._message_taken_of(run)
        for event in reading.end(result):
            yield event

    async def aclose(self) -> None:
        """Release the agent in the bridge; the agent itself is kept."""
        if not self._is_closed and self._bridge.is_open(self._agent.client):
            await _wait_briefly(self._agent.close())
        self._is_closed = True

    async def _resume_if_lost(self) -> None:
        """Resume the agent in another bridge if its bridge has ended since the last answer."""
        if self._bridge.is_open(self._agent.client):
            return
        if self._is_closed or self._closings != self._upstream.closings:
            raise ModelUnavailableError("the agent's bridge was stopped")
        self._resumed = self._agent.agent_id if self._is_begun else ""
        self._agent = await self._upstream.open_agent(self._setup, resume=self._resumed)

    def _message_taken_of(self, run: AsyncRun) -> MessageTaken:
        return MessageTaken(run.agent_id, run.agent_id if self._resumed else "")


class _Reading:
    """One run and its events.

    Text and thoughts come twice: streamed, and complete at the end of a step. The second is for bridges that do not
    stream.
    """

    def __init__(self) -> None:
        self._is_live = False
        self._has_text = False
        self._open: dict[str, str] = {}
        """The arguments of the shown calls, by call id."""

    def read(self, event: sdk.RunStreamEvent) -> list[ModelEvent]:
        """Return the upstream's events for an event of the run; none before the agent begins to answer."""
        if event.interaction_update is not None:
            return self._live(event.interaction_update)
        if event.sdk_message is not None:
            return self._whole(event.sdk_message)
        return []

    def may_have_message(self, result: sdk.RunResult) -> bool:
        """Whether an agent without output exists nevertheless, and may have the message."""
        kind = _kind_of(result)
        return kind is None or not issubclass(
            kind, UpstreamGoneError | UpstreamBusyError | UpstreamFailedError
        )

    def end(self, result: sdk.RunResult) -> list[ModelEvent]:
        """Return the end of a finished run.

        Raises:
            ModelError: The run failed: see `midstream.agents.upstreams`.
        """
        kind = _kind_of(result)
        if kind is not None:
            reason = f": {result.error_message}" if result.error_message else ""
            raise kind(f"the run ended with status {result.status!r}{reason}")
        words = [TextDelta(result.result)] if result.result and not self._has_text else []
        model = result.model.id if result.model else ""
        return [*words, Finished(Finish.STOP, model, _usage_of(result.usage))]

    def _live(self, update: object) -> list[ModelEvent]:
        match update:
            case sdk.TextDeltaUpdate():
                self._is_live = self._has_text = True
                return [TextDelta(update.text)]
            case sdk.ThinkingDeltaUpdate():
                self._is_live = True
                return [ThinkingDelta(update.text)]
            case sdk.UserMessageAppendedUpdate():
                return []
        return [Working()]

    def _whole(self, message: object) -> list[ModelEvent]:
        match message:
            case sdk.SDKToolUseMessage():
                return self._tool(message)
            case sdk.SDKAssistantMessage() if not self._is_live:
                texts = [block.text for block in message.message.content if isinstance(block, sdk.TextBlock)]
                self._has_text = self._has_text or any(texts)
                return [TextDelta(text) for text in texts if text]
            case sdk.SDKThinkingMessage() if not self._is_live:
                return [ThinkingDelta(message.text)]
        kind = message.get("type") if isinstance(message, Mapping) else getattr(message, "type", "")
        return [] if kind in _NO_OUTPUT else [Working()]

    def _tool(self, message: sdk.SDKToolUseMessage) -> list[ModelEvent]:
        events: list[ModelEvent] = []
        arguments = _text_of(message.args or {})
        known = self._open.get(message.call_id)
        if known is None or (message.args and known != arguments):
            self._open[message.call_id] = arguments
            events.append(UpstreamCallStarted(message.call_id, message.name, arguments))
        if message.status != "running":
            outcome = Outcome.ERROR if message.status == "error" else Outcome.OK
            events.append(UpstreamCallEnded(message.call_id, _text_of(message.result), outcome))
        return events or [Working(message.name)]


def _kind_of(result: sdk.RunResult) -> type[ModelError] | None:
    """Return the error class of a failed run, or None for a finished one."""
    if result.status == "finished":
        return None
    code = (result.error_code or "").removeprefix("SDK_ERROR_CODE_").lower()
    return _CODES.get(code) or _STATUSES.get(result.status, UpstreamFailedError)


def _is_never_sent(error: BaseException | None) -> bool:
    return error is not None and is_never_sent(error.__cause__)


class _Bridge:
    """The client of the bridge: the user's, or one with its own bridge, which is restarted after its death."""

    def __init__(
        self, client: AsyncClient | None, command: Sequence[str] | None, folder: Path, world: World
    ) -> None:
        self._yours = client
        self._ours: _Running | None = None
        self._command = list(command) if command is not None else None
        self._folder = folder
        self._world = world
        self._starting: asyncio.Task[_Running] | None = None
        """The start of the own bridge, until it has ended or was closed."""
        self.openings = SingleFlight("the bridge of cursor-sdk")

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """Yield the client, and convert its errors."""
        async with self.errors():
            yield self._yours or await self._start()

    @contextlib.asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Convert the package's errors."""
        try:
            yield
        except sdk.CursorAgentError as error:
            if isinstance(error, sdk.NetworkError):
                await self._restart_if_dead()
            kind = next((ours for theirs, ours in _ERRORS if isinstance(error, theirs)), UpstreamFailedError)
            raise kind(
                f"the agent's bridge answered: {error.message}",
                retry_after_s=retry_after_s(error.retry_after or "", now=self._world.now()),
            ) from error

    async def end(self, run: AsyncRun) -> None:
        """Stop a run, also if the caller is cancelled."""
        await self._world.finish(_wait_briefly(run.cancel()), name="cursor: end of a run")

    def is_open(self, client: AsyncClient) -> bool:
        """Whether this client is the current one and its bridge runs."""
        ours = self._ours
        return client is self._yours or (ours is not None and client is ours.client and not ours.has_exited)

    async def aclose(self) -> None:
        """Stop the own bridge, also one that is being started."""
        self.openings.close()
        self.openings = SingleFlight("the bridge of cursor-sdk")
        starting, self._starting, self._ours = self._starting, None, None
        if starting is not None:
            await self._world.finish(
                _close_begun(starting), name="cursor: end of a bridge, once it has started"
            )

    async def _restart_if_dead(self) -> None:
        """Let the next conversation start another bridge if the own one does not answer; runs may still use it."""
        ours = self._ours
        if ours is not None:
            try:
                async with asyncio.timeout(STOP_S):
                    await ours.client.ping()
            except (TimeoutError, sdk.CursorAgentError):
                if ours is self._ours:
                    await self.aclose()

    async def _start(self) -> AsyncClient:
        if self._ours is not None and self._ours.has_exited:
            await self.aclose()
        if self._starting is None:
            launch = _launch(self._command, self._folder, self._world)
            self._starting = self._world.spawn(launch, name="cursor: start of a bridge")
            self._starting.add_done_callback(self._note_start)
        starting = self._starting
        try:
            # Cancelling the start would leave its process behind.
            running = await asyncio.shield(starting)
        except (OSError, sdk.CursorSDKError) as error:
            raise ModelMissingError(f"the bridge of cursor-sdk does not start: {error}") from error
        if running is not self._ours:
            raise ModelUnavailableError("the bridge of cursor-sdk was closed while it started")
        return running.client

    def _note_start(self, starting: asyncio.Task[_Running]) -> None:
        is_there = not starting.cancelled() and starting.exception() is None
        if self._starting is starting:
            self._starting, self._ours = (starting, starting.result()) if is_there else (None, None)


class _Running(Struct, frozen=True, eq=False):
    """An own bridge, and its client."""

    bridge: sdk.Bridge
    client: AsyncClient
    world: World

    @property
    def has_exited(self) -> bool:
        """Whether the bridge has ended by itself."""
        process = self.bridge.process
        return process is not None and has_exited(process.pid)

    async def aclose(self) -> None:
        """Stop the bridge, within `STOP_S` and the time for ending a killed process."""
        await _wait_briefly(self.client.aclose())
        closing = self.world.spawn(asyncio.to_thread(self.bridge.close), name="cursor: end of a bridge")
        await asyncio.wait({closing}, timeout=STOP_S)
        if not closing.done() and (process := self.bridge.process) is not None:
            process.kill()  # it is frozen; tasks that wait for its answer get an error
        await closing


async def _launch(command: Sequence[str] | None, folder: Path, world: World) -> _Running:
    """Start a bridge in a thread.

    On the event loop, a stop would join the thread of the package's server, which checks for its end twice a second: it
    would block all sessions meanwhile.
    """
    await prepare_to_start()
    bridge = await asyncio.to_thread(
        lambda: sdk.Bridge.launch(_name_owner(command), workspace=os.fspath(folder), timeout=LAUNCH_S)
    )
    assert bridge.process is not None  # it was launched
    assert bridge.process.stderr is not None  # the bridge wrote its address there
    threading.Thread(
        target=_read_away, args=(bridge.process.stderr,), name="cursor: words of a bridge", daemon=True
    ).start()
    return _Running(bridge, AsyncClient(bridge.endpoint, allow_api_key_env_fallback=True), world)


def _name_owner(command: Sequence[str] | None) -> Sequence[str]:
    """Return the command of a bridge with its owner in its environment: the package has no parameter for that."""
    words = [resolve_bridge_path()] if command is None else command
    owner = owner_of_new_agents()
    # A missing program is left to the package, which reports it; after `env` it would be an exit status.
    return ["env", f"{OWNER_VARIABLE}={owner}", *words] if owner and shutil.which(words[0]) else words


def _read_away(words: IO[str]) -> None:
    """Read the bridge's output after its address: the package does not read it, and a full pipe blocks the bridge."""
    with words:
        while os.read(words.fileno(), 65_536):
            pass


async def _close_begun(starting: asyncio.Task[_Running]) -> None:
    """Close a bridge as soon as it has started."""
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().aclose()


def _unread(update: object) -> None:
    """Ignore an update that is read elsewhere."""


def _words(message: UserMessage) -> str:
    parts = (part.text if isinstance(part, Text) else file_words(part) for part in message.parts)
    return "\n\n".join(parts)


def _usage_of(usage: sdk.TokenUsage | None) -> Usage | None:
    if usage is None:
        return None
    cached = usage.cache_read_tokens
    made = usage.cache_write_tokens
    return Usage(usage.input_tokens + cached + made, usage.output_tokens, cached, made)


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json_text(value)


def _server(server: ForwardedMcpServer) -> sdk.HttpMcpServerConfig | sdk.StdioMcpServerConfig:
    if server.transport == "stdio":
        return sdk.StdioMcpServerConfig(server.command, list(server.args), dict(server.env))
    auth = None
    if server.client_id:
        auth = sdk.McpAuth(server.client_id, server.client_secret or None, server.scope.split())
    return sdk.HttpMcpServerConfig(server.url, server.transport, dict(server.headers), auth)


def write_rules(folder: Path, instructions: str) -> None:
    """Write the instructions into `RULES_FILE` for agents. Several processes may do this.

    Another program's file is not changed, and nothing outside the folder: a checkout may have links.

    Args:
        instructions: The content; "" removes the file.
    """
    path = folder / RULES_FILE
    try:
        if RULES_SENTINEL.encode() not in read_own(path, "the rules file"):
            return
    except FileNotFoundError:
        pass
    except UsageError as error:
        _log.warning("no instructions for agents are written: %s", error.message)
        return
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        _log.warning("no instructions for agents are written: %s is outside of the folder", path.parent)
        return
    if not instructions:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    body = f"---\nalwaysApply: true\n---\n{RULES_SENTINEL}\n\n{instructions}\n"
    replace_own(path, body.encode("utf-8", "replace"))


async def _close(agent: AsyncAgent) -> None:
    await _wait_briefly(agent.close())


async def _wait_briefly(work: Awaitable[object]) -> None:
    """Wait a limited time for an answer whose result is not needed."""
    with contextlib.suppress(TimeoutError, sdk.CursorAgentError):
        async with asyncio.timeout(STOP_S):
            await work
