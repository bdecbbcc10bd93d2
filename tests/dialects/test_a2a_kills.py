"""The client of the reference SDK of A2A, unmodified, with a server that is killed; and the compatibility kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.dialects import a2a_kills, a2a_suite
from tests.dialects.a2a_kills import QuestionServer, answer_questions, play, run_client, texts, whole
from tests.dialects.ui_stream import read_on_elsewhere, run_servers

Json = dict[str, Any]
PASSED = 72
"""Requirements of the level MUST that the kit finds met."""

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(bool(a2a_kills.lacking()), reason=a2a_kills.lacking()),
]


async def test_each_task_runs_once_and_its_snapshot_equals_its_stream(tmp_path: Path) -> None:
    result = await play(tmp_path, 6, 3, 5, words=200)
    assert (result["cuts"], result["kills"] >= 3) == (6, True)
    assert result["effects"] <= result["tasks"]
    assert result["subscribed"]


async def test_each_answer_takes_effect_once_however_often_it_is_sent(tmp_path: Path) -> None:
    result = await answer_questions(tmp_path, 3, 7)
    assert result["kills"] >= 3
    assert result["sent"] > 3 * result["tasks"]


@pytest.mark.long
async def test_a_task_is_followed_at_another_server_that_takes_over_its_turn(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = ("--store", request.getfixturevalue("engine").url)
    words = 800
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]}
    story = {"message": message, "binding": "JSONRPC", "is_streaming": True}
    async with run_servers(tmp_path, words, *options, count=2) as servers:
        result = await read_on_elsewhere(
            servers, lambda url: run_client({**story, "url": url}), cut_bytes=(500, 3000)
        )
        assert texts(result["task"])[-1] == "".join(f"word{number} " for number in range(words))
        assert whole(result["folds"][0]) == whole(result["task"])
        assert servers[1].ledger.read_text(encoding="utf-8") == "it\n"


async def test_any_server_of_a_store_answers_follows_lists_and_cancels_a_task(tmp_path: Path) -> None:
    def sent(name: str, **more: str) -> Json:
        return {"message": {"messageId": name, "role": "ROLE_USER", "parts": [{"text": name}], **more}}

    async with run_servers(tmp_path, 0, count=2, kind=QuestionServer) as servers:
        here, there = (f"{each.url}/v1/a2a" for each in servers)
        async with httpx2.AsyncClient(timeout=60, headers={"a2a-version": "1.0"}) as http:

            async def send(url: str, name: str, **more: str) -> Json:
                response = await http.post(f"{url}/message:send", json=sent(name, **more))
                task: Json = response.json()["task"]
                return task

            task = await send(here, "m1")
            name = task["id"]
            assert await send(there, "m1") == task
            async with http.stream("GET", f"{there}/tasks/{name}:subscribe") as following:
                lines = following.aiter_lines()
                assert json.loads((await anext(lines)).removeprefix("data: ")) == {"task": task}
                second = await send(there, "m2", taskId=name)
                assert second["status"]["message"]["parts"][0]["text"] == "Second?"
                done = await send(here, "m3", taskId=name)
                last = [line async for line in lines if line.startswith("data: ")][-1]
            update = json.loads(last.removeprefix("data: "))["statusUpdate"]
            assert update["status"] == done["status"]
            for url in (here, there):
                assert (await http.get(f"{url}/tasks/{name}")).json() == done
                assert (await http.get(f"{url}/tasks")).json()["totalSize"] == 1
            task = await send(here, "m4")
            cancelled = await http.post(f"{there}/tasks/{task['id']}:cancel")
            assert cancelled.json()["status"]["state"] == "TASK_STATE_CANCELED"


@pytest.mark.long
@pytest.mark.skipif(bool(a2a_suite.lacking()), reason=a2a_suite.lacking())
async def test_the_compatibility_kit_gives_the_documented_results(tmp_path: Path) -> None:
    report = await a2a_suite.judge(tmp_path)
    assert a2a_suite.faults(report) == []
    assert {name for name, each in report.items() if each.status == "FAIL"} == a2a_suite.NOT_MET.keys()
    assert a2a_suite.counts(report)["MUST"] == {"PASS": PASSED, "FAIL": 1}
