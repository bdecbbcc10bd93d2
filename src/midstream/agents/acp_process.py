"""A process of an agent that speaks the Agent Client Protocol over its stdin and stdout, from its start to its end."""

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
from midstream.agents.agent_guardian import prepare_to_start
from midstream.agents.child_processes import has_exited
from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.agents.permission_rules import Allowed, Decision
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
"""Seconds an agent has to start and greet: a first `npx` downloads it."""
REPLAY_STARTS_S = 2.0
"""Seconds after the answer to `session/load` in which a replay that comes late must begin."""
REPLAY_PAUSE_S = 0.5
"""Seconds without an update after which a late replay is complete."""
EXIT_LOOK_S = 0.5
"""Seconds between two looks whether the process has ended. Its end closes its pipes, but not where a process that it
started has inherited them, as Claude Code has those of claude-code-acp (0.16)."""
EXIT_S = 2.0
"""Seconds a process has to end by itself once its stdin is closed; and once more, after it was asked to."""
LINE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one message: a picture, a file that was read."""
UPDATES_MAX = 100_000
"""Updates that may wait for their reader; more, and the turn ends with an error."""
STDERR_LINES_MAX = 20
AUTH_REQUIRED = -32000

T = TypeVar("T")
Leave = Callable[[str, ToolCallUpdate], Coroutine[Any, Any, Decision]]
"""Decides what an agent asks leave for, given the session and the call."""

_log = logging.getLogger(__name__)


class AcpProcess:
    """One process. Start it with `start`, and end it with `aclose` whatever `start` raised.

    Args:
        name: What errors and log lines call the agent.
        command: The program and its arguments.
        env: Added to the few variables that it is given of ours.
        leave: Decides what it asks leave for.
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
        """What it does with a message whose turn does not come to its end."""
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
        """Start it, greet it, and sign in in the way of this id.

        Raises:
            ModelMissingError: There is no such program or folder, or it is no agent that we understand.
            ModelStalledError: It did not answer for `GREETING_S`.
            ModelError: It refused.
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
        if self._ending is not None:  # `aclose` was called before there was anything to end
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
        """Whether it was started and has ended by itself."""
        program = self._program
        return program is not None and (program.returncode is not None or has_exited(program.pid))

    @property
    def connection(self) -> ClientSideConnection:
        """Return the connection, once it is started."""
        assert self._connection is not None, "the process was not started"
        return self._connection

    async def wait_for(self, answer: Awaitable[T], *, limit_s: float | None, is_starting: bool = False) -> T:
        """Wait for an answer of the agent, and raise what its refusal means.

        Args:
            answer: Of a method of `connection`.
            limit_s: Seconds it may take; None for no limit.
            is_starting: The text on stderr has the reason for a missing answer.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError as error:
            raise ModelStalledError(f"{self._name} did not answer for {limit_s:.0f} s") from error
        except RequestError as error:
            raise self.classify_error(error) from error
        except (OSError, RuntimeError, pydantic.ValidationError) as error:
            said = await self._last_words()
            typed = (
                upstream_error(self._name, said)
                if is_starting
                else UpstreamFailedError(f"the process of {self._name} ended before its answer did")
            )
            typed.add_note(said)
            raise typed from error

    def classify_error(self, error: RequestError) -> ModelError:
        """Return what a refusal of the agent means."""
        data = error.data if isinstance(error.data, dict) else {"details": error.data}
        said = [str(error), *(str(data[name]) for name in ("details", "message", "error") if data.get(name))]
        unknown: type[ModelError] = ModelAccessError if error.code == AUTH_REQUIRED else UpstreamFailedError
        # opencode (1.18) gives no status of its provider. It retries by itself what can be retried.
        if data.get("errorName") == "APIError":
            unknown = ModelRejectedError
        names = [data.get("code"), data.get("type"), data.get("errorName")]
        # Gemini CLI (0.61) gives the HTTP status of its provider as the code of the refusal.
        status = error.code if error.code in STATUSES else None
        return upstream_error(self._name, ": ".join(said), names=names, status=status, unknown=unknown)

    def take_updates(self) -> list[tuple[str, object]]:
        """Return the updates that came, each with its session, once."""
        updates = self._listener.updates
        waiting = (updates.get_nowait() for _ in range(updates.qsize()))
        return [update for update in waiting if update is not None]

    async def take_replay(self, is_message: Callable[[object], bool]) -> list[tuple[str, object]]:
        """Return the updates of a conversation that was loaded, each with its session, once.

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
        """Give updates as they come, each with its session, until something is done and all have been given.

        Raises:
            UpstreamFailedError: More than `UPDATES_MAX` wait.
        """
        updates = self._listener.updates
        until.add_done_callback(lambda _: updates.put_nowait(None))
        while (update := await updates.get()) is not None:
            if updates.qsize() > UPDATES_MAX:
                raise UpstreamFailedError(f"{self._name} sends output faster than it can be read")
            yield update

    def let_go(self) -> None:
        """Answer all open permission requests: they will not be decided any more."""
        self._listener.let_go()

    async def aclose(self) -> None:
        """End it, with all that it started. It is ended even where who waits for that is cancelled."""
        if self._ending is None:
            self._ending = self._world.spawn(self._end(), name="acp: end of a process")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self.let_go()
        if self._watching is not None:
            self._watching.cancel()
        program = self._program
        if program is None:
            return
        if self._connection is not None:
            with contextlib.suppress(OSError, RuntimeError):  # what it still had to send is lost
                await self._connection.close()
        assert program.stdin is not None
        program.stdin.close()
        if self.has_exited:
            _signal(program, signal.SIGKILL)  # its children may hold the pipes, whose end is waited for
        for means in (None, signal.SIGTERM, signal.SIGKILL):
            if means is not None:
                _signal(program, means)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await program.wait()
                    break
        _signal(program, signal.SIGKILL)  # what it started and left behind
        if self._reading is not None:
            # The pipes close with what had inherited them.
            await asyncio.wait({self._reading}, timeout=EXIT_S)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        program._transport.close()  # type: ignore[attr-defined] # noqa: SLF001 - pipes that are still held elsewhere

    async def _watch_exit(self, program: asyncio.subprocess.Process) -> None:
        """Fail what waits for an answer of a process that has ended.

        asyncio's own `wait` returns only when the pipes are closed, too.
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
        """Return the end of stderr, once the process has ended or had the time to."""
        if self._program is not None and self._reading is not None:
            await asyncio.wait({self._reading}, timeout=EXIT_S)
        return "\n".join(self._stderr)


class _Listener:
    """Our side of the protocol, as far as it is offered: updates are kept, leave is decided."""

    def __init__(self, leave: Leave, world: World) -> None:
        self.updates: asyncio.Queue[tuple[str, object] | None] = asyncio.Queue()
        self._leave = leave
        self._world = world
        self._asking: set[asyncio.Future[Decision]] = set()

    async def session_update(self, session_id: str, update: object, **_: object) -> None:
        """Nothing is awaited here, so that updates keep their order."""
        self.updates.put_nowait((session_id, update))

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **_: object
    ) -> RequestPermissionResponse:
        asking = self._world.spawn(self._leave(session_id, tool_call), name="acp: leave is asked for")
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

    def let_go(self) -> None:
        for asking in self._asking:
            asking.cancel()


def _signal(program: asyncio.subprocess.Process, means: signal.Signals) -> None:
    """Signal the process and all that it started: it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, means)
