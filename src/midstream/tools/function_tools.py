"""Tools: a Python function with a schema for models, and a call with limits.

Used by the server (`engine/`) and by clients that run tools (`client/`), so that a tool behaves the same on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, overload, runtime_checkable

import msgspec
from msgspec import Struct

from midstream.errors import ToolDefinitionError, UsageError
from midstream.history.messages import Outcome, ToolCall, ToolResult, ToolSpec, storable
from midstream.json_depth import require_shallow_text
from midstream.number_checks import require_count, require_seconds
from midstream.session.calls import APPROVERS_MAX, CallPlan, OnDoubt, OnDoubtName, Site, digest_of
from midstream.session.permissions import Ask
from midstream.session.records import ClientTool
from midstream.store.contract import Transaction

TIMEOUT_S = 120.0
"""Default time limit of a tool in seconds."""
TRANSACTION_S = 1.0
"""Time limit in seconds of a tool in the transaction of its outcome, even if its own is longer: it blocks all sessions
of the process, and other processes on the same database, which fail after two seconds."""
RESULT_CHARS_MAX = 4 * 1024 * 1024
"""Characters of one result; a longer one is cut, with a mark of the omitted number. Clients get all of it, a model at
most `compaction.SHOWN_CHARS_MAX`."""
PROGRESS_CHARS_MAX = 2000
"""Characters of one progress report; the rest is cut off."""
THREADS_MAX = 256
"""Running plain functions in one process, including abandoned ones that hang; one more is refused."""

_log = logging.getLogger(__name__)


class Happened(Struct, frozen=True):
    """Answer of a `probe` for a call that took effect; `value` is the value that the call would have returned."""

    value: Any = ""


class DidNotHappen(Struct, frozen=True):
    """Answer of a `probe` for a call that took no effect and never will: it may run again."""


Probed = Happened | DidNotHappen | None
"""The answer of a `probe`; None if it is unknown."""


class Tool(Struct, frozen=True):
    """A tool for a model. Create it with `@tool`, or with `question` if a person answers.

    Args:
        spec: The description for the model.
        function: A coroutine function or a plain one, called with the arguments as keywords.
        arguments: The types for checking and converting the arguments; None if `spec` has a foreign schema: then any
            JSON object is passed on unchanged.
        has_effects: Whether it has effects: then it runs alone and its start is synced to disk.
        on_doubt: The policy for a call in doubt.
        timeout_s: Seconds until a call is given up.
        needs_approval: Whether a person must allow each call: always, or if this function of the arguments returns
            True. A failing function counts as True.
        probe: Finds out whether a call in doubt took effect; it has the tool's own arguments.
        answer_s: Seconds for a person to allow or answer a call; 0 for no limit.
        site: The place where its calls are answered.
        approvers: Number of different people who must allow each call that needs approval.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: type[Struct] | None
    has_effects: bool = True
    on_doubt: OnDoubt = OnDoubt.UNKNOWN
    timeout_s: float = TIMEOUT_S
    needs_approval: bool | Callable[..., bool] = False
    probe: Callable[..., Any] | None = None
    answer_s: float = 0.0
    site: Site = Site.SERVER
    approvers: int = 1

    @property
    def name(self) -> str:
        """The name for the model."""
        return self.spec.name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - the function's own
        """Call the function itself, without checks, approval, limits and journal.

        Raises:
            UsageError: A person or a client answers this tool, so it has no function here.
        """
        if self.site is not Site.SERVER:
            raise UsageError(f"{self.name!r} is not a function; a {self.site.value} answers it")
        return self.function(*arguments, **keywords)


@runtime_checkable
class ToolSource(Protocol):
    """A source of dynamic tools, such as an MCP server. Pass it to an agent as one of its tools.

    All sessions of an agent share a source. It connects at its first use.
    """

    @property
    def name(self) -> str:
        """The name for users, unique among the sources of an agent."""

    async def tools(self) -> Sequence[Tool]:
        """Return the current tools. Called before every model call, so it must be cheap.

        Raises:
            ToolsUnavailableError: They are unknown now; the agent runs without them meanwhile.
        """

    async def close(self) -> None:
        """Close connections and processes. The next call of `tools` connects again. A second call has no effect."""


class StatedOutcome(Struct, frozen=True):
    """A tool returns this to state the outcome of its call, such as an error without an exception.

    Args:
        content: The text for the model.
        outcome: `ok`, `error` (it failed), `unknown` (it may or may not have taken effect).
    """

    content: str
    outcome: Outcome = Outcome.OK


class CallContext(Struct, frozen=True):
    """Context of a running tool: its call, and actions on it; see `current_call`."""

    session: str
    turn: int
    response: int
    call_id: str
    run: int = 1
    tell: Callable[[str], None] = lambda _text: None
    """Receives the text of `report_progress`; may be called from any thread."""
    stopped: threading.Event = msgspec.field(default_factory=threading.Event)
    """Set when the turn was stopped: a plain function then has a few seconds to return a partial result."""
    transaction: Transaction | None = None
    """For a tool with `on_doubt="in_transaction"`; see `transaction`."""

    @property
    def effect_key(self) -> str:
        """A key that is the same for every run of one call, for a service that refuses repetitions."""
        return f"{self.session}/{self.turn}/{self.response}/{self.call_id}"


_current: contextvars.ContextVar[CallContext] = contextvars.ContextVar("midstream_call")


def current_call() -> CallContext:
    """Return the call of the running tool.

    Raises:
        LookupError: No tool is running here.
    """
    return _current.get()


def transaction() -> Transaction:
    """Return the transaction in which the outcome of this call is recorded. The tool's writes there and its outcome are
    committed together, or neither.

    Raises:
        UsageError: The running tool does not have `on_doubt="in_transaction"`.
        LookupError: No tool is running here.
    """
    found = current_call().transaction
    if found is None:
        raise UsageError("no transaction is open; declare this tool with on_doubt='in_transaction'")
    return found


def report_progress(text: str) -> None:
    """Report the progress of this tool to all readers of the session.

    Text is sent with the session's next records, and may be dropped if a tool reports too much.

    Raises:
        LookupError: No tool is running here.
    """
    current_call().tell(storable(text[:PROGRESS_CHARS_MAX]))


@contextlib.contextmanager
def running(context: CallContext) -> Iterator[None]:
    """Make `current_call` return `context` in the block, for code that runs a tool in its own loop."""
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
    on_doubt: OnDoubt | OnDoubtName | None = None,
    timeout_s: float = TIMEOUT_S,
    needs_approval: bool | Callable[..., bool] = False,
    probe: Callable[..., Any] | None = None,
    answer_s: float = 0.0,
    approvers: int = 1,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    has_effects: bool = True,
    on_doubt: OnDoubt | OnDoubtName | None = None,
    timeout_s: float = TIMEOUT_S,
    needs_approval: bool | Callable[..., bool] = False,
    probe: Callable[..., Any] | None = None,
    answer_s: float = 0.0,
    approvers: int = 1,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Create a tool from a function: the schema comes from its type hints, the description from its docstring.

    Args:
        function: A plain or coroutine function. Plain ones run in a thread.
        name: The name for the model; the function's own by default.
        has_effects: False for a tool that only reads: such calls run concurrently.
        on_doubt: The policy for a call in doubt: `unknown` (the default with effects: the model is instructed to
            check), `rerun` (the default without effects), `rerun_with_key`, `probe` (the default with a probe), `hold`
            (a person decides), `in_transaction` (a plain function that writes into the session's own database, see
            `transaction`; it is never in doubt).
        timeout_s: Seconds until a call is given up, with an error result (a plain function's thread cannot be
            stopped; it is abandoned). One in a transaction has `TRANSACTION_S` at most.
        needs_approval: Whether a person must allow each call: `True`, or a function of the same arguments.
        probe: Checks a call in doubt: a function of the same arguments returns `Happened`, `DidNotHappen` or None.
        answer_s: Seconds for a person to allow a call, or to decide about a doubt, at most 366 days; 0: no limit.
        approvers: Number of different people who must allow a call, at most 10. The server must authenticate them.

    Raises:
        ToolDefinitionError: A parameter has no type hint, or one without a JSON form; `approvers` is out of bounds, or
            more than 1 without `needs_approval`; `on_doubt` is not a policy, or conflicts with the probe; or a
            coroutine function has `in_transaction`.
    """
    usual = OnDoubt.PROBE if probe else OnDoubt.UNKNOWN if has_effects else OnDoubt.RERUN
    policy = _policy(on_doubt) if on_doubt is not None else usual
    if (policy is OnDoubt.PROBE) != (probe is not None):
        raise ToolDefinitionError("a tool with on_doubt='probe' needs a probe, and no other takes one")

    require_seconds("timeout_s", timeout_s, error=ToolDefinitionError)
    require_seconds("answer_s", answer_s, error=ToolDefinitionError)
    require_count("approvers", approvers, least=1, most=APPROVERS_MAX, error=ToolDefinitionError)
    if approvers > 1 and needs_approval is False:
        raise ToolDefinitionError("`approvers` needs `needs_approval`")

    def make(function: Callable[..., Any]) -> Tool:
        if policy is OnDoubt.IN_TRANSACTION and inspect.iscoroutinefunction(function):
            raise ToolDefinitionError(
                "a tool with on_doubt='in_transaction' is a plain function: nothing is awaited"
            )
        arguments, spec = _read_signature(function, name or function.__name__)
        limit_s = min(timeout_s, TRANSACTION_S) if policy is OnDoubt.IN_TRANSACTION else timeout_s
        given = (has_effects, policy, limit_s, needs_approval, probe, answer_s)
        return Tool(spec, function, arguments, *given, approvers=approvers)

    return make(function) if function is not None else make


def _policy(on_doubt: str) -> OnDoubt:
    try:
        return OnDoubt(on_doubt)
    except ValueError:
        policies = ", ".join(repr(policy.value) for policy in OnDoubt)
        raise ToolDefinitionError(f"`on_doubt` is {on_doubt!r}; expected one of {policies}") from None


def question(
    name: str = "ask_user",
    *,
    description: str = "Ask the user a question and wait for the answer.",
    answer_s: float = 0.0,
) -> Tool:
    """Create a tool with which the model asks a person; the turn waits for the answer, across restarts and for days.

    Args:
        name: The name for the model.
        description: The description for the model.
        answer_s: Seconds for the answer, 366 days at most; 0 for no limit.

    Raises:
        ToolDefinitionError: `answer_s` is out of bounds.
    """
    require_seconds("answer_s", answer_s, error=ToolDefinitionError)
    options: tuple[str, Any, Any] = ("options", list[str], msgspec.field(default_factory=list))
    arguments = msgspec.defstruct("Arguments", [("question", str), options], kw_only=True)
    spec = ToolSpec(name, description, _plain_schema(arguments))
    return Tool(spec, _refuse_to_run, arguments, has_effects=False, answer_s=answer_s, site=Site.PERSON)


def of_client(theirs: ClientTool) -> Tool:
    """Return a client's tool in the server's form, for planning and deciding its calls; it cannot be run here."""
    return Tool(
        theirs.spec,
        _refuse_to_run,
        None,
        theirs.has_effects,
        theirs.on_doubt,
        theirs.timeout_s,
        theirs.needs_approval,
        answer_s=theirs.answer_s,
        site=Site.CLIENT,
        approvers=theirs.approvers,
    )


def _refuse_to_run(**_: object) -> None:
    raise AssertionError("a person or a client answers this call")


Approval = Callable[[ToolCall, Tool], bool | str | Ask]
"""A rule: whether a person must allow a call; or the reason as text; or the terms, such as how many people."""


def plan_call(call: ToolCall, tools: Mapping[str, Tool], approval: Approval | None = None) -> CallPlan:
    """Look a call up and check its arguments; a call that cannot run gets a `problem` for the model."""
    digest = digest_of(call.name, call.arguments)
    found = tools.get(call.name)
    if found is None:
        known = ", ".join(sorted(tools)) or "none"
        return CallPlan(
            call.id, digest, problem=f"There is no tool named {call.name!r}. Known tools: {known}."
        )
    problem = terms = None
    try:
        keywords = _read_arguments(found, call)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        problem = f"The arguments of {call.name!r} do not fit its schema: {error}"
    else:
        terms = _approval_terms(call, found, keywords, approval)
    return CallPlan(
        call.id,
        digest,
        has_effects=found.has_effects,
        on_doubt=found.on_doubt,
        timeout_s=found.timeout_s,
        problem=problem,
        site=found.site,
        needs_approval=terms is not None and found.site is not Site.PERSON,
        question=terms.text if terms else "",
        answer_s=terms.answer_s if terms else found.answer_s,
        approvers=terms.approvers if terms else found.approvers,
    )


class _Terms(NamedTuple):
    """The text for people before a call, the seconds for their answer, and the number of people who must allow it."""

    text: str
    answer_s: float
    approvers: int


def _approval_terms(
    call: ToolCall, found: Tool, keywords: Mapping[str, Any], approval: Approval | None
) -> _Terms | None:
    """Return the terms of an approval for this call; None if no approval is needed."""
    own = _Terms("", found.answer_s, found.approvers)
    if found.site is Site.PERSON:
        return own._replace(text=str(keywords.get("question", "")))
    needed = found.needs_approval
    try:
        if callable(needed):
            needed = needed(**keywords)
        decision = approval(call, found) if approval is not None else False
    except (Exception, SystemExit):  # noqa: BLE001 - foreign code: a rule that fails must not let a call through
        return own._replace(text="The rule that decides about this call failed.")
    match decision:
        case Ask():
            approvers = max(decision.approvers, own.approvers)
            return _Terms(storable(decision.text), decision.answer_s or own.answer_s, approvers)
        case str() if decision:
            return own._replace(text=storable(decision))
        case _:
            return own if needed or decision else None


async def probe_call(found: Tool, call: ToolCall, context: CallContext) -> tuple[ToolResult | None, bool]:
    """Run the probe of a call in doubt; an error of the probe is logged, not raised.

    Returns:
        The call's result if it took effect, and whether it may run again because it did not.
    """
    if found.probe is None:  # the agent has changed since the call was planned
        return None, False
    token = _current.set(context)
    try:
        keywords = _read_arguments(found, call)
        async with asyncio.timeout(found.timeout_s):
            answer = await _invoke(found.probe, keywords)
    except (Exception, SystemExit):  # noqa: BLE001 - foreign code: a probe that fails has no answer
        _log.exception("the probe of a tool failed", extra={"session": context.session})
        return None, False
    finally:
        _current.reset(token)
    if isinstance(answer, Happened):
        return _result_of(call, answer.value), False
    return None, isinstance(answer, DidNotHappen)


def is_plain(found: Tool) -> bool:
    """Whether a tool is a plain function, which runs in a thread and can only be requested to stop."""
    return not _is_coroutine_function(found.function)


@functools.lru_cache(maxsize=1024)
def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)  # this check takes several microseconds


async def run_call(found: Tool, call: ToolCall, context: CallContext) -> ToolResult:
    """Call a tool within its timeout and return its result; errors of the tool become results.

    A cancellation cancels a coroutine tool, abandons a plain function's thread, and is re-raised.
    """
    try:
        keywords = _read_arguments(found, call)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return _unfit(call, error)
    limit = asyncio.timeout(found.timeout_s)
    token = _current.set(context)
    try:
        async with limit:
            value = await _invoke(found.function, keywords)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: each error is a result
        if limit.expired():
            message = f"{call.name!r} gave no answer within {found.timeout_s:g} s."
            outcome = Outcome.UNKNOWN if found.has_effects else Outcome.ERROR
            return ToolResult(call.id, f"{message} It may or may not have taken effect.", outcome)
        return ToolResult(call.id, storable(f"{type(error).__name__}: {error}"), Outcome.ERROR)
    finally:
        _current.reset(token)
    return _result_of(call, value)


def call_within(
    found: Tool,
    call: ToolCall,
    context: CallContext,
    attempt: Callable[[Callable[[Transaction], object]], object],
) -> ToolResult:
    """Call a tool in the transaction of its outcome, in this thread, and return its result.

    Errors of the tool become results, after `attempt` has undone its writes.
    """

    def effect(transaction: Transaction) -> object:
        token = _current.set(msgspec.structs.replace(context, transaction=transaction))
        try:
            return found.function(**keywords)
        finally:
            _current.reset(token)

    try:
        keywords = _read_arguments(found, call)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return _unfit(call, error)
    try:
        value = attempt(effect)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: each error is a result
        undone = "Its changes were undone."
        return ToolResult(call.id, storable(f"{type(error).__name__}: {error}\n{undone}"), Outcome.ERROR)
    return _result_of(call, value)


def _unfit(call: ToolCall, error: Exception) -> ToolResult:
    return ToolResult(
        call.id, f"The arguments of {call.name!r} do not fit its schema: {error}", Outcome.ERROR
    )


def _read_arguments(found: Tool, call: ToolCall) -> dict[str, Any]:
    require_shallow_text(call.arguments)
    if found.arguments is None:
        return msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    arguments = msgspec.json.decode(call.arguments or "{}", type=found.arguments, strict=False)
    return {field: getattr(arguments, field) for field in arguments.__struct_fields__}


async def _invoke(function: Callable[..., Any], keywords: Mapping[str, Any]) -> object:
    if _is_coroutine_function(function):
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
    """Run a plain function in a thread of its own; a cancellation abandons the thread.

    The thread is a daemon and not in a pool, so that a hanging tool blocks neither the exit nor other tools.
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
        except BaseException as error:  # noqa: BLE001 - the caller would wait for ever; a future takes none of the odd ones
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                failure = error
            else:
                failure = RuntimeError(f"{type(error).__name__}: {error}")
        finally:
            _free_threads.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
            loop.call_soon_threadsafe(settle, value, failure)

    try:
        threading.Thread(target=run, name="midstream tool", daemon=True).start()
    except RuntimeError:  # the system has no thread left
        _free_threads.release()
        raise
    return await ended


def _result_of(call: ToolCall, value: object) -> ToolResult:
    outcome = Outcome.OK
    if isinstance(value, StatedOutcome):
        content, outcome = value.content, value.outcome
    elif isinstance(value, str):
        content = value
    else:
        try:
            content = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            # The tool has run: the message must state that only its answer is lost.
            problem = f"{call.name!r} finished, but its answer has no JSON form ({error})."
            return ToolResult(call.id, problem, Outcome.ERROR)
    if len(content) > RESULT_CHARS_MAX:
        content = f"{content[:RESULT_CHARS_MAX]}\n[+{len(content) - RESULT_CHARS_MAX} characters]"
    return ToolResult(call.id, storable(content), outcome)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Index tools by name.

    Raises:
        ToolDefinitionError: Two tools have the same name.
    """
    found: dict[str, Tool] = {}
    for each in tools:
        if each.name in found:
            raise ToolDefinitionError(f"two tools are named {each.name!r}; rename one of them")
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
    """Return an object schema with its own `$defs`, as providers require."""
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
    """Return the descriptions in a Google-style `Args:` section."""
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
