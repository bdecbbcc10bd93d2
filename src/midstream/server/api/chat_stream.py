"""One reader of a run of a chat: the body of an answer in the UI message stream of the AI SDK."""

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
    """The part of a session that a stream shows.

    Args:
        session: As the store names it.
        chat: As the client names it.
        turn: The number of the turn.
        after: A position before its first record.
        run: A run of the turn, from 0; None for the turn from its beginning.
    """

    session: str
    chat: str
    turn: int
    after: int
    run: int | None

    @property
    def name(self) -> str:
        """The name by which it is read again; the chat's own for a whole turn."""
        return self.chat if self.run is None else f"{self.chat}{RUN_MARK}{self.turn}.{self.run}"

    def stream(self) -> UiMessageStream:
        """Return what turns its records into chunks."""
        return UiMessageStream(self.chat, self.turn, self.run)

    async def written(self, runner: Runner) -> tuple[UiMessageStream, int]:
        """Return the stream as the journal is now, and how many chunks it has."""
        stream, count = self.stream(), 0
        async for stored, record in kept_records(runner, self.after):
            count += len(stream.take(record, epoch=stored.epoch))
        return stream, count


class ChatStream(RecordBody):
    """Send a run to one client, from any chunk on, until it rests.

    Args:
        run: What is read.
        visitor: The client, which is counted and checked as the reader of any stream.
    """

    def __init__(self, host: Host, connections: Connections, run: ChatRun, visitor: Caller) -> None:
        super().__init__(host, connections, run.session, visitor, run.stream(), run.after)
        self._run = run
        self._skip = 0

    async def serve(self, receive: Receive, send: Send, *, start: int = 0) -> None:
        """Send the chunks from number `start` on; below 0 it counts from the end.

        Raises:
            StreamCutError: As `send_to` does.
            MidstreamError: It is refused before the first chunk.
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
