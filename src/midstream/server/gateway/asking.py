"""From a POST to the run that answers it: its own, or one that is under way already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from midstream.core.dialects.asked import Asked, Named, Writer
from midstream.core.dialects.chat import ChatWriter
from midstream.core.dialects.conversations import Place, is_ephemeral
from midstream.core.dialects.fields import bad_field
from midstream.core.dialects.memo import Memo
from midstream.core.dialects.messages import MessagesWriter
from midstream.core.dialects.reading import Read, read
from midstream.core.dialects.refusals import Dialect, Refusal
from midstream.core.dialects.repeats import KeyReused, request_of
from midstream.core.dialects.responses import ResponsesWriter
from midstream.core.dialects.wishing import Wished
from midstream.core.formats.parts import Value
from midstream.core.reuse.resent import ResentRequest
from midstream.errors import StoreBusyError, StoreDamagedError, StoreFullError
from midstream.runtime.models import Model, grants_of
from midstream.server.gateway.bodies import Arrived, RefusedError, shown_key
from midstream.server.gateway.conversations import Conversations
from midstream.server.gateway.runs import Run, Runs
from midstream.server.gateway.stored import Entry, StoredResponses
from midstream.world import World

_WRITERS: Mapping[Dialect, Callable[[Asked, Named], Writer]] = {
    Dialect.CHAT: ChatWriter,
    Dialect.RESPONSES: ResponsesWriter,
    Dialect.MESSAGES: MessagesWriter,
}
_log = logging.getLogger(__name__)
_PREFIXES = {Dialect.CHAT: "chatcmpl-", Dialect.RESPONSES: "resp_", Dialect.MESSAGES: "msg_"}


class Asking:
    """Begins runs, and finds those that a POST repeats.

    Args:
        model: What answers.
        runs: All that are under way.
        responses: What was answered before.
        conversations: Those that their hosts do not name.
        names: The models' names that hosts may ask for; any where it is empty.
    """

    def __init__(
        self,
        model: Model,
        runs: Runs,
        responses: StoredResponses,
        conversations: Conversations,
        names: Collection[str],
        world: World,
    ) -> None:
        self._model = model
        self._grants = grants_of(model)
        self._runs = runs
        self._responses = responses
        self._names = names
        self._world = world
        self._conversations = conversations
        self._memo = Memo()

    async def run_of(self, dialect: Dialect, arrived: Arrived) -> tuple[Run, bool]:
        """Return the run that answers a POST, and whether it was there before.

        Raises:
            RefusedError: The key belongs to another request, or there is no such model.
            MidstreamError: The request has another form, or nothing can be begun now. Nothing was.
        """
        owner = shown_key(arrived.headers)
        found = read(dialect, arrived.headers, arrived.body, self._memo, owner)
        asked = self._granting(found.asked)
        self.check_model(asked.model)
        before, session = await self._before(asked, found.session)
        found = found.behind(before)
        is_side_call = is_ephemeral(arrived.headers, asked, found.instructions, found.gist.newest)
        request = request_of(arrived.path, arrived.headers, found.digest, is_named=bool(session))
        place = None
        if not (session or is_side_call):
            place = found.gist.place
            session = await self._conversations.look_up(place) or self._world.new_id("conversation")
        same = self._runs.find(request)
        if isinstance(same, KeyReused):
            message = "this idempotency key was used for another request"
            raise RefusedError(Refusal(422, "idempotency_key_reused", message))
        if same is not None:
            return same, True
        # Nothing is awaited from here on: two POSTs at once cannot both find nothing.
        number = self._world.new_id("").removeprefix("-")
        named = Named(_PREFIXES[dialect] + number, asked.model or self._model.name, int(self._world.now()))
        run = Run(asked, named, _WRITERS[dialect](asked, named), request, session, self._world.monotonic())
        care = _Care(self._conversations, self._responses, place, before)
        self._runs.start(run, _request(run, found, is_side_call=is_side_call), care)
        return run, False

    def _granting(self, asked: Asked) -> Asked:
        """Return what is asked with the wishes that are granted; the others are named in the answer."""
        wished = asked.wished
        if not wished.fields:
            return asked
        left = Wished(wished.wishes.only(self._grants), wished.fields)
        return replace(asked, wished=left, ignored=(*asked.ignored, *wished.refused(self._grants)))

    def check_model(self, name: str) -> None:
        """Let a name pass that hosts may ask for.

        Raises:
            RefusedError: It is another one.
        """
        if self._names and name not in self._names:
            message = f"there is no such model here; there are {', '.join(sorted(self._names))}"
            raise RefusedError(Refusal(404, "model_not_found", message, param="model"))

    async def _before(self, asked: Asked, session: str) -> tuple[list[Value], str]:
        """Return what came before, where a stored answer is gone on from, and whose conversation it is."""
        if not asked.previous:
            return [], session
        entry = await self._responses.find(asked.previous)
        if entry is None:
            message = "there is no such response: none was stored, or it is too old"
            raise RefusedError(Refusal(400, "previous_response_not_found", message, "previous_response_id"))
        if entry.is_open:
            raise bad_field("previous_response_id", "this response is still being made")
        return [*entry.items, *entry.response.get("output", ())], session or entry.session


class _Care:
    """Data kept of a run: its place in the conversation, and the response where it is stored."""

    def __init__(
        self,
        conversations: Conversations,
        responses: StoredResponses,
        place: Place | None,
        before: list[Value],
    ) -> None:
        self._conversations = conversations
        self._responses = responses
        self._place = place
        self._before = before

    async def prepare(self, run: Run) -> None:
        """Write the intent of a background answer."""
        if run.asked.is_background:
            await self._responses.begin(run.named.id, self._entry(run))

    async def settle(self, run: Run) -> None:
        """Store a response, and learn how the conversation goes on."""
        reply = run.reply
        if run.refusal is None and self._place is not None and reply is not None:
            await self._conversations.said(run.session, self._place, reply)
        if not run.asked.is_stored or (run.refusal is not None and not run.is_begun):
            return
        try:
            events = b"".join([*run.pieces, *run.ending])
            await self._responses.end(run.named.id, self._entry(run), events)
        except (StoreBusyError, StoreDamagedError, StoreFullError) as error:
            if run.asked.is_background:
                raise  # who asks later would be told something else
            _log.warning("an answer is not stored: %s", error.code, extra={"run": run.named.id})

    def _entry(self, run: Run) -> Entry:
        writer = run.writer
        assert isinstance(writer, ResponsesWriter)  # no other API stores
        items = [*self._before, *run.asked.messages]
        return Entry(writer.response, items, run.session, own=len(run.asked.messages))


def _request(run: Run, found: Read, *, is_side_call: bool) -> ResentRequest:
    return ResentRequest(
        found.instructions,
        found.gist.heard,
        found.tail,
        found.whole,
        run.asked.tools,
        wishes=run.asked.wished.wishes,
        key=run.named.id,
        session=run.session,
        is_ephemeral=is_side_call,
    )
