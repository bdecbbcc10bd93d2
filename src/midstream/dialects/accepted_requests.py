"""Acceptance of a POST: it begins a response, or joins the response to an equal request."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.attachments import refuse_local_files
from midstream.dialects.answer_options import AnswerOptions
from midstream.dialects.api_callers import Admission, ApiCaller
from midstream.dialects.api_errors import ApiError
from midstream.dialects.application_sessions import (
    ApplicationSessions,
    FoundResponse,
    NotedRequest,
    response_id,
)
from midstream.dialects.conversation_index import DIGEST_BYTES, ConversationPlace, is_ephemeral
from midstream.dialects.dialect import Asked, Dialect, Form
from midstream.dialects.gateway_bodies import Arrived, RefusedError, digest_key
from midstream.dialects.kept_conversations import KeptConversations
from midstream.dialects.live_responses import LiveResponse, LiveResponses
from midstream.dialects.reading_cache import ReadingCache
from midstream.dialects.request_fields import bad_field
from midstream.dialects.request_reading import Read, read
from midstream.dialects.request_repeats import KeyReused, KnownRun, Request, find_repeated, request_of
from midstream.dialects.stored_conversations import Conversations
from midstream.dialects.usage_ledger import UsageLedger
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import AgentMismatchError, JournalMovedError, SessionNotFoundError, UnavailableError
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import Entry, Step, UserMessage
from midstream.models.model import Model, grants_of, takes_tools_of
from midstream.models.routed_models import RoutedModels, route_of
from midstream.session.application_request import ApplicationRequest
from midstream.session.applications import ApplicationResponse, Comparison
from midstream.session.model_settings import STRICT
from midstream.session.session import Session
from midstream.session.turn.commands import SendTranscript
from midstream.session.turn.states import RunningCalls

EQUAL_S = 10.0
"""Seconds to wait for the response to an equal request of another process, which may have died."""
EQUAL_PAUSE_S = 0.02
ELSEWHERE_S = 10.0
"""Seconds without a request after which another gateway releases a conversation."""
COMPARISONS_MAX = 8
"""Attempts to compare a transcript with a session that other requests change."""


class _Wanted(Struct):
    """A request, with its session and conversation.

    Args:
        sessions: The sessions of the client application.
        session: The session of its conversation.
        conversation: Name of the conversation; "" for a side call.
        place: Digests that identify the conversation by its messages; None if it has a name.
        previous: The response that the request continues, with its sessions.
        caller: Sender of the request.
        is_local: Whether the request came from this machine.
        noted: Entries for equal requests, as read last.
        is_begun_elsewhere: Whether another process wrote one of these entries recently, but its session has no response
            yet.
    """

    params: Asked
    read: Read
    request: Request
    sessions: ApplicationSessions
    session: str
    conversation: str
    place: ConversationPlace | None
    is_ephemeral: bool
    is_noted: bool
    caller: ApiCaller
    previous: _Previous | None = None
    is_local: bool = False
    noted: dict[str, NotedRequest] = {}
    is_begun_elsewhere: bool = False


class _Previous(Struct, frozen=True):
    """The response that a request continues."""

    found: FoundResponse
    sessions: ApplicationSessions


class Reply(Struct, frozen=True):
    """A response that answers a POST.

    Args:
        live: The response; it counts the POST as a reader.
        form: The form for this client, such as a stream, independent of the client that began the response.
        is_repeated: Whether the response already existed.
    """

    live: LiveResponse
    form: Form
    is_repeated: bool


class _Repeated(Struct, frozen=True):
    """The response to an equal request, begun by another process in the meantime."""

    same: LiveResponse


class Accepting:
    """Begins responses, and finds existing ones for repeated POSTs.

    Args:
        model: The model that answers.
        durable, private: The sessions on disk, and the sessions in memory of requests that must not be stored.
        responses: All responses that this process follows.
        conversations: Conversations without a name of their application.
        kept: Conversations of `/v1/conversations`.
        names: Names of models that applications may request; any if empty.
        ledger: Counts the usage.
        admission: Decides whether a caller may begin another response.
    """

    def __init__(
        self,
        model: Model,
        durable: ApplicationSessions,
        private: ApplicationSessions,
        responses: LiveResponses,
        conversations: Conversations,
        kept: KeptConversations,
        names: Collection[str],
        ledger: UsageLedger,
        admission: Admission,
        world: World,
    ) -> None:
        self._model = model
        self._ledger = ledger
        self._admission = admission
        self._kept = kept
        self._default = model.default if isinstance(model, RoutedModels) else ""
        """The default model of `RoutedModels`; "" for a single model."""
        self._durable = durable
        self._private = private
        self._responses = responses
        self._conversations = conversations
        self._names = names
        self._world = world
        self._memo = ReadingCache()
        self._locks: WeakValueDictionary[bytes | str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each request, so that only one of two equal requests begins a response; and one for each session
        during a comparison."""

    async def response_to(
        self, dialect: Dialect, arrived: Arrived, newest: LiveResponse | None = None
    ) -> Reply:
        """Return the response to a POST, and count the caller as a reader; see `LiveResponses.leave`.

        Args:
            newest: The newest response of the same connection, which the request may continue although it is not
                stored.

        Raises:
            RefusedError: The idempotency key belongs to another request, or the model is unknown.
            MidstreamError: The request is invalid, or no response can begin now. Nothing was changed.
        """
        principal = arrived.caller.principal
        owner = digest_key(arrived.headers)
        found = read(dialect, arrived.headers, arrived.body, self._memo, owner, principal=principal)
        self.check_model(found.params.model, arrived.caller)
        params = self._granting(found.params)
        if params.conversation:
            await self._kept.require(params.conversation, principal)
        request = request_of(
            arrived.path,
            arrived.headers,
            found.digest,
            is_named=bool(found.session),
            principal=principal,
        )
        lock = self._locks.setdefault(request.digest, asyncio.Lock())
        async with lock:
            previous = await self._previous(params, newest, principal)
            wanted = await self._resolve(params, found, request, arrived, previous)
            same = await self._find_repeated(wanted)
            if same is None:
                self._responses.refuse_too_many()
                with self._admission.admit(arrived.caller):
                    begun = await self._begin(wanted)
                if isinstance(begun, LiveResponse):
                    return Reply(begun, begun.found.form, is_repeated=False)
                same = begun.same
            self._responses.join(same)
            delivery = {"is_stream": params.is_stream, "includes_usage": params.includes_usage}
            return Reply(same, replace(same.found.form, **delivery), is_repeated=True)

    async def read_input(self, dialect: Dialect, arrived: Arrived) -> tuple[Asked, tuple[Entry, ...]]:
        """Read a POST and its whole conversation, without beginning a response.

        Raises:
            RefusedError: The model or the previous response is unknown.
            MidstreamError: The request is invalid.
        """
        principal = arrived.caller.principal
        found = read(dialect, arrived.headers, arrived.body, principal=principal)
        self.check_model(found.params.model, arrived.caller)
        previous, entries = await self._previous(found.params, None, principal), found.tail
        if found.params.conversation:
            await self._kept.require(found.params.conversation, principal)
            items = await self._kept.items(await self._kept.find(found.params.conversation))
            entries = found.params.transcript(items).history.entries
        elif previous is not None:
            entries = await self._after_previous(found.params, previous)
        return replace(found.params, instructions=found.instructions), entries

    def check_model(self, name: str, caller: ApiCaller) -> None:
        """Require a model name that a caller may request.

        Raises:
            RefusedError: The caller may not request this model.
        """
        served = self._names
        if caller.allowance.models:
            served = frozenset(caller.allowance.models).intersection(served or caller.allowance.models)
        name = name or self._default
        if (self._names or caller.allowance.models) and name not in served:
            available = ", ".join(sorted(served)) or "none"
            message = f"the model is not served {'to this key' if caller.principal else 'here'}; available: {available}"
            raise RefusedError(ApiError(404, "model_not_found", message, param="model"))

    def counted_model(self, name: str) -> str:
        """Return the name under which the usage of a model is counted: one of the served models.

        Args:
            name: The name that the application requests.
        """
        return (name or self._default or self._model.name) if self._names else self._model.name

    def _granting(self, params: Asked) -> Asked:
        """Return the request with only the options that its model supports; the response lists the others."""
        model = route_of(self._model, params.model).model
        grants = grants_of(model)
        if params.tools and not takes_tools_of(model):
            params = replace(params, ignored=(*params.ignored, "tools"))
        wished = params.wished
        if not wished.fields:
            return params
        if STRICT in wished.fields and STRICT not in grants:
            params = replace(params, tools=tuple(replace(tool, strict=None) for tool in params.tools))
        left = AnswerOptions(wished.settings.only(grants), wished.fields)
        return replace(params, wished=left, ignored=(*params.ignored, *wished.find_refused(grants)))

    async def _resolve(
        self, params: Asked, found: Read, request: Request, arrived: Arrived, previous: _Previous | None
    ) -> _Wanted:
        is_side = is_ephemeral(arrived.headers, params, found.instructions, found.gist.newest)
        conversation = found.session or (previous.found.request.conversation if previous else "")
        place, is_new = None, False
        if not (conversation or is_side or previous):
            place = found.gist.place
            conversation = await self._conversations.look_up(place)
            is_new = not conversation
            conversation = conversation or self._world.new_id("conversation")
        sessions = self._private if params.is_private or (is_side and not params.is_stored) else self._durable
        if previous is not None:
            # Session names must differ between the two stores, because the ids of responses depend on them.
            is_there = previous.sessions is sessions
            session = previous.found.session if is_there else sessions.name_of("")
        else:
            session = sessions.name_of("" if is_side else conversation)
        return _Wanted(
            params,
            found,
            request,
            sessions,
            session,
            conversation,
            place,
            is_side,
            is_new or is_side,
            arrived.caller,
            previous,
            arrived.is_local,
        )

    async def _previous(self, params: Asked, newest: LiveResponse | None, principal: str) -> _Previous | None:
        """Return the response that a request continues: a stored one, or the newest of its connection."""
        if not params.previous:
            return None
        if newest is not None and newest.id == params.previous:
            return _Previous(newest.found, newest.sessions)
        found = await self._durable.find(params.previous)
        if found is None or not found.form.is_stored or found.request.principal != principal:
            raise _no_previous()
        if found.response.is_open:
            raise bad_field("previous_response_id", "this response is still running")
        return _Previous(found, self._durable)

    # --- repetitions ------------------------------------------------------------------------------------------

    async def _find_repeated(self, wanted: _Wanted) -> LiveResponse | None:
        request, sessions = wanted.request, wanted.sessions
        for key in _keys_of(request):
            wanted.noted[key] = await sessions.find_noted(key)
        names = [each.session for each in wanted.noted.values()]
        if not wanted.is_noted:
            names.append(wanted.session)
        runners: dict[str, tuple[Runner, ApplicationResponse]] = {}
        known = []
        begun = set()
        for name in dict.fromkeys(filter(None, names)):
            runner = await sessions.host.session(name, create=True)
            await sessions.stop_foreign(runner)
            equal = [each for each in runner.state.application.responses if _is_equal(each, request)]
            if equal:
                begun.add(name)
            if await sessions.is_at_other_upstream(runner):
                continue
            for response in self._responses.repeatable(equal):
                runners[response.id] = (runner, response)
                known.append((await self._describe_run(wanted, runner, response), response.id))
        wanted.is_begun_elsewhere = any(self._is_awaited(each, begun) for each in wanted.noted.values())
        found = find_repeated(request, [each for each, _ in known])
        if found is None:
            return None
        if isinstance(found, KeyReused):
            message = "this idempotency key was used for another request"
            raise RefusedError(ApiError(422, "idempotency_key_reused", message))
        runner, response = runners[next(name for each, name in known if each is found)]
        read_again = await sessions.read(runner, response)
        return None if read_again is None else self._responses.add(sessions, read_again, wanted.place)

    async def _describe_run(self, wanted: _Wanted, runner: Runner, response: ApplicationResponse) -> KnownRun:
        """Return the facts of a run. Only a request without any mark depends on readers at other nodes."""
        request, sessions = wanted.request, wanted.sessions
        is_used = self._responses.is_used(response.id)
        is_decided = bool(request.key) or request.is_retry or (request.is_named and response.is_open)
        if sessions.is_durable and not (is_used or is_decided or response.is_background):
            is_used = await sessions.is_used_elsewhere(response, runner)
        present = runner.state.application.response(response.number) or response
        return self._responses.describe_run(present, is_named=request.is_named, is_used=is_used)

    def _is_awaited(self, noted: NotedRequest, begun: Collection[str]) -> bool:
        """Return whether another process noted an equal request but has not begun its response yet.

        Args:
            begun: Sessions with a response to an equal request.
        """
        is_foreign = noted.node not in {"", self._durable.host.store.node}
        return is_foreign and noted.session not in begun and abs(self._world.now() - noted.at) < EQUAL_S

    async def _wait_for_equal(self, wanted: _Wanted) -> LiveResponse | None:
        """Wait for the response to an equal request of another process; return None if none appears."""
        until = self._world.monotonic() + EQUAL_S
        while (same := await self._find_repeated(wanted)) is None:
            if not wanted.is_begun_elsewhere or self._world.monotonic() > until:
                return None
            await self._world.sleep(EQUAL_PAUSE_S)
        return same

    # --- a new response ---------------------------------------------------------------------------------------

    async def _begin(self, wanted: _Wanted) -> LiveResponse | _Repeated:
        sessions, session, is_noted = wanted.sessions, wanted.session, wanted.is_noted
        whole = await self._after_previous(wanted.params, wanted.previous) if wanted.previous else None
        for _ in range(COMPARISONS_MAX):
            lock = self._locks.setdefault(session, asyncio.Lock())
            async with lock:
                if is_noted:  # the session has a random name, so only the entry leads to it
                    runner = await sessions.host.begin(session)
                else:
                    runner = await sessions.host.session(session, create=True)
                if wanted.params.conversation:
                    whole = await self._in_conversation(wanted.params, runner.state)
                is_elsewhere = await sessions.is_at_other_upstream(runner)
                if not (is_elsewhere or await self._is_in_use(runner.state, wanted)):
                    try:
                        begun = await self._try_to_begin(runner, wanted, whole, is_noted=is_noted)
                    except AgentMismatchError:
                        is_elsewhere = True
                    else:
                        if begun is not None:
                            return begun
                        continue
            if wanted.params.conversation:
                raise _conversation_locked(is_elsewhere=is_elsewhere)
            session, is_noted = (
                sessions.name_of(""),
                True,
            )  # begin a separate session instead of stopping another client's response
        raise UnavailableError("too many other requests change this conversation: retry", retry_after_s=1.0)

    async def _try_to_begin(
        self, runner: Runner, wanted: _Wanted, whole: tuple[Entry, ...] | None, *, is_noted: bool
    ) -> LiveResponse | _Repeated | None:
        """Begin a response, or find that to an equal request; None if the session changed meanwhile.

        Raises:
            AgentMismatchError: A gateway with another upstream has claimed the session.
        """
        state = runner.state
        comparison = self._compare(runner.session_id, state, wanted, whole)
        usage_entry = await self._announce(runner, wanted, is_noted=is_noted)
        if usage_entry is None:
            same = await self._wait_for_equal(wanted)
        else:
            live = await self._submit(runner, wanted, state, comparison=comparison, usage_entry=usage_entry)
            if live is not None:
                return live
            same = await self._find_repeated(wanted)
        return None if same is None else _Repeated(same)

    async def _announce(self, runner: Runner, wanted: _Wanted, *, is_noted: bool) -> str | None:
        """Write the store entries that must precede a response, concurrently; return the name of its usage entry.

        Return None, and remove the entries, if another process begins the response to an equal request.
        """
        sessions, session = wanted.sessions, runner.session_id
        # The index finds a conversation without a name only until its answer has ended; a retry may come later.
        is_noted = is_noted or bool(wanted.request.key) or wanted.place is not None
        if is_noted and wanted.is_begun_elsewhere:
            return None
        on_disk = session if sessions is self._durable else ""
        model = self.counted_model(wanted.params.model)
        counting = self._ledger.begin(wanted.caller.principal, model, on_disk)
        if not is_noted:
            return await counting
        runner.claim_soon()
        counted = self._world.spawn(counting, name=f"entry of usage of {session}")
        try:
            is_first = await sessions.note(session, wanted.noted)
        finally:
            usage_entry = await counted
        if is_first:
            return usage_entry
        await self._ledger.drop(usage_entry)
        await runner.undo_claim()
        return None

    async def _submit(
        self, runner: Runner, wanted: _Wanted, state: Session, *, comparison: Comparison, usage_entry: str
    ) -> LiveResponse | None:
        """Submit the transcript to a session; return None if another process's request was faster.

        Args:
            state: The session state with which the transcript was compared.

        Raises:
            AgentMismatchError: A gateway with another upstream has claimed the session since the comparison.
        """
        params, session = wanted.params, runner.session_id
        number = state.application.count + 1
        name = response_id(params.dialect.id_prefix, session, number)
        form = params.form(name, self._default or self._model.name, int(self._world.now()))
        request = ApplicationRequest(
            name,
            wanted.request.digest.hex(),
            wanted.request.key,
            wanted.conversation,
            params.wished.settings,
            wanted.is_ephemeral,
            params.is_background,
            msgspec.to_builtins(form),
            params.messages if params.is_stored else [],
            (params.model or self._default) if self._default else "",
            wanted.caller.principal,
            usage_entry,
            is_private=not wanted.sessions.is_durable,
        )
        command = SendTranscript(
            request,
            state.application.count,
            comparison.keep,
            comparison.tail,
            wanted.read.instructions,
            params.tools,
            comparison.results,
            wanted.sessions.host.agent.name,
            wanted.sessions.host.agent.version,
        )
        try:
            end = await runner.submit(command)
        except AgentMismatchError:
            await self._ledger.drop(usage_entry)
            raise
        except JournalMovedError:
            await self._ledger.drop(usage_entry)
            return None
        await runner.wait(end - 1)  # if another process runs the session
        response = runner.state.application.response(number)
        if response is None or response.id != name or response.usage_entry != usage_entry:
            await self._ledger.drop(usage_entry)
            return None
        wanted.sessions.keep_chain(session, runner.state, comparison.links)
        live = self._responses.add(
            wanted.sessions, FoundResponse(session, response, request, form), wanted.place
        )
        self._responses.join(live)
        return live

    async def _is_in_use(self, state: Session, wanted: _Wanted) -> bool:
        """Return whether the session has a response that this request must not stop, because a client reads it."""
        newest = state.application.newest
        if newest is None:
            return False
        if wanted.previous is not None and newest.number != wanted.previous.found.response.number:
            return True  # another request has already continued the same response
        if not newest.is_open:
            return False
        live = self._responses.get(newest.id)
        if newest.is_background or (live is not None and live.readers > 0):
            return True
        return await wanted.sessions.is_read_elsewhere(newest.id)

    @staticmethod
    def _compare(
        session: str, state: Session, wanted: _Wanted, whole: tuple[Entry, ...] | None
    ) -> Comparison:
        """Compare the transcript with its session.

        Raises:
            MidstreamError: A request of another machine refers to a local file.
        """
        if whole is not None:
            comparison = wanted.sessions.compare_whole(session, state, whole)
        else:
            comparison = wanted.sessions.compare(session, state, wanted.read)
        if not wanted.is_local:
            for entry in comparison.tail:
                if isinstance(entry, UserMessage):
                    refuse_local_files(entry)
        return comparison

    async def _after_previous(self, params: Asked, previous: _Previous) -> tuple[Entry, ...]:
        """Return the whole conversation of a request that continues a previous response."""
        try:
            state = await previous.sessions.state_at(previous.found)
        except SessionNotFoundError:
            state = None  # the response is too old
        if state is None:
            raise _no_previous()
        return _entries_after(state, params)

    async def _in_conversation(self, params: Asked, state: Session) -> tuple[Entry, ...]:
        """Return the whole conversation of a request to a conversation of `/v1/conversations`."""
        entry = await self._kept.find(params.conversation)
        if entry.removed:  # the session still contains the removed items
            items = await self._kept.items(entry)
            return replace(params, instructions="").transcript(items).history.entries
        return _entries_after(state, params, entry.added_after(state.application.count))


def _entries_after(state: Session, params: Asked, added: Sequence[Value] = ()) -> tuple[Entry, ...]:
    """Return the history of a session, followed by added items and the items of a request."""
    open_items: list[Value] = []
    if isinstance(state.turn, RunningCalls):
        if words := state.turn.response.text:
            open_items.append({"role": "assistant", "content": words})
        open_items += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in state.turn.response.calls
        ]
    calls = {
        call.id for entry in state.history.entries if isinstance(entry, Step) for call in entry.response.calls
    }
    _refuse_strange_results([*open_items, *added, *params.messages], calls)
    transcript = replace(params, instructions="").transcript([*open_items, *added])
    return (*state.history.entries, *transcript.history.entries)


def _refuse_strange_results(items: Sequence[Value], calls: Collection[str]) -> None:
    """Refuse tool results without a call among these items or call ids, because they would be lost.

    Raises:
        BadFieldError: A result has no call.
    """
    named = [(item.get("type"), item.get("call_id")) for item in items if isinstance(item, dict)]
    known = {call_id for kind, call_id in named if not str(kind).endswith("_output")} | {*calls}
    if any(str(kind).endswith("call_output") and call_id not in known for kind, call_id in named):
        raise bad_field("input", "the previous response has no call with the `call_id` of an output")


def _conversation_locked(*, is_elsewhere: bool) -> RefusedError:
    if is_elsewhere:
        message = "a gateway with another upstream has this conversation until it has been idle for 10 s: retry then"
    else:
        message = "another response of this conversation is in progress; retry when it has ended"
    pause_s = ELSEWHERE_S if is_elsewhere else None
    return RefusedError(ApiError(409, "conversation_locked", message, is_final=False, retry_after_s=pause_s))


def _no_previous() -> RefusedError:
    message = "no such response: it was not stored, or it is too old"
    return RefusedError(ApiError(400, "previous_response_not_found", message, "previous_response_id"))


def _is_equal(response: ApplicationResponse, request: Request) -> bool:
    """Return whether a response belongs to an equal request, or to the same idempotency key."""
    is_keyed = bool(request.key) and response.key == request.key
    return is_keyed or response.digest == request.digest.hex()


def _keys_of(request: Request) -> tuple[str, ...]:
    """Return the keys under which a request without a conversation is noted. An encrypted store shows them."""
    digest = request.digest.hex()
    if not request.key:
        return (digest,)
    key_digest = blake2b(request.key.encode("utf-8", "replace"), digest_size=DIGEST_BYTES).hexdigest()
    return (digest, f"key {key_digest}")
