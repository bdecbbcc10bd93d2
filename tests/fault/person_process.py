"""A client that runs a tool or answers questions, and may kill itself: `person_process FOLDER PORT`.

It handles one event after the other: it answers a question before it requests the next event, so that its next
life receives the question again. The answers are true according to the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from midstream.client import Client, Event, connect
from midstream.environment import World
from midstream.errors import QuestionClosedError
from midstream.session.records import QuestionAsked
from tests.fault.drive import truth
from tests.fault.fault_client_process import HAND_S, HastyWorld, ReceivedEvents
from tests.fault.fault_stories import CLIENT_POLICIES, StoryStage
from tests.fault.options import Options
from tests.fault.turn import QUESTION, SESSION


async def main() -> None:
    options = Options("client")
    world = HastyWorld(*options.death, report_to=options.notes)
    stage = StoryStage(options.folder, world, dies_inside=options.dies_inside)
    tools = [stage.tool(options.story)] if options.story in CLIENT_POLICIES else []
    seen = ReceivedEvents(options.folder / "client.seen")
    state, secrets = options.folder / "client.db", options.folder / "secrets.db"
    url = f"http://127.0.0.1:{options.port}"
    async with connect(url, state=state, secrets=secrets, tools=tools, world=world) as client:
        for turn in await client.resume_interrupted():
            await _run_turn(client, turn.__aiter__(), seen, options)
        if not seen.has_end:
            await _run_turn(client, client.send(SESSION, QUESTION), seen, options)

        reader = ReceivedEvents(options.folder / "reader.seen")
        async with contextlib.aclosing(client.follow(SESSION, after="0-0")) as events:
            async for event in events:
                reader.add(event)
                if event.is_end:
                    break


async def _run_turn(
    client: Client, events: AsyncIterator[Event], seen: ReceivedEvents, options: Options
) -> None:
    async for event in events:
        await World().sleep(HAND_S)
        seen.add(event)
        if event.question is not None:
            session = event.path[-1] if event.path else SESSION
            await _answer(client, session, event.question, options)


async def _answer(client: Client, session: str, asked: QuestionAsked, options: Options) -> None:
    choice = truth(options.folder, session, asked)
    with contextlib.suppress(QuestionClosedError):  # an earlier life had sent it
        await client.answer(session, asked, choice, text="so be it")


if __name__ == "__main__":
    asyncio.run(main())
