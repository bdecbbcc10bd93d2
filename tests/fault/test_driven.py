"""Agents of other frameworks, killed at every point of a call: no effect happens twice, no outcome is lost."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from midstream.environment import Fault
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import CallEnded, decode
from midstream.store.sqlite import SQLiteStore
from tests.fault import starting
from tests.fault.driven_process import ANSWER, DB, SESSION
from tests.fault.extent import IS_FULL, select_cases
from tests.spec import spec

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

NEEDS = {
    "pydantic_ai": "pydantic_ai",
    "langgraph": "langgraph.checkpoint.sqlite",
    "openai_agents": "agents.testing",
}
POINTS = (
    Fault.BEFORE_APPEND,
    Fault.AFTER_APPEND,
    Fault.AFTER_PUBLISH,
    Fault.BEFORE_TOOL,
    Fault.AFTER_TOOL,
    Fault.BEFORE_CLAIM,
    Fault.AFTER_CLAIM,
)
CALLS = ("c1", "p1", "p2", "p3")
INTENT = {"pydantic_ai": 4, "langgraph": 3, "openai_agents": 4}
"""The number of the append with the starts of the batch."""
WHERE = (
    "before its intent",
    "before its effect",
    "after its effect",
    "after its return",
    "after its outcome",
)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def kinds() -> list[Any]:
    return [
        pytest.param(kind, marks=pytest.mark.skipif(not _is_installed(needed), reason=f"needs {needed}"))
        for kind, needed in NEEDS.items()
    ]


@spec("DRIVEN-1", "DRIVEN-6")
@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("where", select_cases(WHERE, 0, 2, 4))
async def test_a_killed_agent_continues(kind: str, where: str, tmp_path: Path) -> None:
    deaths = {
        "before its intent": ("--kill-at", "before_append", "--kill-time", str(INTENT[kind])),
        "before its effect": ("--kill-at", "before_tool", "--kill-time", "3"),
        "after its effect": ("--dies-in", "p2"),
        "after its return": ("--kill-at", "after_tool", "--kill-time", "3"),
        "after its outcome": ("--kill-at", "after_append", "--kill-time", str(INTENT[kind] + 1)),
    }
    await _die_and_carry_on(kind, deaths[where], tmp_path)


@spec("DRIVEN-6")
@pytest.mark.parametrize("kind", kinds())
async def test_only_a_policy_lets_an_effect_happen_again(kind: str, tmp_path: Path) -> None:
    death = ("--dies-in", "p2", "--policy", "rerun")
    assert (await _run(kind, tmp_path, *death))[0] == -signal.SIGKILL
    code, report = await _run(kind, tmp_path, "--policy", "rerun")
    assert code == 0
    assert report["answers"]["p2"] == "result of p2"
    assert _effects(tmp_path)["p2"] == 2


@pytest.mark.skipif(not IS_FULL, reason="the full matrix is `make fault`")
@pytest.mark.parametrize("kind", kinds())
async def test_every_point_of_the_whole_turn(kind: str, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.mkdir()
    code, report = await _run(kind, alive)
    assert code == 0
    for point in POINTS:
        for time in range(1, report["reached"].get(point.value, 0) + 1):
            folder = tmp_path / f"{point.value}-{time}"
            folder.mkdir()
            death = ("--kill-at", point.value, "--kill-time", str(time))
            if (await _run(kind, folder, *death))[0] != 0:  # concurrent appends are sometimes merged
                await _carry_on(kind, folder)


async def _die_and_carry_on(kind: str, death: tuple[str, ...], folder: Path) -> None:
    assert (await _run(kind, folder, *death))[0] == -signal.SIGKILL
    await _carry_on(kind, folder)


async def _carry_on(kind: str, folder: Path) -> None:
    journaled = await _outcomes(folder)
    code, report = await _run(kind, folder)
    assert code == 0
    assert report["answer"] == ANSWER
    effects, answers = _effects(folder), report["answers"]
    assert {name: count for name, count in effects.items() if count > 1} == {}
    assert set(answers) == set(CALLS)
    for name in CALLS:
        if name in journaled:
            assert answers[name] == journaled[name]  # a known outcome is the one that the model reads
        if answers[name] == UNKNOWN_CONTENT:
            continue  # interrupted in the middle: the model must check whether it took effect
        assert (answers[name], effects[name]) == (f"result of {name}", 1)
    assert (await _outcomes(folder)).keys() == set(CALLS)


async def _run(kind: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    process = await starting.start("tests.fault.driven_process", kind, folder, *options)
    try:
        async with asyncio.timeout(120):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    code = process.returncode
    assert code is not None
    return code, json.loads(out) if out else {}


async def _outcomes(folder: Path) -> dict[str, str]:
    """Return the journal's outcome of each call, by the provider's id."""
    store = SQLiteStore(folder / DB)
    await store.open()
    outcomes: dict[str, str] = {}
    for session in (SESSION, f"langgraph:{SESSION}"):
        for stored in await store.read(session, after=0, limit=1000):
            record = decode(stored.body)
            if isinstance(record, CallEnded):
                name = record.result.call_id.rpartition("/")[2]
                assert name not in outcomes, "one outcome a call"
                outcomes[name] = record.result.content
    await store.close()
    return outcomes


def _effects(folder: Path) -> Counter[str]:
    lines = (folder / "ledger").read_text().splitlines() if (folder / "ledger").exists() else []
    return Counter(line.removeprefix("effect ") for line in lines if line.startswith("effect "))
