"""One reader of a run of a chat, in the UI message stream of the AI SDK."""

from __future__ import annotations

from msgspec import Struct
from starlette.types import Receive, Send
from typing_extensions import override

from midstream.dialects.ui_message_stream import DONE, HEADER, RUN_MARK, UiMessageStream
from midstream.engine.conversation import kept_records
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.server.api.event_body import RecordBody
from midstream.server.auth.caller import Caller
from midstream.server.transports.connection import Connections

RUN_HEADER = "x-workflow-run-id"
TAIL_HEADER = "x-workflow-stream-tail-index"


class ChatRun(Struct, frozen=True):
    """One run of a chat, or a whole turn.

    Args:
        session: Stored name of the session.
        chat: The client's name of the chat.
        turn: Number of the turn.
        after: A position before the first record of the turn.
        run: Number of the run in the turn, from 0; None for the whole turn.
    """

    session: str
    chat: str
    turn: int
    after: int
    run: int | None

    @property
    def name(self) -> str:
        """Name for reading the run again; for a whole turn, the name of the chat."""
        return self.chat if self.run is None else f"{self.chat}{RUN_MARK}{self.turn}.{self.run}"

    def stream(self) -> UiMessageStream:
        """Return a new converter from records to chunks."""
        return UiMessageStream(self.chat, self.turn, self.run)

    async def written(self, runner: Runner) -> tuple[UiMessageStream, int]:
        """Return the converter after all records of the journal, and its number of chunks."""
        stream, count = self.stream(), 0
        async for stored, record in kept_records(runner, self.after):
            count += len(stream.take(record, epoch=stored.epoch))
        return stream, count


class ChatStream(RecordBody):
    """Sends a run to one client, from any chunk to its end.

    Args:
        run: The run.
        caller: The client, counted and checked like any reader of a stream.
    """

    def __init__(self, host: Host, connections: Connections, run: ChatRun, caller: Caller) -> None:
        super().__init__(host, connections, run.session, caller, run.stream(), run.after)
        self._run = run
        self._skip = 0

    async def serve(self, receive: Receive, send: Send, *, start: int = 0) -> None:
        """Send the chunks from number `start` on; a negative number counts from the end.

        Raises:
            StreamCutError: As in `send_to`.
            MidstreamError: The request is refused before the first chunk.
        """
        headers = [HEADER, (RUN_HEADER, self._run.name)]
        if start < 0:
            _, count = await self._run.written(await self._host.session(self._run.session))
            start = max(0, count + start)
            headers.append((TAIL_HEADER, str(count - 1)))
        self._skip = start
        await self.send_to(receive, send, headers)

    @override
    def shown(self, events: list[bytes]) -> list[bytes]:
        left, self._skip = events[self._skip :], max(0, self._skip - len(events))
        return [*left, DONE] if self._events.is_over else left
