"""A client of the reference SDK of A2A, cut at random bytes, with a server that is killed; and the TCK.

    python -m tests.dialects.a2a_kills [--cuts 200] [--kills 20] [--seed N] [--suite docs/reference/a2a.md]

The client is unmodified (tests/dialects/a2a_client.py). Afterwards the client's task has each word once and
equals the result of `GetTask`, and the tool of the agent has run once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from midstream.environment import World
from tests.dialects import a2a_agent, a2a_suite, chat_agent
from tests.dialects.ui_stream import CuttingRelay, KillableServer, long_form, run_servers

Json = dict[str, Any]

CLIENT_S, SENT_S = 240.0, 30.0
TRIES_MAX = 100
PAUSE_S = 0.2
CUT_BYTES = (300, 6000)
STORIES = (
    ("JSONRPC", True, 1),
    ("HTTP+JSON", True, 1),
    ("JSONRPC", False, 1),
    ("JSONRPC", True, 2),
)
"""Binding, whether it streams, and how many clients send the same message at once."""


def lacking() -> str:
    """Return the missing requirements of the client, or nothing."""
    installed = (a2a_suite.HOME / "bin" / "python").exists()
    return "" if installed else "the reference SDK of A2A is not installed here (make .venv/.a2a)"


async def run_client(story: Json) -> Json:
    """Play a story of a2a_client.py and return the client's result."""
    program = (Path(__file__).parent / "a2a_client.py").read_text(encoding="utf-8")
    text: Json = json.loads(await run_python(program, json.dumps(story)))
    return text


async def run_python(program: str, *arguments: str) -> str:
    """Run a program in the environment of the SDK and return its output."""
    process = await asyncio.create_subprocess_exec(
        *(str(a2a_suite.HOME / "bin" / "python"), "-c", program, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), CLIENT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


def whole(task: Json) -> Json:
    """Return a task with the texts of each artifact as one: a client has them in the pieces in which they arrived."""
    artifacts = [
        {**each, "parts": [{"text": "".join(part["text"] for part in each["parts"])}]}
        for each in task.get("artifacts", ())
    ]
    return {**task, "artifacts": artifacts}


def texts(task: Json) -> list[str]:
    """Return the text of each artifact of a task."""
    return [each["parts"][0]["text"] for each in whole(task)["artifacts"]]


class TaskStory:
    """Tasks of one server that is killed.


    Args:
        words: The words of each answer.
    """

    def __init__(self, server: KillableServer, words: int, chance: random.Random) -> None:
        self.server = server
        self.chance = chance
        self.words = words
        self.counts = dict.fromkeys(("tasks", "kills", "cuts", "tries", "subscribed", "events"), 0)

    def count_runs(self) -> int:
        """Return how often the tool of the agent ran."""
        ledger = self.server.ledger
        return len(ledger.read_text(encoding="utf-8").splitlines()) if ledger.exists() else 0

    async def play(self, relay: CuttingRelay, kills: int) -> None:
        """Play one task, and judge it."""
        binding, is_streaming, clients = STORIES[self.counts["tasks"] % len(STORIES)]
        name, before = f"m-{self.chance.random()}", self.count_runs()
        message = {"messageId": name, "role": "ROLE_USER", "parts": [{"text": "hi"}]}
        story = {"url": relay.url, "message": message, "binding": binding}
        playing = asyncio.create_task(run_client({**story, "is_streaming": is_streaming, "clients": clients}))
        try:
            await self._kill(relay, kills, playing.done)
            result = await playing
        finally:
            playing.cancel()
        expected = [chat_agent.FIRST, "".join(f"word{number} " for number in range(self.words))]
        assert result["task"]["status"]["state"] == "TASK_STATE_COMPLETED", result["task"]["status"]
        assert texts(result["task"]) == expected, (
            f"{binding}: {[len(each) for each in texts(result['task'])]}"
        )
        for fold in result["folds"]:
            assert whole(fold) == whole(result["task"]), f"{binding}: {fold['id']} is not what was streamed"
        assert self.count_runs() - before <= 1, f"{binding}: the tool ran {self.count_runs() - before} times"
        self.counts["tasks"] += 1
        for each in ("tries", "subscribed", "events"):
            self.counts[each] += result[each]

    async def _kill(self, relay: CuttingRelay, kills: int, is_over: Callable[[], bool]) -> None:
        took_s = self.words * chat_agent.PAUSE_S * 1.3 + 1.0  # with the start of the client
        for _ in range(kills):
            await World().sleep(self.chance.random() * took_s / kills)
            if is_over():
                return
            relay.is_up.clear()
            await self.server.kill()
            await self.server.start()
            relay.is_up.set()
            self.counts["kills"] += 1


class QuestionServer(KillableServer):
    """Serves an agent with questions."""

    agent = "tests.dialects.a2a_agent:agent"


async def answer_questions(folder: Path, kills: int, seed: int, *options: str) -> Json:
    """Answer the questions of tasks while the server is killed, each until its answer arrives; return the counts."""
    chance, counts = random.Random(seed), dict.fromkeys(("tasks", "kills", "sent"), 0)
    async with run_servers(folder, 0, *options, kind=QuestionServer) as [server]:
        async with httpx2.AsyncClient(base_url=server.url, timeout=SENT_S) as http:
            while counts["kills"] < kills:
                await _answer_one(server, http, chance, counts)
        noted = server.ledger.read_text(encoding="utf-8").splitlines() if server.ledger.exists() else []
    assert len(noted) == len({*noted}) <= counts["tasks"], noted
    return {**counts, "effects": len(noted)}


async def _answer_one(
    server: KillableServer, http: httpx2.AsyncClient, chance: random.Random, counts: dict[str, int]
) -> None:
    context, task, content = f"c-{chance.random()}", "", list[str]()
    for number in range(3):
        words = f"{number} of {context}"
        parts = [{"text": words}]
        place = {"taskId": task} if task else {"contextId": context}
        message = {"messageId": f"m{number}", "role": "ROLE_USER", "parts": parts, **place}
        sending = asyncio.create_task(_send_twice(http, {"message": message}, counts))
        await World().sleep(chance.random() * 0.1)
        await server.kill()
        await server.start()
        counts["kills"] += 1
        found = await sending
        task = found["id"]
        content.append(words)
        asked = [each["parts"][0]["text"] for each in found["history"] if each["role"] == "ROLE_USER"]
        assert asked == content, found
        if number < len(a2a_agent.QUESTIONS):
            assert found["status"]["state"] == "TASK_STATE_INPUT_REQUIRED", found["status"]
            assert found["status"]["message"]["parts"][0]["text"] == a2a_agent.QUESTIONS[number]
    assert found["status"]["state"] == "TASK_STATE_COMPLETED", found["status"]
    assert texts(found)[-1] == f"Noted: {content[1]} {content[2]}", texts(found)
    counts["tasks"] += 1


async def _send_twice(http: httpx2.AsyncClient, params: Json, counts: dict[str, int]) -> Json:
    """Send a message until its answer arrives, and once more."""
    answers = list[Json]()
    for _ in range(TRIES_MAX):
        counts["sent"] += 1
        try:
            response = await http.post("/v1/a2a/message:send", json=params, headers={"a2a-version": "1.0"})
            if response.status_code == 200:
                answers.append(response.json()["task"])
        except httpx2.HTTPError:
            await World().sleep(PAUSE_S)
        if len(answers) > 1:
            assert answers[0] == answers[1], answers
            return answers[0]
    raise AssertionError("the message was never answered")


async def play(folder: Path, cuts: int, kills: int, seed: int, *options: str, words: int = 1500) -> Json:
    """Cut and kill this many times under tasks of each kind; return the counts."""
    chance = random.Random(seed)
    async with run_servers(folder, words, *options) as [server]:
        story = TaskStory(server, words, chance)
        async with CuttingRelay(server.port, chance, 0, CUT_BYTES) as relay:
            while story.counts["kills"] < kills or relay.cuts < cuts:
                left = cuts - relay.cuts
                relay.left = min(left, max(2, cuts // 8))
                await story.play(relay, min(2, kills - story.counts["kills"]))
            story.counts["cuts"] = relay.cuts
        return {**story.counts, "effects": story.count_runs()}


def main(arguments: list[str]) -> int:
    """Run the long form."""
    options = long_form("a2a_kills", arguments, kills=20)
    write = sys.stdout.write
    write(f"seed {options.seed}\n")
    failed: list[str] = []
    if reason := a2a_suite.lacking():
        write(f"{reason}\n")
    else:
        with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as other:
            ours = asyncio.run(a2a_suite.judge(Path(made)))
            reference = asyncio.run(a2a_suite.judge_reference(Path(other)))
        failed = a2a_suite.faults(ours)
        write(f"TCK: {a2a_suite.counts(ours)}; not as expected: {failed}\n")
        if options.suite is not None:
            options.suite.write_text(a2a_suite.page(ours, reference), encoding="utf-8")
    if reason := lacking():
        sys.stderr.write(reason + "\n")
        return 1
    with tempfile.TemporaryDirectory() as made:
        write(f"kills: {asyncio.run(play(Path(made), options.cuts, options.kills, options.seed))}\n")
    with tempfile.TemporaryDirectory() as made:
        write(f"questions: {asyncio.run(answer_questions(Path(made), options.kills, options.seed))}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
