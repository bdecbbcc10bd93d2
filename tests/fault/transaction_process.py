"""A process whose tool writes in the transaction of its outcome: `transaction_process FOLDER [POINT COUNT]`.

It may kill itself: POINT is a fault point or `within`, in the middle of the tool. It ends by itself when the
turn has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import Fault
from midstream.history.messages import UserMessage
from midstream.session.turn.commands import SendMessage
from midstream.testing import ScriptedModel, calls, text
from midstream.testing.fake_worlds import KillingWorld
from midstream.tools.function_tools import Tool, current_call, tool, transaction
from tests.fault.stored import make_store, name_of

SESSION = "s"
WITHIN = "within"
TABLE = "create table if not exists app_note (what text, key text, run integer, half integer)"
INSERTS = {
    "sqlite": "insert into app_note (what, key, run, half) values (?, ?, ?, ?)",
    "postgresql": "insert into app_note (what, key, run, half) values ($1, $2, $3, $4)",
}
"""Each database has its own placeholders."""
WHATS = ("a", "b", "c")
"""The notes: two in one response, one in the next."""
SCRIPT = [
    calls(("note", '{"what":"a"}'), ("note", '{"what":"b"}')),
    calls(("note", '{"what":"c"}')),
    text("all noted"),
]


def tool_that_dies(count: int, insert: str) -> Tool:
    """Return the tool, which dies in its `count`-th run in this process; 0 for never."""
    runs = 0

    @tool(on_doubt="in_transaction")
    def note(what: str) -> str:
        """Note something down, in two halves."""
        nonlocal runs
        runs += 1
        call = current_call()
        transaction().execute(TABLE)
        for half in (1, 2):
            if half == 2 and runs == count:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
            row = (what, call.effect_key, call.run, half)
            transaction().execute(insert, row)
        return f"noted {what}"

    return note


async def main(folder: Path, point: str = "", count: str = "0") -> None:
    is_within = point == WITHIN
    world = KillingWorld(Fault(point) if point and not is_within else None, int(count))
    insert = INSERTS["postgresql" if name_of(folder).startswith("postgresql:") else "sqlite"]
    note = tool_that_dies(int(count) if is_within else 0, insert)
    host = Host(Agent(ScriptedModel(SCRIPT), tools=[note]), make_store(folder, world), world=world)
    async with asyncio.timeout(60):
        await host.start()
        await host.wait_for_recovery()
        runner = await host.session(SESSION, create=True)
        if not runner.state.turns:
            await runner.submit(SendMessage(UserMessage.of("note three things")))
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        await host.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
