"""AG-UI's client with a server whose connections are cut at random bytes, and which is killed.

    python -m tests.dialects.ag_ui_cuts [--cuts 200] [--kills 1] [--seed N]

The client is npm's, unmodified; a relay resets or closes its connections in the middle of bodies. Afterwards
the client's messages have each word once, and the tool has run once. `ag-ui-validate` finds nothing in the
events as they arrived, in a second reading of the run, and in a reading after any of its events.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from tests.dialects import chat_agent
from tests.dialects.ui_stream import HOME, KillableServer, cut_chats, long_form, run_node, run_servers

Json = dict[str, Any]
Event = tuple[str, Json]
"""The id and the data of an event; a repetition has no id."""

HERE = Path(__file__).parent
CUT_BYTES = {"run": (200, 4000), "connect": (2000, 40_000), "raw": (200, 4000)}
READS_MAX = 3000
SUFFIXES_MAX = 60


def lacking() -> str:
    """Return the missing requirements of the client and the validator, or nothing."""
    if not (HOME / "node_modules" / "@ag-ui" / "client").exists():
        return "npm did not install AG-UI's client here (make dialects)"
    try:
        import ag_ui_validate  # noqa: F401 - it is asked for
    except ImportError:
        return "ag-ui-validate is not installed (requirements/dev.txt)"
    return ""


async def run_client(url: str, story: str, **more: object) -> Json:
    """Play a story of ag_ui_client.mjs and return the client's result."""
    program = (HERE / "ag_ui_client.mjs").read_text(encoding="utf-8")
    result: Json = json.loads(await run_node(program, json.dumps({"url": url, "story": story, **more})))
    return result


def events_of(body: str) -> list[Event]:
    """Return the events of a body, except a truncated one."""
    events: list[Event] = []
    for block in body.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields:
            events.append((fields.get("id", ""), json.loads(fields["data"])))
    return events


def findings(events: Sequence[Event]) -> list[str]:
    """Return all findings of `ag-ui-validate`, including its advice."""
    from ag_ui_validate import create_validator

    validator = create_validator()
    for _, event in events:
        validator.feed(event)
    validator.finalize()
    report = validator.report()
    assert not report.internal_errors, report.internal_errors
    return [f"{found.rule} {found.message}" for found in report.diagnostics]


def body_of(thread: str, run: str, text: str = "hi", **more: object) -> Json:
    """Return a request as the client sends it."""
    message = {"id": f"user-{thread}", "role": "user", "content": text}
    empty: Json = {"tools": [], "context": [], "state": {}, "forwardedProps": {}}
    return {"threadId": thread, "runId": run, "messages": [message], **empty, **more}


async def read_run(url: str, body: Json) -> list[Event]:
    """Read a run, with the same request again after its last event at each cut; only events with an id."""
    events: list[Event] = []
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(READS_MAX):
            headers = {"last-event-id": events[-1][0]} if events else {}
            pieces: list[str] = []
            try:
                async with http.stream("POST", "/v1/ag-ui", json=body, headers=headers) as answer:
                    assert answer.status_code < 500, answer.status_code
                    async for piece in answer.aiter_text():
                        pieces.append(piece)  # noqa: PERF401 - the part before a cut is kept
            except httpx2.HTTPError:
                pass
            events += [event for event in events_of("".join(pieces)) if event[0]]
            if events and events[-1][1]["type"] in ("RUN_FINISHED", "RUN_ERROR"):
                return events
    raise AssertionError("the run did not end")


async def check_suffixes(
    url: str, body: Json, events: Sequence[Event], chance: random.Random, suffixes_max: int
) -> int:
    """Check that repeated readings of a run are equal, whole and after its events; return the number of suffixes."""
    numbers = list(range(len(events)))
    if len(numbers) > suffixes_max:
        first, last = suffixes_max * 2 // 5, suffixes_max // 12
        others = chance.sample(numbers, suffixes_max - first - last)
        numbers = sorted({*numbers[:first], *numbers[-last:], *others})
    path = f"/v1/ag-ui/threads/{body['threadId']}/runs/{body['runId']}"
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        whole = events_of((await http.get(path)).text)
        assert whole == list(events)
        assert findings(whole) == []
        for number in numbers:
            answer = await http.get(path, headers={"last-event-id": events[number][0]})
            suffix = events_of(answer.text)
            assert findings(suffix) == [], (events[number], findings(suffix))
            wanted = list(events[number + 1 :]) or [events[-1]]
            assert [event for event in suffix if event[0]] == wanted
    return len(numbers)


def judge(outcome: Json, server: KillableServer, words: int) -> None:
    """Check that the client has each word once, and that the tool ran once."""
    messages = outcome["messages"]
    assert [each["role"] for each in messages if each["role"] != "reasoning"] == [
        *("user", "assistant", "tool", "assistant")
    ], [(each["role"], each["id"]) for each in messages]
    assert [each["content"] for each in messages if each["role"] == "reasoning"] == [chat_agent.THOUGHT]
    _, called, result, last = (each for each in messages if each["role"] != "reasoning")
    assert called["content"] == chat_agent.FIRST
    expected = "".join(f"word{number} " for number in range(words))
    assert last["content"] == expected, f"{len(last['content'])} characters instead of {len(expected)}"
    (call,) = called["toolCalls"]
    assert result["toolCallId"] == call["id"]
    ran = server.ledger.read_text(encoding="utf-8").splitlines() if server.ledger.exists() else []
    if result["content"] != "noted":  # killed while it ran: an unknown outcome is not retried
        assert "may or may not" in result["content"], result
        assert len(ran) <= 1, ran
    else:
        assert ran == ["it"], ran


async def play(
    story: str,
    folder: Path,
    *,
    cuts: int,
    kills: int,
    words: int,
    seed: int,
    options: tuple[str, ...] = (),
    suffixes_max: int = SUFFIXES_MAX,
) -> int:
    """Cut a client this many times, kill the server, judge the client's result, and return the number of suffixes."""
    chance = random.Random(seed)
    async with run_servers(folder, words, *options) as [server]:
        body = body_of(f"thread-{seed}", f"run-thread-{seed}")
        async with cut_chats(server, chance, cuts=cuts, kills=kills, cut_bytes=CUT_BYTES[story]) as relay:
            if story == "raw":
                events = await read_run(relay.url, body)
            else:
                judge(await run_client(relay.url, story, id=f"thread-{seed}"), server, words)
                events = await read_run(server.url, body)
        assert findings(events) == []
        return await check_suffixes(server.url, body, events, chance, suffixes_max)


def main(arguments: list[str]) -> int:
    """Run the long form."""
    options = long_form("ag_ui_cuts", arguments)
    if reason := lacking():
        sys.stderr.write(reason + "\n")
        return 1
    for story, cuts in (
        ("run", options.cuts),
        ("raw", options.cuts),
        ("connect", max(1, options.cuts // 10)),
    ):
        with tempfile.TemporaryDirectory() as made:
            words = 50 * options.cuts + 200
            playing = play(story, Path(made), cuts=cuts, kills=options.kills, words=words, seed=options.seed)
            suffixes = asyncio.run(playing)
            done = f"{cuts} cuts, {options.kills} kills, seed {options.seed}"
            sys.stdout.write(
                f"ag-ui {story}: {done}: {words} words once, {suffixes} suffixes without findings\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
