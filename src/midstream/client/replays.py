"""Reading of events that an earlier process of a client handled, for a complete transcript in this one."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from midstream.client.checkpoint_file import KeptCall, KeptStream
from midstream.errors import MidstreamError
from midstream.protocol.answer_text import AnswerText
from midstream.protocol.events import Event, PlaybackLost
from midstream.protocol.frames import EventId, Gone, ResultPayload, decode_payload

_log = logging.getLogger(__name__)


async def answer_until(events: AsyncGenerator[Event, None], end: EventId) -> AnswerText:
    """Fold the events of a session up to `end`.

    If they cannot be read, or belong to another line, the answer is shorter. The next complete response corrects its
    part, and the resumed stream raises the error.
    """
    answer = AnswerText()
    try:
        async with aclosing(events):
            async for event in events:
                position = EventId.parse(event.id).position
                if isinstance(event.record, Gone | PlaybackLost) or position > end.position:
                    break
                answer.take(event.record)
                if position == end.position:
                    break
    except MidstreamError as error:
        _log.debug("earlier events cannot be read: %s", error.code)
    return answer


def results_to_send(kept: KeptStream, calls: Iterable[KeptCall]) -> list[ResultPayload]:
    """Return the stored outcomes whose commands may be lost; the server accepts only the first outcome of a call."""
    payloads = [decode_payload(body) for _, body in kept.checkpoint.unacked]
    sent = {
        (each.turn, each.response, each.result.call_id)
        for each in payloads
        if isinstance(each, ResultPayload)
    }
    return [
        ResultPayload(call.turn, call.response, result)
        for call in calls
        if (result := call.state.result) is not None
        and (call.turn, call.response, result.call_id) not in sent
    ]
