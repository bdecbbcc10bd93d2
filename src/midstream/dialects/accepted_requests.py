"""From a POST to the response that answers it: a new one, or one that exists already."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
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
from midstream.dialects.conversation_index import ConversationPlace, is_ephemeral
from midstream.dialects.dialect import Asked, Dialect, Form
from midstream.dialects.fields import bad_field
from midstream.dialects.gateway_bodies import Arrived, RefusedError, digest_key
from midstream.dialects.kept_conversations import KeptConversations
from midstream.dialects.live_responses import LiveResponse, LiveResponses
from midstream.dialects.reading_cache import Memo
from midstream.dialects.request_reading import Read, read
from midstream.dialects.request_repeats import KeyReused, Request, find_repeated, request_of
from midstream.dialects.stored_conversations import Conversations
from midstream.dialects.usage_ledger import UsageLedger
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import JournalMovedError, SessionNotFoundError, UnavailableError
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
"""Seconds in which an equal request that another process noted appears in its session; that process may have died."""
EQUAL_PAUSE_S = 0.02
COMPARISONS_MAX = 8
"""Comparisons of one transcript with a session that others change meanwhile."""


class _Wanted(Struct):
    """A request, and where it belongs.

    Args:
        sessions: The client application's.
        session: The session of its conversation.
        conversation: The conversation's name; "" for a side request.
        place: The place by which the conversation is found by its messages; None where it has a name.
        previous: The response that it goes on from, and where that was made.
        caller: Who sent it.
        is_local: It came from this machine.
        noted: Entries by which equal requests are found, as they were read last.
        is_begun_elsewhere: One of them is new and its session has no response yet: another process is about to begin
            the response, or died before it did.
    """

    asked: Asked
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
    """The response that a request goes on from."""

    found: FoundResponse
    sessions: ApplicationSessions


class Reply(Struct, frozen=True):
    """A response that answers a POST.

    Args:
        live: The response; the POST is counted as one of its readers.
        form: How this client reads it: as a stream or whole, whatever the client that began it wished.
        is_repeated: It was there before.
    """

    live: LiveResponse
    form: Form
    is_repeated: bool


class _Repeated(Struct, frozen=True):
    """The response to an equal request, which another process began meanwhile."""

    same: LiveResponse


class Accepting:
    """Begins responses, and finds those that a POST repeats.

    Args:
        model: What answers.
        durable, private: The sessions on disk, and those of requests that may leave nothing there.
        responses: All that are followed in this process.
        conversations: Those that their applications do not name.
        kept: Those of `/v1/conversations`.
        names: The models' names that applications may request; any where it is empty.
        ledger: Counts what they use.
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
        """The model that answers a request that names none, where there are several."""
        self._durable = durable
        self._private = private
        self._responses = responses
        self._conversations = conversations
        self._names = names
        self._world = world
        self._memo = Memo()
        self._locks: WeakValueDictionary[bytes | str, asyncio.Lock] = WeakValueDictionary()
        """One for each request that is being judged, since two equal ones at once cannot both find nothing; and one for
        each session that is being compared."""

    async def response_to(
        self, dialect: Dialect, arrived: Arrived, newest: LiveResponse | None = None
    ) -> Reply:
        """Return the response to a POST. It has one more reader: see `LiveResponses.leave`.

        Args:
            newest: The newest response of the same connection, which may go on from it although it is not stored.

        Raises:
            RefusedError: The key belongs to another request, or there is no such model.
            MidstreamError: The request has another form, or nothing can be begun now. Nothing was.
        """
        principal = arrived.caller.principal
        owner = digest_key(arrived.headers)
        found = read(dialect, arrived.headers, arrived.body, self._memo, owner, principal=principal)
        self.check_model(found.asked.model, arrived.caller)
        asked = self._granting(found.asked)
        if asked.conversation:
            await self._kept.require(asked.conversation, principal)
            await self._kept.change(asked.conversation, lambda entry: entry)  # kept for as long again
        request = request_of(
            arrived.path,
            arrived.headers,
            found.digest,
            is_named=bool(found.session),
            principal=principal,
        )
        lock = self._locks.setdefault(request.digest, asyncio.Lock())
        async with lock:
            previous = await self._previous(asked, newest, principal)
            wanted = await self._resolve(asked, found, request, arrived, previous)
            same = await self._find_repeated(wanted)
            if same is None:
                self._responses.refuse_too_many()
                with self._admission.admit(arrived.caller):
                    begun = await self._begin(wanted)
                if isinstance(begun, LiveResponse):
                    return Reply(begun, begun.found.form, is_repeated=False)
                same = begun.same
            self._responses.join(same)
            delivery = {"is_stream": asked.is_stream, "includes_usage": asked.includes_usage}
            return Reply(same, replace(same.found.form, **delivery), is_repeated=True)

    async def read_input(self, dialect: Dialect, arrived: Arrived) -> tuple[Asked, tuple[Entry, ...]]:
        """Return what a POST asks, with the whole conversation that a response would answer; none is begun.

        Raises:
            RefusedError: There is no such model, or no such previous response.
            MidstreamError: The request has another form.
        """
        principal = arrived.caller.principal
        found = read(dialect, arrived.headers, arrived.body, principal=principal)
        self.check_model(found.asked.model, arrived.caller)
        previous, entries = await self._previous(found.asked, None, principal), found.tail
        if found.asked.conversation:
            await self._kept.require(found.asked.conversation, principal)
            items = await self._kept.items(await self._kept.find(found.asked.conversation))
            entries = found.asked.transcript(items).history.entries
        elif previous is not None:
            entries = await self._behind(found.asked, previous)
        return replace(found.asked, instructions=found.instructions), entries

    def check_model(self, name: str, caller: ApiCaller) -> None:
        """Let a name pass that a caller may request.

        Raises:
            RefusedError: It is another one.
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
        """Return the name under which the usage of a model is counted: one of those that are served.

        Args:
            name: As the application requests it.
        """
        return (name or self._default or self._model.name) if self._names else self._model.name

    def _granting(self, asked: Asked) -> Asked:
        """Return the request with the wishes that its model grants; the response names the others."""
        model = route_of(self._model, asked.model).model
        grants = grants_of(model)
        if asked.tools and not takes_tools_of(model):
            asked = replace(asked, ignored=(*asked.ignored, "tools"))
        wished = asked.wished
        if not wished.fields:
            return asked
        if STRICT in wished.fields and STRICT not in grants:
            asked = replace(asked, tools=tuple(replace(tool, strict=None) for tool in asked.tools))
        left = AnswerOptions(wished.settings.only(grants), wished.fields)
        return replace(asked, wished=left, ignored=(*asked.ignored, *wished.find_refused(grants)))

    async def _resolve(
        self, asked: Asked, found: Read, request: Request, arrived: Arrived, previous: _Previous | None
    ) -> _Wanted:
        is_side = is_ephemeral(arrived.headers, asked, found.instructions, found.gist.newest)
        conversation = found.session or (previous.found.request.conversation if previous else "")
        place, is_new = None, False
        if not (conversation or is_side or previous):
            place = found.gist.place
            conversation = await self._conversations.look_up(place)
            is_new = not conversation
            conversation = conversation or self._world.new_id("conversation")
        sessions = self._private if asked.is_private or (is_side and not asked.is_stored) else self._durable
        if previous is not None:
            # Two stores never have a session of the same name: its responses would have the same ids.
            is_there = previous.sessions is sessions
            session = previous.found.session if is_there else sessions.name_of("")
        else:
            session = sessions.name_of("" if is_side else conversation)
        return _Wanted(
            asked,
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

    async def _previous(self, asked: Asked, newest: LiveResponse | None, principal: str) -> _Previous | None:
        """Return the response that a request goes on from: a stored one, or the newest of its connection."""
        if not asked.previous:
            return None
        if newest is not None and newest.id == asked.previous:
            return _Previous(newest.found, newest.sessions)
        found = await self._durable.find(asked.previous)
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
            equal = [each for each in runner.state.application.responses if _is_equal(each, request)]
            if equal:
                begun.add(name)
            for response in self._responses.repeatable(equal):
                runners[response.id] = (runner, response)
                known.append((self._responses.describe_run(response, is_named=request.is_named), response.id))
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

    def _is_awaited(self, noted: NotedRequest, begun: Collection[str]) -> bool:
        """Whether another process noted an equal request and has not begun its response yet.

        Args:
            begun: The sessions with a response to an equal request, also one that is not repeated.
        """
        is_foreign = noted.node not in {"", self._durable.host.store.node}
        return is_foreign and noted.session not in begun and abs(self._world.now() - noted.at) < EQUAL_S

    async def _wait_for_equal(self, wanted: _Wanted) -> LiveResponse | None:
        """Return the response to an equal request that another process has noted; None where none appears."""
        until = self._world.monotonic() + EQUAL_S
        while (same := await self._find_repeated(wanted)) is None:
            if not wanted.is_begun_elsewhere or self._world.monotonic() > until:
                return None
            await self._world.sleep(EQUAL_PAUSE_S)
        return same

    # --- a new response ---------------------------------------------------------------------------------------

    async def _begin(self, wanted: _Wanted) -> LiveResponse | _Repeated:
        sessions, session, is_noted = wanted.sessions, wanted.session, wanted.is_noted
        whole = await self._behind(wanted.asked, wanted.previous) if wanted.previous else None
        for _ in range(COMPARISONS_MAX):
            lock = self._locks.setdefault(session, asyncio.Lock())
            async with lock:
                if is_noted:  # no conversation leads to it: its name was drawn at random
                    runner = await sessions.host.begin(session)
                else:
                    runner = await sessions.host.session(session, create=True)
                if wanted.asked.conversation:
                    whole = await self._within(wanted.asked, runner.state)
                if not await self._is_in_use(runner.state, wanted):
                    state = runner.state
                    comparison = self._compare(session, state, wanted, whole)
                    usage_entry = await self._announce(runner, wanted, is_noted=is_noted)
                    if usage_entry is None:
                        if same := await self._wait_for_equal(wanted):
                            return _Repeated(same)
                        continue
                    live = await self._submit(
                        runner, wanted, state, comparison=comparison, usage_entry=usage_entry
                    )
                    if live is not None:
                        return live
                    if same := await self._find_repeated(wanted):
                        return _Repeated(same)
                    continue
            if wanted.asked.conversation:
                message = "another response of this conversation is being made; retry when it has ended"
                raise RefusedError(ApiError(409, "conversation_locked", message, is_final=False))
            session, is_noted = sessions.name_of(""), True  # a fork: no client's response is stopped for it
        raise UnavailableError("other requests of this conversation are too many: retry", retry_after_s=1.0)

    async def _announce(self, runner: Runner, wanted: _Wanted, *, is_noted: bool) -> str | None:
        """Write what is in the store before a response is begun, at the same time, and return its entry of usage.

        Returns None where another process begins, or has begun, the response to an equal request; nothing stays then.
        """
        sessions, session = wanted.sessions, runner.session_id
        is_noted = is_noted or bool(wanted.request.key)
        if is_noted and wanted.is_begun_elsewhere:
            return None
        on_disk = session if sessions is self._durable else ""
        model = self.counted_model(wanted.asked.model)
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
        """Let a session take the transcript; None where another process's request was faster.

        Args:
            state: The session as the transcript was compared with it.
        """
        asked, session = wanted.asked, runner.session_id
        number = state.application.count + 1
        name = response_id(asked.dialect.id_prefix, session, number)
        form = asked.form(name, self._default or self._model.name, int(self._world.now()))
        request = ApplicationRequest(
            name,
            wanted.request.digest.hex(),
            wanted.request.key,
            wanted.conversation,
            asked.wished.settings,
            wanted.is_ephemeral,
            asked.is_background,
            msgspec.to_builtins(form),
            asked.messages if asked.is_stored else [],
            (asked.model or self._default) if self._default else "",
            wanted.caller.principal,
            usage_entry,
        )
        command = SendTranscript(
            request,
            state.application.count,
            comparison.keep,
            comparison.tail,
            wanted.read.instructions,
            asked.tools,
            comparison.results,
        )
        try:
            end = await runner.submit(command)
        except JournalMovedError:
            await self._ledger.drop(usage_entry)
            return None
        await runner.wait(end - 1)  # where another process owns the session
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
        """Whether the session makes a response that this request may not end: a client reads it, or will."""
        newest = state.application.newest
        if newest is None:
            return False
        if wanted.previous is not None and newest.number != wanted.previous.found.response.number:
            return True  # a second request that goes on from the same response
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
        """Return how the transcript differs from its session.

        Raises:
            MidstreamError: It names a local file, and came from another machine.
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

    async def _behind(self, asked: Asked, previous: _Previous) -> tuple[Entry, ...]:
        """Return the whole conversation of a request that goes on from another response."""
        try:
            state = await previous.sessions.state_at(previous.found)
        except SessionNotFoundError:
            state = None  # it is too old
        if state is None:
            raise _no_previous()
        return _entries_after(state, asked)

    async def _within(self, asked: Asked, state: Session) -> tuple[Entry, ...]:
        """Return the whole conversation of a request in a conversation that the gateway keeps."""
        entry = await self._kept.find(asked.conversation)
        if entry.removed:  # the session has the removed items still
            items = await self._kept.items(entry)
            return replace(asked, instructions="").transcript(items).history.entries
        return _entries_after(state, asked, entry.added_after(state.application.count))


def _entries_after(state: Session, asked: Asked, added: Sequence[Value] = ()) -> tuple[Entry, ...]:
    """Return the history of a session, and behind it the added items and those of a request."""
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
    _refuse_strange_results([*open_items, *added, *asked.messages], calls)
    transcript = replace(asked, instructions="").transcript([*open_items, *added])
    return (*state.history.entries, *transcript.history.entries)


def _refuse_strange_results(items: Sequence[Value], calls: Collection[str]) -> None:
    """Refuse the result of a call that is neither among these items nor among these calls: it would be lost.

    Raises:
        BadFieldError: There is one.
    """
    named = [(item.get("type"), item.get("call_id")) for item in items if isinstance(item, dict)]
    known = {call_id for kind, call_id in named if not str(kind).endswith("_output")} | {*calls}
    if any(str(kind).endswith("call_output") and call_id not in known for kind, call_id in named):
        raise bad_field("input", "the previous response has no call of the `call_id` of an output")


def _no_previous() -> RefusedError:
    message = "no such response: it was not stored, or it is too old"
    return RefusedError(ApiError(400, "previous_response_not_found", message, "previous_response_id"))


def _is_equal(response: ApplicationResponse, request: Request) -> bool:
    """Whether a response was requested by an equal request, or under the same key."""
    is_keyed = bool(request.key) and response.key == request.key
    return is_keyed or response.digest == request.digest.hex()


def _keys_of(request: Request) -> tuple[str, ...]:
    """Return by what a request is found again that no conversation leads to."""
    digest = request.digest.hex()
    return (digest, f"key {request.key}") if request.key else (digest,)
