"""Tools: a Python function, the schema a model is shown of it, and one bounded way to call it.

Used by the server (`runtime/`) and by clients that run tools themselves (`client/`), so that a tool means the
same on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import msgspec
from msgspec import Struct

from midstream.core.calls import CallPlan, OnDoubt, Site, digest_of
from midstream.core.messages import Call, Outcome, Result, ToolSpec, storable
from midstream.errors import ToolDefinitionError

TIMEOUT_S = 120.0
"""Seconds a tool may run where it names no timeout (the longest build the originals' users waited for)."""
RESULT_CHARS_MAX = 512 * 1024
"""Characters of one result; a longer one is cut, with a mark that says by how much."""
THREADS_MAX = 256
"""Plain functions at work in one process, abandoned ones that hang included; one more is refused, not started."""


class Tool(Struct, frozen=True):
    """Something a model can call. Make one with `@tool`.

    Args:
        spec: What the model is told.
        function: What is called, with the arguments as keywords; a coroutine function or a plain one.
        arguments: The types the arguments are checked and converted against.
        has_effects: It changes something in the world: it runs alone and its start is synced to disk.
        on_doubt: What to do with a call that started and whose outcome nobody knows.
        timeout_s: Seconds until a call is given up.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: type[Struct]
    has_effects: bool = True
    on_doubt: OnDoubt = OnDoubt.UNKNOWN
    timeout_s: float = TIMEOUT_S

    @property
    def name(self) -> str:
        """The name the model calls it by."""
        return self.spec.name


class CallContext(Struct, frozen=True):
    """What a running tool may know about its call; see `current_call`."""

    session: str
    turn: int
    reply: int
    call_id: str
    run: int = 1

    @property
    def effect_key(self) -> str:
        """The same for every run of one call: hand it to a service that refuses repetitions."""
        return f"{self.session}/{self.turn}/{self.reply}/{self.call_id}"


_current: contextvars.ContextVar[CallContext] = contextvars.ContextVar("midstream_call")


def current_call() -> CallContext:
    """Return the call this tool is running for.

    Raises:
        LookupError: No tool is running here.
    """
    return _current.get()


@contextlib.contextmanager
def running(context: CallContext) -> Iterator[None]:
    """Let `current_call` return `context` inside: for whoever runs a tool in a loop of its own."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    has_effects: bool = True,
    on_doubt: OnDoubt | str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    has_effects: bool = True,
    on_doubt: OnDoubt | str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function: the schema comes from its type hints, the description from its docstring.

    Args:
        function: A plain or coroutine function. Plain ones run in a thread.
        name: The name the model sees; the function's own by default.
        has_effects: False for a tool that only reads: such calls run side by side.
        on_doubt: What happens to a call whose outcome was lost: `unknown` (the default where there are effects: the
            model is told to check), `rerun` (the default where there are none), `rerun_with_key`.
        timeout_s: Seconds until a call is given up, with an error result (a plain function's thread cannot be
            stopped; it is abandoned).

    Raises:
        ToolDefinitionError: A parameter has no type hint, or one without a JSON form.
    """
    policy = OnDoubt(on_doubt) if on_doubt else OnDoubt.UNKNOWN if has_effects else OnDoubt.RERUN

    def make(function: Callable[..., Any]) -> Tool:
        arguments, spec = _read_signature(function, name or function.__name__)
        return Tool(spec, function, arguments, has_effects, policy, timeout_s)

    return make(function) if function is not None else make


def plan_call(call: Call, tools: Mapping[str, Tool]) -> CallPlan:
    """Look a call up and check its arguments; what cannot be run gets a `problem` for the model to read."""
    digest = digest_of(call.name, call.arguments)
    found = tools.get(call.name)
    if found is None:
        known = ", ".join(sorted(tools)) or "none"
        return CallPlan(
            call.id, digest, problem=f"There is no tool named {call.name!r}. Known tools: {known}."
        )
    problem = None
    try:
        msgspec.json.decode(call.arguments or "{}", type=found.arguments, strict=False)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        problem = f"The arguments of {call.name!r} do not fit its schema: {error}"
    return CallPlan(
        call.id,
        digest,
        has_effects=found.has_effects,
        on_doubt=found.on_doubt,
        timeout_s=found.timeout_s,
        problem=problem,
        site=Site.SERVER,
    )


async def run_call(found: Tool, call: Call, context: CallContext) -> Result:
    """Call a tool within its timeout and return its result; whatever the tool does, this does not raise.

    Cancelling this cancels a coroutine tool; a plain function's thread is abandoned. The cancellation goes on
    to the caller.
    """
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=found.arguments, strict=False)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return Result(
            call.id, f"The arguments of {call.name!r} do not fit its schema: {error}", Outcome.ERROR
        )
    limit = asyncio.timeout(found.timeout_s)
    try:
        with running(context):
            async with limit:
                value = await _invoke(found.function, arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: whatever it raises is its answer
        if limit.expired():
            message = f"{call.name!r} gave no answer within {found.timeout_s:g} s."
            outcome = Outcome.UNKNOWN if found.has_effects else Outcome.ERROR
            return Result(call.id, f"{message} It may or may not have taken effect.", outcome)
        return Result(call.id, storable(f"{type(error).__name__}: {error}"), Outcome.ERROR)
    return _result_of(call, value)


async def _invoke(function: Callable[..., Any], arguments: Struct) -> object:
    keywords = {field: getattr(arguments, field) for field in arguments.__struct_fields__}
    if inspect.iscoroutinefunction(function):
        try:
            return await typing.cast("Awaitable[object]", function(**keywords))
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise RuntimeError("CancelledError: the tool cancelled itself") from error
    context = contextvars.copy_context()
    return await _in_thread(lambda: context.run(lambda: function(**keywords)))


_free_threads = threading.Semaphore(THREADS_MAX)


async def _in_thread(work: Callable[[], object]) -> object:
    """Run a plain function in a thread of its own; a cancelled caller abandons it.

    A daemon and no pool: a tool that hangs must keep neither the process from ending nor the next tool from starting.
    """
    if not _free_threads.acquire(blocking=False):
        raise RuntimeError(f"not started: {THREADS_MAX} tools are running or hanging in this process")
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: Exception | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(value)
        else:
            ended.set_exception(error)

    def run() -> None:
        value: object = None
        failure: Exception | None = None
        try:
            value = work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see run_call; a future takes neither of the odd ones
            is_odd = isinstance(error, StopIteration | SystemExit)
            failure = RuntimeError(f"{type(error).__name__}: {error}") if is_odd else error  # type: ignore[assignment]
        finally:
            _free_threads.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="midstream tool", daemon=True).start()
    return await ended


def _result_of(call: Call, value: object) -> Result:
    if isinstance(value, str):
        content = value
    else:
        try:
            content = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            # The tool has run: the model must know that only its answer is lost.
            problem = f"{call.name!r} finished, but its answer has no JSON form ({error})."
            return Result(call.id, problem, Outcome.ERROR)
    if len(content) > RESULT_CHARS_MAX:
        content = f"{content[:RESULT_CHARS_MAX]}\n[+{len(content) - RESULT_CHARS_MAX} characters]"
    return Result(call.id, storable(content))


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Index tools by name.

    Raises:
        ToolDefinitionError: Two of them have the same name.
    """
    found: dict[str, Tool] = {}
    for each in tools:
        if each.name in found:
            raise ToolDefinitionError(f"two tools are named {each.name!r}: give one of them another name")
        found[each.name] = each
    return found


# --- schema from signature and docstring ----------------------------------------------------------------------


def _read_signature(function: Callable[..., Any], name: str) -> tuple[type[Struct], ToolSpec]:
    described = _docstring_arguments(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"a type hint of {name!r} cannot be resolved: {error}") from error
    fields: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolDefinitionError(f"tool {name!r} must take named parameters only, not {parameter}")
        if parameter.name not in hints:
            raise ToolDefinitionError(f"parameter {parameter.name!r} of tool {name!r} needs a type hint")
        hint = hints[parameter.name]
        if text := described.get(parameter.name):
            hint = typing.Annotated[hint, msgspec.Meta(description=text)]
        default = msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default
        fields.append((parameter.name, hint, default))
    try:
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True)
        schema = _plain_schema(arguments)
    except TypeError as error:
        raise ToolDefinitionError(f"a parameter of tool {name!r} has no JSON form: {error}") from error
    summary = _docstring_summary(inspect.getdoc(function) or "")
    return arguments, ToolSpec(name, summary, schema)


def _plain_schema(arguments: type[Struct]) -> dict[str, Any]:
    """Return an object schema with its own `$defs`, as providers want it."""
    (reference,), definitions = msgspec.json.schema_components([arguments])
    schema = dict(definitions.pop("Arguments")) if "$ref" in reference else dict(reference)
    schema.pop("title", None)
    schema["additionalProperties"] = False
    if definitions:
        schema["$defs"] = definitions
    return schema


_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE
)


def _docstring_summary(text: str) -> str:
    found = _SECTION.search(text)
    return (text[: found.start()] if found else text).strip()


def _docstring_arguments(text: str) -> dict[str, str]:
    """Read a Google-style `Args:` section."""
    found = re.search(r"^(?:Args|Arguments|Parameters):\s*$\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    if not found:
        return {}
    described: dict[str, str] = {}
    current = ""
    for line in found.group(1).splitlines():
        entry = re.match(r"^ {1,4}\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$", line)
        if entry:
            current = entry.group(1)
            described[current] = entry.group(2).strip()
        elif current and line.strip():
            described[current] += " " + line.strip()
    return described
