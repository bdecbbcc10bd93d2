"""A served graph that is killed at each write of its store in turn, and finished by the next process.

    python -m tests.fault.graph_process FOLDER [STEP]

For each write, or one of STEP, it prints one line of JSON: its number, whether it killed, and the result of the
turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import interrupt

from midstream.engine.host import Host
from midstream.frameworks.langgraph_served import make_agent
from midstream.history.messages import Step
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice
from midstream.session.questions import questions_of
from midstream.session.turn.commands import Answer
from midstream.store.sqlite import SQLiteStore
from tests.frameworks.graph_model import calling_model, text_model, tool_call

WAIT_S = 60.0
WRITES_MAX = 200


def note(what: str) -> None:
    with Path("ledger").open("a", encoding="utf-8") as ledger:
        ledger.write(f"{what}\n")


@tool
async def pay() -> str:
    """Pay."""
    note("pay")
    return "paid"


@tool
async def look() -> str:
    """Look."""
    note("look")
    return "seen"


@tool
async def ask() -> str:
    """Ask."""
    answer = interrupt("Sure?")
    note("ask")
    return f"asked {answer}"


look.metadata = {"midstream": "rerun"}
ask.metadata = {"midstream": "rerun"}


async def plan(_: MessagesState) -> dict[str, Any]:
    return {"messages": [await text_model("A plan.").ainvoke("x")]}


async def think(state: MessagesState) -> dict[str, Any]:
    model = calling_model(tool_call("look", "1"), tool_call("pay", "2"), tool_call("ask", "3"))
    return {"messages": [await model.ainvoke(state["messages"])]}


async def confirm(_: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"Confirmed: {interrupt('All right?')}.")]}


def build_graph() -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("plan", plan)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([pay, look, ask]))
    graph.add_node("confirm", confirm)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "tools", "__end__": "confirm"})
    graph.add_edge("tools", "think")
    return graph


class DyingStore(SQLiteStore):
    """Dies by SIGKILL before or after its write number `at`."""

    at = -1
    seen = 0
    is_before = True

    async def _dying(self, write: Callable[[], Awaitable[Any]]) -> Any:
        DyingStore.seen += 1
        is_it = DyingStore.seen == DyingStore.at
        if is_it and DyingStore.is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        done = await write()
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    async def append(self, *arguments: Any, **options: Any) -> Any:
        return await self._dying(lambda: super(DyingStore, self).append(*arguments, **options))

    async def kv_put(self, *arguments: Any, **options: Any) -> Any:
        return await self._dying(lambda: super(DyingStore, self).kv_put(*arguments, **options))


async def live() -> str:
    """Send a message, or continue after a death; answer all questions; return the session's next text."""
    async with asyncio.timeout(WAIT_S), Host(make_agent(build_graph()), DyingStore("sessions.db")) as host:
        if not (await host.glance("s")).turns:
            await anext(host.send("s", "go"))
        runner = await host.session("s")
        answered: set[str] = set()
        while runner.state.is_live or not runner.state.turns:
            for each in questions_of("s", runner.state):
                if each.call_id not in answered:
                    answered.add(each.call_id)
                    ref = CallRef(each.turn, each.response, each.call_id)
                    await runner.submit(Answer(ref, each.digest, Choice.RESPOND, f"to {each.text}"))
            await runner.wait(runner.newest.position)
        texts = [each.response.text for each in runner.state.history.entries if isinstance(each, Step)]
        return "".join(texts)


def in_child() -> int:
    child = os.fork()
    if child == 0:
        try:
            Path("answer").write_text(asyncio.run(live()), encoding="utf-8")
        except BaseException as error:  # noqa: BLE001 - it is shown
            Path("answer").write_text(repr(error), encoding="utf-8")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, step: int) -> None:
    for at in range(1, WRITES_MAX, step):
        was_killed = False
        for is_before in (True, False):
            place = folder / f"{at}-{is_before}"
            place.mkdir()
            os.chdir(place)
            DyingStore.at, DyingStore.is_before = at, is_before
            code = in_child()
            was_killed = code == -signal.SIGKILL
            DyingStore.at = -1
            code = in_child() if was_killed else code
            ledger = Path("ledger").read_text(encoding="utf-8").split() if Path("ledger").exists() else []
            answer = Path("answer").read_text(encoding="utf-8")
            found = {"at": at, "killed": was_killed, "code": code, "answer": answer, "ledger": ledger}
            print(json.dumps(found), flush=True)  # noqa: T201 - read by the test
        if not was_killed:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
