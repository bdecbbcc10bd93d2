"""`midstream cache`: each turn of a session, and a comparison of two requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.agents.pool import Pooled
from midstream.cli.terminal import width_of
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.history.messages import Usage, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.session.turn.commands import SendMessage
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, run_turn
from midstream.testing.scripted_model import ScriptedStep
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble
from tests.cli.conftest import Run
from tests.cli.on_terminal import OnTerminal


def model_with_usage(*usages: Usage) -> ScriptedModel:
    """Return a model that answers with these token counts, one after the other."""
    counts = iter(usages)

    def response(_: ModelRequest) -> list[ScriptedStep]:
        return [TextDelta("hi"), Finished(model="m", usage=next(counts))]

    return ScriptedModel(response)


@pytest.fixture
async def store_with_usage(tmp_path: Path) -> Path:
    """A session of three turns; between the second and the third the agent got another system prompt."""
    path = tmp_path / "sessions.db"
    used = [Usage(2000, 5), Usage(2100, 5, 1920), Usage(2200, 5)]
    for prompt, turns in (("Be brief.", used[:2]), ("Be long.", used[2:])):
        host = Host(Agent(model_with_usage(*turns), instructions=prompt), SQLiteStore(path))
        await host.start()
        runner = await host.session("s-1", create=True)
        for _ in turns:
            await runner.submit(SendMessage(UserMessage.of("hi")))
            while runner.state.is_live:
                await runner.wait(runner.newest.position)
        await host.stop()
    return path


def test_each_turn_is_a_line_and_the_sum_goes_to_stderr(run: Run, store_with_usage: Path) -> None:
    done = run("cache", "s-1", "--store", store_with_usage)

    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "TURN  KIND             INPUT    CACHED  UNCACHED  WHY",
        "1     new              2,000         0     2,000  first request",
        "2     continuation     2,100     1,920       180",
        "3     divergence       2,200         0     2,200  the system prompt changed",
    ]
    assert done.stderr == "3 turns, 3 model calls: 1,920 of 6,300 input tokens came from the cache (30 %).\n"


def test_the_last_changed_session_is_the_default_and_json_is_a_line_each(
    run: Run, store_with_usage: Path
) -> None:
    lines = [json.loads(line) for line in run("cache", "--json").stdout.splitlines()]

    assert [(line["kind"], line["cached_tokens"], line["uncached_tokens"]) for line in lines] == [
        ("new", 0, 2000),
        ("continuation", 1920, 180),
        ("divergence", 0, 2200),
    ]
    assert lines[2]["reason"] == "the system prompt changed"


async def test_pooled_turns_show_the_pools_decision(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "pooled.db"
    store = SQLiteStore(path)
    upstream = ScriptedUpstream()
    pool = Pooled(upstream, store)
    host = Host(Agent(pool), store)
    await host.start()
    await run_turn(host, "s-1", "one")
    await run_turn(host, "s-1", "two")
    upstream.troubles.append(Trouble.GONE)
    await run_turn(host, "s-1", "three")
    await host.stop()

    seen = run("cache", "s-1", "--store", path).stdout
    lines = [line.split(maxsplit=5) for line in seen.splitlines()]
    assert [(line[0], line[1], line[5]) for line in lines[1:]] == [
        ("1", "new", "fresh: no record"),
        ("2", "continuation", "resumed: 1 new at the end"),
        ("3", "continuation", "fresh: rebuilt (upstream_gone)"),
    ]
    report = [json.loads(line) for line in run("cache", "s-1", "--store", path, "--json").stdout.splitlines()]
    assert [each["way"] for each in report[2]["judgements"]] == ["resumed", "fresh"]
    assert (report[1]["judgements"][0]["field"], report[1]["judgements"][0]["index"]) == ("users", 1)


def test_the_table_fits_a_terminal_of_80_columns(on_terminal: OnTerminal, store_with_usage: Path) -> None:
    seen = on_terminal("cache", "s-1", "--store", store_with_usage)

    assert max(map(width_of, seen.text.splitlines())) <= 80
    assert "the system prompt changed" in seen.text


def test_an_unknown_session_has_the_usual_error(run: Run, store_with_usage: Path) -> None:
    assert run("cache", "nothing", "--store", store_with_usage).exit_code == 3


@pytest.fixture
def request_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a request with a system prompt."""

    def write(name: str, system: str, *words: str) -> Path:
        path = tmp_path / name
        messages = [{"role": "user", "content": each} for each in words]
        path.write_text(json.dumps({"model": "m", "system": system, "messages": messages}), encoding="utf-8")
        return path

    return write


def test_two_requests_are_compared(run: Run, request_file: Callable[..., Path]) -> None:
    before = request_file("a.json", "Today is 2026-11-21.", "hi")
    after = request_file("b.json", "Today is 2026-11-22.", "hi", "on")
    longer = request_file("c.json", "Today is 2026-11-21.", "hi", "on")

    parted = run("cache", "--diff", before, after)
    assert parted.exit_code == 6
    assert parted.stdout == (
        "40 % of the earlier request is kept: a date or time changed at system (date), after byte 22 of 55.\n"
    )
    kept = run("cache", "--diff", before, longer)
    assert (kept.exit_code, kept.stdout) == (0, "The later request begins with the whole earlier one.\n")


def test_a_comparison_in_json(run: Run, request_file: Callable[..., Path]) -> None:
    before = request_file("a.json", "Today is 2026-11-21.", "hi")
    after = request_file("b.json", "Today is 2026-11-22.", "hi")

    parted = run("cache", "--json", "--diff", before, after)
    assert json.loads(parted.stdout)["difference"] == {
        "byte": 22,
        "total": 55,
        "field": "system",
        "cause": "clock",
        "before": "date",
        "after": "date",
        "words": "a date or time changed at system (date), after byte 22 of 55",
    }
    same = run("cache", "--json", "--diff", before, before)
    assert (same.exit_code, json.loads(same.stdout)) == (0, {"difference": None})


def test_an_invalid_request_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text("[]")

    done = run("cache", "--diff", path, path)
    assert (done.exit_code, f"{str(path)!r} does not contain a request" in done.stderr) == (2, True)
    assert run("cache", "--diff", path, tmp_path / "missing").exit_code == 3
