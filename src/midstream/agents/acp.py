"""Coding agents with the Agent Client Protocol as upstreams: programs, started by a command.

    upstream = AcpAgent(["some-agent", "--acp"], cwd="/srv/project", env={"SOME_KEY": key})

Each open agent is one process, started with the first message, and kept between messages. Another process continues a
conversation with `session/resume`, or with `session/load`, whose replay is skipped. Other agents cannot do it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from midstream.agents.acp_process import AcpProcess, Leave
from midstream.agents.acp_programs import FailedMessage
from midstream.agents.acp_updates import AcpReader
from midstream.agents.mcp_forwarding import Forwarding
from midstream.agents.permission_rules import (
    CAUTIOUS,
    Allowed,
    Asking,
    Decision,
    Kind,
    Permission,
    Person,
    Rules,
    decide_permission,
)
from midstream.agents.stopped_tools import end_tools, ticks_now
from midstream.agents.upstreams import (
    Abilities,
    MessageDropped,
    MessageTaken,
    Setup,
    UpstreamEvent,
    UpstreamMessage,
    doubtful,
)
from midstream.environment import World
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelRejectedError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UpstreamMismatchError,
    UsageError,
)
from midstream.extras import extra
from midstream.history.messages import File, Text, UserMessage
from midstream.models.responses import KeepAlive
from midstream.tools.forwarded_servers import ForwardedMcpServer, Transport

with extra("acp"):
    from acp import RequestError, helpers
    from acp.schema import (
        AgentMessageChunk,
        AudioContentBlock,
        EmbeddedResourceContentBlock,
        EnvVariable,
        HttpHeader,
        HttpMcpServer,
        ImageContentBlock,
        McpServerStdio,
        PromptCapabilities,
        PromptResponse,
        ResourceContentBlock,
        SseMcpServer,
        TextContentBlock,
        ToolCallUpdate,
        UserMessageChunk,
    )

OPENING_S = 120.0
"""Seconds for an agent to open a conversation: it connects its MCP servers, and replays a long conversation."""
CANCEL_S = 2.0
"""Seconds for an agent to stop a run. Then its process is ended, with all its child processes."""
KEY_META = "midstream/key"
"""Member of a prompt's `_meta`: the idempotency key. Agents that read it can refuse repetitions."""

_ENV_OPTIONS_WITH_VALUE = frozenset({"-u", "--unset", "-C", "--chdir"})
"""Options of the program `env` whose value is the next word."""
_NOT_REMEMBERED = frozenset({-32001, -32002, -32601, -32602})
"""Codes of agents' errors for an unknown session, or one that they can no longer open."""
_INSTRUCTIONS = (
    "These are the instructions of the application that you are used in. They hold for the whole conversation; the "
    "user's first message follows them.\n\n{}"
)
_KINDS: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind)}

_Block = (
    TextContentBlock
    | ImageContentBlock
    | AudioContentBlock
    | ResourceContentBlock
    | EmbeddedResourceContentBlock
)
_Server = HttpMcpServer | SseMcpServer | McpServerStdio


class AcpAgent:
    """Conversations with an agent program.

    It uses its own file system and terminal, not the client's.

    Args:
        command: The program and its arguments, without keys: it is part of the identity and of log lines.
        cwd: The folder it works in; its conversations belong to it.
        env: Added to its environment, which has only HOME, LOGNAME, PATH, SHELL, TERM and USER of this one.
        permissions: Decides about permission requests: `Rules`, or your own function. By default reading is allowed and
            effects are refused; `ASK_FIRST` asks the people of the session about effects.
        mode: The session mode to set, if the agent has modes.
        instructions: The place of the client application's system prompt, because the protocol has none. "meta":
            `_meta.systemPrompt` of the new session, for agents that read it. "message": before the first message, where
            some models treat it as an attack. "none": it is not sent.
        sign_in: The id of the agent's authentication method to use before a conversation is opened.
        name: The name for users; by default `acp:` and the program, without a leading `env` and its assignments.
        account: Distinguishes accounts that share a folder. Never a key.

    Raises:
        UsageError: The command is empty. Nothing was started.
    """

    abilities = Abilities(takes_files=True, takes_servers=True, can_retool=True, has_process=True)

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | Path = ".",
        env: Mapping[str, str] | None = None,
        permissions: Rules | Asking = CAUTIOUS,
        mode: str = "",
        instructions: Literal["message", "meta", "none"] = "meta",
        sign_in: str = "",
        name: str = "",
        account: str = "",
        world: World = World(),
    ) -> None:
        words = shlex.split(command) if isinstance(command, str) else [*command]
        if not words:
            raise UsageError("an agent's command names a program")
        self.name = name or f"acp:{Path(_find_program(words)).name}"
        self._terms = _Terms(
            self.name,
            tuple(words),
            str(Path(cwd).resolve()),
            dict(env or {}),
            permissions,
            mode,
            instructions,
            sign_in,
            world,
        )
        self._account = account
        self._agents: set[_Conversation] = set()
        self._forwarding = Forwarding(self.name, self.abilities)

    @property
    def identity(self) -> Mapping[str, str]:
        """See `Upstream.identity`."""
        return {
            "command": shlex.join(self._terms.command),
            "cwd": self._terms.cwd,
            "mode": self._terms.mode,
            "account": self._account,
        }

    async def open(self, setup: Setup, *, resume: str = "") -> _Conversation:
        """See `Upstream.open`. The agent is started with the first message."""
        return _Conversation(self._terms, setup, resume, self._agents, self._forwarding)

    async def verify(self) -> bool:
        """Open a conversation without a message, to find out whether the agent requires a sign-in."""
        process = self._terms.process(_refuse_unattended)
        try:
            await process.start(self._terms.sign_in)
            await process.wait_for(process.connection.new_session(cwd=self._terms.cwd), limit_s=OPENING_S)
        except ModelAccessError:
            return False
        finally:
            await process.aclose()
        return True

    async def delete(self, agent: str) -> None:
        """Do nothing: clients of the protocol cannot delete a session yet."""

    async def aclose(self) -> None:
        """End all processes, also if the caller is cancelled."""
        closings = [agent.aclose() for agent in self._agents]
        await self._terms.world.finish(*closings, name="acp: end of an agent")


class _Terms(Struct, frozen=True):
    """Settings that all conversations of an agent share."""

    name: str
    command: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    permissions: Rules | Asking
    mode: str
    instructions: Literal["message", "meta", "none"]
    sign_in: str
    world: World

    def process(self, leave: Leave) -> AcpProcess:
        """Return a new process of the agent, not started."""
        return AcpProcess(self.name, self.command, cwd=self.cwd, env=self.env, leave=leave, world=self.world)


class _Conversation:
    """See `UpstreamAgent`."""

    def __init__(
        self,
        terms: _Terms,
        setup: Setup,
        source: str,
        agents: set[_Conversation],
        forwarding: Forwarding,
    ) -> None:
        self._terms = terms
        self._setup = setup
        self._session = source
        """The agent's id of the conversation; "" before it has one."""
        self._is_fresh = not source
        """Whether no message was sent yet."""
        self._forwarding = forwarding
        self._agents = agents
        self._process: AcpProcess | None = None
        self._reader = AcpReader()
        self._person: Person | None = None
        """The receiver of permission requests during the current answer."""
        self._since = 0
        """Begin of this turn, in ticks."""
        self._is_sending = False
        self._is_closed = False
        agents.add(self)

    async def send(
        self, outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """See `UpstreamAgent.send`. With `is_forced`, another run of the conversation is cancelled first."""
        if self._is_closed:
            raise UpstreamFailedError(f"this agent of {self._terms.name} is closed")
        if self._is_sending:
            raise UpstreamBusyError(f"{self._terms.name} is still answering the previous message")
        self._is_sending, is_in_order = True, False
        try:
            process = await self._start()
            if is_forced:
                await process.wait_for(process.connection.cancel(self._session), limit_s=CANCEL_S)
            process.take_updates()
            self._reader = reader = AcpReader()
            self._since = ticks_now()
            self._person = outgoing.person
            prompting = self._terms.world.spawn(
                process.wait_for(self._prompt(process, outgoing.message, key), limit_s=None),
                name="acp: a turn",
            )
            try:
                async for event in self._answer(process, reader, prompting):
                    yield event
            finally:
                is_in_order = await self._settle(process, prompting)
        finally:
            self._is_sending = False
            if not is_in_order:
                await self._end()

    async def aclose(self) -> None:
        """End the process. A running answer ends with an error."""
        self._is_closed = True
        await self._end()
        self._agents.discard(self)

    async def _answer(
        self, process: AcpProcess, reader: AcpReader, prompting: asyncio.Task[PromptResponse]
    ) -> AsyncGenerator[UpstreamEvent, None]:
        before, is_opened = "" if self._is_fresh else self._session, False
        is_dropping = process.failed_message is FailedMessage.DROPPED
        async with contextlib.aclosing(process.read_updates(prompting)) as updates:
            async for session, update in updates:
                if not is_opened:
                    # Agents have no other way to report the id of the opened conversation.
                    is_opened, self._is_fresh = True, False
                    opened = session if before else self._session
                    yield MessageTaken(opened, before and session, is_provisional=is_dropping)
                if session != self._session:
                    yield KeepAlive()  # from a sub-agent
                    continue
                for event in reader.update(update):
                    yield event
        try:
            response = await prompting
        except ModelError as error:
            is_refused = isinstance(error.__cause__, RequestError) and _is_of_provider(error)
            if is_refused and not is_opened:
                # The agent lives, and has sent a request to its provider: most agents have the message in the
                # conversation then.
                self._is_fresh, is_opened = False, True
                is_kept = process.failed_message is FailedMessage.KEPT
                yield MessageTaken(self._session, before, is_provisional=not is_kept)
            if is_refused and is_dropping:
                yield MessageDropped()
            if is_opened:
                raise
            raise doubtful(error) from error.__cause__
        if response.stop_reason == "cancelled":
            raise UpstreamFailedError(f"{self._terms.name} was stopped by another client during its answer")
        if response.stop_reason == "refusal" and not reader.has_words:
            if before:  # some agents answer like this to unknown sessions
                raise UpstreamFailedError(f"{self._terms.name} refuses to continue this conversation")
            raise ModelFilteredError(f"{self._terms.name} refused the message")
        if not is_opened:
            self._is_fresh = False
            yield MessageTaken(self._session, before)
        for event in reader.end(response):
            yield event

    async def _settle(self, process: AcpProcess, prompting: asyncio.Task[PromptResponse]) -> bool:
        """Stop a run without a reader; return whether its process can be reused."""
        process.cancel_requests()
        is_in_tool = self._reader.is_in_tool and not prompting.done()
        if not prompting.done():
            with contextlib.suppress(ModelError):
                await process.wait_for(process.connection.cancel(self._session), limit_s=CANCEL_S)
            await asyncio.wait({prompting}, timeout=CANCEL_S)
        if is_in_tool:
            await end_tools(process.id, self._since)  # and the processes that the agent itself has started
        is_answered = prompting.done() and not is_in_tool
        prompting.cancel()
        (end,) = await asyncio.gather(prompting, return_exceptions=True)
        is_refused = isinstance(end, ModelError) and isinstance(end.__cause__, RequestError)
        return is_answered and (is_refused or not isinstance(end, BaseException))

    async def _start(self) -> AcpProcess:
        """Return the process of the conversation. If it has ended, resume the conversation in a new one."""
        if self._process is not None and self._process.has_exited:
            await self._end()
            self._session = "" if self._is_fresh else self._session
        if self._process is not None:
            return self._process
        self._process = process = self._terms.process(self._leave)
        await process.start(self._terms.sign_in)
        servers = self._servers(process)
        if self._session:
            await self._resume(process, servers)
        else:
            await self._begin(process, servers)
        if self._terms.mode:
            mode = process.connection.set_session_mode(self._session, self._terms.mode)
            await process.wait_for(mode, limit_s=OPENING_S)
        if self._is_closed:  # when the last answer had arrived, and was not read yet
            raise UpstreamFailedError(f"{self._terms.name} was closed while it started")
        return process

    async def _begin(self, process: AcpProcess, servers: list[_Server]) -> None:
        meta: dict[str, Any] = {}
        if self._setup.instructions and self._terms.instructions == "meta":
            meta["systemPrompt"] = {"append": self._setup.instructions}
        opening = process.connection.new_session(cwd=self._terms.cwd, mcp_servers=[*servers], **meta)
        self._session = (await process.wait_for(opening, limit_s=OPENING_S)).session_id

    async def _resume(self, process: AcpProcess, servers: list[_Server]) -> None:
        """Resume the conversation, and check as far as possible that the agent has it."""
        can, connection = process.capabilities, process.connection
        opening: Awaitable[object]
        is_loading = False
        if can.session_capabilities is not None and can.session_capabilities.resume is not None:
            opening = connection.resume_session(self._session, cwd=self._terms.cwd, mcp_servers=[*servers])
        elif can.load_session:
            opening = connection.load_session(self._terms.cwd, self._session, mcp_servers=[*servers])
            is_loading = True
        else:
            raise UpstreamGoneError(f"{self._terms.name} cannot resume earlier conversations")
        try:
            await process.wait_for(opening, limit_s=OPENING_S)
        except ModelError as error:
            refusal = error.__cause__
            if isinstance(refusal, RequestError) and refusal.code in _NOT_REMEMBERED:
                raise UpstreamGoneError(str(error)) from refusal
            raise
        replayed = await process.take_replay(_is_message) if is_loading else process.take_updates()
        others = {session for session, _ in replayed} - {self._session}
        if others and len(others) == len({session for session, _ in replayed}):
            raise UpstreamMismatchError(
                f"{self._terms.name} opened another conversation than the requested one"
            )
        if is_loading and not any(_is_message(update) for _, update in replayed):
            raise UpstreamGoneError(f"{self._terms.name} opened the conversation, and it is empty")

    def _servers(self, process: AcpProcess) -> list[_Server]:
        can = process.capabilities.mcp_capabilities
        transports: list[Transport] = ["stdio"]
        if can is not None and can.http:
            transports.append("http")
        if can is not None and can.sse:
            transports.append("sse")
        return [_server(server) for server in self._forwarding.select(self._setup.servers, transports)]

    async def _prompt(self, process: AcpProcess, message: UserMessage, key: str) -> PromptResponse:
        can = process.capabilities.prompt_capabilities or PromptCapabilities()
        blocks = [
            helpers.text_block(part.text) if isinstance(part, Text) else _attachment(part, can)
            for part in message.parts
        ]
        if self._is_fresh and self._setup.instructions and self._terms.instructions == "message":
            blocks.insert(0, helpers.text_block(_INSTRUCTIONS.format(self._setup.instructions)))
        return await process.connection.prompt(session_id=self._session, prompt=blocks, **{KEY_META: key})

    async def _leave(self, session: str, update: ToolCallUpdate) -> Decision:
        reader = self._reader
        tool, kind, arguments, is_vague = reader.describe_request(update)
        permission = Permission(
            session,
            tool,
            _KINDS.get(kind, "other"),
            arguments,
            is_fixed=True,
            is_vague=is_vague,
        )
        answer = await decide_permission(self._terms.permissions, permission, self._person)
        if not isinstance(answer, Allowed):
            reader.note_refusal(update.tool_call_id, answer)
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()


def _find_program(words: Sequence[str]) -> str:
    """Return the program of a command: after a leading `env`, its options and its assignments."""
    if Path(words[0]).name != "env":
        return words[0]
    rest = iter(words[1:])
    for word in rest:
        if word in _ENV_OPTIONS_WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-") and "=" not in word:
            return word
    return words[0]


def _is_of_provider(error: ModelError) -> bool:
    """Whether an error comes from the provider behind an agent; then the agent itself is intact."""
    kinds = (
        ModelAccessError,
        ModelRejectedError,
        ContextOverflowError,
        ModelFilteredError,
        ModelUnavailableError,
    )
    return isinstance(error, kinds) and not isinstance(error, UpstreamBusyError | UpstreamFailedError)


def _is_message(update: object) -> bool:
    return isinstance(update, UserMessageChunk | AgentMessageChunk)


async def _refuse_unattended(_: str, __: ToolCallUpdate) -> Decision:
    return "no person can be asked"


def _attachment(file: File, can: PromptCapabilities) -> _Block:
    name = file.name or file.url or "attachment"
    if file.data is not None and can.image and file.media_type.startswith("image/"):
        return helpers.image_block(file.data, file.media_type)
    if file.data is not None and can.audio and file.media_type.startswith("audio/"):
        return helpers.audio_block(file.data, file.media_type)
    if file.url is not None:
        return helpers.resource_link_block(name, file.url, mime_type=file.media_type)
    if file.data is not None and can.embedded_context:
        return helpers.resource_block(
            helpers.embedded_blob_resource(f"attachment:{name}", file.data, mime_type=file.media_type)
        )
    return helpers.text_block(f"[An attachment that cannot be shown here: {name}, {file.media_type}]")


def _server(server: ForwardedMcpServer) -> _Server:
    headers = [HttpHeader(name=name, value=value) for name, value in server.headers.items()]
    match server.transport:
        case "stdio":
            env = [EnvVariable(name=name, value=value) for name, value in server.env.items()]
            return McpServerStdio(name=server.name, command=server.command, args=[*server.args], env=env)
        case "http":
            return HttpMcpServer(type="http", name=server.name, url=server.url, headers=headers)
        case "sse":
            return SseMcpServer(type="sse", name=server.name, url=server.url, headers=headers)
