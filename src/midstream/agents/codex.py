"""Codex as an upstream, through the `openai-codex` package and its app server.

Sources: the package's own types (0.163.0). A missing thread is refused as an invalid request with the text "no rollout
found for thread id", and an empty one with "rollout … is empty". A search for "not found" misses both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from midstream.agents.codex_permissions import AskingClient, CodexPermissions, OnceClient
from midstream.agents.mcp_forwarding import Forwarding
from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.agents.permission_rules import Asking, Person, Rules
from midstream.agents.process_guardian import prepare_to_start
from midstream.agents.tool_value_json import json_text
from midstream.agents.upstream_errors import kind_of
from midstream.agents.upstreams import (
    Abilities,
    Marked,
    MessageTaken,
    ResponseRestarted,
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
    ModelMissingError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelUnavailableError,
    UpstreamFailedError,
    UpstreamGoneError,
    UpstreamMismatchError,
    UsageError,
)
from midstream.extras import extra
from midstream.history.codecs.file_parts import file_words
from midstream.history.messages import File, Finish, Outcome, Text, Usage, UserMessage
from midstream.models.provider_errors import STATUSES
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.tools.forwarded_servers import ForwardedMcpServer, Transport

with extra("codex"):
    import openai_codex as sdk
    from openai_codex import types
    from openai_codex.generated import v2_all as wire

STOP_S = 5.0
"""Seconds for interrupting a turn that no task waits for."""
_GONE_WORDS = ("no rollout found", "is empty", "thread not found", "no such thread")
_FAULTS: Mapping[str, type[ModelError]] = {
    "contextWindowExceeded": ContextOverflowError,
    "sessionBudgetExceeded": ModelQuotaError,
    "usageLimitExceeded": ModelRateLimitedError,
    "rateLimitExceeded": ModelRateLimitedError,
    "flexUnavailable": ModelOverloadedError,
    "serverOverloaded": ModelOverloadedError,
    "internalServerError": ModelUnavailableError,
    "httpConnectionFailed": ModelUnavailableError,
    "responseStreamConnectionFailed": ModelUnavailableError,
    "responseStreamDisconnected": ModelUnavailableError,
    "responseTooManyFailedAttempts": ModelUnavailableError,
    "cyberPolicy": ModelFilteredError,
    "misalignmentPolicyViolation": ModelFilteredError,
    "tooManyDenials": ModelRejectedError,
    "unauthorized": ModelAccessError,
    "badRequest": ModelRejectedError,
}
"""Error class for each `codexErrorInfo` of a failed turn; any other fault is unknown."""
_TRANSPORTS: tuple[Transport, ...] = ("stdio", "http")
"""Transports of Codex for MCP servers: its configuration supports neither server-sent events nor a registration."""
_CLOSED = (sdk.TransportClosedError, OSError, ValueError, AttributeError)
"""Exceptions of the package when its app server ends: the last three if the pipes close during a request."""
_TERMINATE = "thread/backgroundTerminals/terminate"
_QUIET = ("turn/", "thread/", "account/", "mcpServer/", "warning", "configWarning", "deprecationNotice")
"""Notifications without a part of an answer."""


class Codex:
    """An upstream of Codex threads in a folder of this machine.

    Args:
        model: None for the model of Codex's own configuration.
        cwd: The working folder.
        api_key: The key for a login before the first conversation; None uses Codex's existing login.
        sandbox: What the agent may change.
        is_reviewing: Whether commands that need more than the sandbox allows go to Codex's automatic review.
        permissions: Decides about such commands: `Rules`, or your own function; `ASK_FIRST` asks the people of the
            session. With neither they are refused.
        command: The command that starts the app server; the package's own runtime by default.
        env: Added to its environment, which is that of this process.

    Raises:
        UsageError: The folder `cwd` is missing, or both `is_reviewing` and `permissions` are set.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        cwd: str | Path = ".",
        api_key: str | None = None,
        sandbox: sdk.Sandbox = sdk.Sandbox.workspace_write,
        is_reviewing: bool = False,
        permissions: Rules | Asking | None = None,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        world: World = World(),
    ) -> None:
        folder = Path(cwd).resolve()
        if not folder.is_dir():
            raise UsageError(f"the working folder {str(folder)!r} does not exist")
        if is_reviewing and permissions is not None:
            raise UsageError("either Codex's own review decides (`is_reviewing`), or `permissions` do")
        self.name = f"codex:{model or 'default'}"
        self.abilities = Abilities(takes_files=True, takes_servers=True, can_fork=True)
        self.identity = {
            "model": model or "",
            "cwd": str(folder),
            "sandbox": sandbox.value,
            "review": str(is_reviewing),
            "home": _home(env or {}),
        }
        self._model = model
        self._folder = folder
        self._key = api_key
        self._sandbox = sandbox
        self._approvals = sdk.ApprovalMode.auto_review if is_reviewing else sdk.ApprovalMode.deny_all
        self._config = sdk.CodexConfig(
            launch_args_override=tuple(command) if command is not None else None,
            cwd=str(folder),
            env=dict(env) if env is not None else None,
            client_name="midstream",
            client_title="midstream",
        )
        self.permissions = permissions
        self.world = world
        self.responding: dict[str, CodexPermissions] = {}
        """Permission requests of the threads that are answering, by thread id."""
        self._forwarding = Forwarding(self.name, self.abilities)
        self._codex: sdk.AsyncCodex | None = None
        self._starting = asyncio.Lock()
        self._fresh: sdk.AsyncCodex | None = None
        """An app server that is being started."""
        self._closings = 0

    async def open(self, setup: Setup, *, resume: str = "") -> CodexThread:
        """Start a thread, or resume the one that `resume` names; see `midstream.agents.upstreams`.

        Raises:
            UpstreamMismatchError: Codex opened another, empty thread.
        """
        closings = self._closings
        codex, thread = await self.open_thread(setup, resume=resume)
        return CodexThread(self, setup, codex, thread, resume, closings)

    async def open_thread(self, setup: Setup, *, resume: str = "") -> tuple[sdk.AsyncCodex, sdk.AsyncThread]:
        """Return a thread and its app server; see `open`."""
        async with self._server() as codex:
            options = self._options(setup)
            if self.permissions is not None:
                thread = await self._open_asking_thread(codex, setup, resume)
            elif resume:
                thread = await codex.thread_resume(resume, include_turns=False, **options)
            else:
                thread = await codex.thread_start(**options)
        if resume and thread.id != resume:
            raise UpstreamMismatchError(f"{self.name} resumed {thread.id!r} instead of {resume!r}")
        return codex, thread

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> CodexThread:
        """Continue from the end of an earlier turn (`mark`) in a new thread."""
        closings = self._closings
        async with self._server() as codex:
            params = wire.ThreadForkParams(
                thread_id=agent, last_turn_id=mark, exclude_turns=True, **self._terms(setup)
            )
            # The package's public method has no `last_turn_id`.
            forked = await codex._client.thread_fork(agent, params)  # noqa: SLF001
        return CodexThread(self, setup, codex, sdk.AsyncThread(codex, forked.thread.id), agent, closings)

    async def verify(self) -> bool:
        """Check that a user is logged in."""
        async with self._server() as codex:
            account = await codex.account()
        return account.account is not None or not account.requires_openai_auth

    async def delete(self, agent: str) -> None:
        """Archive a thread, because Codex cannot delete one."""
        with contextlib.suppress(ModelError):
            async with self._server() as codex:
                await codex.thread_archive(agent)

    def is_open(self, codex: sdk.AsyncCodex) -> bool:
        """Whether this app server is the current one and runs."""
        return codex is self._codex and not _has_exited(codex)

    @property
    def closings(self) -> int:
        """Number of calls of `aclose`: everything opened before is closed."""
        return self._closings

    async def aclose(self) -> None:
        """Stop the app server, also one that is being started, and also if the caller is cancelled."""
        self._closings += 1
        servers, self._codex = (self._codex, self._fresh), None
        closings = [codex.close() for codex in servers if codex is not None]
        await self.world.finish(*closings, name="codex: end of an app server")

    def _options(self, setup: Setup) -> dict[str, Any]:
        servers = {each.name: _server(each) for each in self._forwarding.select(setup.servers, _TRANSPORTS)}
        return {
            "approval_mode": self._approvals,
            "cwd": str(self._folder),
            "config": {"mcp_servers": servers} if servers else None,
            "developer_instructions": setup.instructions or None,
            "model": self._model,
            "sandbox": self._sandbox,
        }

    def _terms(self, setup: Setup) -> dict[str, Any]:
        """Return the settings without a parameter in the package's public methods, as fields of its wire protocol."""
        options = self._options(setup)
        is_asking = self.permissions is not None
        return {
            "approval_policy": _policy(is_asking or self._approvals is sdk.ApprovalMode.auto_review),
            "approvals_reviewer": wire.ApprovalsReviewer.user if is_asking else None,
            "cwd": options["cwd"],
            "config": options["config"],
            "developer_instructions": options["developer_instructions"],
            "model": self._model,
            "sandbox": wire.SandboxMode(_WIRE_SANDBOX[self._sandbox]),
        }

    async def _open_asking_thread(self, codex: sdk.AsyncCodex, setup: Setup, resume: str) -> sdk.AsyncThread:
        """Start or resume a thread with permission requests to this client: the public methods have no such mode."""
        client, terms = codex._client, self._terms(setup)  # noqa: SLF001
        if resume:
            params = wire.ThreadResumeParams(thread_id=resume, exclude_turns=True, **terms)
            resumed = await client.thread_resume(resume, params)
            return sdk.AsyncThread(codex, resumed.thread.id)
        started = await client.thread_start(wire.ThreadStartParams(**terms))
        return sdk.AsyncThread(codex, started.thread.id)

    async def _decide(self, method: str, params: dict[str, Any]) -> str:
        leave = self.responding.get(str(params.get("threadId")))
        return "decline" if leave is None else await leave.decide(method, params)

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[sdk.AsyncCodex]:
        """Yield the app server, and convert its errors."""
        codex = await self._start()
        async with self.errors(codex):
            yield codex

    async def _start(self) -> sdk.AsyncCodex:
        closings = self._closings
        async with self._starting:
            if self._codex is not None and _has_exited(self._codex):
                ended, self._codex = self._codex, None
                await ended.close()
            if self._codex is None and self._closings == closings:
                env = {**(self._config.env or {}), OWNER_VARIABLE: owner_of_new_agents()}
                config = dataclasses.replace(self._config, env=env)
                self._fresh = codex = sdk.AsyncCodex(config)
                # The package has no parameter for the client.
                codex._client._sync = (  # noqa: SLF001
                    OnceClient(config) if self.permissions is None else AskingClient(config, self._decide)
                )
                try:
                    await self._greet(codex)
                    if self._closings == closings:
                        self._codex = codex
                except ModelError:
                    if self._closings == closings:
                        raise
                finally:
                    self._fresh = None
                    if self._codex is not codex:  # the package releases it only if no task is cancelled
                        await self.world.finish(codex.close(), name="codex: end of an app server")
            if self._closings != closings:
                raise ModelUnavailableError("the app server of codex was stopped while it started")
            assert self._codex is not None
            return self._codex

    async def _greet(self, codex: sdk.AsyncCodex) -> None:
        await prepare_to_start()
        try:
            await codex.__aenter__()
        except (OSError, ValueError, RuntimeError, sdk.CodexError) as error:
            raise ModelMissingError(f"the app server of openai-codex does not start: {error}") from error
        if self._key is not None:
            async with self.errors(codex):
                await codex.login_api_key(self._key)

    @contextlib.asynccontextmanager
    async def errors(self, codex: sdk.AsyncCodex) -> AsyncIterator[None]:
        """Convert the package's errors."""
        try:
            yield
        except _CLOSED as error:
            if codex is self._codex:  # it died: the next conversation starts another one
                self._codex = None
            await codex.close()
            raise ModelUnavailableError("the app server of codex is gone") from error
        except sdk.JsonRpcError as error:
            raise _refusal(error) from error


def _has_exited(codex: sdk.AsyncCodex) -> bool:
    client = codex._client._sync  # noqa: SLF001 - ours, see `Codex._start`
    return isinstance(client, OnceClient) and client.has_exited


_WIRE_SANDBOX = {
    sdk.Sandbox.read_only: "read-only",
    sdk.Sandbox.workspace_write: "workspace-write",
    sdk.Sandbox.full_access: "danger-full-access",
}


class CodexThread:
    """One thread, created by `Codex.open`."""

    def __init__(
        self,
        upstream: Codex,
        setup: Setup,
        codex: sdk.AsyncCodex,
        thread: sdk.AsyncThread,
        resumed: str,
        closings: int,
    ) -> None:
        self._upstream = upstream
        self._setup = setup
        self._codex = codex
        self._thread = thread
        self._resumed = resumed
        """The source of the next answer; a fork has one only once."""
        self._closings = closings

    async def send(
        self,
        outgoing: UpstreamMessage,
        *,
        key: str,  # noqa: ARG002 - the app server accepts none
        is_forced: bool = False,
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """Send a message; see `midstream.agents.upstreams` for the order of the events and the errors.

        A message would join a turn that is running in the thread: with `is_forced` that turn is interrupted first. Once
        a turn has begun, the message stays in the thread.
        """
        await self._resume_if_lost()
        handle: sdk.AsyncTurnHandle | None = None
        leave = self._leave(outgoing.person)
        reading = CodexTurn(leave.refusals if leave is not None else {})
        try:
            async with self._upstream.errors(self._codex):
                if is_forced:
                    await self._interrupt_all()
                handle = await self._begin_turn(outgoing)
                resumed, self._resumed = self._resumed, self._thread.id
                yield MessageTaken(self._thread.id, resumed)
                async for notification in handle.stream():
                    if leave is not None:
                        leave.notice(notification.payload)
                    for event in reading.read(notification.payload, notification.method):
                        yield event
        except ModelUnavailableError as error:
            # The fault is of the app server, not of the provider.
            if handle is not None and isinstance(error.__cause__, _CLOSED):
                raise doubtful(error) from error.__cause__
            raise
        finally:
            if leave is not None:
                self._upstream.responding.pop(self._thread.id, None)
                leave.cancel_requests()
            # Any request to a stopped app server starts another one.
            if handle is not None and not reading.is_over and self._upstream.is_open(self._codex):
                await self._end_turn(self._interrupt(handle, reading.terminals))
        if reading.failure is not None:
            raise reading.failure
        yield Marked(handle.id)
        yield reading.finish()

    async def aclose(self) -> None:
        """Do nothing: the app server keeps the thread."""

    async def _resume_if_lost(self) -> None:
        """Resume the thread in another app server if its app server has ended since the last answer."""
        if self._upstream.is_open(self._codex):
            return
        if self._closings != self._upstream.closings or self._resumed != self._thread.id:
            raise ModelUnavailableError("the app server of codex was stopped")
        self._codex, self._thread = await self._upstream.open_thread(self._setup, resume=self._thread.id)

    async def _end_turn(self, work: Coroutine[Any, Any, None]) -> None:
        """End a turn, and wait a limited time for it; a cancellation ends only the wait."""
        ending = self._upstream.world.spawn(work, name="codex: end of a turn")
        await asyncio.wait({ending}, timeout=STOP_S)

    async def _interrupt(self, handle: sdk.AsyncTurnHandle, terminals: Mapping[str, str]) -> None:
        """Interrupt a turn, and end its commands, which the app server would continue in the background."""
        with contextlib.suppress(sdk.CodexError, *_CLOSED):
            await handle.interrupt()
        for terminal in terminals.values():
            # The package has no method for this.
            params: dict[str, Any] = {"threadId": self._thread.id, "processId": terminal}
            with contextlib.suppress(sdk.CodexError, *_CLOSED):
                await self._codex._client.request(  # noqa: SLF001
                    _TERMINATE, params, response_model=wire.TurnInterruptResponse
                )

    def _leave(self, person: Person | None) -> CodexPermissions | None:
        """Return the permission requests of this answer; None if Codex sends none."""
        permissions = self._upstream.permissions
        if permissions is None:
            return None
        leave = self._upstream.responding[self._thread.id] = CodexPermissions(
            permissions, self._thread.id, person, self._upstream.world
        )
        return leave

    async def _begin_turn(self, outgoing: UpstreamMessage) -> sdk.AsyncTurnHandle:
        """Start a turn. If the app server dies meanwhile, it may have stored the message."""
        starting = self._upstream.world.spawn(
            self._thread.turn(_input(outgoing.message)), name="codex: start of a turn"
        )
        try:
            async with self._upstream.errors(self._codex):
                return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The app server starts the turn even if no task waits.
            await self._end_turn(_interrupt_begun(starting))
            raise
        except ModelUnavailableError as error:
            if isinstance(error.__cause__, _CLOSED):
                raise doubtful(error) from error.__cause__
            raise

    async def _interrupt_all(self) -> None:
        read = await self._thread.read(include_turns=True)
        for turn in read.thread.turns or ():
            if turn.status is types.TurnStatus.in_progress:
                await sdk.AsyncTurnHandle(self._codex, self._thread.id, turn.id).interrupt()


class CodexTurn:
    """One turn of the app server.

    Args:
        refusals: Reasons for refused permissions, by item id: Codex reports only that an item was declined.
    """

    def __init__(self, refusals: Mapping[str, str] | None = None) -> None:
        self._refusals: Mapping[str, str] = {} if refusals is None else refusals
        self.is_over = False
        self.failure: ModelError | None = None
        self._spoken: set[str] = set()
        """Messages and thoughts whose text was streamed."""
        self._shown: dict[str, str] = {}
        """The arguments of the running calls, by call id."""
        self.terminals: dict[str, str] = {}
        """The processes of the running commands, by call id."""
        self._usage: Usage | None = None
        """Tokens of all model calls of this turn; Codex counts those of the thread and of the last call."""
        self._before: Usage | None = None
        """Tokens of the thread before this turn."""

    def read(self, payload: object, method: str) -> Sequence[UpstreamEvent]:
        """Return the events of one notification; none before the agent begins to answer."""
        match payload:
            case wire.AgentMessageDeltaNotification():
                self._spoken.add(payload.item_id)
                return [TextDelta(payload.delta)]
            case wire.ReasoningSummaryTextDeltaNotification() | wire.ReasoningTextDeltaNotification():
                self._spoken.add(payload.item_id)
                return [ThinkingDelta(payload.delta)]
            case wire.ItemStartedNotification():
                return self._start_item(payload.item.root)
            case wire.ItemCompletedNotification():
                return self._complete_item(payload.item.root)
            case wire.ThreadTokenUsageUpdatedNotification():
                total, last = _usage_of(payload.token_usage.total), _usage_of(payload.token_usage.last)
                self._before = total - last if self._before is None else self._before
                self._usage = total - self._before
                return []
            case wire.ErrorNotification(will_retry=True):
                return [ResponseRestarted()]
            case wire.TurnCompletedNotification():
                self._end(payload.turn)
                return []
        return [] if method.startswith(_QUIET) or method == "error" else [Working()]

    def finish(self) -> Finished:
        """Return the end of a successful turn."""
        return Finished(Finish.STOP, "", self._usage)

    def _start_item(self, item: object) -> list[ModelEvent]:
        call = _call_of(item)
        if call is not None:
            self._shown[call[0]] = call[2]
            if isinstance(item, wire.CommandExecutionThreadItem) and item.process_id:
                self.terminals[call[0]] = item.process_id
            return [UpstreamCallStarted(*call)]
        return [] if isinstance(item, wire.UserMessageThreadItem) else [Working()]

    def _complete_item(self, item: object) -> list[ModelEvent]:
        call = _call_of(item)
        if call is not None:
            content, outcome = _result_of(item)
            refusal = self._refusals.get(call[0], "") if outcome is Outcome.DENIED else ""
            self.terminals.pop(call[0], None)
            is_changed = self._shown.pop(call[0], call[2]) != call[2]
            changed = [UpstreamCallStarted(*call)] if is_changed else []
            return [*changed, UpstreamCallEnded(call[0], refusal or content, outcome)]
        match item:
            case wire.AgentMessageThreadItem() if item.id not in self._spoken and item.text:
                return [TextDelta(item.text)]
            case wire.ReasoningThreadItem() if item.id not in self._spoken:
                thought = "\n\n".join(item.summary or item.content or ())
                return [ThinkingDelta(thought)] if thought else []
        return []

    def _end(self, turn: wire.Turn) -> None:
        self.is_over = True
        if turn.status is types.TurnStatus.completed:
            return
        if turn.error is None:
            self.failure = UpstreamFailedError(f"the turn ended with status {turn.status.value!r}")
            return
        info = turn.error.codex_error_info.root if turn.error.codex_error_info is not None else None
        kind = STATUSES.get(_status_of(info)) or _FAULTS.get(_fault_of(info)) or kind_of(turn.error.message)
        self.failure = (kind or UpstreamFailedError)(f"the turn failed: {turn.error.message}")


def _home(changes: Mapping[str, str]) -> str:
    """Return the home of the app server, given the changes to this process's environment; "" for the default."""
    config = changes.get("CODEX_HOME", os.environ.get("CODEX_HOME"))
    return config or (str(Path(changes["HOME"], ".codex")) if changes.get("HOME") else "")


def _usage_of(counted: wire.TokenUsageBreakdown) -> Usage:
    return Usage(counted.input_tokens, counted.output_tokens, counted.cached_input_tokens)


def _call_of(item: object) -> tuple[str, str, str] | None:
    """Return id, name and arguments of an item that is a call of Codex's own tools, or None."""
    match item:
        case wire.CommandExecutionThreadItem():
            return item.id, "shell", json_text({"command": item.command, "cwd": str(item.cwd.root)})
        case wire.FileChangeThreadItem():
            return item.id, "apply_patch", json_text({"paths": [change.path for change in item.changes]})
        case wire.McpToolCallThreadItem():
            return item.id, item.tool, json_text(item.arguments)
        case wire.WebSearchThreadItem():
            return item.id, "web_search", json_text({"query": item.query})
    return None


def _result_of(item: object) -> tuple[str, Outcome]:
    match item:
        case wire.CommandExecutionThreadItem():
            return item.aggregated_output or "", _outcome(item.status.value)
        case wire.McpToolCallThreadItem():
            if item.error is not None:
                return item.error.message, Outcome.ERROR
            texts = [_words_in(piece) for piece in (item.result.content if item.result else [])]
            return "\n".join(texts), _outcome(item.status.value)
        case wire.FileChangeThreadItem():
            return item.status.value, _outcome(item.status.value)
    return "", Outcome.OK


def _outcome(status: str) -> Outcome:
    return {"failed": Outcome.ERROR, "declined": Outcome.DENIED}.get(status, Outcome.OK)


def _words_in(piece: object) -> str:
    text = piece.get("text") if isinstance(piece, dict) else None
    return text if isinstance(text, str) else json_text(piece)


def _fault_of(info: object) -> str:
    """Return the name of a fault: a string, or the only key of an object."""
    if isinstance(info, str):
        return info.value if isinstance(info, wire.CodexErrorInfoValue) else info
    fields = info if isinstance(info, dict) else dict(getattr(info, "__dict__", {}))
    name = next(iter(fields), "")
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _status_of(info: object) -> int:
    """Return the provider's HTTP status in a fault, which is more exact than the fault's name; 0 if there is none."""
    fields = dict(getattr(info, "__dict__", {}))
    status = getattr(next(iter(fields.values()), None), "http_status_code", None)
    return status or 0


def _refusal(error: sdk.JsonRpcError) -> ModelError:
    if any(words in error.message.lower() for words in _GONE_WORDS):
        return UpstreamGoneError(f"codex: {error.message}")
    kind: type[ModelError] = UpstreamFailedError
    if isinstance(error, sdk.ServerBusyError):
        kind = ModelOverloadedError
    elif isinstance(error, sdk.InvalidRequestError | sdk.InvalidParamsError | sdk.MethodNotFoundError):
        kind = ModelRejectedError
    return kind(f"codex: {error.message}")


def _policy(is_asking: bool) -> types.AskForApproval:  # noqa: FBT001 - it is the question
    """Return when Codex requests permissions: for more than the sandbox permits, or never."""
    value = wire.AskForApprovalValue.on_request if is_asking else wire.AskForApprovalValue.never
    return types.AskForApproval(root=value)


def _input(message: UserMessage) -> list[sdk.InputItem]:
    return [_item(part) for part in message.parts] or [sdk.TextInput("")]


def _item(part: Text | File) -> sdk.InputItem:
    if isinstance(part, Text):
        return sdk.TextInput(part.text)
    if part.media_type.startswith("image/") and part.data is not None:
        return sdk.ImageInput(f"data:{part.media_type};base64,{part.data}")
    return sdk.TextInput(file_words(part))


def _server(server: ForwardedMcpServer) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), "env": dict(server.env)}
    headers = {"http_headers": dict(server.headers)} if server.headers else {}
    return {"url": server.url, **headers}


async def _interrupt_begun(starting: asyncio.Task[sdk.AsyncTurnHandle]) -> None:
    """Interrupt a turn as soon as it has begun; after its end an app server has none."""
    with contextlib.suppress(sdk.CodexError, *_CLOSED):
        await (await starting).interrupt()
