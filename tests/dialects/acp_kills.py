"""An editor whose agent, `midstream acp`, is killed at random points of turns with a tool that has an effect.

    python -m tests.dialects.acp_kills [--kills 50] [--seed N]

The client is the official Python package, unmodified. Each kill is followed by a new start and `session/load`.
The prompt is sent again with its key, or only if the load does not show it. The updates of the load and after
it have each word of all turns once. Of the two tools of a turn, the one that writes in the store's transaction
has had its effect once; the other one, outside of it, at most once, and once if its outcome is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
from acp import RequestError

from tests.dialects.acp_agents import ANSWER, LEDGER_VARIABLE, THOUGHT, WORDS
from tests.dialects.acp_editor import WAIT_S, Editor
from tests.dialects.ui_stream import long_form

Json = dict[str, Any]

AGENT = "tests.dialects.acp_agents:noting"
FATES = ("before the first update", "in the first answer", "at the tool", "in the last answer", "after it")
"""The phase of a turn when its agent was killed, by the editor's updates."""


def make_editor(folder: Path, *options: str, agent: str = AGENT) -> Editor:
    """Return an editor of the agent with an effect."""
    variables = {LEDGER_VARIABLE: str(folder / "ledger.txt")}
    return Editor(folder, agent, "--store", str(folder / "acp.db"), *options, variables=variables)


def fate_of(shown: Sequence[Json]) -> str:
    """Return the phase of a turn, by its updates so far."""
    if not shown:
        return FATES[0]
    text = "".join(
        each["content"]["text"] for each in shown if each["sessionUpdate"] == "agent_message_chunk"
    )
    if f"word{WORDS - 1} " in text:
        return FATES[4]
    if "word0 " in text:
        return FATES[3]
    return FATES[2] if any(each["sessionUpdate"] == "tool_call" for each in shown) else FATES[1]


def judge(editor: Editor, folder: Path, turns: int) -> int:
    """Check that all turns are shown, each word and each effect once; return the number of notes with no outcome."""
    asked = editor.text("user_message_chunk")
    assert asked == "".join(f"turn {number};" for number in range(turns)), asked
    assert editor.text() == ANSWER * turns, editor.text()[-300:]
    assert editor.text("agent_thought_chunk") == THOUGHT * turns
    begun = [each["toolCallId"] for each in editor.shown if each["sessionUpdate"] == "tool_call"]
    assert len({*begun}) == len(begun) == 2 * turns, begun
    results = Counter(editor.results())
    assert results["ordered it"] == turns, results
    unknown = [each for each in results.elements() if each not in ("ordered it", "noted")]
    assert all("may or may not" in each for each in unknown), unknown
    assert results.total() == 2 * turns, results
    database = apsw.Connection(str(folder / "acp.db"), flags=apsw.SQLITE_OPEN_READONLY)
    ((orders, effects),) = database.execute("select count(*), count(distinct effect) from app_order")
    database.close()
    assert orders == effects == turns, (orders, effects)
    ledger = folder / "ledger.txt"
    ran = len(ledger.read_text(encoding="utf-8").splitlines()) if ledger.exists() else 0
    assert turns - len(unknown) <= ran <= turns, (ran, results)
    return len(unknown)


async def play(folder: Path, *, kills: int, seed: int, options: tuple[str, ...] = ()) -> Counter[str]:
    """Kill the agent in each of a session's turns; return the phases, the numbers killed twice and unknown."""
    chance, fates = random.Random(seed), Counter[str]()
    editor = make_editor(folder, *options)
    await editor.start()
    try:
        session_id = await editor.new()
        for number in range(kills):
            await _kill_in_turn(editor, session_id, number, chance, fates)
        await editor.load(session_id)
    finally:
        await editor.close()
    fates["unknown"] = judge(editor, folder, kills)
    return fates


async def _kill_in_turn(
    editor: Editor, session_id: str, number: int, chance: random.Random, fates: Counter[str]
) -> None:
    words, key, before = f"turn {number};", f"key {number}", len(editor.shown)
    asking = asyncio.create_task(editor.prompt(session_id, words, **{"midstream/key": key}))
    point = chance.choice((0, chance.randrange(1, 6), chance.randrange(5, 22), chance.randrange(5, 22)))
    seen = asyncio.create_task(editor.wait_for_updates(before + point))
    await asyncio.wait({asking, seen}, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    fates[fate_of(editor.shown[before:])] += 1
    await editor.kill()
    seen.cancel()
    with contextlib.suppress(RequestError, ConnectionError):
        await asking
    await editor.start()
    await editor.load(session_id)
    if chance.random() < 0.25:  # once more, while the turn is being continued
        fates["twice"] += 1
        await editor.kill()
        await editor.start()
        await editor.load(session_id)
    if chance.random() < 0.5:  # a client with a key of its own sends the prompt again
        await editor.prompt(session_id, words, **{"midstream/key": key})
    elif not editor.text("user_message_chunk").endswith(
        words
    ):  # any other client: if the load does not show it
        await editor.prompt(session_id, words)
        editor.shown.append(
            {"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": words}}
        )
    else:
        await editor.wait_until(lambda: len(editor.text()) >= len(ANSWER) * (number + 1))
    assert editor.text() == ANSWER * (number + 1), editor.text()[-300:]


def main(arguments: list[str]) -> int:
    """Run the long form."""
    options = long_form("acp_kills", arguments, kills=50)
    with tempfile.TemporaryDirectory() as made:
        fates = asyncio.run(play(Path(made), kills=options.kills, seed=options.seed))
    where = ", ".join(f"{fates[fate]} {fate}" for fate in FATES)
    unknown = f"{fates['unknown']} notes of unknown outcome"
    done = f"{options.kills} turns killed, {fates['twice']} of them twice, seed {options.seed}"
    sys.stdout.write(f"acp: {done}: each word once, no effect twice, {unknown}; {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
