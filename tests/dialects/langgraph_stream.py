"""Clients of LangGraph with a server whose connections are cut at random bytes, and which is killed.

    python -m tests.dialects.langgraph_stream [--cuts 200] [--kills 1] [--seed N]

The clients are `langgraph_sdk` and `@langchain/langgraph-sdk`, unmodified; a relay resets or closes their
connections in the middle of bodies. Afterwards the client's result has each word once, the tool has run once,
and the events of the thread protocol have no gap in `seq`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.schema import StreamMode

from tests.dialects import chat_agent
from tests.dialects.ui_stream import KillableServer, cut_chats, long_form, run_node, run_servers

Json = dict[str, Any]

HERE = Path(__file__).parent
HOME = Path(sys.prefix, "graphs")
"""The folder in which npm has installed the packages of tests/dialects/graph_node (tools/judges.py)."""
MODES: list[StreamMode] = ["values", "updates", "messages-tuple"]
CHANNELS = ["values", "updates", "checkpoints", "messages", "tools", "lifecycle", "input", "tasks", "custom"]
CUT_BYTES = (200, 9000)
JOINS_MAX = 2000
"""The maximum number of joins of a run; each is a cut."""


def lacking() -> str:
    """Return the missing requirements of the npm clients, or nothing."""
    installed = HOME / "node_modules" / "@langchain" / "react"
    return "" if installed.exists() else "npm did not install LangGraph's clients here (make dialects)"


def words_of(message: Json) -> str:
    """Return the words of a message, whose content is a text or a list of blocks."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content if block.get("type") == "text")


def sdk(url: str) -> LangGraphClient:
    """Return the client of the SDK for Python."""
    return get_client(url=f"{url}/v1/langgraph", api_key=None)


class RunReader:
    """The application's view of a run's events: the state, and the words of each message."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.words: dict[str, str] = {}
        self.values: Json = {}
        self.attempts: list[int] = []

    def take(self, part: Any) -> None:  # noqa: ANN401 - an event of the SDK
        if part.id:
            self.ids.append(part.id)
        if part.event == "metadata":
            self.attempts.append(part.data["attempt"])
        elif part.event == "values":
            self.values = part.data
        elif part.event == "messages":
            message, _ = part.data
            if message["type"] == "AIMessageChunk":
                self.words[message["id"]] = self.words.get(message["id"], "") + message["content"]


async def read_run(url: str, thread: str, text: str) -> RunReader:
    """Start a run and read it, joining it again after its last event at each cut."""
    reader = RunReader()
    async with sdk(url) as client:
        await _read_run(client, reader, thread, text)
    return reader


async def _read_run(client: LangGraphClient, reader: RunReader, thread: str, text: str) -> None:
    begun: list[str] = []
    given: Json = {"messages": [{"role": "user", "content": text, "id": f"m-{thread}"}]}
    parts = client.runs.stream(
        thread,
        "chat",
        input=given,
        stream_mode=MODES,
        stream_resumable=True,
        if_not_exists="create",
        on_run_created=lambda run: begun.append(run["run_id"]),
    )
    for _ in range(JOINS_MAX):
        try:
            async for part in parts:
                reader.take(part)
        except httpx.HTTPError:
            pass
        if begun and (await client.runs.get(thread, begun[0]))["status"] == "success":
            run = begun[0]
            break
        assert begun, "no run began"
        after = reader.ids[-1] if reader.ids else "-1"
        parts = client.runs.join_stream(thread, begun[0], stream_mode=MODES, last_event_id=after)
    async for part in client.runs.join_stream(thread, run, stream_mode=MODES, last_event_id=reader.ids[-1]):
        reader.take(part)


async def read_events(url: str, thread: str, text: str) -> list[Json]:
    """Start a run by the thread protocol and return all events of the thread, continuing by `since` after each cut."""
    events: list[Json] = []
    async with httpx.AsyncClient(base_url=f"{url}/v1/langgraph", timeout=60) as http:
        message = {"role": "user", "content": text, "id": f"m-{thread}"}
        start = {"assistant_id": "chat", "input": {"messages": [message]}}
        command = {"id": 1, "method": "run.start", "params": start}
        response = (await http.post(f"/threads/{thread}/commands", json=command)).json()
        assert response["type"] == "success", response
        for _ in range(JOINS_MAX):
            body = {"channels": CHANNELS, "since": events[-1]["seq"] if events else 0}
            try:
                async with http.stream("POST", f"/threads/{thread}/stream/events", json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            events.append(json.loads(line[6:]))
                        if events and is_over(events[-1]):
                            return events
            except (httpx.HTTPError, json.JSONDecodeError):
                continue
    raise AssertionError("the run did not end")


def is_over(event: Json) -> bool:
    """Return whether the run of a thread has ended with this event."""
    return event["method"] == "lifecycle" and event["params"]["data"]["event"] in ("completed", "failed")


def judge(messages: list[Json], server: KillableServer, words: int) -> None:
    """Check that a client's final messages have each word once, and that the tool ran at most once."""
    expected = "".join(f"word{number} " for number in range(words))
    assert [each["type"] for each in messages] == ["human", "ai", "tool", "ai"], [
        (m["id"], words_of(m)[:30], words_of(m)[-30:]) for m in messages
    ]
    human, first, tool, last = messages
    assert human["type"] == "human", human
    assert words_of(first) == chat_agent.FIRST, first
    assert words_of(last) == expected, f"{len(words_of(last))} characters instead of {len(expected)}"
    ran = server.ledger.read_text(encoding="utf-8").splitlines() if server.ledger.exists() else []
    if tool.get("status") == "error":  # killed while it ran: an unknown outcome is not retried
        assert len(ran) <= 1, ran
    else:
        assert (tool["content"], ran) == ("noted", ["it"]), (tool, ran)


def judge_run(reader: RunReader, server: KillableServer, words: int) -> None:
    """Check the application's view of a run's events."""
    judge(reader.values["messages"], server, words)
    assert len(set(reader.ids)) == len(reader.ids), "an event came twice"
    expected = "".join(f"word{number} " for number in range(words))
    last = reader.values["messages"][-1]["id"]
    assert reader.words[last] == expected, "the chunks of the message are not its words"


def judge_events(events: list[Json], server: KillableServer, words: int) -> None:
    """Check the events of a thread."""
    assert [event["seq"] for event in events] == [*range(1, len(events) + 1)], "seq has a gap"
    assert len({event["event_id"] for event in events}) == len(events), "an event came twice"
    states = [event["params"]["data"] for event in events if event["method"] == "values"]
    judge(states[-1]["messages"], server, words)
    finished = [
        event["params"]["data"]["content"]["text"]
        for event in events
        if event["method"] == "messages"
        and event["params"]["data"]["event"] == "content-block-finish"
        and event["params"]["data"]["content"]["type"] == "text"
    ]
    assert finished == [chat_agent.FIRST, "".join(f"word{number} " for number in range(words))]


async def play(story: str, folder: Path, *, cuts: int, kills: int, words: int, seed: int) -> Json:
    """Cut a client this many times, kill the server, and judge the client's result."""
    async with (
        run_servers(folder, words) as [server],
        cut_chats(server, random.Random(seed), cuts=cuts, kills=kills, cut_bytes=CUT_BYTES) as relay,
    ):
        thread = f"00000000-0000-4000-8000-{seed:012d}"
        if story == "runs":
            reader = await read_run(relay.url, thread, "hi")
            judge_run(reader, server, words)
            return {"attempts": reader.attempts}
        if story == "events":
            events = await read_events(relay.url, thread, "hi")
            judge_events(events, server, words)
            of_messages = [each["params"]["data"] for each in events if each["method"] == "messages"]
            voided = sum(each["event"] == "error" for each in of_messages)
            return {"events": len(events), "voided": voided}
        result = await run_client(relay.url, story, thread=thread)
        judge(result["messages"], server, words)
        return result


async def run_client(url: str, story: str, **more: object) -> Json:
    """Play a story of langgraph_client.mjs and return the client's result."""
    program = (HERE / "langgraph_client.mjs").read_text(encoding="utf-8")
    result: Json = json.loads(
        await run_node(program, json.dumps({"url": url, "story": story, **more}), home=HOME)
    )
    return result


STORIES = {"runs": 10, "events": 1, "stream": 10, "protocol": 10, "hook": 10, "thread": 10}
"""Stories of the long form, and the divisor of their cuts."""


def main(arguments: list[str]) -> int:
    """Run the long form."""
    options = long_form("langgraph_stream", arguments)
    for story, fewer in STORIES.items():
        cuts = max(2, options.cuts // fewer)
        with tempfile.TemporaryDirectory() as made:
            words = max(1000, 40 * cuts + 200)  # fewer end before the kills
            asyncio.run(
                play(story, Path(made), cuts=cuts, kills=options.kills, words=words, seed=options.seed)
            )
            done = f"{cuts} cuts, {options.kills} kills, seed {options.seed}"
            sys.stdout.write(f"{story}: {done}: {words} words once, tool once\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
