"""MCP servers as sources of tools: over stdio or streamable HTTP, through the official SDK.

    agent = Agent(model, tools=[McpServer.stdio("npx", ["-y", "server-files", "."], name="files")])

A server is connected at its first use, shared by all sessions, and reconnected after its death. The SDK's client has a
task of its own (`_Link`), because the task that opened it must close it. A tool call only waits for its answer, and
fails at once when the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, TypedDict, Unpack, cast
from urllib.parse import urlsplit

import httpx2
import msgspec

from midstream.environment import World
from midstream.errors import ToolsUnavailableError, UsageError
from midstream.extras import extra
from midstream.history.messages import Outcome, ToolSpec, storable
from midstream.json_depth import TOO_DEEP, is_too_deep
from midstream.retries import MCP_BACKOFF
from midstream.session.calls import OnDoubt
from midstream.tools.function_tools import (
    PROGRESS_CHARS_MAX,
    TIMEOUT_S,
    CallContext,
    StatedOutcome,
    Tool,
    current_call,
)
from midstream.version import __version__

with extra("mcp"):
    import mcp_types as wire
    from jsonschema.validators import validator_for
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.client import Transport
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.dispatcher import ProgressFnT

CONNECT_S = 60.0
"""Seconds for a server to start and initialize: a first `npx` or `uvx` downloads its program."""
START_WAIT_S = 8.0
"""Seconds of them that a turn waits for the tools; later turns continue without them until the server is ready."""
LIST_S = 5.0
"""Seconds for a server to list its tools, if it is not busy with a call."""
PAGES_MAX = 100
TOOLS_MAX = 1000
"""Tools that are used from one server, because models have limits."""
NAME_CHARS_MAX = 64
"""Characters of a tool's name that every provider accepts."""
STDERR_LINE_BYTES_MAX = 4096
EFFECT_KEY = "midstream/effect_key"
"""Member of a call's `_meta`: the same for every run of one call, so that a server can refuse repetitions."""

_TIMEOUT = httpx2.Timeout(connect=10.0, read=None, write=30.0, pool=5.0)
"""No limit on silence: each call has its own limit, and a slow tool is silent until its answer."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}", re.ASCII)
_FOREIGN_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]", re.ASCII)
_GATEWAY_FAULT = (wire.INTERNAL_ERROR, "Server returned an error response")
"""The SDK's error for an HTTP failure instead of a JSON-RPC answer."""
_OFF_THE_LINE = (wire.CONNECTION_CLOSED, "Connection closed")
"""The SDK's errors for a closed connection."""

_Streams = AsyncGenerator[Any]  # a pair of streams whose type the SDK does not export

_log = logging.getLogger(__name__)


class ServerOptions(TypedDict, total=False):
    """Options of both kinds of servers.

    Args:
        prefix: Prefix of the names of its tools; `NAME__` by default, to keep servers' names apart. "" for none.
        timeout_s: Seconds until a call is given up.
        hints: "trusted" uses the server's hints about read-only and repeatable tools; "ignored" uses none.
        world: Clock, chance and tasks.
    """

    prefix: str
    timeout_s: float
    hints: Literal["trusted", "ignored"]
    world: World


class McpServer:
    """The tools of one MCP server. Create it with `stdio` or `http`.

    It serves one event loop at a time: `close` it before it is used in another one. Its representation and its log
    lines contain no arguments, environment or headers.
    """

    def __init__(
        self, name: str, where: str, connect: Callable[[], Transport], **options: Unpack[ServerOptions]
    ) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"an MCP server's name is a letter and up to 31 of A-Z a-z 0-9 _ -, not {name!r}"
            )
        self.name = name
        self._where = where
        self._connect = connect
        self._prefix = options.get("prefix", f"{name}__")
        self._timeout_s = options.get("timeout_s", TIMEOUT_S)
        self._hints = options.get("hints", "trusted")
        self._world = options.get("world") or World()
        self._link: _Link | None = None
        self._parting: set[_Link] = set()
        self._failures = 0
        self._retry_at = 0.0
        self._tool_cache: dict[str, tuple[wire.Tool, Tool | None]] = {}
        """The tool for each entry of the server's last list."""

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Unpack[ServerOptions],
    ) -> McpServer:
        """Create a server for a program that is started here, with its stdin and stdout; its stderr is logged (info).

        Args:
            command: The program.
            args: Its arguments.
            name: Its name for users and, as the prefix of its tools, for the model.
            env: Added to its environment, which has only HOME, LOGNAME, PATH, SHELL, TERM and USER of this one.
            cwd: Its working directory.
            options: See `ServerOptions`.

        Raises:
            UsageError: The name is not valid. Nothing was started.
        """
        program = StdioServerParameters(command=command, args=[*args], env=dict(env or {}), cwd=cwd)
        return cls(name, Path(command).name, lambda: _over_stdio(program, name), **options)

    @classmethod
    def http(
        cls,
        url: str,
        *,
        name: str,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        **options: Unpack[ServerOptions],
    ) -> McpServer:
        """Create a server with streamable HTTP at `url`.

        Args:
            url: Its endpoint, such as `https://example.com/mcp`, without secrets: HTTP libraries log addresses.
            name: Its name for users and, as the prefix of its tools, for the model.
            headers: Sent with each request, such as an `Authorization`.
            auth: Creates the headers instead (such as the SDK's `OAuthClientProvider`).
            options: See `ServerOptions`.

        Raises:
            UsageError: The name or the address is not valid. Nothing was sent.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the address of the MCP server {name!r} must look like https://example.com/mcp")
        sent = dict(headers or {})
        return cls(name, f"{parts.scheme}://{parts.hostname}", lambda: _over_http(url, sent, auth), **options)

    def __repr__(self) -> str:
        return f"McpServer({self.name!r}, {self._where!r})"

    async def tools(self) -> tuple[Tool, ...]:
        """Return the server's current tools; see `ToolSource`.

        If the server does not answer in time because it is busy with a call, return its last tools.

        Raises:
            ToolsUnavailableError: The server is unavailable, is still starting, or does not answer.
        """
        for is_last_try in (False, True):
            link = await self._open_link()
            try:
                async with asyncio.timeout(LIST_S):
                    listed = await _list_tools(await link.client())
            except TimeoutError as error:
                if link.calls:
                    return tuple(made for _, made in self._tool_cache.values() if made is not None)
                raise self._fail(link, f"did not list its tools within {LIST_S:g} s") from error
            except Exception as error:  # there is no list after any error
                if is_last_try:
                    raise self._fail(link, _reason_of(error)) from error
                self._drop(link)  # the connection has ended since its last request
            else:
                self._failures = 0
                return self._take(listed)
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Close the connection and end a server that was started here: closed, terminated, killed, within 9 s."""
        if self._link is not None:
            self._drop(self._link)
        await asyncio.gather(*(each.wait_until_closed() for each in self._parting))

    # --- the connection ---------------------------------------------------------------------------------------

    async def _open_link(self) -> _Link:
        link = self._link
        if link is not None and link.failure is not None:  # it failed while no request waited for it
            raise self._fail(link, _reason_of(link.failure))
        if link is None or link.is_over:
            left_s = self._retry_at - self._world.monotonic()
            if left_s > 0:
                raise self._unavailable(f"could not be reached and is tried again in {left_s:.0f} s")
            link = self._link = _Link(self._connect(), self._world, f"MCP {self.name}")
        left_s = max(0.0, link.started_at + START_WAIT_S - self._world.monotonic())
        try:
            async with asyncio.timeout(left_s):
                await link.client()
        except TimeoutError as error:
            if link.failure is None:
                raise self._unavailable("is still starting") from error
            raise self._fail(link, _reason_of(link.failure)) from error
        except Exception as error:
            raise self._fail(link, _reason_of(error)) from error
        return link

    def _drop(self, link: _Link) -> None:
        """Let a connection end in the background; the next call opens another one."""
        if self._link is link:
            self._link = None
        self._parting = {each for each in self._parting if not each.is_done} | {link}
        link.release()

    def _fail(self, link: _Link, reason: str) -> ToolsUnavailableError:
        if self._link is link:  # counted once for all requests that wait for it
            self._drop(link)
            self._failures += 1
            wait_s = MCP_BACKOFF.wait_s(self._failures, chance=self._world.chance())
            self._retry_at = self._world.monotonic() + wait_s
            _log.warning("the MCP server %r %s; tried again in %.0f s", self.name, reason, wait_s)
        return self._unavailable(reason)

    def _unavailable(self, reason: str) -> ToolsUnavailableError:
        return ToolsUnavailableError(f"the MCP server {self.name!r} {reason}")

    # --- its tools --------------------------------------------------------------------------------------------

    def _take(self, listed: Sequence[wire.Tool]) -> tuple[Tool, ...]:
        before, self._tool_cache = self._tool_cache, {}
        for remote in listed:
            known = before.get(remote.name)
            made = known[1] if known and known[0] == remote else self._tool_of(remote)
            self._tool_cache[remote.name] = (remote, made)
        return tuple(made for _, made in self._tool_cache.values() if made is not None)

    def _tool_of(self, remote: wire.Tool) -> Tool | None:
        """Create a tool; None if providers would refuse every request because of its schema."""
        schema = remote.input_schema
        if is_too_deep(schema):
            _log.warning("a tool of %r is omitted: its schema is %s", self.name, TOO_DEEP)
            return None
        try:
            validator_for(schema).check_schema(schema)
        except Exception:  # noqa: BLE001 - a foreign schema in a foreign validator, which raises more than SchemaError
            _log.warning("a tool of %r is omitted: its schema is not a JSON schema", self.name)
            return None
        has_effects, on_doubt = _policy_of(remote.annotations if self._hints == "trusted" else None)

        async def call(**arguments: object) -> StatedOutcome:
            return await self._call(remote.name, arguments, has_effects=has_effects)

        described = storable(remote.description or remote.title or "")
        spec = ToolSpec(_name_for(self._prefix + remote.name), described, {"type": "object", **schema})
        return Tool(spec, call, None, has_effects, on_doubt, self._timeout_s)

    async def _call(self, name: str, arguments: dict[str, object], *, has_effects: bool) -> StatedOutcome:
        context = current_call()
        doubtful = Outcome.UNKNOWN if has_effects else Outcome.ERROR
        try:
            link = await self._open_link()
            client = await link.client()
        except ToolsUnavailableError as error:
            if context.run > 1:
                return StatedOutcome(f"Not run again: {error.message}. {_MAY_HAVE_RUN}", doubtful)
            return StatedOutcome(f"Not run: {error.message}.", Outcome.ERROR)
        # The SDK's type has only the protocol's own members; the specification permits additional ones.
        meta = cast("wire.RequestParamsMeta", {EFFECT_KEY: context.effect_key})
        link.calls += 1
        try:
            result = await client.call_tool(
                name,
                arguments,
                progress_callback=_progress_of(context),
                meta=meta,
            )
        except MCPError as error:
            if (error.code, error.message) == _OFF_THE_LINE:
                self._drop(link)
            if error.code == wire.CONNECTION_CLOSED or (error.code, error.message) == _GATEWAY_FAULT:
                return StatedOutcome(f"The MCP server {self.name!r} went away. {_MAY_HAVE_RUN}", doubtful)
            return StatedOutcome(error.message, Outcome.ERROR)
        except Exception as error:  # noqa: BLE001 - an SDK over a network: what the server did is unknown
            kind = type(error).__name__
            _log.warning("no usable answer of %r: %s", self.name, kind, extra={"session": context.session})
            return StatedOutcome(
                f"The MCP server {self.name!r} gave no usable answer. {_MAY_HAVE_RUN}", doubtful
            )
        finally:
            link.calls -= 1
        return StatedOutcome(text_of(result), Outcome.ERROR if result.is_error else Outcome.OK)


_MAY_HAVE_RUN = "It may or may not have taken effect."


class _Link:
    """One connection, in the task that opens and closes it."""

    def __init__(self, transport: Transport, world: World, name: str) -> None:
        self.started_at = world.monotonic()
        self.calls = 0
        """Number of calls that wait for their answers."""
        self._transport = transport
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_ignore_failure)
        self._leaving = asyncio.Event()
        self._task = world.spawn(self._hold(), name=name)

    @property
    def is_over(self) -> bool:
        """Whether the connection accepts no more calls."""
        return self._leaving.is_set() or self._task.done()

    @property
    def is_done(self) -> bool:
        """Whether the connection is completely closed."""
        return self._task.done()

    @property
    def failure(self) -> BaseException | None:
        """The error that prevented the connection, or None."""
        return self._ready.exception() if self._ready.done() else None

    async def client(self) -> Client:
        """Wait for the initialization, and raise its error. A cancellation does not stop it."""
        return await asyncio.shield(self._ready)

    def release(self) -> None:
        """Begin to close the connection."""
        self._leaving.set()
        if not self._ready.done():
            self._task.cancel()

    async def wait_until_closed(self) -> None:
        """Wait until the connection is completely closed."""
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S) as limit:
                info = wire.Implementation(name="midstream", version=__version__)
                async with Client(self._transport, client_info=info) as client:
                    limit.reschedule(None)
                    self._ready.set_result(client)
                    await self._leaving.wait()
        except Exception as error:  # noqa: BLE001 - any end of a connection is raised in the tasks that wait for it
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                _log.info("an MCP connection ended: %s", type(error).__name__)
        finally:
            if not self._ready.done():
                self._ready.set_exception(ToolsUnavailableError("the connection was given up"))


def _ignore_failure(ready: asyncio.Future[Client]) -> None:
    """Ignore a failure that is not awaited: the next caller gets it."""
    if not ready.cancelled():
        ready.exception()


# --- transports -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _over_stdio(program: StdioServerParameters, name: str) -> _Streams:
    with _stderr_in_the_log(name) as errors:
        async with stdio_client(program, errlog=errors) as streams:
            errors.close()  # the server has its own copy, and the log ends with that
            yield streams


@contextlib.asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str], auth: httpx2.Auth | None) -> _Streams:
    async with (
        httpx2.AsyncClient(headers=headers, auth=auth, timeout=_TIMEOUT, follow_redirects=False) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


@contextlib.contextmanager
def _stderr_in_the_log(name: str) -> Iterator[TextIO]:
    """Yield a file whose lines become log lines, until all copies of it are closed."""
    reading, writing = os.pipe()

    def follow() -> None:
        with os.fdopen(reading, "rb") as lines:
            while line := lines.readline(STDERR_LINE_BYTES_MAX):
                _log.info("%s: %s", name, line.decode("utf-8", "replace").rstrip())

    threading.Thread(target=follow, name=f"stderr of MCP {name}", daemon=True).start()
    with os.fdopen(writing, "w", encoding="utf-8") as file:
        yield file


# --- conversions between MCP and midstream ----------------------------------------------------------------------


async def _list_tools(client: Client) -> list[wire.Tool]:
    found: list[wire.Tool] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await client.list_tools(cursor=cursor)
        found.extend(page.tools)
        cursor = page.next_cursor
        if cursor is None or len(found) > TOOLS_MAX:
            break
    return found[:TOOLS_MAX]


def _policy_of(hints: wire.ToolAnnotations | None) -> tuple[bool, OnDoubt]:
    """Return whether a tool has effects, and its policy for calls in doubt (TURN-44)."""
    if hints is not None and hints.read_only_hint:
        return False, OnDoubt.RERUN
    if hints is not None and hints.idempotent_hint:
        return True, OnDoubt.RERUN
    return True, OnDoubt.UNKNOWN


def _name_for(name: str) -> str:
    """Return a valid name for every provider; a changed one has a digest, so that it stays distinct."""
    plain = _FOREIGN_CHARACTERS.sub("_", name)
    if plain == name and len(name) <= NAME_CHARS_MAX:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{plain[: NAME_CHARS_MAX - 9]}_{digest}"


def _progress_of(context: CallContext) -> ProgressFnT:
    """Return the SDK's callback that passes a tool's progress to the session's readers."""

    async def take(progress: float, total: float | None, message: str | None) -> None:
        done = f"{progress:g}" if total is None else f"{progress:g} of {total:g}"
        context.tell(storable(f"{done}: {message}" if message else done)[:PROGRESS_CHARS_MAX])

    return take


def text_of(result: wire.CallToolResult) -> str:
    """Return a result as text for a model: its texts; pictures and files only by name, kind and size."""
    if not result.content and result.structured_content is not None:
        if is_too_deep(result.structured_content):
            return f"[structured content, {TOO_DEEP}, not shown]"
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(_text_of(block) for block in result.content)


def _text_of(block: wire.ContentBlock) -> str:
    match block:
        case wire.TextContent():
            return block.text
        case wire.ImageContent() | wire.AudioContent():
            return f"[{block.type} {block.mime_type}, {_bytes_in(block.data)} bytes, not shown]"
        case wire.ResourceLink():
            return f"[resource {block.name} at {block.uri}{_kind(block.mime_type)}]"
        case wire.EmbeddedResource(resource=wire.TextResourceContents() as inner):
            return f"[resource {inner.uri}]\n{inner.text}"
        case wire.EmbeddedResource(resource=wire.BlobResourceContents() as inner):
            return f"[resource {inner.uri}{_kind(inner.mime_type)}, {_bytes_in(inner.blob)} bytes, not shown]"
    return f"[{block.type}, not shown]"


def _kind(mime_type: str | None) -> str:
    return f", {mime_type}" if mime_type else ""


def _bytes_in(base64: str) -> int:
    return len(base64.rstrip("=")) * 3 // 4


def _reason_of(error: BaseException) -> str:
    """Return the reason why a server is unavailable, without sent data."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case ToolsUnavailableError():
            return "was closed"
        case MCPError():
            return f"failed: {error.message}"
        case TimeoutError():
            return f"did not start within {CONNECT_S:g} s"
        case OSError():
            return f"cannot be started or reached: {error.strerror or type(error).__name__}"
        case ValueError():  # the SDK's validation
            return "sent an answer that violates the protocol"
        case _:
            return f"cannot be reached ({type(error).__name__})"
