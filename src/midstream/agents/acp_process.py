"""A process of an agent with the Agent Client Protocol over stdin and stdout, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

from midstream.agents.acp_programs import FailedMessage, failed_message_of
from midstream.agents.child_processes import has_exited
from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.agents.permission_rules import Allowed, Decision
from midstream.agents.process_guardian import prepare_to_start
from midstream.agents.stopped_tools import AGENT_VARIABLE
from midstream.agents.upstream_errors import upstream_error
from midstream.environment import World
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelMissingError,
    ModelRejectedError,
    ModelStalledError,
    UpstreamFailedError,
)
from midstream.extras import extra
from midstream.models.provider_errors import STATUSES
from midstream.version import __version__

with extra("acp"):
    import pydantic
    from acp import PROTOCOL_VERSION, RequestError, connect_to_agent
    from acp.core import ClientSideConnection
    from acp.schema import (
        AgentCapabilities,
        AllowedOutcome,
        ClientCapabilities,
        DeniedOutcome,
        Implementation,
        PermissionOption,
        RequestPermissionResponse,
        ToolCallUpdate,
    )
    from acp.transports import default_environment

GREETING_S = 120.0
"""Seconds for an agent to start and answer `initialize`: a first `npx` downloads the agent."""
REPLAY_STARTS_S = 2.0
"""Seconds after the answer to `session/load` in which a late replay must begin."""
REPLAY_PAUSE_S = 0.5
"""Seconds without an update after which a late replay is complete."""
EXIT_LOOK_S = 0.5
"""Seconds between two checks whether the process has ended. The end of its pipes is no sufficient sign: its child
processes may have inherited them, as with claude-code-acp (0.16)."""
EXIT_S = 2.0
"""Seconds for a process to end after its stdin is closed, and again after a terminate signal."""
LINE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one message, which may contain a picture or a file."""
UPDATES_MAX = 100_000
"""Updates that may wait for their reader. With more, the turn ends with an error."""
STDERR_LINES_MAX = 20
AUTH_REQUIRED = -32000

T = TypeVar("T")
Leave = Callable[[str, ToolCallUpdate], Coroutine[Any, Any, Decision]]
"""Decides about a permission request, given the session and the call."""

_log = logging.getLogger(__name__)


class AcpProcess:
    """One process. Start it with `start`, and end it with `aclose`, also if `start` has failed.

    Args:
        name: The agent's name in errors and log lines.
        command: The program and its arguments.
        env: Added to the few variables of this process's environment that it gets.
        leave: Decides about permission requests.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        leave: Leave,
        world: World,
    ) -> None:
        self.capabilities = AgentCapabilities()
        """Abilities that the agent declared."""
        self.failed_message = FailedMessage.UNKNOWN
        """The place of a message whose turn fails."""
        self.id = world.new_id("agent")
        """The value of `AGENT_VARIABLE` in its environment."""
        self._name = name
        self._command = command
        self._cwd = cwd
        self._env = env
        self._world = world
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES_MAX)
        self._program: asyncio.subprocess.Process | None = None
        self._listener = _Listener(leave, world)
        self._connection: ClientSideConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self, sign_in: str = "") -> None:
        """Start the process, initialize the protocol, and sign in with the method of this id.

        Raises:
            ModelMissingError: The program or folder is missing, or the program does not use the protocol.
            ModelStalledError: The agent did not answer for `GREETING_S`.
            ModelError: The agent refused.
        """
        await prepare_to_start()
        try:
            self._program = program = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._cwd,
                env={**default_environment(), **self._env, **self._marks()},
                limit=LINE_BYTES_MAX,
                start_new_session=True,
            )
        except OSError as error:
            raise ModelMissingError(f"{self._name} does not start: {error}") from error
        if self._ending is not None:  # `aclose` was called before the process existed
            self._ending = self._world.spawn(self._end(), name="acp: end of a process")
            await asyncio.shield(self._ending)
            raise UpstreamFailedError(f"{self._name} was closed while it started")
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        self._reading = self._world.spawn(self._read_stderr(program.stderr), name="acp: stderr")
        self._connection = connect_to_agent(cast("Any", self._listener), program.stdin, program.stdout)
        self._watching = self._world.spawn(self._watch_exit(program), name="acp: watch for the exit")
        greeting = await self.wait_for(
            self._connection.initialize(
                PROTOCOL_VERSION,
                ClientCapabilities(),
                Implementation(name="midstream", title="midstream", version=__version__),
            ),
            limit_s=GREETING_S,
            is_starting=True,
        )
        if greeting.protocol_version != PROTOCOL_VERSION:
            raise ModelMissingError(
                f"{self._name} uses version {greeting.protocol_version} of the protocol; expected {PROTOCOL_VERSION}"
            )
        self.capabilities = greeting.agent_capabilities or AgentCapabilities()
        if greeting.agent_info is not None:
            self.failed_message = failed_message_of(greeting.agent_info.name)
        if sign_in:
            await self.wait_for(self._connection.authenticate(sign_in), limit_s=GREETING_S)

    def _marks(self) -> Mapping[str, str]:
        return {OWNER_VARIABLE: owner_of_new_agents(), AGENT_VARIABLE: self.id}

    @property
    def has_exited(self) -> bool:
        """Whether the process was started and has ended by itself."""
        program = self._program
        return program is not None and (program.returncode is not None or has_exited(program.pid))

    @property
    def connection(self) -> ClientSideConnection:
        """Return the connection after the start."""
        assert self._connection is not None, "the process was not started"
        return self._connection

    async def wait_for(self, answer: Awaitable[T], *, limit_s: float | None, is_starting: bool = False) -> T:
        """Wait for an answer of the agent; raise a refusal as a typed error.

        Args:
            answer: The result of a method of `connection`.
            limit_s: Greatest number of seconds; None for no limit.
            is_starting: Whether stderr has the reason for a missing answer.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError as error:
            raise ModelStalledError(f"{self._name} did not answer for {limit_s:.0f} s") from error
        except RequestError as error:
            raise self.classify_error(error) from error
        except (OSError, RuntimeError, pydantic.ValidationError) as error:
            stderr_text = await self._last_words()
            typed = (
                upstream_error(self._name, stderr_text)
                if is_starting
                else UpstreamFailedError(f"the process of {self._name} ended before its answer did")
            )
            typed.add_note(stderr_text)
            raise typed from error

    def classify_error(self, error: RequestError) -> ModelError:
        """Return the typed error for a refusal of the agent."""
        data = error.data if isinstance(error.data, dict) else {"details": error.data}
        texts = [str(error), *(str(data[name]) for name in ("details", "message", "error") if data.get(name))]
        unknown: type[ModelError] = ModelAccessError if error.code == AUTH_REQUIRED else UpstreamFailedError
        # opencode (1.18) reports no status of its provider. It retries itself.
        if data.get("errorName") == "APIError":
            unknown = ModelRejectedError
        names = [data.get("code"), data.get("type"), data.get("errorName")]
        # Gemini CLI (0.61) reports the HTTP status of its provider as the error code.
        status = error.code if error.code in STATUSES else None
        return upstream_error(self._name, ": ".join(texts), names=names, status=status, unknown=unknown)

    def take_updates(self) -> list[tuple[str, object]]:
        """Return and remove the received updates, each with its session."""
        updates = self._listener.updates
        waiting = (updates.get_nowait() for _ in range(updates.qsize()))
        return [update for update in waiting if update is not None]

    async def take_replay(self, is_message: Callable[[object], bool]) -> list[tuple[str, object]]:
        """Return and remove the updates of a loaded conversation, each with its session.

        The protocol has the agent send them before its answer to `session/load`. Gemini CLI (0.61) answers first: if no
        message came before the answer, wait for the first one, and then until no more come.
        """
        replayed = self.take_updates()
        if any(is_message(update) for _, update in replayed):
            return replayed
        limit_s = REPLAY_STARTS_S
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(limit_s):
                    update = await self._listener.updates.get()
                if update is not None:
                    replayed.append(update)
                    limit_s = REPLAY_PAUSE_S if is_message(update[1]) else limit_s
        return replayed

    async def read_updates(self, until: asyncio.Future[Any]) -> AsyncGenerator[tuple[str, object], None]:
        """Yield updates as they arrive, each with its session, until `until` is done and no update is left.

        Raises:
            UpstreamFailedError: More than `UPDATES_MAX` updates wait.
        """
        updates = self._listener.updates
        until.add_done_callback(lambda _: updates.put_nowait(None))
        while (update := await updates.get()) is not None:
            if updates.qsize() > UPDATES_MAX:
                raise UpstreamFailedError(f"{self._name} sends output faster than it can be read")
            yield update

    def cancel_requests(self) -> None:
        """Answer all open permission requests as cancelled."""
        self._listener.cancel_requests()

    async def aclose(self) -> None:
        """End the process and its child processes, also if the caller is cancelled."""
        if self._ending is None:
            self._ending = self._world.spawn(self._end(), name="acp: end of a process")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self.cancel_requests()
        if self._watching is not None:
            self._watching.cancel()
        program = self._program
        if program is None:
            return
        if self._connection is not None:
            with contextlib.suppress(OSError, RuntimeError):  # unsent data are lost
                await self._connection.close()
        assert program.stdin is not None
        program.stdin.close()
        if self.has_exited:
            _signal(program, signal.SIGKILL)  # the child processes may hold the pipes
        for means in (None, signal.SIGTERM, signal.SIGKILL):
            if means is not None:
                _signal(program, means)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await program.wait()
                    break
        _signal(program, signal.SIGKILL)  # the remaining child processes
        if self._reading is not None:
            # The pipes close with the processes that inherited them.
            await asyncio.wait({self._reading}, timeout=EXIT_S)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        program._transport.close()  # type: ignore[attr-defined] # noqa: SLF001 - pipes that are still held elsewhere

    async def _watch_exit(self, program: asyncio.subprocess.Process) -> None:
        """Fail all waits for answers when the process has ended.

        asyncio's own `wait` returns only after the pipes are closed.
        """
        while program.returncode is None:
            await self._world.sleep(EXIT_LOOK_S)
        await self.connection.close()

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        with contextlib.suppress(ValueError):  # a line without an end
            async for line in stderr:
                self._stderr.append(line.decode("utf-8", "replace").rstrip())
                _log.debug("%s: %s", self._name, self._stderr[-1])

    async def _last_words(self) -> str:
        """Return the end of stderr, after the process has ended or had time to end."""
        if self._program is not None and self._reading is not None:
            await asyncio.wait({self._reading}, timeout=EXIT_S)
        return "\n".join(self._stderr)


class _Listener:
    """The client side of the protocol: it stores updates and decides about permission requests."""

    def __init__(self, leave: Leave, world: World) -> None:
        self.updates: asyncio.Queue[tuple[str, object] | None] = asyncio.Queue()
        self._leave = leave
        self._world = world
        self._asking: set[asyncio.Future[Decision]] = set()

    async def session_update(self, session_id: str, update: object, **_: object) -> None:
        """Store an update. No await here, so that updates keep their order."""
        self.updates.put_nowait((session_id, update))

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **_: object
    ) -> RequestPermissionResponse:
        asking = self._world.spawn(self._leave(session_id, tool_call), name="acp: permission is requested")
        self._asking.add(asking)
        try:
            await asyncio.wait({asking})
        finally:
            self._asking.discard(asking)
            asking.cancel()
        if asking.cancelled():
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        is_allowed = isinstance(asking.result(), Allowed)
        kinds = ("allow_once", "allow_always") if is_allowed else ("reject_once", "reject_always")
        chosen = [option.option_id for kind in kinds for option in options if option.kind == kind]
        if not chosen:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen[0]))

    def cancel_requests(self) -> None:
        for asking in self._asking:
            asking.cancel()


def _signal(program: asyncio.subprocess.Process, means: signal.Signals) -> None:
    """Send a signal to the process group of the agent."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, means)
