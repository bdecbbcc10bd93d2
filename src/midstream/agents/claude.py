"""Claude Code as an upstream, through the Claude Agent SDK. Its CLI, or a store of midstream, keeps the conversations.

    upstream = Claude("opus", cwd="/srv/project")

Each open agent is one process of the CLI, started with the first message, and kept between messages. Stopping a message
ends its process; the next message resumes the conversation in a new one. Conversations belong to their folder, and to
the home that the CLI uses: `CLAUDE_CONFIG_DIR`, else `.claude` in `HOME`, of `options.env` or of this process. The same
id is unknown elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from typing_extensions import override

from midstream.agents.child_processes import has_exited
from midstream.agents.claude_messages import ClaudeReader, exact_reason
from midstream.agents.claude_transcripts import delete_transcript, is_whole
from midstream.agents.mcp_forwarding import Forwarding
from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.agents.permission_rules import (
    Allowed,
    Asking,
    Kind,
    Permission,
    Person,
    Rules,
    decide_permission,
)
from midstream.agents.process_guardian import prepare_to_start
from midstream.agents.tool_value_json import json_text
from midstream.agents.upstream_errors import upstream_error
from midstream.agents.upstreams import (
    Abilities,
    Marked,
    MessageTaken,
    Setup,
    Upstream,
    UpstreamEvent,
    UpstreamMessage,
    doubtful,
)
from midstream.environment import World
from midstream.errors import (
    MidstreamError,
    ModelError,
    ModelMissingError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UsageError,
)
from midstream.extras import extra
from midstream.history.messages import File, Text, UserMessage
from midstream.tools.forwarded_servers import ForwardedMcpServer

with extra("claude"):
    from claude_agent_sdk import (
        ClaudeAgentOptions,
        ClaudeSDKClient,
        CLINotFoundError,
        Message,
        PermissionMode,
        PermissionResultAllow,
        PermissionResultDeny,
        ProcessError,
        ResultError,
        SessionStore,
        ToolPermissionContext,
        delete_session_via_store,
    )

INTERRUPT_S = 2.0
"""Seconds for the CLI to stop its run, so that its transcript contains the stop. Then its process is ended."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one message of the CLI, which may contain a file. The SDK's own limit of 1 MiB would end runs."""
STDERR_LINES_MAX = 50
"""Kept lines of the CLI's stderr, which is the only place of some errors' reasons."""
STDERR_WAIT_S = 0.5
"""Seconds for the last lines of a process that has just died."""
KINDS: Mapping[str, Kind] = {
    "Read": "read",
    "NotebookRead": "read",
    "LS": "read",
    "BashOutput": "read",
    "Glob": "search",
    "Grep": "search",
    "ToolSearch": "search",
    "TodoWrite": "think",
    "ExitPlanMode": "think",
    "WebFetch": "fetch",
    "WebSearch": "fetch",
    "Edit": "edit",
    "MultiEdit": "edit",
    "Write": "edit",
    "NotebookEdit": "edit",
    "Bash": "execute",
    "KillShell": "execute",
}
"""The kind of act of each tool of Claude Code; the others are "other"."""

_LOOK_S = 0.02
_CONFIG = "CLAUDE_CONFIG_DIR"
"""Environment variable with the folder of the CLI's conversations; the default is `.claude` in the user's home."""
_HOME = "USERPROFILE" if sys.platform == "win32" else "HOME"


class Claude(Upstream):
    """Conversations with Claude Code.

    Args:
        model: A name such as "opus", or a full name; "" for the CLI's own choice.
        cwd: The folder it works in; its conversations belong to it. By default that of `options`, or of this process.
        permission_mode: The SDK's mode; by default acts that need a person are refused.
        permissions: Decides about acts that the mode does not decide: `Rules`, or your own function; `ASK_FIRST` asks
            the people of the session about effects. None refuses all of them.
        options: Other options of the SDK. Its `system_prompt` is Claude Code's own by default, to which the client
            application's instructions are added. `mcp_servers` must be a dict here; the client application's servers
            are added to it.
        sessions: An additional store of transcripts, so that any machine can resume them: `KeyValueSessions`, or any
            store of the SDK's protocol. By default only the CLI has them.
        account: Distinguishes accounts that share a folder. Never a key.
        is_verbatim: Users' text is sent to the model unchanged. Otherwise the CLI first reads files that are named with
            an `@`, and runs commands that begin with a slash.

    Raises:
        UsageError: `options` conflicts with another argument. Nothing was started.
    """

    abilities = Abilities(
        takes_files=True,
        takes_servers=True,
        can_retool=True,
        can_fork=True,
        can_oauth=True,
        has_process=True,
        rest_s=60.0,  # each process uses some 200 MB, and a resume takes 0.7 to 1.5 s
    )

    def __init__(
        self,
        model: str = "",
        *,
        cwd: str | Path | None = None,
        permission_mode: PermissionMode | None = None,
        permissions: Rules | Asking | None = None,
        options: ClaudeAgentOptions | None = None,
        sessions: SessionStore | None = None,
        account: str = "",
        is_verbatim: bool = True,
        world: World = World(),
    ) -> None:
        given = options or ClaudeAgentOptions()
        if not isinstance(given.mcp_servers, dict):
            raise UsageError("give `mcp_servers` as a dict; the client application's servers are added to it")
        if permissions is not None and given.can_use_tool is not None:
            raise UsageError("give either `permissions` or the SDK's `can_use_tool`")
        preset = {"type": "preset", "preset": "claude_code"}
        self._options = dataclasses.replace(
            given,
            model=model or given.model,
            cwd=str(Path(cwd or given.cwd or ".").resolve()),
            permission_mode=permission_mode or given.permission_mode,
            system_prompt=cast("Any", preset) if given.system_prompt is None else given.system_prompt,
            session_store=sessions or given.session_store,
            include_partial_messages=True,
            verbatim_prompts=is_verbatim,
            max_buffer_size=given.max_buffer_size or MESSAGE_BYTES_MAX,
            resume=None,
            continue_conversation=False,
        )
        self._permissions = permissions
        self._account = account
        self._world = world
        self._agents: set[_ClaudeAgent] = set()
        if self._options.session_store is not None:
            self.abilities = msgspec.structs.replace(self.abilities, stores_transcripts=True)
        self._forwarding = Forwarding(self.name, self.abilities)

    @property
    def name(self) -> str:
        """The name for users."""
        return f"claude:{self._options.model}" if self._options.model else "claude"

    @property
    @override
    def identity(self) -> Mapping[str, str]:
        return {
            "model": self._options.model or "",
            "cwd": str(self._options.cwd),
            "permissions": self._options.permission_mode or "default",
            "tools": " ".join([*self._options.allowed_tools, "-", *self._options.disallowed_tools]),
            "home": "" if (home := _home_of(self._options)) == _home_of(self._options, {}) else str(home),
            "account": self._account,
        }

    async def open(self, setup: Setup, *, resume: str = "") -> _ClaudeAgent:
        """See `Upstream.open`. The CLI is started with the first message."""
        return self._agent(setup, resume, mark="")

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> _ClaudeAgent:
        """See `ForkingUpstream.fork`. The fork is created with the first message."""
        return self._agent(setup, agent, mark=mark)

    async def verify(self) -> bool:
        """Check that the CLI is signed in or has a key. The key is not used, because that would cost tokens."""
        options = dataclasses.replace(self._options, session_store=None, mcp_servers={})
        async with contextlib.AsyncExitStack() as stack:
            program = _Program(self.name, options, self._world)
            stack.push_async_callback(program.aclose)
            await program.start()
            account = program.greeting.get("account")
        return not isinstance(account, dict) or any(account.values())

    async def delete(self, agent: str) -> None:
        """Delete the transcript of a conversation, here and in `sessions`."""
        folder, store = str(self._options.cwd), self._options.session_store
        with contextlib.suppress(OSError, ValueError, MidstreamError):
            # Only ids of the CLI may become part of a path.
            name = str(uuid.UUID(agent))
            if store is not None:
                await delete_session_via_store(store, agent, directory=folder)
            await asyncio.to_thread(delete_transcript, _home_of(self._options), name)

    async def aclose(self) -> None:
        """End all processes, also if the caller is cancelled."""
        closings = [agent.aclose() for agent in self._agents]
        await self._world.finish(*closings, name="claude: end of an agent")

    def _agent(self, setup: Setup, source: str, *, mark: str) -> _ClaudeAgent:
        servers: dict[str, Any] = {
            **cast("Mapping[str, Any]", self._options.mcp_servers),
            **{server.name: _server(server) for server in self._forwarding.select(setup.servers)},
        }
        options = dataclasses.replace(
            self._options,
            mcp_servers=servers,
            system_prompt=_add_instructions(self._options.system_prompt, setup.instructions),
            session_store=None if setup.is_private else self._options.session_store,
        )
        agent = _ClaudeAgent(self.name, options, source, mark, self._world, self._agents)
        if self._permissions is not None:
            agent.use_permissions(self._permissions)
        return agent


def _home_of(options: ClaudeAgentOptions, changes: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the CLI's conversations. `changes` are those to the environment of this process."""
    env = {**os.environ, **(options.env if changes is None else changes)}
    home = env.get(_CONFIG) or Path(env.get(_HOME) or Path.home(), ".claude")
    return Path(str(options.cwd), home)


class _Program:
    """One process of the CLI, from its start to its end."""

    def __init__(self, name: str, options: ClaudeAgentOptions, world: World) -> None:
        self._name = name
        self._world = world
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES_MAX)
        env = {**options.env, OWNER_VARIABLE: owner_of_new_agents()}
        self.client = ClaudeSDKClient(dataclasses.replace(options, env=env, stderr=self._stderr.append))
        self.greeting: Mapping[str, Any] = {}
        self.is_branch = options.fork_session
        """Whether its conversation must still be created as a copy."""
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the CLI and wait until it is ready. Call `aclose` even if this raises."""
        await prepare_to_start()
        if self._ending is not None:
            raise UpstreamFailedError(f"{self._name} was closed while it started")
        self._starting = self._world.spawn(self.client.connect(), name="claude: start of a process")
        try:
            await self._starting
            self.greeting = await self.client.get_server_info() or {}
        except asyncio.CancelledError:
            if self._ending is None:
                raise
            raise UpstreamFailedError(f"{self._name} was closed while it started") from None
        except Exception as error:
            raise await self.classify_error(error) from error

    @property
    def has_exited(self) -> bool:
        """Whether it was started and has ended by itself. The SDK shows that only by a failed request."""
        process = getattr(self.client._transport, "_process", None)  # noqa: SLF001 - it has no public way
        return process is not None and has_exited(process.pid)

    async def classify_error(self, error: Exception) -> ModelError:
        """Return the typed error for an error of the SDK; the reason may be only on stderr."""
        if isinstance(error, CLINotFoundError):
            return ModelMissingError(f"{self._name} has no CLI: {error}")
        if isinstance(error, ResultError):
            names = [exact_reason(error.terminal_reason), error.subtype]
            return upstream_error(self._name, str(error), names=names, status=error.api_error_status)
        waits = int(STDERR_WAIT_S / _LOOK_S) if isinstance(error, ProcessError) else 0
        for _ in range(waits):
            if self._stderr:
                break
            await self._world.sleep(_LOOK_S)
        stderr_text = "\n".join(self._stderr)
        typed = upstream_error(
            self._name, stderr_text if waits and stderr_text else f"{error}\n{stderr_text}"
        )
        typed.add_note(stderr_text)
        return typed

    def clear_stderr(self) -> None:
        """Drop earlier output, which does not explain later failures."""
        self._stderr.clear()

    async def aclose(self) -> None:
        """End the process, also if the caller is cancelled."""
        if self._ending is None:
            self._ending = self._world.spawn(self._end(), name="claude: end of a process")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self.client.disconnect()


class _ClaudeAgent:
    """See `UpstreamAgent`."""

    def __init__(
        self,
        name: str,
        options: ClaudeAgentOptions,
        source: str,
        mark: str,
        world: World,
        agents: set[_ClaudeAgent],
    ) -> None:
        self._name = name
        self._options = options
        self._source = source
        """The conversation to continue: its own as soon as it has an id."""
        self._mark = mark
        """The point at which it branches off; "" if it does not, or already has."""
        self._last = ""
        """The id of an entry that its transcript must have; "" if unknown."""
        self._world = world
        self._program: _Program | None = None
        self._person: Person | None = None
        """The receiver of permission requests during the current answer."""
        self._is_sending = False
        self._is_closed = False
        self._agents = agents
        agents.add(self)

    def use_permissions(self, permissions: Rules | Asking) -> None:
        """Set the callback for acts that the permission mode does not decide."""

        async def can_use_tool(
            tool: str, arguments: dict[str, Any], _: ToolPermissionContext
        ) -> PermissionResultAllow | PermissionResultDeny:
            shown = json_text(arguments)
            permission = Permission(self._source, tool, KINDS.get(tool, "other"), shown)
            answer = await decide_permission(permissions, permission, self._person)
            if not isinstance(answer, Allowed):
                return PermissionResultDeny(message=answer)
            edited = None if answer.arguments is None else msgspec.json.decode(answer.arguments)
            return PermissionResultAllow(updated_input=edited)

        self._options = dataclasses.replace(self._options, can_use_tool=can_use_tool)

    async def send(
        self,
        outgoing: UpstreamMessage,
        *,
        key: str,  # noqa: ARG002 - the CLI skips a message whose id it has, also one that it never answered
        is_forced: bool = False,
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """See `UpstreamAgent.send`.

        A conversation that runs in another process of the CLI is busy. With `is_forced`, a branch of it continues under
        an id of its own, and the other run is not stopped.
        """
        if self._is_closed:
            raise UpstreamFailedError(f"this agent of {self._name} is closed")
        if self._is_sending:
            raise UpstreamBusyError(f"{self._name} is still answering the previous message")
        self._is_sending, is_ended_well = True, False
        self._person = outgoing.person
        try:
            program = await self._start(is_forced=is_forced)
            self._last = ""
            # Each try has a new id: the CLI skips a message whose id is in its transcript, also an unanswered one.
            message_id = str(uuid.UUID(hex=_digits(self._world)))
            reader = ClaudeReader(self._name, self._source, message_id, is_branch=program.is_branch)
            async for event in self._answer(program, reader, outgoing.message):
                yield event
            is_ended_well = reader.failure is None
            if reader.failure is not None:
                raise reader.failure
        finally:
            self._is_sending = False
            if not is_ended_well:
                await self._end()

    async def aclose(self) -> None:
        """End the process. A running answer ends with an error."""
        self._is_closed = True
        program, self._program = self._program, None
        if program is not None:
            await program.aclose()
        self._agents.discard(self)

    async def _answer(
        self, program: _Program, reader: ClaudeReader, message: UserMessage
    ) -> AsyncGenerator[UpstreamEvent, None]:
        is_opened = False
        try:
            program.clear_stderr()
            await program.client.query(_once(_message(message, reader.message_id)))
            async with contextlib.aclosing(_messages(program.client)) as messages:
                async for read in messages:
                    for event in reader.read(read, now=self._world.now()):
                        if isinstance(event, MessageTaken):
                            self._source, self._mark, program.is_branch = event.agent, "", False
                            is_opened = True
                        elif isinstance(event, Marked):
                            self._last = event.mark
                        yield event
                    if reader.is_ended:
                        return
        except ModelError:
            raise
        except Exception as error:
            typed = await program.classify_error(error)
            raise (typed if is_opened else doubtful(typed)) from error
        raise UpstreamFailedError(f"{self._name} ended before its answer did")

    async def _start(self, *, is_forced: bool) -> _Program:
        """Return the process of the conversation. If it has ended, resume the conversation in a new one."""
        if self._program is not None and self._program.has_exited:
            await self._end()
        if self._program is not None:
            return self._program
        await self._check_transcript()
        branches = (
            [bool(self._mark), True] if is_forced and self._source and not self._mark else [bool(self._mark)]
        )
        for is_branch in branches:
            options = dataclasses.replace(
                self._options,
                resume=self._source or None,
                fork_session=is_branch,
                resume_session_at=self._mark or None,
            )
            self._program = program = _Program(self._name, options, self._world)
            try:
                await program.start()
            except UpstreamBusyError:
                await self._end()
                if is_branch is branches[-1]:
                    raise
            else:
                break
        return program

    async def _check_transcript(self) -> None:
        """Check that the transcript to continue is complete. One in a store is not on this disk."""
        if not self._source or self._options.session_store is not None:
            return
        last = self._mark or self._last
        if not await asyncio.to_thread(is_whole, _home_of(self._options), self._source, last):
            raise UpstreamGoneError(f"{self._name} has lost a part of the transcript of this conversation")

    async def _end(self) -> None:
        """Stop the run, within `INTERRUPT_S`, and end the process."""
        program, self._program = self._program, None
        if program is None:
            return
        try:
            if not program.has_exited:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(INTERRUPT_S):
                        await program.client.interrupt()
        finally:
            await program.aclose()


async def _messages(client: ClaudeSDKClient) -> AsyncGenerator[Message, None]:
    async for message in client.receive_messages():
        yield message


async def _once(message: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield message


def _digits(world: World) -> str:
    return world.new_id("message").rpartition("-")[2]


def _message(message: UserMessage, message_id: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part.text} if isinstance(part, Text) else _attachment(part)
        for part in message.parts
    ]
    return {
        "type": "user",
        "message": {"role": "user", "content": content},
        "parent_tool_use_id": None,
        "uuid": message_id,
    }


def _attachment(file: File) -> dict[str, Any]:
    kind = "image" if file.media_type.startswith("image/") else "document"
    if kind == "image" or file.media_type == "application/pdf":
        if file.data is not None:
            source = {"type": "base64", "media_type": file.media_type, "data": file.data}
            return {"type": kind, "source": source}
        if file.url is not None:
            return {"type": kind, "source": {"type": "url", "url": file.url}}
    named = file.name or file.url or "without a name"
    return {"type": "text", "text": f"[An attachment that cannot be shown here: {named}, {file.media_type}]"}


def _server(server: ForwardedMcpServer) -> dict[str, Any]:
    if server.transport == "stdio":
        return {
            "type": "stdio",
            "command": server.command,
            "args": [*server.args],
            "env": server.env,
        }
    config: dict[str, Any] = {"type": server.transport, "url": server.url}
    if server.headers:
        config["headers"] = server.headers
    if server.client_id:
        scopes = {"scopes": server.scope} if server.scope else {}
        config["oauth"] = {"clientId": server.client_id, **scopes}
    return config


def _add_instructions(prompt: Any, instructions: str) -> Any:  # noqa: ANN401 - the SDK's union of dicts
    """Return the SDK's system prompt with the client application's instructions at its end."""
    if not instructions:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n\n{instructions}".strip()
    match prompt["type"]:
        case "preset":
            before = prompt.get("append", "")
            return {**prompt, "append": f"{before}\n\n{instructions}".strip()}
        case "custom":
            return {**prompt, "prompt": f"{prompt['prompt']}\n\n{instructions}".strip()}
    raise UsageError(
        "instructions of a client application cannot be added to a system prompt in a file; give the prompt as text"
    )
